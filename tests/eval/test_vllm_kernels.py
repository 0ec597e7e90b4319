"""A real vLLM serves source and output with its own kernels for the CPU, and the simulation predicts its figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import families
import pytest
import tiny
import torch
from conftest import Finished, needs_vllm, write_set
from probed import computed
from runs import change
from streamed import divergence, held_out_texts, log_probabilities

import quantizers
from quantizers.pipeline.pipeline import Options, run
from quantizers.planning.job import prepare


@pytest.mark.slow
@needs_vllm
@pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="vLLM's kernels were not run: they need AVX-512 with bfloat16"
)
def test_kl_as_served_is_predicted(tmp_path: Path, finished: Finished, say: Callable[[str], None]) -> None:
    """KL(source || output), both as served: the median within a tenth; and how far the server is from our evaluation.

    Of the trained MiniMax-M2 that travels with the program, whose router and groups of 32 vLLM's kernels compute and do
    not list (vllm_forward.py); and of a random Mixtral in groups of 128, which a vLLM serves as it is.
    """
    families.write(tmp_path / "model", "mixtral", intermediate_size=256)
    recipe = tiny.write_recipe(tmp_path, words=60, samples=6, group_size=128)
    change(recipe, lambda body: body.pop("verify"))
    run(prepare(str(recipe)), Options(tmp_path / "output", torch.device("cpu")))
    (more := tmp_path / "more").mkdir()  # texts: from the 12 of `finished` a mean is known to a tenth at best
    write_set(more / "held-out.yaml", {"held-out-code": 28, "held-out-spoken": 8, "held-out-chat": 8}, 256)
    jobs = [(more, finished.source, finished.folder), (tmp_path, tmp_path / "model", tmp_path / "output")]
    texts = [held_out_texts(home, 44, 256, source) for home, source, _ in jobs]
    folders = [folder for _, *both in jobs for folder in both]
    served = computed(folders, [own for own in texts for _ in range(2)], kernels=True)
    assert [one.problem for one in served] == [""] * len(served)
    say("KL(source || output) as stored, as served, as predicted, and their medians; KL(output as stored || as served)")
    for number, (family, (home, *both), own) in enumerate(zip(("MiniMax-M2", "Mixtral"), jobs, texts, strict=True)):
        found = quantizers.evaluate(*both, home / "held-out.yaml", as_served=["vllm-cpu"], device="cpu").candidates[0]
        predicted = found.figures["as_served"]["vllm-cpu"]["served"]["kl"]
        by_source, by_output = served[2 * number].logs, served[2 * number + 1].logs
        apart = divergence(log_probabilities(both[1], own), by_output)
        kl = torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in zip(by_source, by_output, strict=True)])
        figures = [
            f"{found.figures['kl'][name]:.5f} {float(there):.5f} {predicted[name]:.5f}"
            for name, there in (("mean", kl.mean()), ("median", kl.median()))
        ]
        say("  ".join([*figures, f"{apart:.5f}", family]))
        # The mean hangs on the few tokens that a router sends to another expert by the last bit of a sum.
        assert predicted["mean"] == pytest.approx(float(kl.mean()), rel=0.2)
        assert predicted["median"] == pytest.approx(float(kl.median()), rel=0.1)
        assert 1e-6 < apart < 0.02
