"""Writes shards and the config, and takes digests of what is written."""
