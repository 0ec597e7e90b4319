"""Recipes: their schema, the shipped ones, and the portable form that is published with a finished checkpoint.

`planning/` decides what a recipe means on this machine.
"""
