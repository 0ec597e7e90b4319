"""A real vLLM serves source and output with its own kernels for the CPU, and the simulation predicts its figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import torch
from conftest import needs_vllm
from probed import computed
from runs import change
from streamed import divergence, held_out_texts, log_probabilities

import quantizers
from quantizers.pipeline.pipeline import Options, run
from quantizers.planning.job import prepare

# Of each family a group size, and widths of whole FP8 blocks, since vLLM takes no experts in parts of one. Mixtral runs
# in a vLLM as it is; MiniMax-M2 where its lists of what its kernels take are longer, see vllm_forward.py.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "mixtral": (128, {"intermediate_size": 256}),
    "minimax_m2": (32, {"intermediate_size": 256}),
}


@pytest.mark.slow
@needs_vllm
@pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="vLLM's kernels were not run: they need AVX-512 with bfloat16"
)
def test_kl_as_served_is_predicted(tmp_path: Path, say: Callable[[str], None]) -> None:
    """KL(source || output), both as served, within a tenth; and how far the served output is from our evaluation."""
    folders, texts, simulated = list[Path](), [], []
    for family, (group, changes) in CASES.items():
        home = tmp_path / family
        families.write(home / "model", family, **changes)
        recipe = tiny.write_recipe(home, words=60, samples=6, group_size=group)
        change(recipe, lambda body: body.pop("verify"))
        run(prepare(str(recipe)), Options(home / "output", torch.device("cpu")))
        folders += [home / "model", home / "output"]
        texts += [held_out_texts(recipe, 6, 256)] * 2
        found = quantizers.evaluate(*folders[-2:], home / "held-out.yaml", as_served=["vllm-cpu"], device="cpu")
        simulated.append(found.candidates[0].figures["as_served"]["vllm-cpu"]["served"]["kl"]["mean"])
    stored = [log_probabilities(folder, own) for folder, own in zip(folders, texts, strict=True)]
    served = computed(folders, texts, kernels=True)
    assert [one.problem for one in served] == [""] * len(served)
    say("KL(source || output) as stored, as served, as predicted; KL(output as stored || as served); top-1 as served")
    for number, (family, predicted) in enumerate(zip(CASES, simulated, strict=True)):
        (source, output), (by_source, by_output) = (
            (two[2 * number], two[2 * number + 1]) for two in (stored, [one.logs for one in served])
        )
        kl, apart = divergence(by_source, by_output), divergence(output, by_output)
        same = torch.cat([p.argmax(-1) == q.argmax(-1) for p, q in zip(by_source, by_output, strict=True)])
        stated = divergence(source, output)
        say(f"{stated:.5f} {kl:.5f} {predicted:.5f}  {apart:.5f}  {same.float().mean():.2%}  {family}")
        assert predicted == pytest.approx(kl, rel=0.1)
        assert 1e-6 < apart < 0.02
