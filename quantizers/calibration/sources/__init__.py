"""Where the rows of a calibration set come from: local files and the Hub, pinned by locks, kept in a cache."""
