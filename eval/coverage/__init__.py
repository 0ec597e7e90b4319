"""Which experts the router sends tokens to, counted over a calibration set; gates on it."""
