"""Plan a run from headers alone: an action for each tensor, a scheme for each layer, and disk, memory, time and GPUs.

Nothing here reads a weight.
"""
