"""Commands about calibration sets: parse, call, print, exit code."""
