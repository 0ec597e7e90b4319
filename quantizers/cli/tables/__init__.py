"""Makes the text that commands print at their end from their reports. No figure is computed here."""
