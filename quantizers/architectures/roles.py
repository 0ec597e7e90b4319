"""Roles of the parts of a decoder layer, found by running it: no name is read, every claim is a number.

The weights are random: what is asked holds for all weights or for none. In the layer a cheap function stands for the
experts, whose module is probed by itself with the matrices of one: a layer of a large model takes seconds.

Legend: T tokens, H hidden size, E experts, K experts chosen per token, I width of an expert.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any, Literal

import torch
from torch.func import functional_call
from torch.fx.experimental import _config
from torch.utils._pytree import tree_leaves, tree_map

from quantizers.system.errors import ArchitectureError

from .architecture import HandedFacts
from .attention import keys_and_values
from .expert_probes import ExpertsModule, relative_distance
from .experts_call import experts_per_token, replaced_experts
from .matrices import FUSED
from .skeleton import NOT_BY_LAYER, NOT_QUANTIZED, Call, Skeleton, first, replaced_forward, scores

TOKENS = 32
EXACT = 1e-4  # of a probe in float32: sums in another order differ by less, anything that is not exact by far more
LONG = 4096  # tokens: what layers hand on may grow with them, up to a number that config.json has
PLAIN = ("product", "up_down", "large")  # probes of act(gate) * up
HUGE = 2**30  # numbers in a table that are never filled: its rows are one
BIG = 2**22  # numbers in a matrix; the rows of a larger one are parts of one vector, to draw fewer numbers


@dataclass(frozen=True)
class Roles:
    """The parts of a decoder layer with experts; modules are paths within the layer, as transformers names them.

    Attributes:
        norm_offset: what the norm adds to its stored weight before it multiplies; None if it has anything else than one
            vector of weights, so that no scale can be folded into it.
        readers: the linear modules, and the other matrices, that read its output besides the router and the experts;
            `residual` among them if scales cannot be folded into the norm, and these do not explain it.
    """

    experts: str  # the module of all routed experts, see `ExpertsModule`
    router_weight: str  # the name of the matrix that makes the router's logits
    router: str  # the module that is called for them
    router_follows: bool  # whether it reads what the experts read, so that it must follow a scale that is folded
    chosen: int  # K
    scoring: Literal["sigmoid", "softmax"]  # what the router makes of its logits; softmax where neither is seen
    norm: str | None  # the module whose output the experts read
    norm_offset: int | None
    readers: tuple[str, ...]
    probes: dict[
        str, float
    ]  # the largest difference of each probe by name, as a part of the largest value: see `probe`
    has_gate: bool = True  # whether an expert has three matrices
    transposed: bool = False  # how the experts' module holds their matrices, see `Modules`; and the next
    interleaved: bool = False
    weighs_inputs: bool = False  # see experts_call.py
    count: int = 0  # of experts with matrices
    identities: int = 0  # the number of experts without matrices, after the others
    idle: tuple[str, ...] = ()  # the parameters of other experts, through which no text goes

    @property
    def own_gate(self) -> bool:
        """Whether the experts have a gate of their own, see gates.py."""
        return self.has_gate and not all(self.probes[name] < EXACT for name in PLAIN)

    @property
    def degree(self) -> int:
        """The degree of what down reads in up's rows, see gates.py: 0 where no scale of these passes through."""
        if self.has_gate:
            return 1
        return next((n for n, name in enumerate(("up_down", "squared"), 1) if self.probes[name] < EXACT), 0)


def kinds_of_layers(skeleton: Skeleton) -> list[list[int]]:
    """The numbers of the layers of each kind: of the same classes, parameters, arguments and settings.

    Settings are whatever a layer's forward may read besides tensors: those of its modules, such as a router's number of
    experts per token or a clamp, and its entries in lists of the config that have one for each layer.
    """

    def shapes_of(value: Any) -> str:
        return str([tuple(leaf.shape) if torch.is_tensor(leaf) else leaf for leaf in tree_leaves(value)])

    config = skeleton.config.get_text_config().to_dict().items()
    by_layer = {key: value for key, value in config if isinstance(value, list) and len(value) == len(skeleton.layers)}
    kinds: dict[Any, list[int]] = {}
    for number, (layer, call) in enumerate(zip(skeleton.layers, skeleton.calls(TOKENS), strict=True)):
        shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.state_dict().items())
        given = tuple(sorted((name, shapes_of(value)) for name, value in call.arguments.items()))
        classes = tuple(map(type, layer.modules()))
        own = tuple((key, str(values[number])) for key, values in by_layer.items())
        kinds.setdefault((classes, shapes, given, _settings(layer), own), []).append(number)
    return list(kinds.values())


