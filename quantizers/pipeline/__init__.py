"""Runs a recipe from start to finish on this machine: the visits of the layers, the proof, the report, the card.

A stitch is proven and reported here as well (stitched.py).

Order and bookkeeping only: the mathematics is in `solve/`, the bytes in `stitch`, the figures in `eval`.
"""
