"""Measures a checkpoint against its source, and presents what was measured.

Nothing here writes a checkpoint. Import as `from eval.fidelity.metrics import …`, never `import eval`, which would
hide the builtin.
"""
