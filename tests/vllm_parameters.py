"""The parameters of vLLM's models, compared with the tensors of a checkpoint.

Names are vLLM's own affair: a tensor is looked for by its bytes, which random weights make unlike all others.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

# Between these vLLM may convert while it loads. Codes and packed integers must keep their dtype: a cast would load
# without an error, and be wrong.
CONVERTIBLE = (torch.bfloat16, torch.float16, torch.float32)
# What vLLM computes of a tensor, by the end of its name. All of these are kept, never quantized.
COMPUTED: dict[str, Callable[[Tensor], Tensor]] = {".A_log": lambda tensor: -tensor.float().exp()}
# The matrices of the vocabulary may lie in a model that predicts further tokens (MTP) too, wherever its layer is.
VOCABULARY = re.compile(r"\b(embed_tokens|lm_head|shared_head\.head)\.weight$")
# The shape is one pair of numbers, for gate and up alike: vLLM writes both into the same place.
SHAPE = "weight_shape"
KV_SCALES = (".k_scale", ".v_scale")
AGAIN = re.compile(rf"{VOCABULARY.pattern}|{SHAPE}$")  # may have another number of places than one each
NUMBER = re.compile(r"\b(?:layers|blocks)\.(\d+)\.")
EXPERT = re.compile(r"\.experts\.(\d+)\.(\w+)\.\w+$")
MATRICES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


class Block(NamedTuple):
    """A parameter, or what it has of one expert's matrix, in the stored layout.

    Attributes:
        name: the parameter's.
        address: numbers of the layer and, of experts, of the expert, and its matrix as w1, w2 or w3.
        data: contiguous.
    """

    name: str
    address: tuple[str, ...]
    data: Tensor


def state_of(model: torch.nn.Module) -> dict[str, tuple[torch.nn.Module, Tensor]]:
    """Parameters and persistent buffers by name, with the module they belong to; a tied one occurs once.

    Without those of attention whose cache is not quantized: they are placeholders for its scales, which keep vLLM's
    1.0. A checkpoint that has some is found out, since its tensors then have no place.
    """
    state: dict[str, tuple[torch.nn.Module, Tensor]] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        owner = model.get_submodule(name.rpartition(".")[0])
        scale = isinstance(owner, Attention) and owner.kv_cache_dtype.startswith("fp8") and name.endswith(KV_SCALES)
        if id(tensor) not in seen and (scale or not isinstance(owner, (Attention, MLAAttention))):
            state[name] = (owner, tensor)
            seen.add(id(tensor))
    return state


def fill(parameter: Tensor) -> None:
    """Set every byte to 0xFF."""
    parameter.data.view(-1).view(torch.uint8).fill_(0xFF)


def blocks(model: torch.nn.Module) -> Iterator[Block]:
    """All parameters of a model; of experts, [experts, rows, columns] or transposed, one block for each matrix."""
    for name, (module, parameter) in state_of(model).items():
        fused = name.rpartition(".")[2].partition("_")[0]
        if isinstance(module, RoutedExperts) and fused in ("w13", "w2"):
            matrices = ("w2",) if fused == "w2" else ("w1",) if name.endswith(SHAPE) else ("w1", "w3")
            transposed = getattr(parameter, "is_transposed", False)
            for expert, held in enumerate(parameter.data):
                whole = held.t() if transposed else held
                for matrix, part in zip(matrices, whole.chunk(len(matrices)), strict=True):
                    yield Block(name, (*NUMBER.findall(name), str(expert), matrix), part.contiguous())
        else:
            padded = isinstance(module, VocabParallelEmbedding)  # with zeros, to a multiple of 64 rows
            data = parameter.data[: module.org_vocab_size] if padded else parameter.data
            yield Block(name, address(name), data.contiguous())


def address(name: str) -> tuple[str, ...]:
    """That of a stored tensor, or of a parameter that is not of experts."""
    if VOCABULARY.search(name):
        return ()
    expert = EXPERT.search(name)
    if expert is None:
        return tuple(NUMBER.findall(name))
    matrix = MATRICES.get(expert[2], expert[2])
    return (*NUMBER.findall(name), expert[1], "w1" if name.endswith(SHAPE) and matrix == "w3" else matrix)


def kind(name: str) -> str:
    """The last word of a name, without that of vLLM's fused experts."""
    return re.sub("^(w13|w2)_", "", name.rpartition(".")[2])


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


