"""The plan: exactly one action for every tensor of the source, from headers alone.

    keep        the source's bytes under the source's name
    rename      the source's bytes under another name (an FP8 scale, as compressed-tensors calls it)
    quantize    an expert's matrix: written as packed integers, scales and shape
    drop        the FP8 scale of such a matrix: used to dequantize it, not written
    fold        the norm that AWQ divides by its scales
    compensate  the router that reads this norm, multiplied by the scales

No file is opened here. An unknown tensor is refused instead of kept, because it might read the folded
norm.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from quantizers.architectures.architecture import Architecture, Sizes
from quantizers.architectures.matrices import MATRICES, Matrix
from quantizers.checkpoint.safetensors_header import DTYPE_BYTES, Spec
from quantizers.recipe.schema import Experts
from quantizers.recipe.scheme import Scheme
from quantizers.system.errors import CheckpointError, RecipeError

Kind = Literal["keep", "rename", "quantize", "drop", "fold", "compensate"]
KEPT: tuple[Kind, ...] = ("keep", "rename")  # whose tensors keep their bytes
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

    def of_layer(self, layer: int | None) -> list[Action]:
        """The actions of one decoder layer, or, for None, of the tensors outside the layers."""
        return [action for action in self.actions if action.layer == layer]

    def fp8_block(self, block: tuple[int, int]) -> tuple[int, int] | None:
        """`block`, the rows and columns of an FP8 block, if the plan keeps FP8 attention weights; else None."""
        return block if any(action.kind == "rename" for action in self.actions) else None

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


def expected_tensors(facts: Architecture, sizes: Sizes, block: tuple[int, int]) -> dict[str, Spec]:
    """Every tensor of a checkpoint as the family publishes it, for planning without the files."""
    tensors = {name: Spec(t.dtype, sizes.shape(t.shape)) for name, t in facts.outside.items()}

    def linear(name: str, shape: tuple[int, ...]) -> None:
        tensors[f"{name}.weight"] = Spec("F8_E4M3", shape)
        blocks = tuple(math.ceil(n / b) for n, b in zip(shape, block, strict=True))
        tensors[f"{name}.weight_scale_inv"] = Spec("F32", blocks)

    for layer in range(sizes["layers"]):
        for name, t in facts.in_layer.items():
            tensors[facts.layer(layer, name)] = Spec(t.dtype, sizes.shape(t.shape))
        for name, terms in facts.linears.items():
            linear(facts.layer(layer, name), sizes.shape(terms))
        for expert in range(sizes["experts"]):
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
        block: rows and columns of an FP8 block.

    Raises:
        CheckpointError: a tensor is missing, unknown, or has a wrong shape or dtype.
        RecipeError: the group size does not divide the experts' matrices.
    """
    for size in ("hidden", "width"):
        if sizes[size] % experts.group_size:
            raise RecipeError(
                f"{where}: experts.group_size {experts.group_size} does not divide {facts.sizes[size]} {sizes[size]}; "
                "choose a smaller group"
            )
    remaining = dict(tensors)
    actions: list[Action] = []

    def take(name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> Spec:
        spec = remaining.pop(name, None)
        if spec is None:
            raise CheckpointError(f"{where}: {name} is missing; the checkpoint is incomplete, download it again")
        if spec.shape != shape:
            raise CheckpointError(
                f"{where}: {name} has shape {list(spec.shape)}, config.json says {list(shape)}; they do not belong "
                "together, download both again"
            )
        if spec.dtype not in dtypes:
            raise CheckpointError(
                f"{where}: {name} is {spec.dtype}; {' or '.join(dtypes)} is needed; give the published checkpoint"
            )
        return spec

    def take_scale(module: str, shape: tuple[int, ...]) -> tuple[str, Spec]:
        blocks = tuple(math.ceil(n / b) for n, b in zip(shape, block, strict=True))
        return f"{module}.weight_scale_inv", take(f"{module}.weight_scale_inv", blocks, ("F32", "BF16"))

    floating, linear = ("BF16", "F16", "F32"), ("F8_E4M3", "BF16", "F16", "F32")
    for layer in range(sizes["layers"]):
        for name, t in facts.in_layer.items():
            full_name = facts.layer(layer, name)
            spec = take(full_name, sizes.shape(t.shape), floating)
            kind: Kind = "keep"
            output = spec
            if experts.awq and name == facts.fold.norm:
                kind = "fold"
            elif experts.awq and name == facts.fold.router:
                kind, output = "compensate", Spec("F32", spec.shape)  # servers hold the router in float32
            actions.append(Action(full_name, spec, kind, {full_name: output}, layer))
        for name, terms in facts.linears.items():
            module = facts.layer(layer, name)
            spec = take(f"{module}.weight", sizes.shape(terms), linear)
            actions.append(Action(f"{module}.weight", spec, "keep", {f"{module}.weight": spec}, layer))
            if spec.dtype == "F8_E4M3":
                scale, scale_spec = take_scale(module, spec.shape)
                actions.append(Action(scale, scale_spec, "rename", {f"{module}.weight_scale": scale_spec}, layer))
        for expert in range(sizes["experts"]):
            for matrix in MATRICES:
                module = facts.expert(layer, expert, matrix)
                spec = take(f"{module}.weight", sizes.shape(facts.expert_linears[matrix].shape), linear)
                outputs = packed_specs(module, spec.shape, experts.scheme)
                actions.append(Action(f"{module}.weight", spec, "quantize", outputs, layer, expert, matrix))
                if spec.dtype == "F8_E4M3":
                    scale, scale_spec = take_scale(module, spec.shape)
                    actions.append(Action(scale, scale_spec, "drop", {}, layer, expert, matrix))
    for name, t in facts.outside.items():
        spec = take(name, sizes.shape(t.shape), floating)
        actions.append(Action(name, spec, "keep", {name: spec}))
    if remaining:
        more = f" (and {len(remaining) - 1} more)" if len(remaining) > 1 else ""
        raise CheckpointError(
            f"{where}: {next(iter(remaining))}{more} is not among the facts of {facts.model_type}; it might read the "
            "folded norm, so it is refused; give the published checkpoint"
        )
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
