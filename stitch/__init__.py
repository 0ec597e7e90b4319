"""Assembling and proving a finished checkpoint."""
