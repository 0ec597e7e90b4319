"""Texts that are the same, or nearly: Jaccard similarity of their sets of five-word shingles.

Exact at this size: an inverted index counts the shingles that two texts share, and only texts that
share one are ever compared. Chinese and Japanese, which write no spaces, count characters as words.
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

SHINGLE = 5  # words
NEAR = 0.5  # from this similarity on, two texts are near-duplicates
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")


@dataclass(frozen=True)
class Duplicate:
    """Two texts, by their positions, and their similarity: 1.0 only for equal words in equal order."""

    first: int
    second: int
    similarity: float


def find_duplicates(texts: Sequence[str]) -> list[Duplicate]:
    """All pairs of texts with a similarity of at least `NEAR`, in the order of their positions.

    Upper and lower case, spaces and punctuation make no difference.
    """
    words = [_WORD.findall(unicodedata.normalize("NFKC", text).casefold()) for text in texts]
    shingles = [_shingles(text) for text in words]
    holders: dict[int, list[int]] = defaultdict(list)
    for position, own in enumerate(shingles):
        for shingle in own:
            holders[shingle].append(position)
    shared: Counter[tuple[int, int]] = Counter()
    for positions in holders.values():
        shared.update(combinations(positions, 2))
    found = []
    for (first, second), count in sorted(shared.items()):
        similarity = count / (len(shingles[first]) + len(shingles[second]) - count)
        if similarity >= NEAR:
            exact = words[first] == words[second]
            found.append(Duplicate(first, second, 1.0 if exact else min(similarity, 0.999)))
    return found


def _shingles(words: list[str]) -> set[int]:
    """The checksums of all runs of five words; of the whole text where it is shorter."""
    if not words:
        return set()
    starts = range(max(1, len(words) - SHINGLE + 1))
    return {zlib.crc32(" ".join(words[start : start + SHINGLE]).encode()) for start in starts}
