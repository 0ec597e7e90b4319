"""Σ x² of the inputs of every matrix of the source, as a run goes through its layers: an importance matrix's sums."""
