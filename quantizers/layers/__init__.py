"""The one loop over a checkpoint's decoder layers; its uses are consumers (loop.py)."""
