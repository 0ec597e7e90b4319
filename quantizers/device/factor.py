"""By what large matrices are factorized, which is a switch until it has been measured on a GPU.

`library` leaves whole batches to the device's routines. `blocks` gives these small blocks alone, and has products do
the rest, see solve/inverse_factor.py: a layer of MiniMax-M2.1 is then 0.9 s shorter on an H100, counted, if routines
for batches reach 15 % of the card's rate. The last bits differ, so it is part of a run's fingerprint.
"""

from __future__ import annotations

import os

from quantizers.system.errors import InputError

VARIABLE, CHOICES = "QUANTIZE_FACTOR", ("library", "blocks")


def factorization() -> str:
    """One of CHOICES, from the environment.

    Raises:
        InputError: the variable has another value.
    """
    asked = os.environ.get(VARIABLE) or CHOICES[0]
    if asked not in CHOICES:
        raise InputError(f"{VARIABLE}={asked}: is not known; give one of {', '.join(CHOICES)}, or unset it")
    return asked


def in_blocks() -> bool:
    """Whether products do most of it."""
    return factorization() == "blocks"
