"""Inner loops as one kernel each, in Triton, and the torch operators that launch them.

rounding.py, refine.py, awq.py, symmetric.py, token_weights.py and forced_rows.py say what is computed, with torch's own
operations, and compute it wherever there are no kernels. A kernel gives the same bits, by a rule that both keep:

    every operation rounds by itself: a product and the sum after it are two roundings, never one
    division is IEEE's
    sums have a written order: from left to right, or as sum_in_order.py says

So neither block sizes nor the number of warps nor the kind of card decide a bit of them. What weigh_rows adds up is
written down in operators.py, and is not the order in which torch's own sum goes. Matrix products stay with the
libraries, on both ways alike.
"""
