"""Stored codes as numbers in one pass, by a kernel in Triton, and the torch operator that launches it.

stored_matrix.py says what is computed, with torch's own operations, and computes it wherever there are no kernels. The
kernel gives the same bits: each number is one product, and is rounded once more if it is to be bfloat16.
"""
