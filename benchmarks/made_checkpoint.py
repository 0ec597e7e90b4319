"""A checkpoint of a published model's shapes whose bytes are made as they are asked for, and of which nothing is kept.

Every layer has the same numbers, drawn from one pool for each dtype: a tensor is a piece of its pool from a place that
its name within the layer decides, so no two matrices of a layer are equal. Norms are 1, a linear module's weights have
the deviation 1/√columns, and so have the router's: activations stay finite through all layers, and tokens spread over
the experts. Shards are named and filled as MiniMax-M2.1's: numbered from 0, two for each layer, and the embedding in
the first, final norm and head in the last of them. Where a layer is cut in two is not published: at half of its bytes.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from layer_measurement import resized

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.families import architecture_for
from quantizers.checkpoint.reader import CONFIG, INDEX, torch_dtype
from quantizers.checkpoint.safetensors_header import FP8, Spec
from quantizers.formats.fp8 import SCALE, SCALE_INV
from quantizers.planning.assign_actions import expected_tensors

POOL = 2**24 - 3  # numbers of a pool: prime, so that the rows of a matrix that is larger are not equal
LEVELS = 256  # different numbers in a pool
CODES = 64.0  # deviation of FP8 codes
UNUSED = 3  # layers for which MiniMax-M2.1's shards are numbered, and which are not in its files
PIECE = 1 << 26  # bytes that are hashed at a time


class Shard:
    """A file that is made of pieces: of each the bytes that repeat, where in them it begins, and how long it is.

    `sha256` is empty until somebody has asked `hash` for it, or knows it from an earlier time.
    """

    def __init__(self, pieces: Sequence[tuple[memoryview, int, int]]) -> None:
        self.pieces, self.sha256 = pieces, ""
        self.starts = [0, *accumulate(length for _, _, length in pieces)]

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, part: slice) -> bytes:
        return b"".join(self._between(*part.indices(len(self))[:2]))

    def _between(self, start: int, stop: int) -> Iterator[memoryview]:
        number = bisect_right(self.starts, start) - 1
        while start < stop:
            pool, first, _ = self.pieces[number]
            at = (first + start - self.starts[number]) % len(pool)
            count = min(self.starts[number + 1], stop) - start
            yield pool[at : at + count]
            start += min(count, len(pool) - at)
            number += start == self.starts[number + 1]

    def hash(self) -> str:
        """SHA-256 of all its bytes, hexadecimal."""
        digest = hashlib.sha256()
        for start in range(0, len(self), PIECE):
            for piece in self._between(start, min(start + PIECE, len(self))):
                digest.update(piece)
        return digest.hexdigest()


@dataclass(frozen=True)
class MadeCheckpoint:
    """The config.json of a model, and its shards by name."""

    config: dict[str, Any]
    facts: Architecture
    shards: dict[str, Shard]
    index: bytes

    @property
    def files(self) -> dict[str, bytes]:
        """The files that are not shards, by name."""
        return {CONFIG: json.dumps(self.config, indent=1).encode(), INDEX: self.index}


def made_checkpoint(config: dict[str, Any], **sizes: int) -> MadeCheckpoint:
    """The checkpoint of a model's config.json, of other sizes where they are given, by this program's names for them.

    Raises an ArchitectureError if the sizes do not go together, or its model type is of no family.
    """
    config = resized(config, **sizes) | {"bos_token_id": 1, "eos_token_id": 0}
    facts = architecture_for(config, CONFIG)
    specs = expected_tensors(facts, config, CONFIG)
    groups = dict(_groups(facts, specs))
    shards = {name: _shard(names, specs, facts) for name, names in groups.items()}
    index = {
        "metadata": {"total_size": sum(spec.bytes for spec in specs.values())},
        "weight_map": {tensor: name for name, names in groups.items() for tensor in names},
    }
    return MadeCheckpoint(config, facts, shards, json.dumps(index).encode())


def _groups(facts: Architecture, specs: Mapping[str, Spec]) -> Iterator[tuple[str, list[str]]]:
    """The names of the tensors in each shard, by the shard's name."""
    layers = facts.num_layers
    of_layer: list[list[str]] = [[] for _ in range(layers)]
    first, last = list[str](), list[str]()
    for name in specs:
        number, _ = _place(name, facts)
        (last if number is None else of_layer[number]).append(name)
    if facts.embedding in last:
        last.remove(facts.embedding)
        first.append(facts.embedding)
    shards = []
    for names in of_layer:
        sums = list(accumulate(specs[name].bytes for name in names))
        cut = bisect_right(sums, sums[-1] // 2)
        shards += [names[:cut], names[cut:]]
    shards[0] = first + shards[0]
    for number, names in enumerate([*shards, last]):
        yield f"model-{number:05d}-of-{2 * (layers + UNUSED):05d}.safetensors", names


def _place(name: str, facts: Architecture) -> tuple[int | None, str]:
    """The layer of a tensor, None outside of the layers, and its name there."""
    prefix = facts.layer_prefix.partition("{layer}")[0]
    if not name.startswith(prefix):
        return None, name
    number, _, within = name.removeprefix(prefix).partition(".")
    return int(number), within


def _shard(names: Iterable[str], specs: Mapping[str, Spec], facts: Architecture) -> Shard:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    pieces, end = [], 0
    for name in names:
        spec, begin = specs[name], end
        end += spec.bytes
        entries[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [begin, end]}
        pieces.append(_piece(name, specs, facts))
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    begun = memoryview(len(header).to_bytes(8, "little") + header)
    return Shard([(begun, 0, len(begun)), *pieces])


def _piece(name: str, specs: Mapping[str, Spec], facts: Architecture) -> tuple[memoryview, int, int]:
    spec, (module, _, suffix) = specs[name], name.rpartition(".")
    if suffix in (SCALE, SCALE_INV):
        return _constant(spec.dtype, specs[f"{module}.weight"].shape[1] ** -0.5 / CODES), 0, spec.bytes
    if len(spec.shape) == 1 and not suffix.endswith("bias"):
        return _constant(spec.dtype, 1.0), 0, spec.bytes
    deviation = 0.02 if len(spec.shape) == 1 else spec.shape[1] ** -0.5
    if name == facts.embedding:
        deviation = 1.0
    pool = _pool(spec.dtype, CODES if spec.dtype == FP8 else deviation)
    _, within = _place(name, facts)
    return pool, zlib.crc32(within.encode()) % POOL * (len(pool) // POOL), spec.bytes


@cache
def _constant(dtype: str, value: float) -> memoryview:
    return torch.full((4096,), value, dtype=torch_dtype(dtype)).view(torch.uint8).numpy().data


@cache
def _pool(dtype: str, deviation: float) -> memoryview:
    """Numbers of a normal distribution, LEVELS different ones, as bytes."""
    levels = torch.special.ndtri((torch.arange(LEVELS, dtype=torch.float64) + 0.5) / LEVELS) * deviation
    table = levels.to(torch_dtype(dtype))
    words = table.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[table.itemsize]).numpy()
    chosen = np.random.default_rng(0).integers(0, LEVELS, POOL, dtype=np.uint8)
    return words[chosen].view(np.uint8).data
