"""The plan: exactly one action for every tensor of the source, from headers alone.

    keep        the source's bytes under the source's name
    rename      the source's bytes under another name (the FP8 scale of a block, as compressed-tensors calls it)
    quantize    an expert's matrix: written in the format that the recipe names
    drop        a scale, or another small part, of a matrix that is quantized or converted, not written
    fold        the norm that AWQ divides by its scales
    compensate  the router that reads this norm, multiplied by the scales
    convert     a linear module that is no routed expert's, dequantized or made FP8 as the recipe's `attention` says;
                or an expert's, in the format that `experts.convert` says
    carry       the source's bytes under the source's name, of a tensor that the facts call unread: never opened
                (but an FP8 scale among them is renamed)

Tables of which a layer looks rows up have a shard of their own, behind those of the layers: no memory holds them.

Layers that predict further tokens (MTP) follow the others. They are not computed, and every tensor in them passes
through, experts too, unless it is converted. Each has a shard of its own, as every decoder layer has. A norm is folded
only if the router and the experts are its only readers and the recipe wants it; else norm and router pass through.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.matrices import Matrix
from quantizers.checkpoint.safetensors_header import DTYPE_BYTES, Spec
from quantizers.formats.format import ExpertFormat, QuantizedFormat, RowFormat, StoredMatrix
from quantizers.formats.lossless import TARGETS
from quantizers.recipe.schema import Attention, Experts

Kind = Literal["keep", "rename", "quantize", "drop", "fold", "compensate", "convert", "carry"]
PASSTHROUGH: tuple[Kind, ...] = ("keep", "rename", "carry")  # whose tensors keep their bytes
METADATA = {"format": "pt"}
WAITING = 2  # shards that may wait for their upload while a run goes on, if they are removed after it
KV_SCALES = ("k_scale", "v_scale")
KV_SCALE = Spec("F32", (1,))
_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")  # a whole part of a name


@dataclass(frozen=True, slots=True)
class Action:
    """The action of one source tensor."""

    source: str
    spec: Spec
    kind: Kind
    outputs: Mapping[str, Spec]  # the tensors written for it
    layer: int | None = None  # None for a tensor outside the layers
    expert: int | None = None  # this and the next: for quantize and drop, and of the experts of MTP layers
    matrix: Matrix | None = None
    module: str | None = None  # the linear module that the tensor is a part of
    stored: StoredMatrix | None = None  # of the tensor with a module's numbers or codes: its matrix in the source
    written: RowFormat | None = None  # and the format in which the output has it
    table: bool = False  # whether it is of a table whose rows are looked up in the files

    @property
    def is_scale(self) -> bool:
        """Whether it is a small part of a module's matrix: its scale or its shape."""
        return self.module is not None and self.stored is None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the numbers that the tensor stands for: of a matrix's codes (R, C), however these are packed."""
        return self.spec.shape if self.stored is None else self.stored.shape

    @property
    def is_weight(self) -> bool:
        """Whether the forward pass uses it, and it is no scale."""
        return not self.is_scale and self.kind != "carry"

    @property
    def is_other_matrix(self) -> bool:
        """Whether it is a weight (rows, columns) of anything but a routed expert."""
        return self.is_weight and self.expert is None and len(self.shape) == 2 and not self.table

    @property
    def is_made(self) -> bool:
        """Whether it is an expert's matrix that is quantized or converted."""
        return self.kind == "quantize" or (self.kind == "convert" and self.expert is not None)

    @property
    def quantized(self) -> QuantizedFormat | None:
        """The format of its codes in the output; None for plain numbers, and what belongs to no module."""
        return self.written if isinstance(self.written, QuantizedFormat) else None


