"""How much of a set its token limits cut off, and from where on that is worth a warning.

A calibration text that is cut loses its end, and with it what only ends have: the answer after the reasoning, the
code after the imports. A quarter is the limit here. Below it, most texts are whole; above it, the set mostly shows
how texts begin. No measurement stands behind the number: it decides a warning and nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from quantizers.calibration.data import Sample

MOST = 0.25  # share of the tokens of a set, or of a category, that may be cut off without a warning
NAMED = 5  # categories that a warning names at most


def cut_share(samples: Iterable[Sample]) -> float:
    """The share of the texts' tokens that was cut off, 0 to 1."""
    kept, cut = map(sum, zip(*((len(sample.tokens), sample.truncated) for sample in samples), strict=True))
    return cut / (kept + cut)


def truncation_warnings(samples: Sequence[Sample]) -> tuple[str, ...]:
    """One line if more than `MOST` of the tokens are cut: of the whole set, or else of single categories."""
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.category].append(sample)
    if (share := cut_share(samples)) > MOST:
        return (f"{share:.0%} of the set's tokens are cut {_where(samples)}; {_remedy(samples)}",)
    shares = {category: cut_share(members) for category, members in groups.items()}
    over = sorted((category for category in shares if shares[category] > MOST), key=lambda c: (-shares[c], c))
    if not over:
        return ()
    affected = [sample for category in over for sample in groups[category]]
    names = ", ".join(f"{category} {shares[category]:.0%}" for category in over[:NAMED])
    more = f" and {len(over) - NAMED} more" if len(over) > NAMED else ""
    count = "1 category" if len(over) == 1 else f"{len(over)} categories"
    cut = f"of {count} more than {MOST:.0%} of the tokens are cut {_where(affected)}: {names}{more}"
    return (f"{cut}; {_remedy(affected)}",)


def _where(samples: Iterable[Sample]) -> str:
    limits = sorted({len(sample.tokens) for sample in samples if sample.truncated})
    return f"at {' or '.join(f'{limit:,}' for limit in limits)} tokens"


def _remedy(samples: Sequence[Sample]) -> str:
    """The smallest doubling of the smallest limit that cuts no more than `MOST`."""
    length = min(len(sample.tokens) for sample in samples if sample.truncated)
    wholes = [(len(sample.tokens), len(sample.tokens) + sample.truncated) for sample in samples]
    total, share = sum(whole for _, whole in wholes), 1.0
    while share > MOST:
        length *= 2
        share = sum(max(0, whole - max(length, kept)) for kept, whole in wholes) / total
    return f"raise sequence_length ({length:,} would cut {share:.0%})"
