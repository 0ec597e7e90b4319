"""Triton kernels for the inner loops of rounding, and the functions that launch them.

Each has an eager twin, which says in torch's operations what is computed, and computes it without the kernel:
`rounding._round_block`, `rounding._mse_steps` and `coordinate_descent._refine_group`. A kernel gives its twin's bits,
by a rule that both keep:

    every operation rounds by itself: a product and the sum after it are two roundings, never one
    division is IEEE's
    sums have a written order: from left to right, or as symmetric.py says

So neither block sizes nor the number of warps nor the model of GPU decide a bit. Matrix products stay with the
libraries in both. kernel_check.py compares each with its twin at the start of a run.
"""
