"""Calibration sets examined: checked, compared file by file, by the experts they reach, and by the outputs they give.

A run needs none of it. Reading a set, and counting routed tokens, belong to the core.
"""
