"""The processes that share one run: which of them this is, what they pass on to each other, and how each of them knows
that the others are still there.

What is dealt out, broadcast and gathered has no meaning here.
"""
