"""The mathematics: one layer's inputs become its solved experts. Pure functions over tensors; nothing opens a file."""
