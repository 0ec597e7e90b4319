"""One shard and the config: what is written, and the digests taken while it is."""
