"""An importance matrix for llama.cpp: Σ x² of the inputs of every matrix of the source, and its file."""
