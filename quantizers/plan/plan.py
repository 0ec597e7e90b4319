"""The plan: exactly one action for every tensor of the source, from headers alone.

    keep        the source's bytes under the source's name
    rename      the source's bytes under another name (the FP8 scale of a block, as compressed-tensors calls it)
    quantize    an expert's matrix: written as packed integers, scales and shape
    drop        the FP8 scale of such a matrix: used to dequantize it, not written
    fold        the norm that AWQ divides by its scales
    compensate  the router that reads this norm, multiplied by the scales
    carry       the source's bytes under the source's name, of a tensor that the facts call unread: nothing opens it

A norm is folded only if the router and the experts are its only readers. Where anything else reads it, or the recipe
does not want it, norm and router are kept like everything else.

No file is opened here. An unknown tensor is refused instead of kept, because it might read the folded
norm.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.matrices import MATRICES, Matrix
from quantizers.architectures.sizes import Sizes
from quantizers.checkpoint.fp8 import ROWS, Fp8, declared_form, scale_of, stored_form
from quantizers.checkpoint.safetensors_header import DTYPE_BYTES, Spec
from quantizers.recipe.schema import Experts
from quantizers.recipe.scheme import Scheme
from quantizers.system.errors import CheckpointError, RecipeError

from .folding import folds
from .taking import take, take_scale, take_unread

Kind = Literal["keep", "rename", "quantize", "drop", "fold", "compensate", "carry"]
KEPT: tuple[Kind, ...] = ("keep", "rename", "carry")  # whose tensors keep their bytes
METADATA = {"format": "pt"}


@dataclass(frozen=True)
class Action:
    """What happens to one source tensor.

    Attributes:
        source: its name.
        spec: its dtype and shape.
        kind: see the module's docstring.
        outputs: the tensors written for it, by name.
        layer: its decoder layer; None for a tensor outside the layers.
        expert, matrix: the expert and which of its matrices, for quantize and drop.
    """

    source: str
    spec: Spec
    kind: Kind
    outputs: Mapping[str, Spec]
    layer: int | None = None
    expert: int | None = None
    matrix: Matrix | None = None

    @property
    def is_scale(self) -> bool:
        """Whether it is the scale of an FP8 weight, and no weight itself."""
        return self.source.endswith((".weight_scale_inv", ".weight_scale"))

    @property
    def is_weight(self) -> bool:
        """Whether the forward pass holds it as numbers of its own."""
        return not self.is_scale and self.kind != "carry"


@dataclass(frozen=True)
class Plan:
    """All actions, in the order of shards: layer by layer, then the tensors outside the layers.

    Attributes:
        experts: the recipe's settings; use `schemes` instead of its bits and group size.
        schemes: the scheme of each layer's experts.
    """

    actions: tuple[Action, ...]
    layers: int
    experts: Experts
    schemes: tuple[Scheme, ...]

    def settings(self, layer: int) -> Experts:
        """The recipe's settings with this layer's bits and group size."""
        scheme = self.schemes[layer]
        return self.experts.model_copy(update={"bits": scheme.bits, "group_size": scheme.group_size})

    def with_schemes(self, schemes: Sequence[Scheme]) -> Plan:
        """The plan with other schemes, one for each layer; their groups must divide the matrices."""
        assert len(schemes) == self.layers
        actions = (
            action if action.layer is None else stored_as(action, schemes[action.layer]) for action in self.actions
        )
        return replace(self, actions=tuple(actions), schemes=tuple(schemes))

    @property
    def folds(self) -> bool:
        """Whether scales are folded into norms."""
        return any(action.kind == "fold" for action in self.actions)

    def with_norms_kept(self, layers: Collection[int]) -> Plan:
        """The plan with norms and routers of these layers kept as they are."""

        def kept(action: Action) -> Action:
            if action.kind not in ("fold", "compensate") or action.layer not in layers:
                return action
            return replace(action, kind="keep", outputs={action.source: action.spec})

        return replace(self, actions=tuple(map(kept, self.actions)))

    def of_layer(self, layer: int | None) -> list[Action]:
        """The actions of one decoder layer, or, for None, of the tensors outside the layers."""
        return [action for action in self.actions if action.layer == layer]

    def fp8_block(self, block: tuple[int, int]) -> Fp8 | None:
        """The form of the FP8 weights that the plan keeps: ROWS, or `block` as it is given; None without any."""
        if any(action.kind == "keep" and action.is_scale for action in self.actions):
            return ROWS
        return block if any(action.kind == "rename" for action in self.actions) else None

    def carried(self, layer: int | None) -> set[str]:
        """The names of the tensors in one output shard that nothing opens, so that they may hold anything."""
        return {action.source for action in self.of_layer(layer) if action.kind == "carry"}

    def counts(self) -> dict[str, int]:
        """Number of source tensors by kind of action."""
        return dict(Counter(action.kind for action in self.actions))

    def shard(self, layer: int | None) -> dict[str, Spec]:
        """The tensors of one output shard."""
        return {name: spec for action in self.of_layer(layer) for name, spec in action.outputs.items()}

    def shard_file(self, layer: int | None) -> str:
        """File name of a layer's shard; the tensors outside the layers are in the last shard."""
        number = self.layers + 1 if layer is None else layer + 1
        return f"model-{number:05d}-of-{self.layers + 1:05d}.safetensors"

    def shards(self) -> dict[str, dict[str, Spec]]:
        """Every output shard's file name with its tensors."""
        by_layer: dict[int | None, dict[str, Spec]] = {layer: {} for layer in (*range(self.layers), None)}
        for action in self.actions:
            by_layer[action.layer].update(action.outputs)
        return {self.shard_file(layer): tensors for layer, tensors in by_layer.items()}


