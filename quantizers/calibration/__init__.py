"""Calibration sets: their schema, and their way from rows of local files and Hub datasets to token sequences."""
