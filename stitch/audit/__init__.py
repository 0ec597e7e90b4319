"""Audits a finished checkpoint against its source, from the files alone. Nothing here writes."""
