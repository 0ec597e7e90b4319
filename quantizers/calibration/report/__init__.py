"""What a calibration set holds, and whether that is what it claims: languages, duplicates, differences, samples."""
