"""The output folder of a run: its journal while the run is unfinished, the final move, and the record at the end.

Other rooms make the contents.
"""
