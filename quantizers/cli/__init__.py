"""The commands, one file each: parse, call, print, exit code. No logic, and no heavy import before it is needed.

Results are printed here, and by the commands of rooms that are found by their hooks. The tables are made from reports;
no figure is computed here.
"""
