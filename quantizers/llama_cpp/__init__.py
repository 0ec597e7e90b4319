"""An importance matrix for llama.cpp: its names of a model's matrices, the sums, the file, and what makes them."""
