"""A stand-in for torchvision, whose published builds do not import beside a torch for the CPU.

vLLM's models with vision import transformers' image processors, and these import torchvision, before any weight is
loaded. Every module and every name in it can be imported; nothing is computed with them, and calling one is an error.
vllm_probe.py alone has this folder on its path.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

__version__ = "0"


class Nothing(type):
    """The class of what any name stands for: a class that has every name too."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name

    def __call__(cls, *_arguments: Any, **_named: Any) -> Any:
        raise NotImplementedError(f"{cls.__name__} of the stand-in for torchvision computes nothing")


class StandIn(ModuleType):
    __path__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(name, (), {})


for _name in (
    "io",
    "ops",
    "ops.boxes",
    "transforms",
    "transforms.functional",
    "transforms.v2",
    "transforms.v2.functional",
):
    sys.modules[f"{__name__}.{_name}"] = StandIn(f"{__name__}.{_name}")
