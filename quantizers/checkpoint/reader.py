"""A checkpoint in a folder: an index of all shards' headers, and tensors or raw bytes on demand.

Nothing is mapped: an open safetensors handle would keep its mapped pages resident, and with 130 shards that is the
whole model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantizers.system.caches import downloads_are_lost
from quantizers.system.errors import CheckpointError
from quantizers.system.output_files import is_own

from .safetensors_header import TORCH_DTYPES, TensorInfo, printed, read_header

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
GIVE_ORIGINAL = "here give the checkpoint that it was made from"
EVALUATE_GGUF = f"evaluate it with llama.cpp's llama-perplexity --kl-divergence; {GIVE_ORIGINAL}"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder whose headers have been read and checked.

    Attributes:
        folder: its path.
        name: the user's name for it: a Hub id or a folder.
        config: the content of config.json.
        tensors: every tensor of every shard, by name.
        revision: its revision on the Hub; None for a local checkpoint.
    """

    folder: Path
    name: str
    config: dict[str, Any]
    tensors: dict[str, TensorInfo] = field(repr=False)
    revision: str | None = None

    def raw(self, name: str) -> bytearray:
        """The bytes of one tensor as stored in the file."""
        return read_bytes(self.tensors[name])

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor in its stored dtype, in newly allocated memory."""
        return as_tensor(self.tensors[name], self.raw(name))

    def sha256(self, name: str) -> str:
        """SHA-256, hexadecimal, of one tensor's bytes."""
        return hashlib.sha256(self.raw(name)).hexdigest()

    def require(self, name: str, why: str) -> TensorInfo:
        """The header entry of a tensor that must exist; `why` says in the error what it is."""
        if name not in self.tensors:
            raise CheckpointError(
                f"{self.folder}: {name} is missing ({why}); the checkpoint is incomplete, download it again"
            )
        return self.tensors[name]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        CheckpointError: the file cannot be read, is not JSON, or does not contain an object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as failure:
        raise CheckpointError(f"{path}: cannot be read ({failure.strerror or failure}); check the folder") from None
    except (ValueError, RecursionError) as failure:
        line = getattr(failure, "lineno", 1)
        raise CheckpointError(f"{path}:{line}: not valid JSON; download this file again") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}:1: must be a JSON object; download this file again")
    return data


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder.

    Raises:
        CheckpointError: it cannot be read, or is a link that leads out of the folder.
    """
    _refuse_link_out(folder / CONFIG)
    return read_json(folder / CONFIG)


def refuse_gguf(model: str) -> None:
    """Refuse a GGUF file, a folder with GGUF files and no safetensors, and a Hub id that ends in GGUF.

    Raises:
        CheckpointError: one line with the remedy.
    """
    folder = os.path.expanduser(model)
    if os.path.isdir(folder):
        names = sorted(os.listdir(folder))
        gguf = [name for name in names if name.lower().endswith(".gguf")]
        if gguf and not any(name.endswith(".safetensors") for name in names):
            raise CheckpointError(f"{os.path.join(folder, gguf[0])}: GGUF is not supported; {EVALUATE_GGUF}")
    elif model.lower().endswith((".gguf", "-gguf", "_gguf")):
        raise CheckpointError(f"{model}: GGUF is not supported; {EVALUATE_GGUF}")


def open_folder(folder: Path, name: str | None = None, revision: str | None = None) -> Checkpoint:
    """Read config.json, the index and every shard's header.

    Args:
        folder: a checkpoint in the Hugging Face layout.
        name: the user's name for it; None for the folder's path.

    Raises:
        CheckpointError: one line naming the file or tensor at fault.
    """
    refuse_gguf(str(folder))
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder}: no such folder; give a checkpoint folder or a Hub id")
    for path in (folder / INDEX, folder / SINGLE, *side_files(folder)):
        _refuse_link_out(path)
    config = read_config(folder)
    tensors: dict[str, TensorInfo] = {}
    index = folder / INDEX
    if not os.path.isfile(index):
        if not os.path.isfile(folder / SINGLE):
            raise CheckpointError(f"{folder}: neither {INDEX} nor {SINGLE}; give a safetensors checkpoint")
        tensors = read_header(folder / SINGLE)
        return Checkpoint(folder, name or str(folder), config, tensors, revision)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is missing or empty; download this file again")
    for file in sorted({_shard_name(index, shard) for shard in weight_map.values()}):
        if not os.path.isfile(folder / file):
            raise CheckpointError(f"{index}: names {file}, which is not in the folder; download it")
        for tensor, info in read_header(folder / file).items():
            if tensor in tensors:
                raise CheckpointError(f"{folder / file}: {tensor} is also in {tensors[tensor].file.name}; keep one")
            tensors[tensor] = info
    _check_index(index, weight_map, tensors)
    return Checkpoint(folder, name or str(folder), config, tensors, revision)


def _shard_name(index: Path, shard: object) -> str:
    # A shard must be in the folder of its index: `../x` or an absolute path would read other files of the user.
    if not isinstance(shard, str) or shard in ("", "..") or Path(shard).name != shard or not shard.isprintable():
        raise CheckpointError(
            f"{index}: names the shard {reprlib.repr(shard)}, which is not a plain file name, and is refused; "
            "download this file again"
        )
    _refuse_link_out(index.parent / shard)
    return shard


def _refuse_link_out(path: Path) -> None:
    # The Hub's cache links each file to the folder `blobs` next to `snapshots`; other links out are refused.
    if os.path.islink(path):
        target, home = Path(os.path.realpath(path)), path.parent.resolve()
        cache = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
        if target.parent not in (home, cache):
            raise CheckpointError(f"{path}: is a link that leads out of the checkpoint; put the file itself there")


def _check_index(index: Path, weight_map: dict[str, Any], tensors: dict[str, TensorInfo]) -> None:
    for tensor, shard in weight_map.items():
        if tensor not in tensors or tensors[tensor].file.name != shard:
            raise CheckpointError(
                f"{index}: {printed(tensor)} should be in {shard}, which has no such tensor; download it again"
            )
    for tensor, info in tensors.items():
        if tensor not in weight_map:
            raise CheckpointError(
                f"{info.file}: {tensor} is not in {index.name}; index and shards do not belong together, download both"
            )


def side_files(folder: Path) -> list[Path]:
    """The other files of a checkpoint, without weights and config.json: tokenizer, chat template, license, code.

    Files that a run of this program adds are left out.
    """
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file()
        and path.name not in (CONFIG, INDEX)
        and not is_own(path.name)
        and path.suffix not in WEIGHTS
        and not path.name.endswith(".index.json")
        and not path.name.startswith(".")
    )


def resolve(model: str, revision: str = "main", patterns: Iterable[str] | None = None) -> Path:
    """The folder of a checkpoint: the given one, or the one in the Hub's cache, after downloading missing files.

    Args:
        model: a folder, or a Hub id.
        revision: branch, tag or commit on the Hub.
        patterns: glob patterns of the files to download; None for all files of the checkpoint.

    Raises:
        CheckpointError: the Hub does not know the id or cannot be reached, and the cache does not have it.
    """
    folder = os.path.expanduser(model)
    if os.path.isdir(folder):
        return Path(folder)
    refuse_gguf(model)
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise CheckpointError(f"{model}: no such folder, and not a Hub id (owner/name); correct it")
    if patterns is None and downloads_are_lost():
        raise CheckpointError(
            f"{model}: there is no home folder to keep it in; set HF_HOME to a folder with room for it"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    ignored = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "original/*"]
    try:
        allowed = list(patterns) if patterns else None
        return Path(snapshot_download(model, revision=revision, ignore_patterns=ignored, allow_patterns=allowed))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as failure:
        reason = str(failure).strip().splitlines()[0] if str(failure).strip() else type(failure).__name__
        raise CheckpointError(
            f"{model}: not a folder, and the Hub did not give it ({reason}); download it and name the folder"
        ) from None


def open_checkpoint(model: str, revision: str = "main") -> Checkpoint:
    """`resolve`, then `open_folder`."""
    return open_folder(resolve(model, revision), model, revision)


def read_into(wanted: Iterable[tuple[TensorInfo, memoryview]]) -> Iterator[TensorInfo]:
    """Fill memory with tensors' bytes, one after the other, and with not one byte more: nothing is read ahead.

    Args:
        wanted: header entries, and writable bytes of their sizes; a file stays open while they are in it.

    Yields:
        Each entry once its bytes have been read.

    Raises:
        CheckpointError: the file is gone or has shrunk since its header was read.
    """
    with contextlib.ExitStack() as opened:
        file: Path | None = None
        for info, view in wanted:
            try:
                if info.file != file:
                    opened.close()
                    file, stream = info.file, opened.enter_context(info.file.open("rb", buffering=0))
                stream.seek(info.start)
                _fill(stream, info, view)
            except OSError as failure:
                reason = failure.strerror
                raise CheckpointError(f"{info.file}: {info.name}: cannot be read ({reason}); check the disk") from None
            yield info


def _fill(stream: FileIO, info: TensorInfo, view: memoryview) -> None:
    filled = 0
    while filled < len(view):
        count = stream.readinto(view[filled:])  # at most 2 GiB at a time
        if not count:
            raise CheckpointError(f"{info.file}: {info.name}: the file is truncated; download this shard again")
        filled += count


def read_bytes(info: TensorInfo) -> bytearray:
    """The bytes of one tensor; raises as `read_into`."""
    buffer = bytearray(info.size)
    for _ in read_into([(info, memoryview(buffer))]):
        pass
    return buffer


def as_tensor(info: TensorInfo, raw: bytearray | torch.Tensor) -> torch.Tensor:
    """View bytes as a tensor with the dtype and shape from the header, without a copy.

    Args:
        raw: its bytes, from Python or as a uint8 tensor (size,) on any device, aligned for the dtype.
    """
    import torch

    if info.dtype not in TORCH_DTYPES:
        raise CheckpointError(f"{info.file}: {info.name}: dtype {info.dtype} cannot be read")
    dtype = torch_dtype(info.dtype)
    if info.size == 0:
        return torch.empty(info.shape, dtype=dtype, device=raw.device if isinstance(raw, torch.Tensor) else None)
    if not isinstance(raw, torch.Tensor):
        return torch.frombuffer(raw, dtype=dtype).view(info.shape)
    return raw.view(dtype).view(info.shape)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, without a copy."""
    import torch

    return tensor.flatten().view(torch.uint8).numpy().data


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype, from one of TORCH_DTYPES in safetensors' spelling."""
    import torch

    dtype: torch.dtype = getattr(torch, TORCH_DTYPES[name])
    return dtype
