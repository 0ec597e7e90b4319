"""transformers' whole model of a config.json without its weights: parameters on the meta device, computed buffers real.

It says where the decoder layers are, where each stored tensor goes, and what the model's own forward passes to every
layer (masks, windows, rotary embeddings, position ids).
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from quantizers.system.errors import ArchitectureError

from .matrices import FUSED, PROJECTIONS

CPU = torch.device("cpu")
MOST_ENTRIES = 3  # in the tuples that layers return
MOST_COMPUTED = 2**26  # numbers in a buffer that a class computes
ATTENTION = ("sdpa", "eager")  # in this order: some classes have eager attention alone
RETURNED = ("output_attentions", "output_hidden_states", "output_router_logits")  # keys for what a forward returns
# Ends of messages.
NOT_QUANTIZED = "such a model cannot be quantized with this program"
NOT_BY_LAYER = "such a model cannot be computed layer by layer here; give another model"
# What transformers raises at a config.json with wrong values, and at tensors that do not go together.
FAILURES = (
    StrictDataclassError, ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a decoder layer by the model's own forward.

    Attributes:
        handed: the names of the arguments that the layer before returns besides its states, with their places in the
            tuple that it returns; their values are unknown.
    """

    arguments: dict[str, Any]  # by the names of the layer's parameters, without the hidden states
    states: torch.Tensor  # (B, T, H), or with several streams (B, T, S, H)
    name: str  # of the states among the layer's parameters
    handed: dict[str, int]
    tokens: tuple[str, ...] = ()  # the names of the arguments that are the token ids themselves

    def of(
        self, states: torch.Tensor, handed: torch.Tensor | None = None, tokens: torch.Tensor | None = None
    ) -> dict[str, Any]:
        """All arguments by keyword, with other states (B, T, …), what the layer before hands on, and ids (B, T) int64.

        What a layer puts into a mapping is lost. Without `tokens`, the ids are those of the call.
        """
        states = states.reshape(*states.shape[:2], *self.states.shape[2:])
        own = {k: copy.copy(v) if isinstance(v, MutableMapping) else v for k, v in self.arguments.items()}
        if tokens is not None:
            own |= dict.fromkeys(self.tokens, tokens)
        return own | dict.fromkeys(self.handed, handed) | {self.name: states}


@dataclass(frozen=True)
class Place:
    """Parameter or persistent buffer of the model that a stored tensor belongs to."""

    layer: int | None  # the decoder layer's number; None outside the layers
    parameter: str  # the name of a parameter or persistent buffer, within the layer, or outside them within the model
    part: int | None = None  # if the parameter is made of several kinds of tensors, or rearranged: which this is


# Names of an expert's matrices, the parameters that hold those of all experts, and which part of them they are: FP8
# releases have them for models whose fused experts transformers saves as they are.
_PARTS = {PROJECTIONS[matrix]: (name, index) for name, parts in FUSED.items() for index, matrix in enumerate(parts)}


