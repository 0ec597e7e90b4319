"""A checkpoint in a folder: an index of all shards' headers, and tensors or raw bytes on demand.

Nothing is mapped: an open safetensors handle would keep its mapped pages resident, and with 130 shards that is the
whole model.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from quantizers.system.caches import downloads_are_lost
from quantizers.system.errors import CheckpointError, first_line
from quantizers.system.formatting import places
from quantizers.system.hub_client import hub_errors
from quantizers.system.output_files import CARD, is_own
from quantizers.system.shipped import shipped_model
from quantizers.system.thread_map import thread_map

from .remote import HubFiles, files_of
from .safetensors_header import TORCH_DTYPES, Rows, TensorInfo, printed, read_errors, read_header

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
ADAPTER = "adapter_config.json"
DECLARATION = "hf_quant_config.json"  # of ModelOpt: what servers take for a quantization_config that config.json lacks
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
OTHER_FORMS = ("onnx", "original")  # folders with the model's weights in other formats
LARGEST_SIDE_FILE = 100_000_000  # bytes
PIECE = 64 * 2**20  # bytes of a tensor that are read at a time where it need not be in memory
UNREAD = "weights that are not read"
POINTER = b"version https://git-lfs.github.com/spec/"  # what git-lfs leaves in place of a file
COMMIT = re.compile(r"[0-9a-f]{40}")
BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # the name of a file in the Hub's cache, its hash
GIVE_ORIGINAL = "here give the checkpoint that it was made from"
EVALUATE_GGUF = f"evaluate it with llama.cpp's llama-perplexity --kl-divergence; {GIVE_ORIGINAL}"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder whose headers have been read and checked."""

    folder: Path
    name: str  # the user's name for it: a Hub id or a folder
    config: dict[str, Any]  # the content of config.json
    tensors: dict[str, TensorInfo] = field(repr=False)  # of every shard, by name
    revision: str | None = None  # on the Hub, a commit if that is known; None for a local checkpoint
    remote: HubFiles | None = field(default=None, repr=False, kw_only=True)  # has the shards, which are not in `folder`

    def raw(self, name: str) -> bytearray:
        """The bytes of one tensor as stored in the file; raises as `read_into`."""
        buffer = bytearray(self.tensors[name].size)
        list(self.read_into([(self.tensors[name], memoryview(buffer))]))
        return buffer

    def read_into(
        self, wanted: Iterable[tuple[TensorInfo, memoryview]], stop: Event | None = None
    ) -> Iterator[TensorInfo]:
        """`read_into`, from the Hub if the shards are there; waiting for a shard ends once `stop` is set."""
        return self.remote.read_into(wanted, stop) if self.remote else read_into(wanted)

    def release(self, names: Iterable[str]) -> None:
        """Say that all processes of this machine have read these tensors, and do not need them until the next pass."""
        if self.remote:
            self.remote.release(self.tensors[name] for name in names)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor in its stored dtype, in newly allocated memory."""
        return as_tensor(self.tensors[name], self.raw(name))

    def sha256(self, name: str) -> str:
        """SHA-256, hexadecimal, of one tensor's bytes."""
        digest = hashlib.sha256()
        for piece in self.pieces(name):
            digest.update(piece)
        return digest.hexdigest()

    def pieces(self, name: str) -> Iterator[memoryview]:
        """The bytes of one tensor, at most PIECE at a time in the same memory; raises as `read_into`."""
        info = self.tensors[name]
        buffer = memoryview(bytearray(min(info.size, PIECE)))
        for start in range(info.start, info.end, PIECE):
            end = min(start + PIECE, info.end)
            piece = buffer[: end - start]
            list(self.read_into([(replace(info, start=start, end=end), piece)]))
            yield piece

    @property
    def files(self) -> Checkpoint | None:
        """The checkpoint that reads from files; None if these tensors came from elsewhere."""
        return self

    def require(self, name: str, why: str) -> TensorInfo:
        """The header entry of a tensor that must exist; `why` says in the error what it is."""
        if name not in self.tensors:
            raise CheckpointError(
                self.folder, f"{name} is missing ({why})", "the checkpoint is incomplete, download it again"
            )
        return self.tensors[name]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; a CheckpointError if it cannot be read, is not JSON, or contradicts itself."""
    try:
        with read_errors(path):
            data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=partial(_object, path))
    except (ValueError, RecursionError) as failure:
        line = getattr(failure, "lineno", 1)
        raise CheckpointError(f"{path}:{line}", "not valid JSON", "download this file again") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}:1", "must be a JSON object", "download this file again")
    return data


def _object(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a CheckpointError if two of its values have one key, of which programs take the first or last."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made and made[key] != value:
            raise CheckpointError(path, f"{printed(key)} is given twice, with different values", "keep one")
        made[key] = value
    return made


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder; a CheckpointError if it cannot be read, or is not in the folder itself.

    A quantization_config that only text_config has, as in Kimi-K2.5, is given at the top, where servers look as well.
    """
    _refuse_elsewhere(folder / CONFIG, folder)
    config, key = read_json(folder / CONFIG), "quantization_config"
    text = config.get("text_config")
    if isinstance(text, dict) and text.get(key) and not config.get(key):
        config[key] = text.pop(key)
    return config


