"""`quantize eval`: checkpoints made by others, several at once, resume, intervals, and its tables."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Finished
from foreign import FORMATS, bf16_copy, oneshots
from runs import Small
from safetensors.torch import load_file, save_file
from sets import write_set
from whole_models import compared, run_whole, source_weights

from quantizers.architectures.families import architecture_for
from quantizers.calibration.load_set import load_set
from quantizers.checkpoint.reader import Checkpoint, open_folder
from quantizers.commands.evaluate import measure
from quantizers.eval.fidelity.figures import Cut, HeldOutSet, LayerFigures
from quantizers.eval.fidelity.metrics import Measured, Text, figures
from quantizers.formats.dequantization import read_weight
from quantizers.formats.tensor_names import published_names
from quantizers.model import streamed_model
from quantizers.system.errors import CheckpointError, Interrupted, OutputError

CPU = torch.device("cpu")
WholeModel = Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]
NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}

ABOUT = HeldOutSet(name="held-out", digest="0" * 64, past_the_model=Cut(texts=0, tokens=0))


@pytest.fixture(scope="module")
def copy(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bf16_copy(tiny_model, tmp_path_factory.mktemp("copy") / "bf16")


@pytest.fixture(scope="module")
def stock(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each format, made by the library."""
    folder = tmp_path_factory.mktemp("stock")
    made = oneshots(copy, {folder / str(n): {"weights": weights} for n, weights in enumerate(FORMATS.values())})
    return dict(zip(FORMATS, made, strict=True))