class Skeleton:
    """The whole model without weights.

    Args:
        config: of the config class of `model_class`; its implementations of attention and experts are set here.
        device: of the computed buffers, and of the arguments of layers.
        dtype: of the hidden states.

    Raises:
        ArchitectureError: the model has no layers with experts.
    """

    def __init__(
        self, model_class: Any, config: Any, device: torch.device = CPU, dtype: torch.dtype = torch.float32
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.config = config
        # On a CPU the plain loop is faster. Else the default: a grouped matmul, where the class can.
        config._experts_implementation = "eager" if device.type == "cpu" else None
        for part in (config, config.get_text_config()):
            part.return_dict = True
            for key in RETURNED:
                if getattr(part, key, False):
                    setattr(part, key, False)
        self.model: Any = _built(model_class, config, device)  # in evaluation mode
        self.name = type(self.model).__name__
        self.path, self.layers = _decoder_layers(self.model)  # `path` is the name of the list within the model
        self._longest = 0
        self._calls: dict[int, list[Call]] = {}  # by length, views of the longest
        self._other: dict[int, list[Call]] = {}

    @cached_property
    def head(self) -> Any:
        """The module that makes the logits: the model's own, or that of the model of text within it; None without."""
        models = (module for module in self.model.modules() if hasattr(module, "get_output_embeddings"))
        return next((head for model in models if (head := model.get_output_embeddings()) is not None), None)

    def layer(self, number: int) -> torch.nn.Module:
        """A copy of a decoder layer, to be given weights."""
        config = getattr(self.layers[number], "config", self.config)
        return copy.deepcopy(self.layers[number], {id(config): config, id(self.config): self.config})

    def calls(self, length: int) -> list[Call]:
        """Return the arguments of each layer in the model's forward on `length` tokens; states are zeros.

        The arguments of a shorter sequence are views of those of the longest so far, once they are known to be equal:
        masks are large, and making them takes longer than small layers do. Where they are not, the last are kept.
        """
        if length in self._other:
            return self._other[length]
        if length > self._longest:
            self._longest, self._calls = length, {}
        if length not in self._calls:
            own = self.calls_with(torch.zeros(1, length, dtype=torch.int64, device=self.device))
            begun = _beginnings(self._calls[self._longest], length) if length < self._longest else own
            if any(differing_arguments(own, begun)):
                self._other = {length: own}
                return own
            self._calls[length] = begun
        return self._calls[length]

    def calls_with(self, tokens: torch.Tensor, leaving: torch.Tensor | None = None) -> list[Call]:
        """The same for token ids (B, T) int64, and with what all layers return instead of zeros."""
        return self._record(tokens, layers=len(self.layers), leaving=leaving, weights=self._zeros())[0]

    def _zeros(self) -> dict[str, torch.Tensor]:
        """Zeros, as the states are, for what has no weights yet outside the layers, by name; one number each."""
        outside = {n: p for n, p in self.model.named_parameters() if p.is_meta and not n.startswith(f"{self.path}.")}
        zero = torch.zeros((), dtype=self.dtype, device=self.device)
        return {name: zero.expand(parameter.shape) for name, parameter in outside.items()}

    def require_layers_alone(self, length: int) -> None:
        """Refuse a model whose layers, called one after the other with the arguments of `calls`, are not all of it.

        Raises:
            ArchitectureError: an argument depends on the tokens, or on what earlier layers return; layers are called
                again; or the forward fails behind them.
        """
        calls, tokens = self.calls(length), torch.arange(length, device=self.device).unsqueeze(0)
        for argument in differing_arguments(self.calls_with(tokens), calls):
            raise ArchitectureError(
                self.name, f"{argument} depends on the tokens, not on their number alone", NOT_BY_LAYER
            )
        for argument in differing_arguments(self.calls_with(tokens, torch.ones_like(calls[0].states)), calls):
            raise ArchitectureError(self.name, f"{argument} is made of what earlier layers return", NOT_BY_LAYER)
        with replaced_forward(self.head, lambda rows: rows):
            self._record(tokens, weights=self._zeros())

    def begin(self, tokens: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """The states (B, T, H) that enter layer 0, from token ids (B, T) int64 and the embedding table."""
        table = self.model.get_input_embeddings()
        own, table.weight = table.weight, torch.nn.Parameter(embedding, requires_grad=False)
        try:
            return self._record(tokens, layers=1, embed=True)[0][0].states
        finally:
            table.weight = own

    def end(self, states: torch.Tensor) -> torch.Tensor:
        """Compute the input (1, T, H) of the head from the states (1, T, H) that leave the last layer.

        The modules between need their weights, see `put`.
        """
        multiplied: list[torch.Tensor] = []

        def head(rows: torch.Tensor) -> torch.Tensor:
            multiplied.append(rows)
            raise _Reached

        tokens = torch.zeros(states.shape[:2], dtype=torch.int64, device=self.device)
        with replaced_forward(self.head, head):
            self._record(tokens, leaving=states)
        return multiplied[0]

    def logits(self, products: torch.Tensor) -> torch.Tensor:
        """The logits (1, T, V) that the model makes of its head's products (1, T, V), which it may scale or cap."""
        tokens = torch.zeros(products.shape[:2], dtype=torch.int64, device=self.device)
        head = self.head
        bias = getattr(head, "bias", None)
        biased = products if bias is None else products + bias.to(products.dtype)
        with replaced_forward(head, lambda _: biased):
            _, logits = self._record(tokens)
        assert logits is not None
        return logits

    @torch.no_grad()
    def _record(
        self,
        tokens: torch.Tensor,
        *,
        layers: int | None = None,
        embed: bool = False,
        leaving: torch.Tensor | None = None,
        weights: Mapping[str, torch.Tensor] | None = None,
    ) -> tuple[list[Call], torch.Tensor | None]:
        """The calls of layers that keep their arguments and pass their states on by the model's forward; its logits.

        Args:
            layers: it ends once so many have been called, without logits; None to go on behind the last one.
            embed: whether the embedding has its weight; zeros stand for it otherwise.
            leaving: what all layers return; None for their states.
            weights: stand for parameters of these names.
        """
        table = self.model.get_input_embeddings()

        def zeros(ids: torch.Tensor) -> torch.Tensor:
            return torch.zeros(*ids.shape, table.weight.shape[-1], dtype=self.dtype, device=self.device)

        furthest, reason = -1, ""  # the failure that says most
        for entries in range(MOST_ENTRIES + 1):  # of what a layer returns; 0: its states, in no tuple
            calls: list[Call] = []
            logits: torch.Tensor | None = None
            try:
                with contextlib.suppress(_Reached), contextlib.ExitStack() as stack:
                    if not embed:
                        stack.enter_context(replaced_forward(table, zeros))
                    for number, layer in enumerate(self.layers):
                        recorder = _recorder(layer, calls, tokens, layers, leaving, entries, number=number)
                        stack.enter_context(replaced_forward(layer, recorder))
                    given = {"input_ids": tokens, "use_cache": False}
                    logits = torch.func.functional_call(self.model, dict(weights or {}), (), given).logits
                return calls, logits
            except torch.OutOfMemoryError:
                raise
            except (TypeError, ValueError, IndexError, AttributeError, RuntimeError) as failure:
                if len(calls) > furthest:
                    furthest, reason = len(calls), " ".join(str(failure).split())
        raise ArchitectureError(
            self.name,
            f"it cannot run with layers that pass their states on ({reason}), or without more than text",
            NOT_BY_LAYER,
        )

    def put(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Give tensors outside the layers, by the names under which they are stored, to the modules that have them."""
        for parameter, weight in self.convert(tensors).items():
            path, _, last = parameter.rpartition(".")
            module = self.model.get_submodule(path)
            module.load_state_dict({last: weight}, strict=False, assign=True)
            module.requires_grad_(False)

    def convert(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's parameters, by name, that transformers makes of stored tensors, by name.

        Raises:
            FAILURES: tensors are missing, or their shapes do not go together.
        """
        from transformers.core_model_loading import dot_natural_key

        made: dict[str, torch.Tensor] = {}
        conversions: dict[str, Any] = {}
        for name in sorted(tensors, key=dot_natural_key):  # experts by their numbers
            parameter, pattern, converter = self._target(name)
            if _keeps_shape(converter):
                made[parameter] = tensors[name]
            else:
                conversion = conversions.setdefault(parameter, copy.deepcopy(converter))
                conversion.add_tensor(parameter, name, pattern, tensors[name])
        for parameter, conversion in conversions.items():
            made |= {
                n: first(tensor) for n, tensor in conversion.convert(parameter, self.model, self.model.config).items()
            }
        return {name: tensor for name, tensor in made.items() if name in self.parameters}

    @cached_property
    def _transforms(self) -> tuple[list[Any], list[Any]]:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        mapping = get_model_conversion_mapping(self.model)
        renamings = [transform for transform in mapping if isinstance(transform, WeightRenaming)]
        return renamings, [transform for transform in mapping if isinstance(transform, WeightConverter)]

    @cached_property
    def parameters(self) -> dict[str, torch.Tensor]:
        """All parameters and persistent buffers by name, without memory."""
        state: dict[str, torch.Tensor] = self.model.state_dict()
        return state

    def _target(self, name: str) -> tuple[str, str | None, Any]:
        """The parameter that a stored tensor is, or the first of which it is a part, whether or not the model has it.

        And the pattern that the name matches, with transformers' converter that has it; None if it is not converted.
        """
        from transformers.core_model_loading import rename_source_key

        prefix = self.model.base_model_prefix
        parameter, pattern = rename_source_key(name, *self._transforms, prefix, self.parameters)
        if parameter not in self.parameters and name in self.parameters:
            return name, None, None
        converters = (converter for converter in self._transforms[1] if pattern in converter.source_patterns)
        return parameter, pattern, next(converters, None)

    def place(self, name: str) -> Place | None:
        """Find where transformers' own rules load a stored tensor to; None if the model does without it."""
        parameter, pattern, converter = self._target(name)
        if parameter not in self.parameters:
            single = re.fullmatch(rf"(.*\.experts\.)\d+\.({'|'.join(_PARTS)})\.weight", name)
            if single is None:
                return None
            fused, of_fused = _PARTS[single[2]]
            whole = self.place(f"{single[1]}{fused}")
            return whole and replace(whole, part=of_fused)
        within = re.match(rf"{re.escape(self.path)}\.(\d+)\.", parameter)
        part = None if _keeps_shape(converter) else converter.source_patterns.index(pattern)
        return Place(int(within[1]), parameter[within.end() :], part) if within else Place(None, parameter, part)


def _keeps_shape(converter: Any) -> bool:
    """Whether a conversion, or None, leaves a tensor that has the parameter's shape as it is."""
    return converter is None or all(getattr(operation, "check_dims", False) for operation in converter.operations)


@cache  # a large model is made of them
def can_be_made(model_class: Any) -> bool:
    """Whether transformers can make a model of its config class's own defaults."""
    try:
        _built(model_class, model_class.config_class(), CPU)
    except FAILURES:
        return False
    return True


def _beginnings(calls: Sequence[Call], length: int) -> list[Call]:
    """The calls for the first `length` tokens, as views; a dimension of the full length is taken for one of tokens."""
    full = calls[0].states.shape[1]

    @cache  # the layers share most of their arguments; tensors are hashed by identity
    def cut_tensor(value: torch.Tensor) -> torch.Tensor:
        return value[tuple(slice(length if size == full else None) for size in value.shape)]

    def cut(value: Any) -> Any:
        return cut_tensor(value) if torch.is_tensor(value) else value

    return [replace(call, arguments=tree_map(cut, call.arguments), states=call.states[:, :length]) for call in calls]


def differing_arguments(calls: Sequence[Call], others: Sequence[Call]) -> Iterator[str]:
    """The layers' numbers and names of the arguments that are not equal, tensor by tensor; but of no token ids."""
    equal_tensors = cache(torch.equal)  # by identity: the layers share most of their arguments

    def equal(a: Any, b: Any) -> bool:
        both = torch.is_tensor(a) and torch.is_tensor(b)
        return equal_tensors(a, b) if both else a is b or bool(a == b)

    for number, (first, second) in enumerate(zip(calls, others, strict=True)):
        for name, value in first.arguments.items():
            leaves = tree_leaves(value), tree_leaves(second.arguments.get(name))
            if name not in first.tokens and (len(leaves[0]) != len(leaves[1]) or not all(map(equal, *leaves))):
                yield f"layer {number}: {name}"


class _Reached(Exception):  # no error: the forward has reached its last layer
    """Ends the model's forward once all layers have been called."""


@dataclass(frozen=True)
class _Handed:
    """Stands for what a layer returns besides its states, at this place in a tuple."""

    layer: int = field(compare=False, repr=False)
    entry: int


def _recorder(
    layer: torch.nn.Module,
    calls: list[Call],
    tokens: torch.Tensor,
    layers: int | None,
    leaving: torch.Tensor | None,
    entries: int,
    *,
    number: int,
) -> Callable[..., Any]:
    """A layer's forward that keeps its arguments, see `Skeleton._record`."""
    signature = inspect.signature(layer.forward)
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(*args, **kwargs).arguments)
        given |= given.pop(rest, {})
        name = next(iter(given))
        states = given.pop(name)
        handed = {key: value.entry for key, value in given.items() if isinstance(value, _Handed)}
        if any(
            isinstance(leaf, _Handed) and (leaf is not value or leaf.layer != len(calls) - 1)
            for value in given.values()
            for leaf in tree_leaves(value)
        ):
            raise ValueError("a layer gets what another than the one before returns")
        if number != len(calls):
            raise ValueError(f"layer {number} is called as number {len(calls)}, since layers are called again")
        calls.append(Call(given, states, name, handed, tuple(k for k, value in given.items() if value is tokens)))
        if len(calls) == layers:
            raise _Reached
        result = states if leaving is None else leaving.reshape(*leaving.shape[:2], *states.shape[2:])
        return (result, *(_Handed(len(calls) - 1, entry) for entry in range(1, entries))) if entries else result

    return forward


def first(output: Any) -> torch.Tensor:
    """Return a module's output, or the first of several outputs, which for a layer is its states."""
    tensor: torch.Tensor = output[0] if isinstance(output, (tuple, list)) else output
    return tensor


def scores(output: Any, experts: int) -> torch.Tensor | None:
    """The scores (…, E) among what a router returns, perhaps with more columns; None if no tensor is that wide."""
    leaves = [leaf for leaf in tree_leaves(output) if torch.is_tensor(leaf) and leaf.is_floating_point()]
    wide = [leaf for leaf in leaves if leaf.dim() > 1 and leaf.shape[-1] >= experts]
    return min(wide, key=lambda leaf: leaf.shape[-1], default=None)


@contextlib.contextmanager
def replaced_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a module run this instead of its own forward, or of what replaces that already, within the block."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


class _EmptyOnMeta(TorchFunctionMode):
    """Puts parameters on the meta device, but no buffer that is computed: what `torch.empty` makes, and large zeros."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.init.normal_ and kwargs["tensor"].is_meta:  # it draws nothing, for a third of the time
            return kwargs["tensor"]
        if func in (torch.empty, torch.zeros) and kwargs.get("device") is None:
            made = func(*args, **kwargs | {"device": "meta"})
            if func is torch.empty or made.numel() > MOST_COMPUTED:  # zeros: llama4's experts
                return made
        return func(*args, **kwargs)


def _built(model_class: Any, config: Any, device: torch.device) -> Any:
    """A model without weights, its computed buffers on `device`; with the first kind of attention that it has."""
    for attention in ATTENTION:
        config._attn_implementation = attention
        try:
            with _EmptyOnMeta():
                model = model_class(config).eval()
            break
        except ValueError as failure:
            if "attention implementation" not in str(failure) or attention == ATTENTION[-1]:
                raise
    for module in model.modules():
        free(module)
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_meta:
                setattr(module, name, buffer.to(device))
    return model.requires_grad_(False)


def free(module: torch.nn.Module) -> None:
    """Put a module's weights, which are its parameters and persistent buffers, on the meta device; not its children's.

    Buffers that are computed stay, and integers, which are numbers of something and cannot be drawn.
    """
    for name, parameter in module.named_parameters(recurse=False):
        if not parameter.is_meta:
            setattr(module, name, torch.nn.Parameter(parameter.to("meta"), requires_grad=False))
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
            setattr(module, name, buffer.to("meta"))


def _decoder_layers(model: torch.nn.Module) -> tuple[str, torch.nn.ModuleList]:
    """The name of the list of layers with experts that has most parameters, and the list."""
    decoders = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList)
        and any("expert" in path.lower() for layer in module for path, _ in layer.named_modules())
    }
    if not decoders:
        raise ArchitectureError(
            "", f"{type(model).__name__} has no layers with a module called experts", "give a mixture-of-experts model"
        )
    # The experts themselves may be a list within such a layer: the outermost has the most.
    name = max(decoders, key=lambda path: (sum(p.numel() for p in decoders[path].parameters()), -path.count(".")))
    return name, decoders[name]
