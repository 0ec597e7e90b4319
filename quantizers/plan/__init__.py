"""What a run will do and need, from headers alone: actions for tensors, schemes for layers, disk, memory, time, cards.

Nothing here reads a weight.
"""