def expected_tensors(facts: Architecture, sizes: Sizes, config: Mapping[str, Any], where: str) -> dict[str, Spec]:
    """Every tensor of a checkpoint as the family publishes it, for planning without the files.

    Args:
        config: config.json, whose quantization_config says whether linear modules are FP8; else they are bfloat16.
        where: its path, for messages.

    Raises:
        CheckpointError: quantization_config declares a form of weights that cannot be read.
    """
    form = declared_form(config, where) if config.get("quantization_config") else None
    tensors = {name: Spec(t.dtype, sizes.shape(t.shape)) for name, t in facts.outside.items()}

    def linear(name: str, shape: tuple[int, ...]) -> None:
        tensors[f"{name}.weight"] = Spec("F8_E4M3" if form else "BF16", shape)
        if form:
            suffix, scale = scale_of(form, shape)
            tensors[f"{name}.{suffix}"] = Spec(facts.scale_dtype, scale)

    for layer in range(sizes["layers"]):
        dense = layer in sizes.dense
        for name, t in facts.tensors(dense).items():
            tensors[facts.layer(layer, name)] = Spec(t.dtype, sizes.shape(t.shape))
        for name, terms in facts.linears(dense).items():
            linear(facts.layer(layer, name), sizes.shape(terms))
        for expert in range(0 if dense else sizes["experts"]):
            for matrix in MATRICES:
                shape = sizes.shape(facts.expert_linears[matrix].shape)
                linear(facts.expert(layer, expert, matrix), shape)
    return tensors


