"""The reference engine: llm-compressor's own AWQ and quantization modifiers on one decoder layer.

The library gets a one-layer model, a session of its own and one sequence a batch. Three things differ on purpose:

- The layer is float32, and so are the library's group scales, but a checkpoint holds bfloat16 scales. They are rounded
  first, and the smoothed float32 weights are then rounded to codes with them, by the library's own `quantize`.
- The library divides the norm by its s and multiplies the router and the experts by the same s. A checkpoint holds
  norm' = bf16(norm / s), so `smooth` is norm / norm', and the router is the source's times that: exact. The experts
  keep the unrounded s, hence a relative error of at most 2^-9 in each input.
- `BasicPipeline` of 0.14 turns fake quantization on again before AWQ starts its search, which then measures weights
  that are quantized twice. So the events are sent here, in the order of the library's `SequentialPipeline` (which
  `oneshot` uses) and with quantization off as there.

Legend: E experts, H hidden, g group size.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from functools import partial
from importlib import import_module
from io import StringIO
from typing import Any

import torch
from torch import Tensor

from quantizers.architectures.architecture import Modules
from quantizers.architectures.matrices import MATRICES, PROJECTIONS, Matrix
from quantizers.recipe.schema import Awq, Experts
from quantizers.system.errors import QuantizeError

from .result import LayerResult

LOG_DISABLED = "LLM_COMPRESSOR_LOG_DISABLED"  # else its import replaces loguru's sinks by one on standard output


@contextmanager
def quiet_library() -> Iterator[None]:
    """Suppress the library's log, and what it writes to standard error, within the block.

    llm-compressor 0.14 has no option that hides its progress bars, and tqdm reads TQDM_DISABLE only when imported.
    A bar of ours on a terminal stands still meanwhile.
    """
    from loguru import logger

    with ExitStack() as stack:
        if LOG_DISABLED not in os.environ:
            os.environ[LOG_DISABLED] = "true"
            stack.callback(os.environ.pop, LOG_DISABLED)
        for package in ("llmcompressor", "compressed_tensors"):
            logger.disable(package)
            stack.callback(logger.enable, package)
        stack.enter_context(redirect_stderr(StringIO()))
        import_module("llmcompressor")
        yield


@quiet_library()
def solve_with_llmcompressor(
    layer: torch.nn.Module,
    inputs: Sequence[Mapping[str, Any]],
    settings: Experts,
    modules: Modules,
    norm: Tensor | None,
    *,
    compensate_router: bool = True,
) -> LayerResult:
    """Smooth and quantize one layer's routed experts as llm-compressor does.

    Args:
        layer: a materialised transformers decoder layer whose experts carry `use_experts_implementation`. Its
            attention must be causal by itself where the mask is None (sdpa is, eager is not). It is used up: its fused
            experts are replaced by three nn.Linear each, during which they are in memory twice, and weights change.
        inputs: the keyword arguments of `layer(**kwargs)`, one mapping a calibration sequence, on the layer's device.
            Not used where `settings.awq` is False: min-max scales need no data.
        settings: `bits`, `group_size` and `awq` are used; the library has nothing like the others.
        norm: (H,) in the source's dtype, if scales are to be folded into it. The library divides the stored weight, so
            it must not be one that the model adds 1 to.
        compensate_router: False leaves the router as it is although the norm is folded: it does not read the norm, or
            the defect of the published recipe is wanted, for the benchmark.

    Returns:
        The solved layer, on the layer's device. `error` holds mean squared errors of an output element as the library
        measures them, `search_before` and `search_after` of the MoE block for the shared scale, `search_down_before`
        and `search_down_after` of w2 averaged over the experts; and `expert_tokens`, the tokens that each expert saw.

    Raises:
        QuantizeError: an expert did not see every token, or a group scale is not finite.
    """
    assert inputs or not settings.awq, "AWQ needs calibration data"
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor.core import create_session
    from llmcompressor.modifiers.quantization import QuantizationModifier

    source_router = layer.get_parameter(f"{modules.router}.weight").detach().to(torch.float32, copy=True)
    hidden = layer.get_parameter(f"{modules.experts}.down_proj").shape[1]
    divided = None if norm is None else modules.norm
    linear = _linearize(layer, modules.experts)
    args = QuantizationArgs(
        num_bits=settings.bits, type="int", symmetric=True, strategy="group", group_size=settings.group_size
    )
    every = rf"re:layer\.{re.escape(modules.experts)}\.\d+\."
    scheme = QuantizationScheme(targets=[f"{every}(gate|up|down)_proj$"], weights=args)
    modifiers: list[Any] = [QuantizationModifier(config_groups={"experts": scheme})]
    if settings.awq:
        router = modules.router if compensate_router else None
        modifiers.insert(0, _awq_modifier(settings.awq, divided, router, every))

    error, fallbacks = dict[str, float](), list[str]()
    with create_session() as session, torch.no_grad():
        session.initialize(model=torch.nn.ModuleDict({"layer": layer}), recipe=modifiers, start=-1)
        tokens = _calibrate(layer, linear, inputs if settings.awq else (), modifiers[0] if settings.awq else None)
        if settings.awq:
            error, fallbacks = _report(modifiers[0]._error_metrics, divided, modules.experts, linear.num_experts)
            error["expert_tokens"] = float(tokens)
        session.finalize()

    folded, smooth = None, torch.ones(hidden, device=source_router.device)
    if norm is not None and modules.norm is not None:
        folded = layer.get_parameter(f"{modules.norm}.weight").detach().to(norm.dtype)  # (H,)
        smooth = torch.where(folded == 0, 1.0, norm.float() / folded.float())
    compensated = norm is not None and settings.awq and compensate_router
    codes, scales = _codes(linear, args)
    return LayerResult(folded, smooth, source_router * smooth if compensated else None, codes, scales, error, fallbacks)


def _linearize(layer: torch.nn.Module, experts: str) -> Any:
    """Replace the fused experts by the library's: a module list of experts, each of three nn.Linear."""
    from llmcompressor.modeling.moe.linear_experts import LinearExperts2D

    fused: Any = layer.get_submodule(experts)
    config = copy.copy(fused.config)
    config.dtype = fused.down_proj.dtype  # that of the checkpoint would round a float32 layer
    linear = LinearExperts2D.get_linear_experts_cls(type(fused)).from_experts_module(fused, config)
    layer.set_submodule(experts, linear)
    return linear


