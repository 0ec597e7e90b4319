"""One decoder layer at a time: stored tensors as numbers, hidden states in files, the streamed forward pass.

Nothing here changes a weight.
"""