def refuse_gguf(model: str) -> None:
    """Raise a CheckpointError for a GGUF file, a folder with such files and no safetensors, and a Hub id in GGUF."""
    folder = os.path.expanduser(model)
    if os.path.isdir(folder):
        names = sorted(os.listdir(folder))
        gguf = [name for name in names if name.lower().endswith(".gguf")]
        if gguf and not any(name.endswith(".safetensors") for name in names):
            raise CheckpointError(os.path.join(folder, gguf[0]), "GGUF is not supported", EVALUATE_GGUF)
    elif model.lower().endswith((".gguf", "-gguf", "_gguf")):
        raise CheckpointError(model, "GGUF is not supported", EVALUATE_GGUF)


def open_folder(
    folder: Path,
    name: str | None = None,
    revision: str | None = None,
    *,
    strays: bool = False,
    remote: HubFiles | None = None,
) -> Checkpoint:
    """Read config.json, the index and every shard's header of a folder in the Hugging Face layout.

    Args:
        name: the user's name for it; None for the folder's path.
        revision: on the Hub, unless the folder's own name in the Hub's cache is the commit.
        strays: whether other weights may lie there, which some loaders read instead; an audit reports them.
        remote: has the shards, which then need not be in the folder.

    Raises:
        CheckpointError: one line naming the file or tensor at fault.
    """
    refuse_gguf(str(folder))
    if not os.path.isdir(folder):
        raise CheckpointError(folder, "no such folder", "give a checkpoint folder or a Hub id")
    for path in (folder / INDEX, folder / SINGLE, *side_files(folder)):
        _refuse_elsewhere(path, folder)
    config, has_index = read_config(folder), os.path.isfile(folder / INDEX)
    if not strays:
        _refuse_other_weights(folder, config, INDEX if has_index else SINGLE)
    if has_index:
        tensors = _indexed_tensors(folder / INDEX, strays, remote)
    elif _is_there(folder / SINGLE, remote):
        tensors = _header(folder / SINGLE, remote)
    else:
        raise CheckpointError(folder, f"neither {INDEX} nor {SINGLE}", "give a safetensors checkpoint")
    if folder.parent.name == "snapshots" and COMMIT.fullmatch(folder.name):
        revision = folder.name
    return Checkpoint(folder, name or str(folder), config, tensors, revision, remote=remote)


def _indexed_tensors(index: Path, strays: bool, remote: HubFiles | None) -> dict[str, TensorInfo]:
    """The tensors of all shards of an index, if it agrees with them."""
    folder = index.parent
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(index, "weight_map is missing or empty", "download this file again")
    for shard in weight_map.values():
        # A shard must be in the folder of its index: `../x` or an absolute path would read other files of the user.
        if not isinstance(shard, str) or shard in ("", "..") or Path(shard).name != shard or not shard.isprintable():
            raise CheckpointError(
                index,
                f"names the shard {reprlib.repr(shard)}, which is not a plain file name, and is refused",
                "download this file again",
            )
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        _refuse_elsewhere(folder / shard, folder)
    if SINGLE not in shards and _is_there(folder / SINGLE, remote) and not strays:
        raise CheckpointError(
            folder,
            f"holds two sets of weights: {SINGLE}, which transformers reads, and those of {INDEX} ({shards[0]}, …), "
            "which servers read",
            "remove one of them",
        )
    tensors: dict[str, TensorInfo] = {}
    for file in shards:
        if not _is_there(folder / file, remote):
            if remote:
                raise CheckpointError(index, f"names {file}, which the Hub lacks", "give another revision")
            raise CheckpointError(index, f"names {file}, which is not in the folder", "download it")
    for file, infos in zip(shards, thread_map(lambda shard: _header(folder / shard, remote), shards), strict=True):
        for tensor, info in infos.items():
            if tensor in tensors:
                raise CheckpointError(folder / file, f"{tensor} is also in {tensors[tensor].file.name}", "keep one")
            tensors[tensor] = info
    for tensor, shard in weight_map.items():
        if tensor not in tensors or tensors[tensor].file.name != shard:
            raise CheckpointError(
                index, f"{printed(tensor)} should be in {shard}, which has no such tensor", "download it again"
            )
    for tensor, info in tensors.items():
        if tensor not in weight_map:
            raise CheckpointError(
                info.file, f"{tensor} is not in {INDEX}", "index and shards do not belong together, download both"
            )
    return tensors