def _awq_modifier(awq: Awq, norm: str | None, router: str | None, every: str) -> Any:
    """The library's AWQ with the readers of the norm, of which the library's own table of mappings leaves some out.

    No scale is folded without a norm, and none compensated without a router; `every` is the pattern of the experts.
    """
    from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier

    mappings = [AWQMapping(f"{every}up_proj$", [f"{every}down_proj$"])]
    if norm is not None:
        readers = [f"layer.{router}"] * (router is not None) + [f"{every}gate_proj$", f"{every}up_proj$"]
        mappings.insert(0, AWQMapping(f"layer.{norm}", readers))
    cpu = torch.device("cpu")  # the library's default for a mixture of experts
    return AWQModifier(mappings=mappings, offload_device=cpu, n_grid=awq.grid, duo_scaling=awq.duo_scaling)


def _calibrate(layer: torch.nn.Module, linear: Any, inputs: Sequence[Mapping[str, Any]], awq: Any) -> int:
    """Send the calibration's events, with one forward pass a sequence; returns the tokens that every expert saw.

    `awq` is the library's modifier, if there is one.
    """
    from llmcompressor.core import LifecycleCallbacks
    from llmcompressor.modeling.moe.context import moe_calibration_context
    from llmcompressor.utils.helpers import DisableQuantization, eval_context

    seen = [0] * linear.num_experts

    def count(expert: int, _module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        seen[expert] += args[0].shape[:-1].numel()

    with ExitStack() as stack:
        stack.enter_context(moe_calibration_context())
        LifecycleCallbacks.calibration_start()
        stack.enter_context(eval_context(layer))
        stack.enter_context(DisableQuantization(layer))  # until the search is over, too
        hooks = [linear[e].register_forward_pre_hook(partial(count, e)) for e in range(linear.num_experts)]
        for batch in inputs:
            layer(**batch)
        for hook in hooks:
            hook.remove()
        tokens: int = sum(batch["hidden_states"].shape[:2].numel() for batch in inputs)
        for expert, number in enumerate(seen):
            if number != tokens:
                raise QuantizeError(
                    "",
                    f"expert {expert} saw {number} of {tokens} calibration tokens: llm-compressor's all-experts "
                    "calibration had no effect",
                )
        if awq is not None and not torch.accelerator.is_available():
            _keep_unpinned(awq)
        LifecycleCallbacks.sequential_epoch_end(list(layer.modules()))
        LifecycleCallbacks.calibration_end()
    return tokens


def _keep_unpinned(awq: Any) -> None:
    """Give AWQ caches that do not pin: 0.14 pins what it gathered without asking, and torch refuses on a CPU alone."""
    from llmcompressor.pipelines.cache import IntermediatesCache

    class Unpinned(IntermediatesCache):  # type: ignore[misc]  # the library has no types
        def pin_memory(self, *_arguments: Any, **_named: Any) -> None:
            pass

    for module, cache in awq._parent_args_cache.items():
        awq._parent_args_cache[module] = Unpinned(cache.batch_intermediates, cache.offload_device)


def _report(
    metrics: Sequence[Mapping[str, Any]], norm: str | None, experts: str, count: int
) -> tuple[dict[str, float], list[str]]:
    """The search's errors, and a line for each scale that the library did not search (it only logs that)."""
    searched = {entry["layer_name"]: entry for entry in metrics}
    error, fallbacks = dict[str, float](), list[str]()
    if norm is not None:
        if shared := searched.get(f"layer.{norm}"):
            error |= {"search_before": shared["initial_error"], "search_after": shared["best_error"]}
        else:
            fallbacks.append(f"all experts: no scale for {norm}, the MoE block's output is not finite")
    entries = [searched.get(f"layer.{experts}.{expert}.up_proj") for expert in range(count)]
    without = [expert for expert, entry in enumerate(entries) if entry is None]
    fallbacks += [f"expert {expert}: no scale for w2, its output is not finite" for expert in without]
    if down := [entry for entry in entries if entry is not None]:
        for key, library_key in (("search_down_before", "initial_error"), ("search_down_after", "best_error")):
            error[key] = sum(entry[library_key] for entry in down) / len(down)
    return error, fallbacks


def _codes(linear: Any, args: Any) -> tuple[dict[Matrix, Tensor], dict[Matrix, Tensor]]:
    """The smoothed weights' codes and group scales as in `LayerResult`: the library's scales, rounded to bfloat16."""
    from compressed_tensors.quantization import quantize

    codes, scales = dict[Matrix, Tensor](), dict[Matrix, Tensor]()
    for matrix in MATRICES:
        modules = [getattr(linear[e], PROJECTIONS[matrix]) for e in range(linear.num_experts)]
        scales[matrix] = torch.stack([module.weight_scale.detach().to(torch.bfloat16) for module in modules])
        for expert, finite in enumerate(scales[matrix].isfinite().flatten(1).all(1).tolist()):
            if not finite:
                raise QuantizeError(f"expert {expert}", f"a group scale of {PROJECTIONS[matrix]} is not finite")
        both = [(module.weight.detach(), scale) for module, scale in zip(modules, scales[matrix], strict=True)]
        codes[matrix] = torch.stack(
            [quantize(weight, scale.to(weight.dtype), None, args, dtype=torch.int8) for weight, scale in both]
        )
    return codes, scales
