"""The class in transformers that computes a config.json's whole model, its config class, and what to install for it.

A class is named by `architectures`. Where transformers has none of this name, and the name is that of `model_type`, it
is the one that its AutoModel takes for the type: Kimi-K2.5's and Sarvam's files name the class of their own code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from packaging.version import InvalidVersion, Version

from quantizers.system.errors import ArchitectureError

# The newest transformers that was tried: CI computes every type with it. CONTRIBUTING.md says what a newer one takes.
NEWEST = "5.24.0"
# Types with experts that it has, and the oldest version that pyproject.toml allows has not.
LATER = frozenset({
    "bailing_hybrid", "beam", "dots3_note", "dots3_note_text", "flint", "hy_v4_vl", "inkling2", "inkling2_loop",
    "inkling2_loop_text", "inkling2_text", "kolibri1", "lara_mini", "mistral_large4", "muse_spark", "nemo_speechlm",
    "nemotron_h_omni", "sarvam_mla", "sarvam_moe", "unlimited_ocr",
})  # fmt: skip
AUTO = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES")
KIND = re.compile(r"For[A-Z]\w+$")  # the end of a class's name


def model_class(name: str, source: str, config: Mapping[str, Any] | None = None) -> Any:
    """transformers' class of a whole model, of this name; `source` is what gives the name, for the message.

    Args:
        config: config.json, whose `model_type` says the class if transformers has none of this name.

    Raises:
        ArchitectureError: transformers has none of this name or type.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    config, installed = config or {}, f"transformers {transformers.__version__}"
    model_type = config.get("model_type")
    if model_type in LATER and model_type not in CONFIG_MAPPING_NAMES:  # whose class may be that of another type
        problem = f"{installed} does not know the model type {model_type!r}, and {NEWEST} does"
        raise ArchitectureError(source, f"{name}: {problem}", f"install that: {_install(NEWEST)}")
    cls = getattr(transformers, name, None)
    if hasattr(cls, "config_class"):
        return cls
    if KIND.sub("", name).lower().replace("_", "") == str(model_type).replace("_", ""):
        for other in _by_type(config):
            if KIND.findall(other) == KIND.findall(name):
                return getattr(transformers, other)
    remedy = "give a model that it has, or facts with `source.facts` that name another class"
    problem = f"{installed} has no {name}"
    if name in str(config.get("auto_map")):
        raise ArchitectureError(source, f"{problem}: it is code of the model's own, which is never run", remedy)
    if later := saved_with_later(config):
        raise ArchitectureError(source, f"{problem}; the model was saved with {later[0]}", f"{later[1]}, or {remedy}")
    raise ArchitectureError(source, problem, remedy)


def _by_type(config: Mapping[str, Any]) -> list[str]:
    """The names of the classes that transformers' AutoModel takes for a config.json."""
    from transformers.models.auto import modeling_auto

    mappings = (getattr(modeling_auto, name) for name in AUTO)
    return [mapping[config["model_type"]] for mapping in mappings if config.get("model_type") in mapping]


def config_class_of(whole: Any, config: Mapping[str, Any]) -> Any:
    """The config class of a whole model's class for a config.json: of its `model_type`, if transformers pairs the two.

    Several types may share a class: Sarvam's are computed by those of DeepSeek-V3 and GLM-4.5. A class for the text
    alone of a type with more has the config of that section.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if whole.__name__ not in _by_type(config):
        return whole.config_class
    of_type = CONFIG_MAPPING[config["model_type"]]
    return whole.config_class if whole.config_class in of_type.sub_configs.values() else of_type


def saved_with_later(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """The version of transformers with which a model was saved and how to install it, if it is later than what is."""
    import transformers

    try:
        saved = Version(str(config.get("transformers_version"))).base_version  # of a development version, its release
    except InvalidVersion:
        return None
    if Version(saved) <= Version(Version(transformers.__version__).base_version):
        return None
    return saved, f"install that: {_install(saved)}"


def _install(version: str) -> str:
    return f"`pip install -U 'transformers>={version}'`"
