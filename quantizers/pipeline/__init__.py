"""A run from recipe to finished checkpoint: the quantizer, its loop over the layers, and the report.

Order and bookkeeping only: the mathematics is in `solve/`, the bytes in `stitch`, the figures in `eval`.
"""
