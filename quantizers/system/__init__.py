"""What any program needs and nothing of models: errors, atomic files, strict YAML, progress, tables of text.

Nothing here knows of recipes, checkpoints or torch modules, and nothing here imports another room.
"""
