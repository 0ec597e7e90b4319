"""Reports on calibration sets: contents, languages, duplicates, differences between sets, and samples."""
