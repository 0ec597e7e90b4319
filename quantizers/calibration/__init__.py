"""Calibration sets: their schema, and the way from a set to token sequences with a category each.

Where rows come from is in `sources/`, what is said about a loaded set in `report/`. No model is run here.
"""