@dataclass(frozen=True)
class Plan:
    """All actions, in the order of shards: layer by layer, then the tensors outside the layers."""

    actions: tuple[Action, ...]
    layers: int  # number of decoder layers, without those that predict further tokens
    experts: Experts  # the recipe's settings; use `schemes` instead of its bits and group size
    schemes: tuple[ExpertFormat, ...]  # of each layer's experts; none if they are converted
    attention: Attention = "keep"  # what becomes of the other linear modules
    mtp: tuple[int, ...] = ()  # the numbers of the layers that predict further tokens, as far as the source has them
    cached: Mapping[int, str] = field(default_factory=dict)  # attention modules that get scales for an FP8 cache

    @property
    def parts(self) -> tuple[int | None, ...]:
        """Every layer, its tables, and None for the non-layer tensors, in order: each has a shard of its own."""
        return (*range(self.layers), *self.mtp, *self.tables, None)

    @cached_property
    def tables(self) -> tuple[int, ...]:
        """The parts that are a layer's tables, see `Architecture.table_parts`."""
        return tuple(sorted({action.layer for action in self.actions if action.table and action.layer is not None}))

    @property
    def passthrough_parts(self) -> tuple[int | None, ...]:
        """Parts that are never run: all but the decoder layers."""
        return self.parts[self.layers :]

    @cached_property
    def expert_forms(self) -> Mapping[int, RowFormat]:
        """The formats of the layers whose experts are quantized or converted."""
        layers = sorted({a.layer for a in self.actions if a.is_made and a.layer is not None})
        if self.experts.convert is not None:
            return dict.fromkeys(layers, TARGETS[self.experts.convert].form)
        return {layer: self.schemes[layer] for layer in layers}

    def settings(self, layer: int) -> Experts:
        """The recipe's settings with this layer's bits and group size."""
        scheme = self.schemes[layer]
        return self.experts.model_copy(update={"bits": scheme.bits, "group_size": scheme.group_size})

    def with_schemes(self, schemes: Sequence[ExpertFormat]) -> Plan:
        """The plan with other schemes, one for each layer; their groups must divide the matrices."""
        assert len(schemes) == self.layers
        actions = (
            action if action.layer is None or action.layer >= self.layers else stored_as(action, schemes[action.layer])
            for action in self.actions
        )
        return replace(self, actions=tuple(actions), schemes=tuple(schemes))

    @property
    def folds(self) -> bool:
        """Whether scales are folded into norms."""
        return any(action.kind == "fold" for action in self.actions)

    def with_norms_kept(self, layers: Collection[int]) -> Plan:
        """The plan with norms and routers of these layers passed through."""

        def kept(action: Action) -> Action:
            changed = action.kind in ("fold", "compensate") and action.layer in layers
            return replace(action, kind="keep", outputs={action.source: action.spec}) if changed else action

        return replace(self, actions=tuple(map(kept, self.actions)))

    def of_layer(self, layer: int | None) -> list[Action]:
        """The actions of one layer, or, for None, of the tensors outside the layers."""
        return self._by_layer.get(layer, [])

    @cached_property
    def _by_layer(self) -> dict[int | None, list[Action]]:
        by_layer = defaultdict[int | None, list[Action]](list)
        for action in self.actions:
            by_layer[action.layer].append(action)
        return by_layer

    @cached_property
    def linear_forms(self) -> list[QuantizedFormat]:
        """The quantized formats in which the output has linear modules other than experts, each once."""
        return list(dict.fromkeys(a.quantized for a in self.actions if a.is_other_matrix and a.quantized))

    @cached_property
    def mtp_form(self) -> QuantizedFormat | None:
        """The quantized format of the experts of layers that predict further tokens, which is the source's."""
        experts = (a for a in self.actions if a.expert is not None and a.layer in self.mtp)
        return next((action.quantized for action in experts if action.quantized), None)

    @cached_property
    def attention_form(self) -> QuantizedFormat | None:
        """The quantized format of attention, by the first of its matrices that has one."""
        attention = (action for action in self.actions if action.is_other_matrix and "attn" in action.source)
        return next((action.quantized for action in attention if action.quantized), None)

    @property
    def kept_forms(self) -> list[QuantizedFormat]:
        """The quantized formats of all that is no routed expert of a decoder layer, each once."""
        return list(dict.fromkeys([*self.linear_forms, *filter(None, [self.mtp_form])]))

    @cached_property
    def source_experts(self) -> list[RowFormat]:
        """The formats in which the source has the routed experts, each once."""
        return list(dict.fromkeys(a.stored.form for a in self.actions if a.is_made and a.stored))

    def unread(self, layer: int | None) -> set[str]:
        """The names of the tensors in one output shard that are never opened."""
        return {action.source for action in self.of_layer(layer) if action.kind == "carry"}

    def kv_scales(self, layer: int | None) -> tuple[str, ...]:
        """The names of a layer's scales of keys and of values, each F32 (1,); none without."""
        attention = None if layer is None else self.cached.get(layer)
        return tuple(f"{attention}.{name}" for name in KV_SCALES) if attention else ()

    def shard(self, layer: int | None) -> Mapping[str, Spec]:
        """The tensors of one output shard."""
        return self._shards[layer]

    @cached_property
    def _shards(self) -> dict[int | None, dict[str, Spec]]:
        return {
            layer: {name: spec for action in self.of_layer(layer) for name, spec in action.outputs.items()}
            | dict.fromkeys(self.kv_scales(layer), KV_SCALE)
            for layer in self.parts
        }

    def shard_file(self, layer: int | None) -> str:
        """File name of a layer's shard; the tensors outside the layers are in the last shard."""
        return f"model-{self.parts.index(layer) + 1:05d}-of-{len(self.parts):05d}.safetensors"

    def shards(self) -> dict[str, Mapping[str, Spec]]:
        """Every output shard's file name with its tensors."""
        return {self.shard_file(layer): self.shard(layer) for layer in self.parts}

    @cached_property
    def shard_bytes(self) -> dict[str, int]:
        """Every output shard's file name with the file's bytes."""
        return {file: file_size(tensors) for file, tensors in self.shards().items()}

    def removed_bytes(self, processes: int) -> int:
        """Bytes of shards that need no room on the disk of a run that removes what it has uploaded.

        All but the largest: those that wait, one more that makes the run wait, and one being written in each process.
        """
        sizes = sorted(self.shard_bytes.values())
        return sum(sizes[: -(WAITING + 1 + processes)])


