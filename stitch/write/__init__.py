"""Writes shards and what lies beside them, and takes digests of what is written.

Nothing is computed here but packed codes.
"""
