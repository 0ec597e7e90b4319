"""The functions of `import quantizers`: as the commands, with dataclasses back."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
import typer
from conftest import Finished

import quantizers
from quantizers.checkpoint.reader import open_folder
from quantizers.cli.adapter import declaration
from quantizers.cli.main import app
from quantizers.commands.options import Recipe, documented, option_of
from quantizers.formats.dequantization import read_weight
from quantizers.recipe.schema import CARDS

CPU = torch.device("cpu")
COMMANDS = [name for name in quantizers.__all__ if name not in ("InputError", "QuantizeError", "layer")]
OTHER_NAMES = {"evaluate": "eval", "serve_check": "serve-check", "stitch_experts": "stitch"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_argument_is_an_option_of_the_command(name: str) -> None:
    """With the same default, where it has one; the command line has the others itself."""
    function, program = getattr(quantizers, name), typer.main.get_command(app)
    command: Any = program.commands[OTHER_NAMES.get(name, name)]
    options = {option.name: option for option in command.params}
    kinds = get_type_hints(function, include_extras=True)
    for argument in inspect.signature(function).parameters.values():
        if option_of(kinds[argument.name]) is None:
            assert argument.name in {"command", "dist"}
        else:
            assert options[argument.name].required == (argument.default is inspect.Parameter.empty)
            assert options[argument.name].default in (argument.default, None)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_declaration_read_without_its_module_is_that_of_the_function(name: str) -> None:
    function = getattr(quantizers, name)
    read = declaration(f"{function.__module__}:{function.__name__}")
    kinds = get_type_hints(function, include_extras=True)
    del kinds["return"]
    assert get_type_hints(read, include_extras=True) == kinds
    parameters = [inspect.signature(each).parameters.values() for each in (function, read)]
    own, theirs = ([(one.name, one.kind, one.default) for one in each] for each in parameters)
    assert own == theirs


def test_the_help_of_as_served_names_all_cards() -> None:
    option = option_of(get_type_hints(quantizers.evaluate, include_extras=True)["as_served"])
    assert option is not None
    assert f": {', '.join(CARDS)}, or a GPU's name" in option.help


def test_an_argument_without_help_is_refused() -> None:
    def command(recipe: Recipe, tokens: int = 1) -> None:
        """Count."""

    with pytest.raises(ValueError, match="tokens: has no help; declare an Option, or a text"):
        documented(command)


def test_importing_is_quick_and_unknown_names_are_refused() -> None:
    code = "import quantizers, sys; assert not {'torch', 'transformers', 'numpy', 'pydantic'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert not hasattr(quantizers, "quantise")


def test_a_fresh_interpreter_completes_all_public_names() -> None:
    """Before the first use of any: what is offered is __all__, and importing modules adds nothing to it."""
    code = "import quantizers; print(*dir(quantizers))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == dir(quantizers) == sorted(quantizers.__all__)
    assert {"layer", "run"} <= set(dir(quantizers))


@pytest.mark.every  # examples/python_api.py does the same in CI
def test_a_finished_run_is_found_evaluated_and_verified(finished: Finished, tmp_path: Path) -> None:
    made = quantizers.run(finished.recipe, finished.folder)
    assert made.report["already_done"]
    assert made.passed
    assert Path(made.source) == finished.source
    again = quantizers.evaluate(made.source, [made.folder, made.folder], finished.held_out, work=tmp_path / "work")
    first, second = again.candidates
    assert (first.kl, first.perplexity) == (made.kl, made.perplexity) == (second.kl, second.perplexity)
    assert again.paired[0]["difference"] == 0
    assert quantizers.verify(made.folder, made.source).passed
    counted = quantizers.coverage(finished.recipe, work=tmp_path / "work")
    assert counted.passed == all(gate["passed"] for gate in made.report["gates"] if gate["name"] == "coverage")


def test_settings_as_a_mapping_are_those_of_set(finished: Finished) -> None:
    def action(settings: Any) -> Any:
        return quantizers.plan(finished.recipe, settings=settings).figures

    given: dict[str, Any] = {"experts.group_size": 64, "verify": None}
    assert action(given) == action(["experts.group_size=64", "verify=null"]) != action({})
    with pytest.raises(quantizers.InputError, match=r"experts\.group_sise"):
        action({"experts.group_sise": 16})


def test_a_dry_publication_lists_what_would_be_sent(finished: Finished) -> None:
    found = quantizers.publish(finished.folder, "me/tiny", dry_run=True)
    assert not found.uploaded
    assert {file["name"] for file in found.figures["files"]} >= {"config.json", "report.json"}


@pytest.fixture(scope="module")
def first_layer(finished: Finished) -> Any:
    return quantizers.layer(finished.recipe, 0)


def test_a_layer_by_itself_is_solved_as_in_a_run(finished: Finished, first_layer: Any) -> None:
    made, solved = open_folder(finished.folder), first_layer.solve()
    for expert in (0, 7, 15):
        for matrix, name in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
            module = f"model.layers.0.block_sparse_moe.experts.{expert}.{name}"
            own = solved.codes[matrix][expert] * solved.scales[matrix][expert].float().repeat_interleave(32, -1)
            assert torch.equal(own, read_weight(made, module, CPU))
    assert torch.equal(solved.norm, made.tensor("model.layers.0.post_attention_layernorm.weight"))


def test_the_error_of_an_expert_is_that_of_its_output(finished: Finished, first_layer: Any) -> None:
    layer, made = first_layer, open_folder(finished.folder)
    source, expert = open_folder(finished.source), 5
    names = [f"model.layers.0.block_sparse_moe.experts.{expert}.{name}" for name in ("w1", "w3", "w2")]
    norms = (file.tensor("model.layers.0.post_attention_layernorm.weight").float() for file in (source, made))
    before, after = norms
    lost, whole = 0.0, 0.0
    for x, chosen, weight in zip(layer.x, layer.chosen, layer.weight, strict=True):
        if expert not in chosen:
            continue
        outputs = []
        for file, inputs in ((source, x), (made, x / before * after)):
            w1, w3, w2 = (read_weight(file, name, CPU) for name in names)
            outputs.append(w2 @ (torch.nn.functional.silu(w1 @ inputs) * (w3 @ inputs)))
        r = float(weight[chosen == expert])
        lost += r**2 * float((outputs[1] - outputs[0]).square().sum())
        whole += r**2 * float(outputs[0].square().sum())
    found = layer.errors(layer.solve())
    assert found.shape == (16,)
    assert float(found[expert]) == pytest.approx((lost / whole) ** 0.5, rel=1e-3)


def test_a_hessian_is_the_sum_that_method_md_says(first_layer: Any) -> None:
    layer, expert, a = first_layer, 3, 0.9
    r = (layer.weight * (layer.chosen == expert)).sum(1, keepdim=True)
    share = a * min(1, int((r > 0).sum()) / layer.x.shape[1])
    h = layer.gate(layer.gate_up[expert] @ layer.x.T).T
    for of, rows in (("x", layer.x.double()), ("h", h.double())):
        routed, everyone = (rows * r).T @ (rows * r) / r.square().sum(), rows.T @ rows / len(rows)
        wanted = share * routed + (1 - share) * everyone
        found = layer.hessian(expert, of).double()
        assert (found - wanted).norm() < 1e-5 * wanted.norm()


def test_a_layer_is_folded_as_it_is_asked(first_layer: Any) -> None:
    assert not (first_layer.solve().smooth == 1).all()
    assert (first_layer.solve(awq={"fold": False}).smooth == 1).all()
    assert first_layer.solve(format="nvfp4", bits=None, group_size=None).global_scales
    elsewhere = replace(first_layer, norm=None)  # as where the norm has other readers
    assert (elsewhere.solve().smooth == 1).all()
    with pytest.raises(quantizers.InputError, match=r"layer 0: experts\.awq\.fold: would not be exact"):
        elsewhere.solve(awq={"fold": True})


def test_a_layer_takes_other_settings_and_refuses_what_is_wrong(finished: Finished, first_layer: Any) -> None:
    by_budget = {"experts.budget": "4MB", "experts.bits": None, "experts.group_size": None}
    four, eight = (first_layer.errors(first_layer.solve(bits=bits)).mean() for bits in (4, 8))
    assert eight < four / 8
    with pytest.raises(quantizers.InputError, match=r"experts\.bits: should be 2, 3"):
        first_layer.solve(bits=7)
    with pytest.raises(quantizers.InputError, match=r"experts\.bit: "):
        first_layer.solve(bit=4)
    narrow = replace(first_layer, down=first_layer.down[..., :96])
    with pytest.raises(quantizers.InputError, match=r"64 does not divide the experts' width 96; give .*group_size: 32"):
        narrow.solve(group_size=64)
    with pytest.raises(quantizers.InputError, match=r"^expert: should be a number from 0 to 15, not 16$"):
        first_layer.hessian(16)
    with pytest.raises(quantizers.InputError, match=r"^of: should be 'x' or 'h', not 'y'$"):
        first_layer.hessian(0, "y")
    with pytest.raises(quantizers.InputError, match=r"llmcompressor solves whole models only"):
        first_layer.solve(engine="llmcompressor")
    with pytest.raises(quantizers.InputError, match=r"layer 4: has no routed experts; give one from 0 to 3"):
        quantizers.layer(finished.recipe, 4)
    with pytest.raises(quantizers.InputError, match=r"a budget chooses bits for whole models"):
        quantizers.layer(finished.recipe, 0, settings=by_budget)
