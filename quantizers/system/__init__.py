"""General tools that know nothing about models: errors, atomic files, strict YAML, progress, text tables.

Nothing here knows about recipes, checkpoints or torch modules, and nothing here imports another room.
"""
