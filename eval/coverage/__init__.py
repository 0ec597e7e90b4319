"""Counts which experts the router sends tokens to over a calibration set, and checks gates on the counts.

Nothing is quantized here.
"""
