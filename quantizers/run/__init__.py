"""Runs a recipe from start to finish on this machine: the loop over layers, the proof, the report, the card."""
