"""The sources of a calibration set: local files and Hub datasets, pinned by a lock and cached on disk."""
