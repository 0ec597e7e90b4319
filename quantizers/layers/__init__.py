"""The one loop over a checkpoint's decoder layers; every use of it is a consumer (loop.py)."""
