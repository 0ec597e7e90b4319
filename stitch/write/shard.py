"""Turns a solved layer and the source's own bytes into one finished shard, written atomically; digests of shards.

A shard's SHA-256 in journal and report.json shows that it changed since it was written, eight bytes of BLAKE2b per
tensor show which tensor did. (A full hash per tensor would make the report of a 256-expert model 12 MB.)
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from io import BufferedReader
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from quantizers.checkpoint.reader import PIECE, Checkpoint, as_bytes, torch_dtype
from quantizers.checkpoint.safetensors_header import read_header
from quantizers.device.devices import is_accelerator
from quantizers.device.prefetch import PinnedBuffers
from quantizers.formats.conversion import converted
from quantizers.formats.dequantization import is_finite
from quantizers.formats.format import PACKED, SCALE, ExpertFormat
from quantizers.formats.nvfp4 import GLOBAL_SCALE, INPUT_SCALE
from quantizers.formats.packed_integers import SHAPE
from quantizers.output.journal import ShardDigest
from quantizers.planning.plan import METADATA, PASSTHROUGH, Action, Plan, file_header, in_file
from quantizers.solve.result import LayerResult
from quantizers.system.errors import CheckpointError, QuantizeError
from quantizers.system.files import disk_errors, file_sha256, sync_folder
from quantizers.system.output_files import is_within
from quantizers.system.thread_map import thread_map

TENSOR_BYTES = 8  # of each tensor's digest
PACKED_AT_A_TIME = 16  # experts, on an accelerator: few launches, and temporaries that are small beside the result

Key = tuple[str, str]  # a matrix and which of its arrays, or a tensor's name and nothing


class LayerTensors(NamedTuple):
    """One output shard's tensors, by name. The shapes of packed weights, read as numbers, are on the CPU in both."""

    host: dict[str, torch.Tensor]  # for the file, on the CPU, contiguous
    device: dict[str, torch.Tensor]  # for computing, where the layer was solved; on a CPU the same memory


def layer_tensors(
    plan: Plan,
    layer: int | None,
    source: Checkpoint,
    solved: LayerResult | None,
    *,
    made: Mapping[str, torch.Tensor] = MappingProxyType({}),
    near: Checkpoint | None = None,
    buffers: PinnedBuffers | None = None,
    written: bool = True,
) -> LayerTensors:
    """Every tensor of one output shard.

    Args:
        source: on the CPU.
        solved: None if the plan neither quantizes nor folds in this layer.
        made: what `converted_tensors` made, and scales of keys and values.
        near: the source's tensors where the layer was solved, if they are there too.
        buffers: where what was made on a device is copied to on the host; None for new memory.
        written: False if this process does not write the shard: then solved tensors are not copied to the host.
    """
    actions = plan.of_layer(layer)
    passing = [action for action in actions if action.kind in PASSTHROUGH]
    host = {name: tensor.contiguous() for name, tensor in _passed_through(passing, source)}
    device = dict(host) if near is None else dict(_passed_through(passing, near))
    device |= made
    host |= {name: tensor.cpu() for name, tensor in made.items()} if written else {}
    computed = [action for action in actions if action.kind in ("quantize", "fold", "compensate")]
    if not computed:
        return LayerTensors(host, device)
    assert layer is not None
    assert solved is not None
    small = {action.source: _folded(action, source, solved) for action in computed if action.kind != "quantize"}
    arrays = _arrays(small, solved, plan.schemes[layer])
    places = [(device, arrays)]
    if written:
        copied = buffers.copied(arrays) if buffers else {key: tensor.cpu() for key, tensor in arrays.items()}
        places.append((host, copied))
    for tensors, values in places:
        for action in computed:
            if action.kind == "quantize":
                assert action.matrix is not None
                assert action.expert is not None
                for name in action.outputs:
                    part = name.rpartition(".")[2]
                    tensors[name] = (
                        torch.tensor(action.shape, dtype=torch.int64)
                        if part == SHAPE
                        else values[action.matrix, part][action.expert]
                    )
            else:
                tensors[action.source] = values[action.source, ""]
    return LayerTensors(host, device)


