"""Finished files from solved experts and original bytes, and the audit of them against their source."""
