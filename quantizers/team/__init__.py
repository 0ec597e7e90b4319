"""Which process this is, of how many, and what processes say to each other.

No room above is known here: what is dealt, sent and gathered is anonymous.
"""
