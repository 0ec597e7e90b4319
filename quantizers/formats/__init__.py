"""Formats of stored weights, one object in one file each (see format.py), and how their tensors are named."""