class Memory:
    """The blocks of one dtype, one after another."""

    def __init__(self, held: list[Block]) -> None:
        self.blocks = held
        self.ends = list(accumulate(block.data.nbytes for block in held))
        self.bytes = b"".join(raw(block.data) for block in held)
        self.taken = bytearray(len(self.bytes))

    def find(self, wanted: bytes, led: tuple[Any, ...] | None) -> Iterator[Block]:
        """The blocks that hold these bytes, once for each place; these are taken from then on.

        Args:
            led: None, or what says in which blocks to look, and there alone where nothing is taken.
        """
        at = self.bytes.find(wanted)
        while at >= 0:
            number = bisect_right(self.ends, at)
            block, end = self.blocks[number], self.ends[number]
            here = slice(at, at + len(wanted))
            free = led is None or (led == (block.address, kind(block.name)) and not any(self.taken[here]))
            if fits := free and here.stop <= end and (end - at) % block.data.element_size() == 0:
                self.taken[here] = b"\1" * len(wanted)
                yield block
            at = self.bytes.find(wanted, at + (len(wanted) if fits else 1))

    def left(self) -> Iterator[str]:
        """The problem of each parameter of which no tensor has been found for some elements."""
        unwritten: Counter[str] = Counter()
        strange: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for block, end in zip(self.blocks, self.ends, strict=True):
            here = slice(end - block.data.nbytes, end)
            width = block.data.element_size()
            taken, held = (
                torch.frombuffer(bytearray(of[here]), dtype=torch.uint8).view(-1, width)
                for of in (self.taken, self.bytes)
            )
            empty = (held == 0xFF).all(1)
            free = ~taken.bool().all(1)
            sizes[block.name] += block.data.numel()
            unwritten[block.name] += int((free & empty).sum())
            strange[block.name] += int((free & ~empty).sum())
        for name, size in sizes.items():
            if unwritten[name]:
                yield f"{name}: {unwritten[name]} of {size} elements were never written"
            if strange[name]:
                yield f"{name}: {strange[name]} of {size} elements belong to no stored tensor"


def compare(models: list[torch.nn.Module], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Every parameter of loaded models with the stored tensors.

    Args:
        models: the main one and, where there is one, that of MTP; their weights not yet rearranged.
        tensors: all that vLLM has read.

    Returns:
        The figures of the report: `parameters`, `tensors` (those found once and equal), `conversions` (dtypes by
        name without numbers), `problems`.
    """
    by_dtype: dict[torch.dtype, list[Block]] = defaultdict(list)
    for model in models:
        for block in blocks(model):
            by_dtype[block.data.dtype].append(block)
    memories = {dtype: Memory(held) for dtype, held in by_dtype.items()}
    alike: dict[Any, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        # So few numbers may be others' too; they are looked for last, and where their name leads alone.
        led = (address(name), kind(name)) if tensor.numel() < 4 and not name.endswith(SHAPE) else None
        alike[tensor.dtype, raw(tensor), led].append(name)
    problems: list[str] = []
    conversions: dict[str, Counter[str]] = {}
    right = 0
    for (dtype, _, led), names in sorted(alike.items(), key=lambda item: -len(item[0][1])):
        places = list(found(names[0], tensors[names[0]], led, memories))
        wanted, there = Counter(map(address, names)), Counter(place.address for place in places)
        for name in names:
            count = there[address(name)]
            if count == wanted[address(name)] or (count and AGAIN.search(name)):
                right += 1
            else:
                bytes_lie = "; ".join(f"{place.name}, {', '.join(place.address)}" for place in places)
                problems.append(
                    f"{name}: found in {count} places of vLLM's model"
                    + (f"; its bytes lie in {bytes_lie}" * bool(places))
                )
        for held in {place.data.dtype for place in places} - {dtype}:
            text = f"{dtype} to {held}".replace("torch.", "")
            conversions.setdefault(re.sub(r"\.\d+\.", ".N.", names[0]), Counter())[text] += len(names)
    problems += [problem for memory in memories.values() for problem in memory.left()]
    return {
        "parameters": sum(len(state_of(model)) for model in models),
        "tensors": right,
        "conversions": conversions,
        "problems": problems,
    }


def found(
    name: str, tensor: Tensor, led: tuple[Any, ...] | None, memories: Mapping[torch.dtype, Memory]
) -> Iterator[Block]:
    """The places of a stored tensor, as it is or as vLLM has converted it."""
    computed = next((compute for end, compute in COMPUTED.items() if name.endswith(end)), None)
    for dtype, memory in memories.items():
        convertible = tensor.dtype in CONVERTIBLE and dtype in CONVERTIBLE
        if tensor.dtype == dtype or convertible or name.endswith(SHAPE):
            yield from memory.find(raw(tensor.to(dtype)), led)
        if computed is not None and convertible:
            yield from memory.find(raw(computed(tensor).to(dtype)), led)
