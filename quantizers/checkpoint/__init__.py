"""What lies in a checkpoint's files: headers, tensors, published formats, on a disk or on the Hub. Read only.

Bytes are found and named here; what they mean as numbers is in `forward/`.
"""