def _passed_through(actions: Sequence[Action], source: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that keep their bytes, in the dtype under which servers load them, see formats/e8m0.py."""
    for action in actions:
        for name, spec in action.outputs.items():
            tensor = source.tensor(action.source)
            yield name, tensor if spec.dtype == action.spec.dtype else tensor.view(torch_dtype(spec.dtype))


def converted_tensors(
    plan: Plan, layer: int | None, source: Checkpoint, device: torch.device
) -> dict[str, torch.Tensor]:
    """The tensors of a shard that the recipe's `attention` makes of the source's linear modules, on `device`."""
    made: dict[str, torch.Tensor] = {}
    for action in plan.of_layer(layer):
        if action.kind == "convert" and action.module is not None:
            made |= converted(source, action.module, plan.attention, device)
    return made


def _folded(action: Action, source: Checkpoint, solved: LayerResult) -> torch.Tensor:
    """The norm or the router that replaces the source's."""
    if action.kind == "fold":
        assert solved.norm is not None
        return solved.norm
    # If the router was not compensated (the library's published recipe, for comparison), its values are kept.
    router = source.tensor(action.source) if solved.router is None else solved.router
    return router.to(torch_dtype(action.outputs[action.source].dtype))


def _arrays(small: Mapping[str, torch.Tensor], solved: LayerResult, scheme: ExpertFormat) -> dict[Key, torch.Tensor]:
    """The packed codes of each matrix, its scales and the small tensors, where they were made."""
    arrays: dict[Key, torch.Tensor] = {(name, ""): tensor.contiguous() for name, tensor in small.items()}
    for matrix, scale in solved.scales.items():
        arrays[matrix, SCALE] = scheme.pack_scale(scale)
    for name, of_matrices in ((GLOBAL_SCALE, solved.global_scales), (INPUT_SCALE, solved.input_scales)):
        arrays |= {(matrix, name): values.unsqueeze(-1) for matrix, values in of_matrices.items()}
    for matrix, codes in solved.codes.items():
        spec = scheme.specs(matrix, codes.shape[1:])[f"{matrix}.{PACKED}"]
        packed = torch.empty((len(codes), *spec.shape), dtype=torch_dtype(spec.dtype), device=codes.device)
        # On a CPU temporaries that fit in its cache are quicker.
        step = PACKED_AT_A_TIME if is_accelerator(codes.device) else 1
        for first in range(0, len(codes), step):
            packed[first : first + step] = scheme.pack(codes[first : first + step])
        arrays[matrix, PACKED] = packed
    return arrays


def check_finite(tensors: Mapping[str, torch.Tensor], where: str, carried: Collection[str] = ()) -> None:
    """Raise a QuantizeError for the first tensor with a NaN or infinity; what is `carried` may hold anything."""
    for name, tensor in tensors.items():
        if name not in carried and tensor.is_floating_point() and not bool(is_finite(tensor)):
            raise QuantizeError(where, f"{name} is not finite", "nothing was written for this layer")


def write_shard(
    tensors: Mapping[str, torch.Tensor],
    path: Path,
    kept: Mapping[str, str] = MappingProxyType({}),
    carried: Collection[str] = (),
) -> ShardDigest:
    """Write a safetensors file, and read it back before it gets its final name; returns its digests.

    The file is compared with the memory that was to be written, and its passthrough tensors, which are the source's
    own memory, with the hashes that the source had when it was read.

    Args:
        tensors: on the CPU, contiguous.
        kept: SHA-256, hexadecimal, of the source's bytes for each tensor that keeps them.
        carried: see `check_finite`.

    Raises:
        QuantizeError: a tensor is not finite, the disk is full or cannot be written, or the file holds other bytes.
    """
    check_finite(tensors, path.name, carried)
    temporary = path.with_name(path.name + ".tmp")
    with disk_errors(path):
        temporary.touch()
        mode = temporary.stat().st_mode  # as the user's umask allows; save_file makes it readable by the owner only
        save_file(dict(tensors), temporary, metadata=METADATA)
        temporary.chmod(mode)
        with temporary.open("rb+") as stream:
            os.fsync(stream.fileno())
        return _named(temporary, path, kept, tensors)


def copy_shard(plan: Plan, part: int, source: Checkpoint, path: Path) -> ShardDigest:
    """Write the shard of a part whose tensors all keep their bytes, in pieces: no tensor is in memory as a whole.

    The file is as safetensors would write it, and is read back before it gets its final name, as by `write_shard`.

    Raises:
        CheckpointError: the source cannot be read.
        QuantizeError: the disk is full or cannot be written, or the file holds other bytes.
    """
    tensors, hashes = plan.shard(part), dict[str, str]()
    sources = {name: action.source for action in plan.of_layer(part) for name in action.outputs}
    temporary = path.with_name(path.name + ".tmp")
    with disk_errors(path):
        with temporary.open("wb") as stream:
            stream.write(file_header(tensors))
            for name in in_file(tensors):
                digest, spec = hashlib.sha256(), tensors[name]
                for piece in source.pieces(sources[name]):
                    numbers = torch.frombuffer(piece, dtype=torch.uint8).view(torch_dtype(spec.dtype))
                    if numbers.is_floating_point() and not bool(is_finite(numbers)):
                        file = source.tensors[sources[name]].file
                        raise CheckpointError(file, f"{name} holds a NaN or infinity", "download this shard again")
                    digest.update(piece)
                    stream.write(piece)
                hashes[name] = digest.hexdigest()
            stream.flush()
            os.fsync(stream.fileno())
        return _named(temporary, path, hashes)


def _named(
    temporary: Path,
    path: Path,
    kept: Mapping[str, str],
    written: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> ShardDigest:
    """Give a written file its final name, once it has been read back; returns its digests.

    Args:
        kept: SHA-256, hexadecimal, of the source's bytes for each tensor that keeps them.
        written: all tensors, if they are in memory.
    """
    try:
        digest, hashes, changed = read_back(temporary, kept, written)
    except CheckpointError as failure:
        raise QuantizeError("", f"{failure}, though it was just written", "check the disk") from None
    differing = [f"{name} has other bytes in the file than it was written with" for name in changed]
    differing += [
        f"{name} has other bytes than the source's" for name, wanted in kept.items() if hashes[name] != wanted
    ]
    if differing:
        temporary.unlink()
        raise QuantizeError(
            path.name,
            f"{differing[0]}{f', and {len(differing) - 1} more' if len(differing) > 1 else ''}",
            "check disk and memory, then give the same command again",
        )
    os.replace(temporary, path)
    sync_folder(path.parent)
    return digest


def kept_hashes(plan: Plan, layer: int | None, source: Checkpoint) -> dict[str, str]:
    """SHA-256, hexadecimal, of the source's bytes for every tensor of a shard that keeps them."""
    actions = (action for action in plan.of_layer(layer) if action.kind in PASSTHROUGH)
    return {name: source.sha256(action.source) for action in actions for name in action.outputs}


# Digests -----------------------------------------------------------------------------------------------------------


def _short(raw: bytearray) -> str:
    return hashlib.blake2b(raw, digest_size=TENSOR_BYTES).hexdigest()


def read_back(
    file: Path, wanted: Collection[str] = (), written: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> tuple[ShardDigest, dict[str, str], list[str]]:
    """Read a shard once.

    Args:
        wanted: names of tensors whose SHA-256 is asked for.
        written: tensors to compare with the file's, on the CPU, contiguous.

    Returns:
        Its digests, the SHA-256, hexadecimal, of the wanted tensors, and the names of those whose bytes are not what is
        in memory.

    Raises:
        CheckpointError: it is not a whole safetensors file.
        OSError: it cannot be read.
    """
    header, whole = read_header(file), hashlib.sha256()
    size = min((info.start for info in header.values()), default=file.stat().st_size)

    def tensors(stream: BufferedReader) -> Iterator[tuple[str, bytearray] | tuple[str, _Read]]:
        whole.update(stream.read(size))
        for name, info in header.items():  # in the order of their bytes, without gaps
            if info.size > PIECE:  # in pieces: it may be a table that no memory holds
                yield name, _in_pieces(stream, info.size, whole, _memory(name))
                continue
            raw = _next(stream, info.size)
            whole.update(raw)
            yield name, raw

    def _memory(name: str) -> memoryview | None:
        return as_bytes(written[name]) if name in written else None

    def read(tensor: tuple[str, bytearray] | tuple[str, _Read]) -> _Read:
        name, raw = tensor
        if isinstance(raw, _Read):
            return raw
        memory = _memory(name)
        same = memory is None or raw == memory  # as fast as memory is read: neither is hashed for it
        return _Read(_short(raw), hashlib.sha256(raw).hexdigest() if name in wanted else "", same)

    with file.open("rb") as stream, closing(thread_map(read, tensors(stream))) as by_tensor:
        tensors_read = dict(zip(header, by_tensor, strict=True))
    digest = ShardDigest(
        bytes=size + sum(info.size for info in header.values()),
        sha256=whole.hexdigest(),
        tensors="".join(tensors_read[name].short for name in sorted(tensors_read)),
    )
    hashes = {name: tensor.full for name, tensor in tensors_read.items() if name in wanted}
    return digest, hashes, sorted(name for name, tensor in tensors_read.items() if not tensor.same)


def _next(stream: BufferedReader, size: int) -> bytearray:
    raw = bytearray(size)
    stream.readinto(raw)
    return raw


class _Read(NamedTuple):
    """One tensor of a file: its digests in hexadecimal, and whether its bytes are those in memory."""

    short: str
    full: str
    same: bool


def _in_pieces(stream: BufferedReader, size: int, whole: hashlib._Hash, memory: memoryview | None) -> _Read:
    """The next bytes of a file, which `whole` gets as well, compared with those in memory."""
    short = hashlib.blake2b(digest_size=TENSOR_BYTES)
    full = hashlib.sha256()
    same = True
    for at in range(0, size, PIECE):
        piece = _next(stream, min(size - at, PIECE))
        for digest in (short, full, whole):
            digest.update(piece)
        same = same and (memory is None or piece == memory[at : at + len(piece)])
    return _Read(short.hexdigest(), full.hexdigest(), same)


def recorded_digests(report: dict[str, Any]) -> dict[str, ShardDigest]:
    """The digests in a report, by shard in its folder, without the malformed ones of a damaged report."""
    audit = report.get("audit")
    by_shard = audit.get("digests") if isinstance(audit, dict) else None
    digests: dict[str, ShardDigest] = {}
    for name, digest in by_shard.items() if isinstance(by_shard, dict) else ():
        if is_within(name) and isinstance(digest, dict) and ShardDigest.model_fields.keys() <= digest.keys():
            values = {key: digest[key] for key in ShardDigest.model_fields}
            if isinstance(values["tensors"], str):
                # Not validated: a damaged SHA-256 is to differ from the file's, rather than not to be compared.
                digests[name] = ShardDigest.model_construct(**values)
    return digests


def changes(file: Path, written: ShardDigest, *, past_the_cache: bool = False) -> list[str]:
    """The changes in a shard since it was written, one line each; none if its SHA-256 is equal.

    A line names the changed tensor; or the file, if that has another number of tensors, cannot be read, or changed only
    in its header. With `past_the_cache` the system's cached copy is dropped first, so that the disk is read.
    """
    try:
        if past_the_cache:
            with file.open("rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if file_sha256(file) == written.sha256:
            return []
        digest, names = read_back(file)[0], sorted(read_header(file))
    except OSError as failure:
        return [f"{file.name}: cannot be read ({failure.strerror})"]
    except CheckpointError as failure:
        return [f"{file.name}: changed since the run wrote it ({failure})"]
    known, now = split(written.tensors), split(digest.tensors)
    if len(known) != len(now):
        return [f"{file.name}: changed since the run wrote it: {len(known)} tensors then, {len(now)} now"]
    changed = [name for name, old, new in zip(names, known, now, strict=True) if old != new]
    return [f"{name}: changed since the run wrote it" for name in changed] or [
        f"{file.name}: changed since the run wrote it, only in its header"
    ]


def split(tensors: str) -> list[str]:
    """The digests joined in `ShardDigest.tensors`."""
    return [tensors[i : i + 2 * TENSOR_BYTES] for i in range(0, len(tensors), 2 * TENSOR_BYTES)]
