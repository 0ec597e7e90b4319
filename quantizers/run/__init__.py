"""A recipe from beginning to end on this machine: the loop over layers, the proof, the report, the card."""
