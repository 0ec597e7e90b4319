"""Publishes a finished checkpoint on the Hugging Face Hub: checks it, uploads it, and compares what the Hub holds.

Reading from the Hub is not done here but in `checkpoint/` and `calibration/hub.py`.
"""
