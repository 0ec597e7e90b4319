"""Experts that others quantized, put beside the source's other bytes, with the router that they forgot repaired.

Nothing is quantized here. Writing a shard, and its audit, belong to `stitch`.
"""