def _settings(layer: torch.nn.Module) -> tuple[tuple[str, str, str], ...]:
    """The settings of a layer's modules: path, name and value of each attribute that is no tensor, module or config.

    Not the layer's own number, which all of transformers' classes call `layer_idx`.
    """
    plain = (int, float, str, tuple, list, FunctionType, torch.dtype, type(None))
    return tuple(
        (path, name, value.__qualname__ if isinstance(value, FunctionType) else str(value))
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, plain) and name != "layer_idx"
    )


@torch.no_grad()
def probe(skeleton: Skeleton, number: int, handed: HandedFacts | None = None) -> tuple[Roles | None, float, str | None]:
    """The roles of a layer's parts, None if it has no routed experts; the probe `batch`; and the attention module.

    That is the path of the one whose keys and values arrive at transformers' attention interface, None without any.

    Args:
        handed: what layers hand on; sequences then go through them alone, so `batch` is infinite. So it is where
            experts get all tokens in E blocks, for the memory that these need.

    The probes, each a difference that is 0 but for rounding where the claim holds:
        batch       sequences that run together, padded at their ends, give what each gives alone
        tokens      the experts treat every token alone, and are linear in its routing weights
        product     an expert is down · (act(gate · x) * (up · x)), gate above up in `gate_up_proj`; or, without a
                    gate, down · act(up · x)
        up_down     a scale may lie between up and down
        squared     a scale may lie in up, and its square in down; of experts without a gate alone
        large       product and up_down at activations 20 times as large; without a gate product alone
        gate        an expert is down · gate(gate_up · x) with a gate of its own, at both sizes of activations
        fold        a scale may be divided out of the norm, and multiplied into the experts, and into the router if it
                    reads the norm too
        halves      the layer is residual + block(norm(residual)), where the experts lie in the block

    Raises:
        ArchitectureError: its experts have matrices or arguments that are not known here, or it needs another layer's.
    """
    path, model = _experts_path(skeleton, number), skeleton.name
    sizes = _called_experts(skeleton.layers[number]) if path else {}
    others = [name for name, size in sizes.items() if name != path and size and "shared" not in name.lower()]
    layer = _with_random_weights(skeleton, number, [path, *others] if path else [])
    value = example_of(handed, TOKENS) if handed else None

    def refuse(*_: Any, **__: Any) -> None:
        raise ArchitectureError(
            model, f"a text goes through {path} and {' and '.join(others)} of one layer", NOT_QUANTIZED
        )

    called: list[torch.nn.Module] = []

    def see(module: torch.nn.Module, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        called.append(module)
        return keys, values

    with contextlib.ExitStack() as stack:
        for other in others:
            stack.enter_context(replaced_forward(layer.get_submodule(other), refuse))
        try:
            probed = _Layer(skeleton.calls(TOKENS)[number], value, layer, path, model) if path else None
            with keys_and_values(layer, see):
                alone = handed or (probed and probed.held.weighs_inputs)
                batch = math.inf if alone else _batch(skeleton, number, layer, path)
        except KeyError as failure:
            raise ArchitectureError(
                model,
                f"layer {number} cannot run alone: it looks for {failure}, which another layer makes",
                NOT_BY_LAYER,
            ) from None
        idle = [f"{other}.{name}" for other in others for name in layer.get_submodule(other).state_dict()]
        paths = {name for name, module in layer.named_modules() if module in called}
        attention = next(iter(paths)) if len(paths) == 1 else None
        return replace(probed.roles(), idle=tuple(idle)) if probed else None, batch, attention


def require_usable(roles: Roles, model_type: str) -> None:
    """Refuse a model of which a probe refutes what is needed of every one, with an ArchitectureError that names it."""
    needed = {  # of the last three none, where a gate of the experts' own explains them
        "tokens": "its experts do not treat every token alone",
        "product": "its experts compute another product than act(gate) * up",
        "up_down": "its experts are not linear in up",
        "large": "its experts compute another product where activations are large, as with a clamp",
    }
    explained: Sequence[str] = PLAIN if roles.probes["gate"] < EXACT else ()
    if not roles.has_gate:
        needed["product"], explained = "its experts compute another product than down · act(up · x)", ["up_down"]
    for name, meaning in needed.items():
        if name not in explained and not roles.probes[name] < EXACT:
            raise ArchitectureError(
                f"model type {model_type}",
                f"{meaning} (probe {name}: {roles.probes[name]:.2g} where 0 is needed)",
                NOT_QUANTIZED,
            )


# Weights ------------------------------------------------------------------------------------------------------------


def _with_random_weights(skeleton: Skeleton, number: int, experts: Sequence[str]) -> torch.nn.Module:
    """A layer with random weights, all but those of these modules of experts, which stay without memory.

    Integers that its class does not compute are taken for the numbers of experts through which each token goes.
    """
    generator = torch.Generator().manual_seed(number)
    layer = skeleton.layer(number)
    random = {
        name: _random(name, tensor, generator)
        for name, tensor in layer.state_dict(keep_vars=True).items()
        if tensor.is_floating_point() and not name.startswith(tuple(f"{path}." for path in experts))
    }
    for name, numbers in layer.named_buffers():
        if experts and not numbers.is_floating_point() and not numbers.any():
            count = next(layer.get_submodule(experts[0]).parameters()).shape[0]
            random[name] = torch.randint(count, numbers.shape, generator=generator)
    layer.load_state_dict(random, strict=False, assign=True)
    layer.requires_grad_(False)
    return layer


def _random(name: str, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Matrices that keep a vector's length; vectors around 1 if they are weights, else around 0."""
    if like.dim() == 2 and like.numel() > HUGE:
        return torch.randn(1, like.shape[1], generator=generator).expand(like.shape)
    if like.dim() == 2 and like.numel() > BIG:
        rows, columns = like.shape
        shift = 61  # of each row against the one before
        vector = torch.randn(rows * shift + columns, generator=generator) / math.sqrt(columns)
        return vector.as_strided((rows, columns), (shift, 1)).contiguous()
    values = torch.randn(like.shape, generator=generator)
    if like.dim() >= 2:  # several matrices, or a convolution's, have more dimensions
        return values / math.sqrt(max(like.shape[1:]))
    return 1 + 0.2 * values if name.endswith("weight") else 0.1 * values


def _experts_path(skeleton: Skeleton, number: int) -> str | None:
    """The module of a layer's routed experts: of those called so, the one with most three-dimensional parameters."""
    sizes = _called_experts(skeleton.layers[number])
    path = max(sizes, key=lambda name: sizes[name], default=None)
    if path is None or sizes[path]:
        return path
    if all("shared" in path for path in sizes):
        return None
    raise ArchitectureError(skeleton.name, f"its experts are not held in {' and '.join(FUSED)}", NOT_QUANTIZED)


def _called_experts(layer: torch.nn.Module) -> dict[str, int]:
    """The modules that are called experts, by path, with how many numbers their three-dimensional parameters have."""
    experts = [(path, module) for path, module in layer.named_modules() if "expert" in path.lower()]
    return {path: sum(p.numel() for p in module.parameters(recurse=False) if p.dim() == 3) for path, module in experts}


# Probes -------------------------------------------------------------------------------------------------------------


def _batch(skeleton: Skeleton, number: int, layer: torch.nn.Module, experts: str | None) -> float:
    """Measure how far two sequences in a padded batch are from each alone; infinite if the layer takes no batch."""
    lengths, shape = (TOKENS, TOKENS - 9), skeleton.calls(TOKENS)[number].states.shape
    states = torch.randn(2, *shape[1:], generator=torch.Generator().manual_seed(number))
    tokens = torch.stack([torch.arange(TOKENS), torch.arange(TOKENS).flip(0)])
    states[1, lengths[1] :] = tokens[1, lengths[1] :] = 0

    with contextlib.ExitStack() as stack:
        if experts:
            stack.enter_context(replaced_experts(layer.get_submodule(experts), weighted))
        try:
            together = first(layer(**skeleton.calls(TOKENS)[number].of(states, None, tokens)))
        except (IndexError, RuntimeError):
            return math.inf  # the layer gets something for each token of one sequence, such as indices
        alone = [
            first(layer(**skeleton.calls(n)[number].of(states[i : i + 1, :n], None, tokens[i : i + 1, :n])))
            for i, n in enumerate(lengths)
        ]
    return max(relative_distance(together[i, : output.shape[1]], output[0]) for i, output in enumerate(alone))


def weighted(states: torch.Tensor, _: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Stands for the experts: what they read, times the sum of the routing weights (T, K)."""
    return states * weight.sum(-1, keepdim=True).to(states.dtype)


def example_of(handed: HandedFacts, tokens: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make example values (1, T, W) of the tensor that a layer passes to the next for one sequence.

    They are random numbers in `dtype`, or the indices of W of its T tokens.
    """
    if handed.dtype == "float":
        return torch.randn(1, tokens, handed.width, generator=torch.Generator().manual_seed(2)).to(dtype)
    indices = torch.arange(min(tokens, handed.width), dtype=getattr(torch, handed.dtype))
    return indices.repeat(1, tokens, 1)


def run_without_numbers(skeleton: Skeleton, number: int, arguments: Mapping[str, Any]) -> Any:
    """Run a layer on the meta device, with `weighted` in place of its experts; returns what it returns."""
    layer, path = skeleton.layer(number).to("meta"), _experts_path(skeleton, number)
    on_meta = tree_map(lambda leaf: leaf.to("meta") if torch.is_tensor(leaf) else leaf, dict(arguments))
    with contextlib.ExitStack() as stack:
        if path:
            stack.enter_context(replaced_experts(layer.get_submodule(path), weighted))
        # How many rows a mask chooses is not known without numbers: all of them. The module gets `patch` when it is
        # imported, which types cannot know.
        stack.enter_context(_config.patch(meta_nonzero_assume_all_nonzero=True))  # type: ignore[attr-defined]
        return layer(**on_meta)


def find_handed(skeleton: Skeleton) -> HandedFacts | None:
    """Find the tensor that the model's layers pass on besides their states; None if there is none.

    Nothing is computed: the layers run on the meta device.

    Raises:
        ArchitectureError: it is of a kind that is not known here.
    """
    places = {place for call in skeleton.calls(TOKENS) for place in call.handed.items()}
    if not places:
        return None
    positions = getattr(skeleton.config.get_text_config(), "max_position_embeddings", None) or LONG
    value: torch.Tensor | None = None
    seen: list[torch.Tensor] = []
    for number, call in enumerate(skeleton.calls_with(torch.zeros(1, min(LONG, positions), dtype=torch.int64))):
        output = run_without_numbers(skeleton, number, call.of(call.states, value))
        (_, entry), *others = places
        value = output[entry]
        seen += [] if value is None else [value]
    if not seen:
        return None
    shapes = {tuple(tensor.shape[:-1]) for tensor in seen}
    dtypes = {"float" if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.") for tensor in seen}
    if others or len(shapes | {tuple(call.states.shape[:2])}) != 1 or len(dtypes) != 1:
        names = ", ".join(sorted({name for name, _ in places}))
        raise ArchitectureError(
            skeleton.name,
            f"its layers hand on more than hidden states and one number, or list, for each token ({names})",
            NOT_BY_LAYER,
        )
    ((argument, entry),) = places
    return HandedFacts.model_validate(
        {"argument": argument, "entry": entry, "width": max(tensor.shape[-1] for tensor in seen), "dtype": dtypes.pop()}
    )


class _Layer:
    """A layer with random weights but for its experts, at `path`; and what its modules are called with.

    `handed` is what the layer before hands on, and `model` the model's name, for messages.
    """

    def __init__(self, call: Call, handed: torch.Tensor | None, layer: torch.nn.Module, path: str, model: str) -> None:
        self.layer = layer
        self.path = path
        self.model = model
        self.experts: Any = layer.get_submodule(path)
        self.held = ExpertsModule(self.experts, model)
        self.count, self.hidden = self.held.count, self.held.inputs
        self.generator = torch.Generator().manual_seed(0)
        self.states = torch.randn(call.states.shape, generator=self.generator)
        self.call = call
        self.handed = handed
        self.tokens = torch.arange(TOKENS).unsqueeze(0)
        # Σ_k weight_k · (x ∘ mix[index_k]): linear in x, another for each expert, and no matrix.
        self.mix = torch.randn(self.count + self.held.identities, self.hidden, generator=self.generator)
        self.undone: torch.Tensor | float = 1.0  # by which the experts' input is multiplied
        self.inputs: dict[str, tuple[Any, ...]] = {}  # of the modules in the first run, by path
        self.outputs: dict[str, Any] = {}
        self.arguments: list[torch.Tensor] = []  # of the experts, in the last run
        with contextlib.ExitStack() as stack:
            for name, module in layer.named_modules():
                if name:
                    stack.callback(module.register_forward_hook(partial(self._observe, name), with_kwargs=True).remove)
            self.output = self.run()
        if path not in self.inputs:
            raise self._refused(f"no text goes through {path}, most of its experts")
        self.x, self.index, self.weight = self.arguments
        if self.held.weighs_inputs and (most := experts_per_token(self.inputs[path][0], self.count)) > 1:
            raise self._refused(f"each of the {most} experts of a token reads another multiple of its state")

    def _refused(self, reason: str) -> ArchitectureError:
        return ArchitectureError(self.model, reason, NOT_QUANTIZED)

    def _stand_in(self, x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        read = (x * self.undone).unsqueeze(1)
        if self.held.identities:  # which have no matrix into which a scale could be multiplied
            read = torch.where((index < self.count).unsqueeze(-1), read, x.unsqueeze(1))
        return (read * self.mix[index] * weight.to(x.dtype).unsqueeze(-1)).sum(1)

    def run(self, changed: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """The layer's output, with the stand-in for the experts, and with other parameters of these names."""

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            self.arguments = arguments = [*args, *kwargs.values()]
            if (
                len(arguments) != 3
                or not all(map(torch.is_tensor, arguments))
                or arguments[0].dim() != 2
                or arguments[1].dtype not in (torch.int64, torch.int32)
                or arguments[1].shape != arguments[2].shape
            ):
                raise self._refused("its experts are not called with states, indices and weights")
            return self._stand_in(*arguments)

        given = self.call.of(self.states, self.handed, self.tokens)
        with replaced_experts(self.experts, forward):
            return first(functional_call(self.layer, dict(changed or {}), (), given))

    def _observe(self, name: str, _: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """A hook of the module of this name, which keeps its inputs and outputs."""
        if name == self.path and name in self.inputs:
            raise ArchitectureError(self.model, "its experts are called twice in a layer", "give another model")
        self.inputs[name], self.outputs[name] = (*args, *kwargs.values()), output

    def roles(self) -> Roles:
        probes = self.held.probes(self.generator) | {"fold": 1.0, "halves": 1.0}
        norm, router = self._norm(), self._router()
        follows = self._reads_the_same(router)
        offset = None
        readers = list[str]()
        if norm is not None:
            probes["halves"] = self._halves(norm)
            if [tuple(p.shape) for p in self.layer.get_submodule(norm).parameters()] == [(self.hidden,)]:
                offset, readers = self._offset(norm), self._readers(router)
                matrices = [router] if follows else []
                probes["fold"] = self._fold(norm, offset, matrices)
                explained = readers and self._fold(norm, offset, matrices + readers) < EXACT
                readers = [*map(self._linear, readers)]
                if probes["fold"] >= EXACT and not explained:
                    readers.append("residual")
        return Roles(
            self.path,
            router,
            self._module_of(router),
            follows,
            self.index.shape[1],
            self._scoring(router),
            norm,
            offset,
            tuple(readers),
            probes,
            has_gate=self.held.has_gate,
            transposed=self.held.transposed,
            interleaved=self.held.interleaved,
            weighs_inputs=self.held.weighs_inputs,
            count=self.count,
            identities=self.held.identities,
        )

    def _is_input(self, value: Any) -> bool:
        """Whether this is what the experts read, in whatever shape (…, H), or a multiple of each row of it."""
        if not (torch.is_tensor(value) and value.dim() > 1 and value.shape[-1] == self.hidden):
            return False
        rows = value.reshape(-1, self.hidden)
        if not self.held.weighs_inputs:
            return torch.equal(rows, self.x)
        if rows.shape != self.x.shape:
            return False
        score = (rows * self.x).sum(-1, keepdim=True) / rows.square().sum(-1, keepdim=True)
        return relative_distance(rows * score, self.x) < EXACT

    def _norm(self) -> str | None:
        """The module with weights whose output is what the experts read."""
        of_input = [p for p, output in self.outputs.items() if p != self.path and self._is_input(first(output))]
        return next(
            (p for p in reversed(of_input) if any(True for _ in self.layer.get_submodule(p).parameters())), None
        )

    def _matrices(self, path: str) -> dict[str, torch.nn.Parameter]:
        """A module's own parameters of more than one dimension, by name."""
        own = self.layer.get_submodule(path).named_parameters(prefix=path, recurse=False)
        return {name: parameter for name, parameter in own if parameter.dim() > 1}

    def _router(self) -> str:
        """The name of the matrix that makes the scores of the experts: without it, all tokens choose the same ones.

        Or where a table chooses by the token alone: without it, the choice stays, and all have the same weights.
        """
        made = {path: scores(output, self.count) for path, output in self.outputs.items() if path != self.path}
        columns = {
            name: logits.shape[-1]
            for path, logits in made.items()
            if logits is not None and logits[..., 0].numel() == len(self.x)
            for name in self._matrices(path)
        }

        def same(rows: torch.Tensor) -> bool:
            return bool((rows == rows[0]).all())

        candidates = sorted(columns, key=lambda matrix: columns[matrix])
        candidates += [
            name for name in self._rows_for_experts() if name not in columns
        ]  # of modules that are not called
        for name in candidates:
            self.run({name: torch.zeros_like(self.layer.get_parameter(name))})
            _, index, weight = self.arguments
            if same(index) or (torch.equal(index, self.index) and same(weight)):
                return name
        raise self._refused(f"no matrix of a layer makes scores by which its {self.count} experts are chosen")

    def _rows_for_experts(self) -> list[str]:
        """The matrices (R, H) with a row for each expert, or more."""
        matrices = {name: p for name, p in self.layer.named_parameters() if p.dim() == 2 and "expert" not in name}
        return [name for name, p in matrices.items() if len(p) == self.count + self.held.identities]

    def _module_of(self, matrix: str) -> str:
        """The path of the module with a matrix, or of the one around it that is called."""
        path = matrix.rpartition(".")[0]
        while path and path not in self.inputs:
            path = path.rpartition(".")[0]
        return path

    def _reads_the_same(self, matrix: str) -> bool:
        """Whether the module of a matrix reads what the experts read."""
        inputs = self.inputs[self._module_of(matrix)]
        return bool(inputs) and self._is_input(inputs[0])

    def _scoring(self, router: str) -> Literal["sigmoid", "softmax"]:
        """Whose scores have the ratios of the routing weights."""
        weight, read = self.layer.get_parameter(router), self.inputs[self._module_of(router)][0]
        logits = torch.nn.functional.linear(read.reshape(-1, weight.shape[1]), weight)
        ratios = self.weight / self.weight[:, :1]
        scores = logits.sigmoid().gather(1, self.index.long())
        return (
            "sigmoid"
            if self.index.shape[1] > 1 and relative_distance(scores / scores[:, :1], ratios) < EXACT
            else "softmax"
        )

    def _readers(self, router: str) -> list[str]:
        """The matrices that read what the experts read, besides the router's."""
        return [
            name
            for path in self.inputs
            if path != self.path
            for name, matrix in self._matrices(path).items()
            if name != router and matrix.shape[-1] == self.hidden and self._reads_the_same(name)
        ]

    def _linear(self, matrix: str) -> str:
        """The linear module of a matrix; the matrix itself where it is of none."""
        path, name = matrix.rpartition(".")[::2]
        return path if name == "weight" and isinstance(self.layer.get_submodule(path), torch.nn.Linear) else matrix

    def _offset(self, norm: str) -> int:
        """Return the constant that a norm adds to its weight, 0 or 1.

        The normed input is the change of the norm's output when its weight grows by 1.
        """
        module: Any = self.layer.get_submodule(norm)
        weight, states = next(module.parameters()), self.inputs[norm][0]
        before = module(states)
        weight.add_(1)
        normed = module(states) - before
        weight.sub_(1)
        return min((0, 1), key=lambda offset: relative_distance(normed * (weight + offset), before))

    def _fold(self, norm: str, offset: int, readers: Sequence[str]) -> float:
        """The norm divided by a scale, the experts' input and these readers multiplied by it."""
        scale = torch.exp(0.5 * torch.randn(self.hidden, generator=self.generator))
        changed = {name: self.layer.get_parameter(name) * scale for name in readers}
        (name, weight), *_ = self.layer.get_submodule(norm).named_parameters(prefix=norm)
        changed[name] = (weight + offset) / scale - offset
        self.undone = scale
        folded = relative_distance(self.run(changed), self.output)
        self.undone = 1.0
        return folded

    def _halves(self, norm: str) -> float:
        """The residual plus the block's output of the norm of the residual."""
        block_path = self.path.rpartition(".")[0]
        if not block_path:
            return 1.0
        block: Any = self.layer.get_submodule(block_path)
        try:
            with replaced_forward(block, lambda states, *_, **__: torch.zeros_like(states)):
                residual = self.run().reshape(-1, self.hidden)
            with replaced_experts(self.experts, self._stand_in):
                added = block(self.layer.get_submodule(norm)(residual.unsqueeze(0)))
            if not torch.is_tensor(added):
                return 1.0
            return relative_distance(residual + added[0], self.output.reshape(-1, self.hidden))
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return 1.0  # the layer asks more of its block than to add its output
