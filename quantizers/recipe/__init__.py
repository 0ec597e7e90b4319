"""Recipes: their schema, the shipped ones, and the form in which a recipe travels with a finished checkpoint.

What a recipe means on this machine is not decided here but in `plan/`.
"""
