"""How vLLM reads AutoAWQ's and GPTQ's sections: by our rules, and by its own functions where it is installed."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import families
import pytest
from awq_gptq import Kind
from conftest import VLLM_PYTHON, needs_vllm

from eval.consumers.check import STORED, check
from eval.consumers.config_groups import Refused
from eval.consumers.findings import Consumers
from eval.consumers.rules import VLLM
from eval.consumers.tensors import by_module, expected_modules, expected_vectors
from eval.consumers.words import _asked, _is_quantized, _listed
from quantizers.architectures.families import architecture_for
from quantizers.architectures.sizes import sizes_of
from quantizers.checkpoint.integer_words_config import read_words
from quantizers.checkpoint.safetensors_header import Spec

AWQ = Kind("awq", group=64).section()
WITHOUT_KEY = {key: value for key, value in AWQ.items() if key != "zero_point"}
GPTQ = Kind("gptq", symmetric=True, group=64).section()
USUAL = ("gate", "lm_head", "eh_proj", "shared_head.head")  # what stays plain
AT = "model.layers.0"
EXPERTS = f"{AT}.block_sparse_moe.experts"


def headers(family: str, section: dict[str, Any], plain: tuple[str, ...] = USUAL) -> dict[str, Spec]:
    """What a checkpoint holds whose linear layers are stored as the section says, but for the names in `plain`."""
    config = families.config(family, num_hidden_layers=2)
    facts = architecture_for(config, "x")
    sizes = sizes_of(facts, config, "x")
    words = read_words(section, "x")

    found = {name: Spec("F16", (1,)) for name in expected_vectors(facts, sizes)}
    for module, expected in expected_modules(facts, sizes).items():
        rows, columns = expected.shape
        scheme = words.of(module)
        if scheme is None or module.endswith((*plain, "embed_tokens")):
            found[f"{module}.weight"] = Spec("F16", expected.shape)
            continue
        bits, group = scheme
        groups, in_word = 1 if group == -1 else columns // group, 32 // bits
        awq = words.layout == "awq"
        found[f"{module}.qweight"] = Spec("I32", (columns, rows // in_word) if awq else (columns // in_word, rows))
        found[f"{module}.qzeros"] = Spec("I32", (groups, rows // in_word))
        found[f"{module}.scales"] = Spec("F16", (groups, rows))
    return found


def checked(family: str, section: dict[str, Any], plain: tuple[str, ...] = USUAL) -> Consumers:
    config = families.config(family, num_hidden_layers=2) | {"quantization_config": section}
    facts = architecture_for(config, "x")
    return check(config, headers(family, section, plain), facts, sizes_of(facts, config, "x"))


@pytest.mark.parametrize("family", families.CONFIGS)
@pytest.mark.parametrize("section", [AWQ, GPTQ, GPTQ | {"bits": 8, "group_size": -1}], ids=["AWQ", "GPTQ", "8 bits"])
def test_a_usual_checkpoint_is_read_as_it_is_stored(family: str, section: dict[str, Any]) -> None:
    found = checked(family, section)
    assert found.errors == []
    (warning,) = found.findings
    assert warning.where == "quantization_config.quant_method"
    assert "its rules are not checked here" in warning.problem
    assert VLLM.name not in warning.engine.split(", ")
    taken, stored = found.schemes[VLLM.name], found.schemes[STORED]
    quantized = {kind for kind, text in stored.items() if "INT" in text}
    plain = {"router", "lm_head", "embeddings", "MTP other"}
    assert quantized == {kind for kind, text in stored.items() if text != "-"} - plain
    assert quantized >= {"attention q,k,v", "attention o", "experts"}
    assert {kind: text for kind, text in taken.items() if text not in ("plain", "-")} == {
        kind: stored[kind] for kind in quantized
    }


@pytest.mark.parametrize(
    ("section", "plain", "where", "said"),
    [
        (GPTQ | {"desc_act": True}, USUAL, "quantization_config.desc_act", "act-order"),
        (GPTQ | {"sym": False}, USUAL, "quantization_config.sym", "only symmetric"),
        (GPTQ | {"dynamic": {"x": {"sym": False}}}, USUAL, "quantization_config.dynamic['x'].sym", "is false"),
        (WITHOUT_KEY, USUAL, "quantization_config.zero_point", "is missing; vLLM needs it"),
        (GPTQ | {"dynamic": {r".*\.w2": {"bits": 8}}}, USUAL, f"{EXPERTS}.0.w2",
         f"is taken as GPTQ INT4 group 64 under the name {EXPERTS}, but stored as GPTQ INT8"),
        (GPTQ, ("gate", "lm_head", "q_proj"), f"{AT}.self_attn.qkv_proj", "only some of q_proj, k_proj, v_proj"),
        (GPTQ, ("gate", "lm_head", ".w1", ".w2", ".w3"), f"{EXPERTS}.0.w1",
         f"is taken as GPTQ INT4 group 64 under the name {EXPERTS}, but stored as plain"),
        (AWQ | {"modules_to_not_convert": ["self_attn"]}, USUAL, f"{AT}.self_attn.q_proj",
         f"is taken as plain under the name {AT}.self_attn.qkv_proj, but stored as AWQ INT4 group 64"),
        (AWQ, ("gate",), "lm_head", "lm_head: is taken as plain under the name lm_head, but stored as AWQ INT4"),
    ],
)  # fmt: skip
def test_what_vllm_stumbles_on_is_an_error(
    section: dict[str, Any], plain: tuple[str, ...], where: str, said: str
) -> None:
    errors = checked("mixtral", section, plain).errors
    first = errors[0]
    assert (first.where, first.engine) == (where, VLLM.name)
    assert said in first.problem


def test_autoround_is_not_claimed_to_be_known() -> None:
    found = checked("mixtral", {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": True})
    (warning,) = found.findings
    assert VLLM.name in warning.engine
    assert list(found.schemes) == [STORED]


# Runs in vLLM's interpreter: its own functions, asked about the same names.
ASK = """
import json, sys
import torch
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.utils.gptq_utils import (
    get_dynamic_override, is_layer_gptq_quantized, override_config)
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