def library_weights(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """config.json, and every parameter as compressed-tensors decompresses it, under published names."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = json.loads((folder / "config.json").read_text())
    section = QuantizationConfig.model_validate(config["quantization_config"])
    (scheme,) = section.config_groups.values()
    stored: dict[str, torch.Tensor] = {}
    for shard in folder.glob("*.safetensors"):
        stored |= load_file(shard)
    weights, used = {}, set()
    for module in {name.removesuffix(".weight_scale") for name in stored if name.endswith(".weight_scale")}:
        parts = {n.removeprefix(f"{module}."): t for n, t in stored.items() if n.startswith(f"{module}.")}
        used |= {f"{module}.{part}" for part in parts}
        codec = BaseCompressor.get_value_from_registry(scheme.format)
        weights[f"{module}.weight"] = codec.decompress(parts | {"weight_scale": parts["weight_scale"].float()}, scheme)[
            "weight"
        ].float()
    weights |= {name: tensor for name, tensor in stored.items() if name not in used}
    for ours, theirs in NAMES.items():
        weights = {name.replace(f".{theirs}.", f".{ours}."): tensor for name, tensor in weights.items()}
    return config, weights


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_a_stock_checkpoint_is_read_as_the_library_reads_it(name: str, stock: dict[str, Path]) -> None:
    opened, (_, weights) = open_folder(stock[name]), library_weights(stock[name])
    named = published_names(opened, architecture_for(opened.config, "x"))
    for module in ("block_sparse_moe.experts.3.w1", "block_sparse_moe.experts.9.w2", "self_attn.q_proj"):
        full = f"model.layers.2.{module}"
        assert torch.equal(read_weight(named, full, CPU), weights[f"{full}.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pack-quantized, group", "float-quantized, block"])
def test_a_stock_checkpoint_measures_as_the_whole_model_does(
    name: str, stock: dict[str, Path], finished: Finished, whole_model: WholeModel, tmp_path: Path
) -> None:
    """Figures equal those of transformers with both models in memory, weights decompressed by the library."""
    config, weights = library_weights(stock[name])
    opened, data = [open_folder(folder) for folder in (finished.source, stock[name])], finished.held_out
    found = measure(opened[0], opened[1:], data, CPU, tmp_path / "work")[0].as_dict()
    config["rope_theta"] = 10000
    texts = [torch.from_numpy(sample.tokens).long() for sample in load_set(data, str(finished.source)).samples]
    models = (source_weights(finished.source), (config, weights))
    wanted = compared(*(run_whole(whole_model(*model), texts) for model in models), texts)
    assert found["kl"]["mean"] == pytest.approx(float(wanted.kl.mean()), abs=1e-4)
    assert found["kl"]["p99"] == pytest.approx(float(wanted.kl.quantile(0.99)), abs=1e-4)
    assert found["perplexity"]["candidate"] == pytest.approx(float(wanted.nll[1].mean().exp()), rel=1e-4)
    assert found["top1"] == pytest.approx(float(wanted.same_top1.double().mean()), abs=1e-4)
    assert all(0 < layer["experts"] < 0.3 for layer in found["weight_error"])
    assert wanted.kl.mean() > 1e-4


@pytest.fixture
def materialised(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, int]]:
    """How often each model's layers are materialised."""
    counts: Counter[tuple[str, int]] = Counter()
    original = streamed_model.layer_weights

    def counted(checkpoint: Checkpoint, facts: Any, layer: int, *rest: Any, **named: Any) -> Any:
        counts[checkpoint.name, layer] += 1
        return original(checkpoint, facts, layer, *rest, **named)

    monkeypatch.setattr(streamed_model, "layer_weights", counted)
    return counts


@pytest.mark.slow
def test_an_evaluation_resumes_where_it_was_interrupted(
    small: Small, materialised: Counter[tuple[str, int]], tmp_path: Path
) -> None:
    """Interrupted whenever something new is kept: the same figures of short and long texts, and no layer done twice."""
    source, candidate, data = open_folder(small.model), open_folder(small.whole), write_set(tmp_path)
    whole = measure(source, [candidate], data, CPU, tmp_path / "whole")
    assert set(materialised.values()) == {1}, "the source is computed once"
    materialised.clear()
    seen, cuts, again = 0, 0, None

    def cut() -> None:
        nonlocal seen, cuts
        kept = len([*(tmp_path / "work").glob("layer-*.json"), *(tmp_path / "work").glob("scores-*.npy")])
        if kept > seen:
            seen, cuts = kept, cuts + 1
            raise Interrupted("", "cut", "", 2)

    while again is None:
        with contextlib.suppress(Interrupted):
            again = measure(source, [candidate], data, CPU, tmp_path / "work", cut)
    assert cuts == 3 + 5
    assert whole[0].long
    assert again == whole
    assert set(materialised.values()) == {1}
    assert not (tmp_path / "work").exists()


def test_another_evaluations_work_folder_is_refused(finished: Finished, tmp_path: Path) -> None:
    source, candidate = open_folder(finished.source), open_folder(finished.folder)

    def cut() -> None:
        raise Interrupted("", "cut", "", 2)

    for data, expected in ((finished.held_out, Interrupted), (finished.calibration, OutputError)):
        with pytest.raises(expected):
            measure(source, [candidate], data, CPU, tmp_path / "work", cut)


def test_scores_with_other_columns_are_made_again(small: Small, tmp_path: Path) -> None:
    """Scores of a version that had three columns lie in the work folder of an evaluation that goes on."""
    source, candidate, work = open_folder(small.model), open_folder(small.whole), tmp_path / "work"
    data, scored = small.folder / "held-out.yaml", list[Path]()

    def cut() -> None:
        scored.extend(work.glob("scores-*.npy"))
        if scored:
            raise Interrupted("", "cut", "", 2)

    with pytest.raises(Interrupted):
        measure(source, [candidate], data, CPU, work, cut)
    (file,) = scored
    np.save(file, np.load(file)[:, :3] + 1)
    (measured,) = measure(source, [candidate], data, CPU, work)
    found = measured.as_dict()
    for name in ("perplexity", "kl", "reverse_kl", "top1"):
        assert found[name] == small.report[name]
    assert [text["place"] for text in found["per_text"]] == ["held-out.jsonl:1", "held-out.jsonl:2", "held-out.jsonl:3"]


def test_the_worst_text_and_the_tails_of_a_known_case() -> None:
    """One position of a thousand carries all of KL; the worst text is not the one in which that is."""
    lengths, kl = [900, 60, 40], np.zeros(1000)
    kl[500], kl[900:960] = 9.0, 0.5
    measured = Measured(kl, kl, kl, kl[::-1], kl < 1, [LayerFigures(agreement=1.0, hidden_error=0.0)])
    texts = [Text(torch.zeros(n + 1, dtype=torch.int64), "a", 1, place=f"a.jsonl:{n}") for n in lengths]
    found = figures(measured, texts, ABOUT).as_dict()
    row = {"place": "a.jsonl:60", "category": "a", "tokens": 60, "kl": 0.5, "max": 0.5, "position": 1}
    assert found["worst"] == found["per_text"][1] == row
    assert (found["per_text"][0]["max"], found["per_text"][0]["position"]) == (9.0, 501)
    assert found["kl"] == found["reverse_kl"]
    assert (found["kl"]["median"], found["kl"]["p99"], found["kl"]["max"]) == (0.0, 0.5, 9.0)
    assert found["kl"]["p999"] == pytest.approx(0.5 + 0.001 * 8.5)  # the last but one value, and of the step after it
    assert [band["reverse_kl"]["mean"] for band in found["positions"]] == pytest.approx([*_means(kl[::-1], lengths)])


def _means(values: np.ndarray, lengths: list[int]) -> Iterator[float]:
    """The mean of the first 255 positions of all texts, and of the others."""
    parts = np.split(values, np.cumsum(lengths)[:-1])
    yield np.concatenate([part[:255] for part in parts]).mean()
    yield np.concatenate([part[255:] for part in parts]).mean()


def test_intervals_are_seeded_and_hold_the_mean() -> None:
    rng = np.random.default_rng(3)
    lengths = [50, 80, 20, 60, 90, 40]
    kl = rng.exponential(0.1, sum(lengths))
    loss = rng.normal(3, 1, sum(lengths))
    layers = [LayerFigures(agreement=1.0, hidden_error=0.0)]
    measured = Measured(loss, loss + 0.1, kl, 2 * kl, kl < 0.2, layers)
    texts = [Text(torch.zeros(n + 1, dtype=torch.int64), f"a/{i % 2}", 4 * n) for i, n in enumerate(lengths)]
    one, two = (figures(measured, texts, ABOUT).as_dict() for _ in range(2))
    assert one == two
    low, high = one["interval"]["kl"]
    assert low < one["kl"]["mean"] < high
    # Against the textbook: the standard error of a mean over samples of unequal length.
    means = np.array([part.mean() for part in np.split(kl, np.cumsum(lengths)[:-1])])
    weights = np.array(lengths) / sum(lengths)
    error = np.sqrt((weights**2 * (means - one["kl"]["mean"]) ** 2).sum())
    assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.25)
    assert one["interval"]["increase"] == pytest.approx([np.expm1(0.1)] * 2)
    assert set(one["families"]) == {"a"}
    assert one["families"]["a"]["kl"] == one["kl"]
    alone = Measured(loss[:50], loss[:50], kl[:50], kl[:50], kl[:50] < 1, layers)
    assert figures(alone, texts[:1], ABOUT).interval is None


def test_other_spellings_are_read_and_doubles_are_refused(finished: Finished, copy: Path, tmp_path: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    renamed = {}
    for name, tensor in tensors.items():
        other = name.replace(".block_sparse_moe.", ".mlp.")
        for ours, theirs in NAMES.items():
            other = other.replace(f".{ours}.", f".{theirs}.")
        renamed[other] = tensor
    for file in copy.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(renamed, tmp_path / "model.safetensors")
    opened = open_folder(tmp_path)
    facts = architecture_for(opened.config, "x")
    assert set(published_names(opened, facts).tensors) == set(tensors)
    found = measure(open_folder(copy), [opened], finished.held_out, CPU, tmp_path / "work")[0]
    assert found.kl.max == 0.0
    double = "model.layers.0.block_sparse_moe.gate.weight"
    save_file(renamed | {double: tensors[double].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="are the same tensor; keep one"):
        published_names(open_folder(tmp_path), facts)


def test_another_model_is_refused(finished: Finished, tmp_path: Path) -> None:
    import tiny

    other = open_folder(tiny.make(tmp_path / "other"))
    with pytest.raises(CheckpointError, match="is another model than"):
        measure(open_folder(finished.source), [other], finished.held_out, CPU, tmp_path / "work")
