"""The folder that a run writes: its journal while it is unfinished, its record once it is done, the last move.

What is written into it is made elsewhere.
"""
