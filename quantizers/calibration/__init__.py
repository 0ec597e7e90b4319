"""Calibration sets: their schema, and the code that turns a set into token sequences, each with a category.

`sources/` reads the rows, `report/` describes a loaded set. No model runs here.
"""
