"""Writes shards, config and side files, and hashes every written tensor; computes nothing but packed integers."""
