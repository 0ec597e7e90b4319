"""The commands, one file each: parse, call, print, exit code. No logic, and no heavy import before it is needed.

Only this package prints results. The tables that it prints are made from reports; no figure is computed here.
"""
