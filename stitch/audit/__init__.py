"""Audit of a checkpoint against its source: a finished one from its files alone, a single layer also in memory."""