def answer(section, listed, kind, name, together):
    experts = kind.endswith("experts") and not name.endswith("_proj")
    try:
        if section["quant_method"] == "awq":
            AutoAWQConfig.from_config(section)
            return not is_layer_skipped(name, listed, {} if experts else together, match_mode="substring")
        config = AutoGPTQConfig.from_config(section)
        if get_dynamic_override(config, layer_name=name) == False:
            return False
        if not experts and not is_layer_gptq_quantized(name, listed, together):
            return False
        override_config(config, prefix=name)
        return [config.weight_bits, config.group_size]
    except ValueError as failure:
        return "refused"

print("ANSWERS " + json.dumps([answer(*question) for question in json.load(sys.stdin)]))
"""


@needs_vllm
@pytest.mark.slow
def test_vllms_own_functions_answer_alike() -> None:
    sections = [
        AWQ,
        AWQ | {"modules_to_not_convert": ["gate", "self_attn.q_proj"]},
        AWQ | {"modules_to_not_convert": ["self_attn", "block_sparse_moe.experts"]},
        GPTQ,
        GPTQ | {"desc_act": True},
        GPTQ | {"desc_act": True, "group_size": -1},
        GPTQ | {"sym": False},
        GPTQ | {"dynamic": {"-:.*self_attn": {}, r".*\.1\.": {"bits": 8, "group_size": -1}, "m": {"group_size": 32}}},
        GPTQ | {"dynamic": {r".*\.q_proj": {"bits": 8}}},
        GPTQ | {"dynamic": {"x": {"desc_act": True}}},
        GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj", "self_attn.k_proj"], ["self_attn.o_proj"]]},
    ]  # fmt: skip
    questions: list[Any] = []
    ours: list[Any] = []
    for family in families.CONFIGS:
        config = families.config(family, num_hidden_layers=2)
        facts = architecture_for(config, "x")
        sizes = sizes_of(facts, config, "x")
        together = VLLM.of_family(facts).fused
        for section in sections:
            words, tensors = read_words(section, "x"), headers(family, section)
            listed = _listed(section, words, by_module(tensors))
            config = config | {"quantization_config": section}
            errors = check(config, tensors, facts, sizes).errors
            stops = any(error.where.startswith("quantization_config") for error in errors)
            for kind, name, _ in _asked(facts, sizes):
                if kind in ("lm_head", "embeddings", "router", "MTP other"):
                    continue
                questions.append([section, listed, kind, name, together])
                try:
                    quantized = not stops and _is_quantized(kind, name, words, listed, together)
                    scheme = True if words.layout == "awq" else list(words.of(name) or ())
                    ours.append("refused" if stops else scheme if quantized else False)
                except Refused:
                    ours.append("refused")
    done = subprocess.run(
        [os.environ[VLLM_PYTHON], "-c", ASK], input=json.dumps(questions), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    theirs = json.loads(line.removeprefix("ANSWERS "))
    ours = [
        bool(answer) if q[0]["quant_method"] == "awq" and answer != "refused" else answer
        for q, answer in zip(questions, ours, strict=True)
    ]
    assert len(questions) > 100
    assert {str(answer) for answer in ours} >= {"True", "False", "refused", "[4, 64]", "[8, -1]"}
    differ = [(q[0], q[3], a, b) for q, a, b in zip(questions, ours, theirs, strict=True) if a != b]
    assert differ == []