def stored_as(action: Action, scheme: ExpertFormat) -> Action:
    """A quantize action with another scheme; any other action unchanged."""
    if action.kind != "quantize":
        return action
    assert action.module is not None
    assert action.stored is not None
    return replace(action, outputs=scheme.specs(action.module, action.stored.shape), written=scheme)


def file_size(tensors: Mapping[str, Spec]) -> int:
    """Bytes of a safetensors file as the library writes it."""
    return len(file_header(tensors)) + sum(spec.bytes for spec in tensors.values())


def in_file(tensors: Mapping[str, Spec]) -> list[str]:
    """The names of a file's tensors in safetensors' order: by dtype, last of DTYPE_BYTES first, then by name."""
    by_dtype = defaultdict[str, list[str]](list)
    for name, spec in tensors.items():
        by_dtype[spec.dtype].append(name)
    return [name for dtype in reversed(DTYPE_BYTES) for name in sorted(by_dtype[dtype])]


def file_header(tensors: Mapping[str, Spec]) -> bytes:
    """The beginning of a safetensors file as the library writes it: compact JSON, padded to 8 bytes, and its length."""
    header: dict[str, object] = {"__metadata__": METADATA}
    offset = 0
    for name in in_file(tensors):
        spec = tensors[name]
        header[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": (offset, offset + spec.bytes)}
        offset += spec.bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    padded = text.ljust(math.ceil(len(text) / 8) * 8)
    return len(padded).to_bytes(8, "little") + padded


def index_json(plan: Plan) -> str:
    """The text of model.safetensors.index.json, as `json.dumps(…, indent=2)` writes it.

    That would take seconds for a large model: only without `indent` does the encoder run in C.
    """
    shards = plan.shards()
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    total = sum(spec.bytes for tensors in shards.values() for spec in tensors.values())
    lines = json.dumps(dict(sorted(weight_map.items())), separators=(",\n    ", ": ")).strip("{}")
    head = json.dumps({"metadata": {"total_size": total}}, indent=2).removesuffix("\n}")
    return f'{head},\n  "weight_map": {{\n    {lines}\n  }}\n}}\n'


def kinds(plan: Plan) -> list[dict[str, object]]:
    """Every kind of tensor, with `*` for layer and expert, its action, count, and bytes before and after, in order."""
    of_kind: dict[tuple[str, str], list[Action]] = {}
    for action in plan.actions:
        name = re.sub(r"\d+", "*", action.source) if action.table else _NUMBER.sub("*", action.source)
        if action.layer in plan.mtp:  # which has other actions
            name = name.replace(".*.", f".{action.layer}.", 1)
        of_kind.setdefault((name, action.kind), []).append(action)
    return [
        {
            "kind": name,
            "action": kind,
            "tensors": len(actions),
            "bytes_before": sum(action.spec.bytes for action in actions),
            "bytes_after": sum(spec.bytes for action in actions for spec in action.outputs.values()),
        }
        for (name, kind), actions in of_kind.items()
    ]


def listing(plan: Plan) -> list[dict[str, object]]:
    """Every source tensor with its action and the tensors written for it, in the order of the shards."""
    return [
        {
            "source": action.source,
            "dtype": action.spec.dtype,
            "shape": list(action.spec.shape),
            "action": action.kind,
            "shard": plan.shard_file(action.layer),
            "outputs": {name: [spec.dtype, list(spec.shape)] for name, spec in action.outputs.items()},
        }
        for action in plan.actions
    ]


def summary(plan: Plan, facts: Architecture) -> dict[str, object]:
    """The plan in numbers: tensors and bytes by kind of action, output size, source size of a layer."""
    by_kind, table = kinds(plan), defaultdict[str, Counter[str]](Counter)
    for row in by_kind:
        table[str(row["action"])].update({key: row[key] for key in ("tensors", "bytes_before", "bytes_after")})
    source = {layer: sum(action.spec.bytes for action in plan.of_layer(layer)) for layer in plan.parts}
    index = len(index_json(plan).encode())
    experts = [action for action in plan.actions if action.is_made]
    only_if_given: dict[str, object] = {} if plan.attention == "keep" else {"attention": plan.attention}
    if plan.cached:
        only_if_given["kv_cache"] = sorted(plan.cached)
    if plan.mtp:
        of_experts = {"form": str(plan.mtp_form)} if plan.mtp_form else {}
        only_if_given["mtp"] = {"layers": list(plan.mtp), "bytes": sum(source[n] for n in plan.mtp), **of_experts}
    return {
        "layers": facts.num_layers,
        "dense_layers": sorted(facts.dense),
        "experts_per_layer": facts.num_experts,
        "quantized_matrices": len(experts),
        "kept_attention_tensors": sum(".self_attn." in a.source for a in plan.actions if a.kind in PASSTHROUGH),
        "actions": table,
        "kinds": by_kind,
        "source_bytes": sum(source.values()),
        "expert_bytes": sum(spec.bytes for action in experts for spec in action.outputs.values()),
        "output_bytes": sum(plan.shard_bytes.values()) + index,
        "index_bytes": index,
        "shards": plan.shard_bytes,
        "layer_source_bytes": max(source[layer] for layer in range(plan.layers)),
        **({"kept_forms": list(map(str, plan.kept_forms))} if plan.kept_forms else {}),
        **({"attention_form": str(plan.attention_form)} if plan.attention_form else {}),
        **only_if_given,
    }
