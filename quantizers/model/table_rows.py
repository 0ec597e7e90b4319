"""Rows of a layer's table, such as one of n-grams, looked up in the checkpoint's files.

Such a table may have 51 billion numbers in one layer, of which a text needs a few thousand rows: neither the device nor
the host ever holds it. What is looked up are the rows of the ids in a batch, each once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from quantizers.checkpoint.reader import Checkpoint, as_bytes, torch_dtype
from quantizers.checkpoint.safetensors_header import FLOATING, FP8, TensorInfo
from quantizers.system.errors import CheckpointError
from quantizers.system.thread_map import thread_map

# Legend: N ids, U different ones, W numbers of a row

AT_A_TIME = 4096  # runs of neighbouring rows that one thread reads
PUBLISHED = "give the published checkpoint"


class TableRows(torch.nn.Module):
    """Stands for transformers' embedding in a layer.

    Args:
        checkpoint: reads from files.
        names: the tensors whose rows follow each other in the table, (rows, W) of one dtype.
        scale: the tensor with the number that every row is multiplied by, in float32, if there is one.
        device, dtype: of what is looked up.

    Raises:
        CheckpointError: a tensor is missing, has another width or dtype than the others, there is a scale of rows that
            are not FP8, or a row that is looked up is not finite.
    """

    def __init__(
        self, checkpoint: Checkpoint, names: Sequence[str], scale: str | None, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self._files = checkpoint
        self._infos = [checkpoint.require(name, "a tensor of a table") for name in names]
        first = self._infos[0]
        for info in self._infos:
            whole = f"{info.name} is {info.dtype} {list(info.shape)}"
            if info.dtype not in (FP8, *FLOATING) or (info.dtype == FP8 and scale is None):
                problem = "a table is read in 16 or 32 bits, or in FP8 with one scale"
                raise CheckpointError(info.file, f"{whole}; {problem}", PUBLISHED)
            if info.dtype != FP8 and scale is not None:
                raise CheckpointError(
                    info.file, f"{whole}, but {scale} is a scale, as FP8 has; one is wrong", PUBLISHED
                )
            if len(info.shape) != 2 or info.shape[1] != first.shape[1] or info.dtype != first.dtype:
                other = f"{first.name} {first.dtype} {list(first.shape)}"
                raise CheckpointError(info.file, f"{whole}, and {other}: these are no parts of one table", PUBLISHED)
        self._scale: float | None = None
        if scale is not None:
            self._scale = checkpoint.tensor(checkpoint.require(scale, "the scale of a table").name).float().item()
        self._starts = torch.tensor([0, *(info.shape[0] for info in self._infos)]).cumsum(0)
        # Classes ask for its device.
        self.weight = torch.empty(0, first.shape[1], device=device, dtype=dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows (…, W) of ids (…) int64."""
        different, places = torch.unique(ids.cpu(), return_inverse=True)
        rows = self._read(different)
        numbers = rows if self._scale is None else rows.float() * self._scale
        if not bool(numbers.isfinite().all()):
            info = self._infos[0]
            beside = "" if self._scale is None else ", or its scale,"
            problem = f"{info.name}, or what follows it in the table{beside} holds a NaN or infinity"
            raise CheckpointError(info.file, problem, "download this shard again")
        made = numbers.to(device=self.weight.device, dtype=self.weight.dtype)
        return torch.nn.functional.embedding(places.to(made.device), made)

    def _read(self, different: torch.Tensor) -> torch.Tensor:
        """The rows (U, W), as they are stored, of ids (U,) in ascending order."""
        first = self._infos[0]
        rows = torch.empty(len(different), first.shape[1], dtype=torch_dtype(first.dtype))
        raw = as_bytes(rows)
        wanted = list(self._runs(different, raw))
        pieces = (wanted[start : start + AT_A_TIME] for start in range(0, len(wanted), AT_A_TIME))
        for _ in thread_map(lambda piece: list(self._files.read_into(piece)), pieces):
            pass
        return rows

    def _runs(self, different: torch.Tensor, raw: memoryview) -> Iterator[tuple[TensorInfo, memoryview]]:
        """The bytes of neighbouring rows in one tensor, with the memory that they are read into."""
        tensors = torch.searchsorted(self._starts, different, right=True) - 1
        within = different - self._starts[tensors]
        begins = (different.diff() != 1) | (tensors.diff() != 0)
        edges = [0, *(begins.nonzero().flatten() + 1).tolist(), len(different)] if len(different) else []
        numbers, rows = tensors.tolist(), within.tolist()
        for begin, end in pairwise(edges):
            info = self._infos[numbers[begin]]
            size = info.size // info.shape[0]
            start = info.start + rows[begin] * size
            part = replace(info, start=start, end=start + (end - begin) * size, shape=(end - begin, info.shape[1]))
            yield part, raw[begin * size : end * size]
