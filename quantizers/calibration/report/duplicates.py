"""Find equal and nearly equal texts: Jaccard similarity of their sets of five-word shingles.

Sets are small enough to do without an approximation such as MinHash: an inverted index counts the shingles
that two texts share, so only texts that share one are compared. Chinese and Japanese, which are written without
spaces, count characters as words.
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
NEAR = 0.5  # texts with at least this similarity are near-duplicates
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")


@dataclass(frozen=True)
class Duplicate:
    """The positions of two texts and their similarity; 1.0 only if all words and their order are equal."""

    first: int
    second: int
    similarity: float


def find_duplicates(texts: Sequence[str]) -> list[Duplicate]:
    """All pairs of texts with a similarity of at least `NEAR`, in order of their positions.

    Case, spaces and punctuation are ignored.
    """
    words = [_WORD.findall(unicodedata.normalize("NFKC", text).casefold()) for text in texts]
    shingles = [_shingles(text) for text in words]
    holders: dict[int, list[int]] = defaultdict(list)
    for position, text_shingles in enumerate(shingles):
        for shingle in text_shingles:
            holders[shingle].append(position)
    shared: Counter[tuple[int, int]] = Counter()
    for positions in holders.values():
        shared.update(combinations(positions, 2))
    duplicates = []
    for (first, second), count in sorted(shared.items()):
        similarity = count / (len(shingles[first]) + len(shingles[second]) - count)
        if similarity >= NEAR:
            equal = words[first] == words[second]
            duplicates.append(Duplicate(first, second, 1.0 if equal else min(similarity, 0.999)))
    return duplicates


def _shingles(words: list[str]) -> set[int]:
    """CRC-32 checksums of all runs of five words, or of the whole text if it is shorter."""
    if not words:
        return set()
    starts = range(max(1, len(words) - SHINGLE + 1))
    return {zlib.crc32(" ".join(words[start : start + SHINGLE]).encode()) for start in starts}