def make_plan(
    facts: Architecture,
    sizes: Sizes,
    tensors: Mapping[str, Spec],
    experts: Experts,
    where: str,
    block: tuple[int, int],
) -> Plan:
    """Assign an action to every tensor.

    Args:
        tensors: the source's headers, or `expected_tensors`.
        where: the source's name, for messages.
        block: rows and columns of an FP8 block, where FP8 weights have a scale per block.

    Raises:
        CheckpointError: a tensor is missing, unknown, or has a wrong shape or dtype, or there are both forms of FP8.
        ArchitectureError: the facts name a tensor, and call it unread as well.
        RecipeError: the group size does not divide the experts' matrices, or the recipe asks for a fold that is
            not exact.
    """
    for size in ("hidden", "width"):
        if sizes[size] % experts.group_size:
            raise RecipeError(
                f"{where}: experts.group_size {experts.group_size} does not divide {facts.sizes[size].key} "
                f"{sizes[size]}; choose a smaller group"
            )
    folded = folds(facts, experts, where)
    remaining = dict(tensors)
    actions: list[Action] = []

    in_layers, _, _ = facts.layer_prefix.partition("{layer}")
    form = stored_form((name for name in tensors if name.startswith(in_layers) and not facts.is_unread(name)), block)
    floating, linear = ("BF16", "F16", "F32"), ("F8_E4M3", "BF16", "F16", "F32")
    for layer in range(sizes["layers"]):
        dense = layer in sizes.dense
        for name, t in facts.tensors(dense).items():
            full_name = facts.layer(layer, name)
            if t.optional and full_name not in remaining:
                continue
            spec = take(remaining, full_name, sizes.shape(t.shape), floating, where)
            kind: Kind = "keep"
            output = spec
            if folded and not dense and name == facts.norm.tensor:
                kind = "fold"
            elif folded and not dense and name == facts.router.tensor:
                kind, output = "compensate", Spec(facts.router.served, spec.shape)
            actions.append(Action(full_name, spec, kind, {full_name: output}, layer))
        for name, terms in facts.linears(dense).items():
            module = facts.layer(layer, name)
            spec = take(remaining, f"{module}.weight", sizes.shape(terms), linear, where)
            actions.append(Action(f"{module}.weight", spec, "keep", {f"{module}.weight": spec}, layer))
            if spec.dtype == "F8_E4M3":
                scale, scale_spec = take_scale(remaining, module, spec.shape, form, where)
                written = f"{module}.weight_scale"
                kind = "keep" if scale == written else "rename"
                actions.append(Action(scale, scale_spec, kind, {written: scale_spec}, layer))
        for expert in range(0 if dense else sizes["experts"]):
            for matrix in MATRICES:
                module = facts.expert(layer, expert, matrix)
                shape = sizes.shape(facts.expert_linears[matrix].shape)
                spec = take(remaining, f"{module}.weight", shape, linear, where)
                outputs = packed_specs(module, spec.shape, experts.scheme)
                actions.append(Action(f"{module}.weight", spec, "quantize", outputs, layer, expert, matrix))
                if spec.dtype == "F8_E4M3":
                    scale, scale_spec = take_scale(remaining, module, spec.shape, form, where)
                    actions.append(Action(scale, scale_spec, "drop", {}, layer, expert, matrix))
    for name, t in facts.outside.items():
        spec = take(remaining, name, sizes.shape(t.shape), floating, where)
        actions.append(Action(name, spec, "keep", {name: spec}))
    named = {name for action in actions for name in (action.source, *action.outputs)}
    for name, spec, number in take_unread(remaining, named, facts, sizes["layers"], where):
        actions.append(Action(name, spec, "carry", {name: spec}, number))
    if remaining:
        more = f" (and {len(remaining) - 1} more)" if len(remaining) > 1 else ""
        raise CheckpointError(
            f"{where}: {next(iter(remaining))}{more} is not among the facts of {facts.model_type}; it might read the "
            "folded norm, so it is refused; give the published checkpoint"
        )
    actions.sort(key=lambda action: sizes["layers"] if action.layer is None else action.layer)
    return Plan(tuple(actions), sizes["layers"], experts, (experts.scheme,) * sizes["layers"])


def stored_as(action: Action, scheme: Scheme) -> Action:
    """A quantize action with another scheme; any other action unchanged."""
    if action.kind != "quantize":
        return action
    return replace(action, outputs=packed_specs(action.source.removesuffix(".weight"), action.spec.shape, scheme))


def packed_specs(module: str, shape: tuple[int, ...], scheme: Scheme) -> dict[str, Spec]:
    """The tensors written for one quantized matrix of shape (rows, columns)."""
    rows, columns = shape
    return {
        f"{module}.weight_packed": Spec("I32", (rows, columns * scheme.bits // 32)),
        f"{module}.weight_scale": Spec("BF16", (rows, columns // scheme.group_size)),
        f"{module}.weight_shape": Spec("I64", (2,)),
    }


def file_size(tensors: Mapping[str, Spec]) -> int:
    """Bytes of a safetensors file as the library writes it.

    The header is compact JSON padded to 8 bytes. The tensors are sorted by dtype, last of DTYPE_BYTES first, then
    by name.
    """
    ranks = list(DTYPE_BYTES)
    order = sorted(tensors, key=lambda name: (-ranks.index(tensors[name].dtype), name))
    header: dict[str, object] = {"__metadata__": METADATA}
    offset = 0
    for name in order:
        spec = tensors[name]
        header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, offset + spec.bytes]}
        offset += spec.bytes
    length = len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode())
    return 8 + math.ceil(length / 8) * 8 + offset


def index_json(plan: Plan) -> str:
    """The text of model.safetensors.index.json."""
    weight_map = {name: file for file, tensors in plan.shards().items() for name in tensors}
    total = sum(spec.bytes for tensors in plan.shards().values() for spec in tensors.values())
    body = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(body, indent=2) + "\n"
