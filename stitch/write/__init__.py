"""Writes shards, config and side files, and hashes every written tensor.

Nothing is computed except packed integers.
"""
