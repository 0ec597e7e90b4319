"""The sources of a calibration set: local files and Hub datasets, pinned by a lock and cached on disk.

Rows leave this room as they are; what becomes of them is decided in the room above.
"""
