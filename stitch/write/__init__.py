"""Writes shards and the config, and takes digests of what is written. Nothing is computed here but packed codes."""
