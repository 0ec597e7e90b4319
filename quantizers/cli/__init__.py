"""The commands, one file each: parse, call, print, exit code. No logic, and no heavy import before it is needed.

Only this package prints results; the tables that it prints are in `tables/`.
"""
