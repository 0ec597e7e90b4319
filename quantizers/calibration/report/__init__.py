"""Reports on calibration sets: contents, languages, duplicates, differences between sets, and samples.

Nothing here decides what is loaded.
"""
