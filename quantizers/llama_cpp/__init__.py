"""An importance matrix for llama.cpp: its names of a model's matrices, its file, and the command that makes one.

Adding up the squares of inputs, which a run does on its way, is `importance`.
"""
