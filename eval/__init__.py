"""Measures a checkpoint against its source, and presents what was measured.

Nothing here writes a checkpoint. The package's link to this folder, `quantizers.eval`, is its only name.
"""
