"""`quantize stitch`: builds a mixed checkpoint from an FP8 source and experts quantized by another tool.

Outputs of `quantize run` do not pass through here.
"""
