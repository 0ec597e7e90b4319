"""Which process this is, of how many, and what the processes send each other.

What is shared out, broadcast and gathered has no meaning here.
"""
