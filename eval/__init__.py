"""Measuring a checkpoint against its source, and saying what was measured.

Nothing here writes a checkpoint. Imported as `from eval.fidelity.figures import …`, never `import eval`.
"""
