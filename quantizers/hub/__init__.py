"""Publishing on the Hugging Face Hub: check a finished checkpoint, upload it, compare the Hub's hashes.

Downloads are in `checkpoint/` and `calibration/`.
"""