def _is_there(shard: Path, remote: HubFiles | None) -> bool:
    return shard.name in remote.files if remote else os.path.isfile(shard)


def _header(shard: Path, remote: HubFiles | None) -> dict[str, TensorInfo]:
    return remote.header(shard) if remote else read_header(shard)


def _refuse_elsewhere(path: Path, folder: Path) -> None:
    """Refuse a link that leads out of a checkpoint's folder, other than into the Hub's cache, and a git-lfs pointer."""
    if os.path.islink(path):
        # The Hub's cache links each file to the folder `blobs` next to `snapshots`, which may be a link itself.
        target, home = Path(os.path.realpath(path)), folder.resolve()
        cache = (home.parent.parent / "blobs").resolve() if home.parent.name == "snapshots" else home
        if target.parent != cache and not target.is_relative_to(home) and not BLOB.fullmatch(target.name):
            raise CheckpointError(path, "is a link that leads out of the checkpoint", "put the file itself there")
    with contextlib.suppress(OSError), path.open("rb") as stream:
        if stream.read(len(POINTER)) == POINTER:
            raise CheckpointError(
                path, "is a pointer of git-lfs, not the file itself", "run `git lfs pull` there, or download the file"
            )


def _refuse_other_weights(folder: Path, config: dict[str, Any], read: str) -> None:
    """Refuse a folder of which transformers would read other weights than `read`."""
    named = config.get("transformers_weights", read)
    if named != read:
        raise CheckpointError(
            folder / CONFIG,
            f"transformers_weights is {reprlib.repr(named)}, which transformers reads, and servers {read}",
            "remove the key, or the weights that are not meant",
        )
    if os.path.isfile(folder / ADAPTER):
        raise CheckpointError(
            folder / ADAPTER,
            "with it transformers reads an adapter and the model that it names, not the weights beside it",
            "merge them (merge_and_unload of peft) into a folder of their own, or remove it",
        )


def side_files(folder: Path) -> list[Path]:
    """The other files of a checkpoint, in subfolders too: tokenizer, chat templates, license, code, parsers.

    Not among them are config.json, files that a run of this program adds, hidden ones, and what is left behind.
    """
    return [folder / name for name, reason in _others(folder) if not reason]


def left_behind(checkpoint: Checkpoint) -> str:
    """Entries of a checkpoint's folder that are neither read nor copied along, as a sentence; empty if none."""
    read, by_reason = {info.file.name for info in checkpoint.tensors.values()}, dict[str, list[str]]()
    for name, reason in _others(checkpoint.folder):
        if reason and name not in read:
            by_reason.setdefault(reason, []).append(name)
    listed = "; ".join(f"{places(names)} ({reason})" for reason, names in by_reason.items())
    return f"left behind in the source: {listed}" if listed else ""


def _others(folder: Path, within: str = "") -> Iterator[tuple[str, str]]:
    """The names of the other files and why each is left behind, if it is; of a folder left behind its own name and /.

    A folder with weights is another model, or the same in another format: without them its other files mean nothing.
    """
    for path in sorted((folder / within).iterdir()):
        name = within + path.name
        read = not within and name in (CONFIG, INDEX, CARD)
        if read or path.name.startswith(".") or path.name == "__pycache__":
            continue
        if path.is_file() and not within and is_own(name):
            yield name, "names of a run's own files"
        elif name == DECLARATION:
            yield name, "says how the source is quantized"
        elif path.is_file():
            large = f"larger than {LARGEST_SIDE_FILE:,} bytes" if path.stat().st_size > LARGEST_SIDE_FILE else ""
            weights = path.suffix in WEIGHTS or name.endswith(".index.json")
            yield name, UNREAD if weights else large
        elif not path.is_dir():
            yield name, "no file"
        elif path.is_symlink():
            yield f"{name}/", "a link to a folder"
        elif path.name in OTHER_FORMS or any(Path(file).suffix in WEIGHTS for file in os.listdir(path)):
            yield f"{name}/", UNREAD
        else:
            yield from _others(folder, f"{name}/")


