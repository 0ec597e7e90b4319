"""The section `serving` of report.json: servers that know the model, their options, and GPUs that the output fits.

server_commands.py makes commands of it.
"""

from __future__ import annotations

from typing import Any

from quantizers.architectures.architecture import Architecture, Options, ServerName
from quantizers.calibration.render import custom_class
from quantizers.checkpoint.reader import Checkpoint, read_json
from quantizers.eval.report.schema import Serving
from quantizers.planning.gpus import lacking_facts
from quantizers.planning.plan import Plan
from quantizers.system.errors import CheckpointError

from .vram import fits_on_common

SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def how_to_serve(plan: Plan, facts: Architecture, source: Checkpoint, name: str) -> Serving:
    """The section `serving` for the output of a plan.

    Args:
        source: its tokenizer and generation_config.json say which options and which sampling it wants.
        name: of the source as it is published, since some models of a family have options of their own.
    """
    # transformers finds the class, and fuses the experts, by the model type in config.json.
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    generation = _json(source, "generation_config.json")
    sglang = server_options(facts, "sglang", name, source) if "sglang" in facts.servers else None
    parsers = server_options(facts, "vllm", name, source) if "vllm" in facts.servers else {}
    problem = lacking_facts(facts)
    fitting: dict[str, Any] = {"longest": facts.positions or 0, "fits": [], "assumptions": []}
    if not problem:
        fitting = fits_on_common(plan, facts, source)
    return Serving(
        servers=sorted(facts.servers),
        parsers=parsers,
        sglang=sglang,
        transformers=None if facts.model_type in CONFIG_MAPPING_NAMES else False,
        sampling={key: generation[key] for key in SAMPLING_KEYS if type(generation.get(key)) in (int, float)},
        **fitting,
        cards_unknown=problem,
    )


def server_options(facts: Architecture, server: ServerName, model: str, source: Checkpoint) -> Options:
    """Options that a server needs: those of the family, those of this model, and one for a tokenizer with own code."""
    code: Options = {"trust-remote-code": True} if custom_class(_json(source, "tokenizer_config.json")) else {}
    return facts.server_options(server, model) | code


def _json(source: Checkpoint, name: str) -> dict[str, Any]:
    """The table in a JSON file beside the shards; empty if there is none or it cannot be read."""
    try:
        return read_json(source.folder / name)
    except CheckpointError:
        return {}
