"""The llmcompressor engine, layer by layer on files, against the library's own `oneshot` on the whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from whole_models import run_whole, source_weights

from quantizers.calibration.load_set import load_set
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning.job import prepare

GRID = 6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the library's own use of torch and transformers
def test_oneshot_on_the_whole_model_has_the_same_kl(
    tmp_path: Path,
    tiny_model: Path,
    write_recipe: Callable[..., Path],
    whole_model: Callable[[dict[str, Any], dict[str, Any]], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from llmcompressor import oneshot
    from llmcompressor.core import create_session
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier
    from llmcompressor.pipelines.cache import IntermediatesCache
    from torch.utils.data import DataLoader

    recipe = write_recipe(tmp_path, engine="llmcompressor", awq={"grid": GRID})
    report = run(prepare(str(recipe)), Options(tmp_path / "output", torch.device("cpu")))

    # pin_memory raises on a machine without an accelerator (llm-compressor 0.14).
    monkeypatch.setattr(IntermediatesCache, "pin_memory", lambda *_arguments: None)
    calibration = load_set(tmp_path / "calibration.yaml", str(tiny_model))
    held_out = load_set(tmp_path / "held-out.yaml", str(tiny_model))
    texts = [torch.from_numpy(sample.tokens).long() for sample in held_out.samples]
    config, weights = source_weights(tiny_model)
    source = run_whole(whole_model(config, weights), texts)
    model = whole_model(config, weights)
    model.save_pretrained(tmp_path / "plain")  # oneshot looks at config.json, and refuses one that says FP8
    model.config.name_or_path, model.config.dtype = str(tmp_path / "plain"), torch.float32
    scheme = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    modifiers = [
        AWQModifier(
            mappings=[
                AWQMapping(
                    "re:.*post_attention_layernorm$",
                    ["re:.*mlp.gate$", "re:.*experts.*gate_proj$", "re:.*experts.*up_proj$"],
                ),
                AWQMapping("re:.*up_proj$", ["re:.*down_proj$"]),
            ],
            n_grid=GRID,
        ),
        QuantizationModifier(config_groups={"group_0": {"targets": ["re:.*experts.*_proj$"], "weights": scheme}}),
    ]
    rows: Any = [{"input_ids": torch.from_numpy(sample.tokens).long()} for sample in calibration.samples]
    with create_session():
        oneshot(model=model, processor=object(), dataset=DataLoader(rows, batch_size=1), recipe=modifiers)
    candidate = run_whole(model, texts)
    kl = torch.cat([(p.exp() * (p - q)).sum(-1)[:-1] for p, q in zip(source.logs, candidate.logs, strict=True)]).mean()
    print(f"KL: oneshot {float(kl):.5f}, the engine {report['kl']['mean']:.5f}")
    assert report["kl"]["mean"] == pytest.approx(float(kl), rel=0.10)
