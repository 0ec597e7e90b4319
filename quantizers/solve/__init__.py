"""The mathematics: Hessians ─► scales, folding, correction, rounding; one layer's inputs become its solved experts.

Pure functions over tensors; nothing here opens a file.
"""
