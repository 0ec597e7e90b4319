"""The files of a checkpoint, on disk or on the Hub: headers, tensors, published formats. Read only.

This room finds and names bytes; `forward/` turns them into numbers, except for formats of others (formats.py).
"""
