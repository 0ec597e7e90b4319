"""Audits a checkpoint against its source: a finished one from its files alone, a layer wherever it lies.

Nothing here writes.
"""
