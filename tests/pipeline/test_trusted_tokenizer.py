"""A run of a model whose tokenizer has code of its own, and whose type transformers does not know."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import families
import numpy as np
import pytest
import torch
import transformers
from own_tokenizer import FILES, FIRST, write_own_tokenizer

from quantizers.calibration.load_set import load_set
from quantizers.checkpoint.reader import open_folder
from quantizers.commands.evaluate import measure
from quantizers.eval.report.schema import checked
from quantizers.hub.publish import local_files
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning.job import prepare
from quantizers.system.errors import CalibrationError

CPU = torch.device("cpu")


@pytest.mark.slow
def test_it_is_read_where_the_recipe_allows_it_and_travels_with_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    recipe = families.write_job(tmp_path, "kimi_k2")
    source = write_own_tokenizer(tmp_path / "model", tmp_path / "ran")
    with pytest.raises(CalibrationError, match=r"source\.trust_remote_code: tokenizer"):
        run(prepare(str(recipe)), Options(tmp_path / "refused", CPU))
    recipe.write_text(recipe.read_text().replace("source:\n", "source:\n  trust_remote_code: tokenizer\n"))
    output = tmp_path / "output"
    report = run(prepare(str(recipe)), Options(output, CPU))
    assert report["audit"]["differences"] == []
    assert report["serving"]["parsers"]["trust-remote-code"] is True
    assert report["serving"]["transformers"] is False
    data = load_set(tmp_path / "calibration.yaml", source, trust_remote_code=True)
    ids = np.concatenate([sample.tokens for sample in data.samples])
    assert ((ids < 2) | (ids >= FIRST)).all()  # its own: the plain tokenizer of these models has the ids between
    assert data.digest == report["calibration"]["digest"]
    uploaded = {file.name: file.sha256 for file in local_files(output, checked(report))}
    for name in (*FILES, "configuration_own.py"):
        assert uploaded[name] == hashlib.sha256((source / name).read_bytes()).hexdigest(), name
    held, opened = tmp_path / "held-out.yaml", (open_folder(source), open_folder(output))
    with pytest.raises(CalibrationError, match="--trust-remote-code"):
        measure(opened[0], [opened[1]], held, CPU, tmp_path / "work")
    (figures,) = measure(opened[0], [opened[1]], held, CPU, tmp_path / "work", trust_remote_code=True)
    assert figures.kl.mean == pytest.approx(report["kl"]["mean"], rel=1e-6)
    assert not (tmp_path / "ran").exists()  # which the model's own code would have left
