"""Writes finished files from solved experts and original bytes, and audits them against their source."""