def locate(
    model: str,
    revision: str = "main",
    *,
    stream: bool = False,
    patterns: Sequence[str] = (),
    cache: Path | None = None,
) -> tuple[Path, HubFiles | None]:
    """The folder of a checkpoint: the given one, or that of a Hub id in the cache, after downloading missing files.

    Args:
        model: a folder, the bare name of the model that comes with the program, or a Hub id.
        stream: leave the shards on the Hub, and return its files, too.
        patterns: glob patterns of the files to download; none for all files of the checkpoint.
        cache: the folder for what is downloaded; None for the Hub's cache.

    Raises:
        CheckpointError: the Hub does not know the id or cannot be reached, and the cache does not have it; or `stream`
            is asked for a folder.
    """
    folder, remote = os.path.expanduser(model), None
    if os.path.isdir(folder):
        if stream:
            raise CheckpointError(model, "is a folder, which is read where it lies", "leave --stream out")
        return Path(folder), None
    refuse_gguf(model)
    if os.path.isfile(folder):
        beside = (Path(folder).parent / CONFIG).is_file()
        raise CheckpointError(
            model, "is a file", f"give {Path(model).parent if beside else 'the folder of a checkpoint'}"
        )
    if stream:
        with hub_errors(model, "its headers", revision, begun=False):
            remote = HubFiles(model, *files_of(model, revision))
        revision = remote.commit
    kept = shipped_model(model)
    if kept is not None:
        return kept, remote
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise CheckpointError(model, "no such folder, and not a Hub id (owner/name)", "correct it")
    if not patterns and not stream and downloads_are_lost():
        raise CheckpointError(
            model, "there is no home folder to keep it in", "set HF_HOME to a folder with room for it"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    ignored = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", *(f"{name}/*" for name in OTHER_FORMS)]
    ignored += ["*.safetensors"] if stream else []
    allowed = list(patterns) or None
    try:
        snapshot = snapshot_download(
            model, revision=revision, ignore_patterns=ignored, allow_patterns=allowed, cache_dir=cache
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as failure:
        reason = first_line(failure)
        if getattr(failure, "errno", None) == errno.ENOSPC:
            raise CheckpointError(
                model,
                f"the disk of the Hub's cache is full ({reason})",
                "make room there, or set HF_HOME to a folder on a larger disk; `quantize run --stream` needs no copy "
                "of it",
            ) from None
        raise CheckpointError(
            model, f"not a folder, and the Hub did not give it ({reason})", "download it and name the folder"
        ) from None
    return Path(snapshot), remote


def open_checkpoint(model: str, revision: str = "main", *, stream: bool = False) -> Checkpoint:
    """`locate`, then `open_folder`."""
    folder, remote = locate(model, revision, stream=stream)
    return open_folder(folder, model, revision, remote=remote)


def read_into(wanted: Iterable[tuple[TensorInfo, memoryview]]) -> Iterator[TensorInfo]:
    """Fill memory with tensors' bytes, one after the other, and with not one byte more: nothing is read ahead.

    Args:
        wanted: header entries, and writable bytes of their sizes; a file stays open while they are in it. Each entry
            is yielded once its bytes have been read.

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
                left = view
                while left:
                    count = stream.readinto(left)  # at most 2 GiB at a time
                    if not count:
                        raise CheckpointError(
                            f"{info.file}: {info.name}", "the file is truncated", "download this shard again"
                        )
                    left = left[count:]
            except OSError as failure:
                reason = failure.strerror
                raise CheckpointError(
                    f"{info.file}: {info.name}", f"cannot be read ({reason})", "check the disk"
                ) from None
            yield info


def as_tensor(info: TensorInfo, raw: bytearray | torch.Tensor) -> torch.Tensor:
    """View bytes, of Python or uint8 (size,) on any device, with dtype and shape from the header, without a copy.

    Some columns or rows of a stored matrix are a view that is not contiguous.
    """
    import torch

    if info.dtype not in TORCH_DTYPES:
        raise CheckpointError(f"{info.file}: {info.name}", f"dtype {info.dtype} cannot be read")
    if not isinstance(raw, torch.Tensor):
        raw = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    numbers = raw.view(torch_dtype(info.dtype))
    if info.part is None:
        return numbers.view(info.shape)
    if isinstance(info.part, Rows):
        return numbers.view(-1, info.shape[1])[info.part.first :: info.part.step]
    total, first, step = info.part
    return numbers.view(-1, total)[:, first::step][:, : info.shape[0]].mT


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, without a copy."""
    import torch

    return tensor.flatten().view(torch.uint8).numpy().data


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype, from one of TORCH_DTYPES in safetensors' spelling."""
    import torch

    dtype: torch.dtype = getattr(torch, TORCH_DTYPES[name])
    return dtype
