"""`quantize stitch`: a mixed checkpoint from an FP8 source and experts that others quantized."""
