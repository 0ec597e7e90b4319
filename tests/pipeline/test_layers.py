"""A run's layers: what is read how often, what is measured on the way, what stops a run, and how it resumes."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from commands import Command
from delayed_copies import Delayed, delay
from runs import Small, assert_same, change, cut_at, cut_in_layer, hashes
from safetensors.torch import save_file
from tiny import config, make, write_job

from quantizers.architectures.families import architecture_for
from quantizers.checkpoint.reader import open_folder
from quantizers.checkpoint.safetensors_header import read_header
from quantizers.model.activation_store import ActivationStore
from quantizers.output import journal
from quantizers.pipeline import layer as layering
from quantizers.pipeline import layer_entry, pipeline, quantize, quantizer
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning.device_memory import DeviceMemory, placement
from quantizers.planning.job import prepare
from quantizers.stitch.write import shard as writing
from quantizers.stitch.write.shard import LayerTensors
from quantizers.system.errors import QuantizeError
from quantizers.walk import walk

CPU = torch.device("cpu")
SHARD = "model-00002-of-00004.safetensors"
KEPT = "model.layers.1.self_attn.q_proj.weight"
PACKED = "model.layers.1.block_sparse_moe.experts.3.w2.weight_packed"


@pytest.mark.slow
@pytest.mark.parametrize(("experts", "source_limit"), [({}, 1.02), ({"bits_per_weight": 4.4}, 2.04)])
def test_each_byte_is_read_once(
    experts: dict[str, Any], source_limit: float, tmp_path: Path, read: Counter[str]
) -> None:
    """Of a model large enough for its headers and what identifies it not to count; twice where a budget measures."""
    recipe = write_job(tmp_path, words=12, samples=2, awq=False, scales="minmax", rounding="nearest", **experts)
    sizes = {"hidden_size": 384, "intermediate_size": 512, "num_local_experts": 16, "num_hidden_layers": 2}
    make(tmp_path / "model", shards=1, **sizes)
    for old in (tmp_path / "model").glob("model-*-of-00002.safetensors"):
        old.unlink()
    source = sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    read.clear()
    run(prepare(str(recipe)), Options(tmp_path / "out", CPU))
    output = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    print({"source": read["model"] / source, "output": read["output"] / output})
    assert source <= read["model"] <= source_limit * source
    assert 2 * output <= read["output"] <= 2.1 * output


def test_a_layer_is_journaled_once_what_goes_on_from_it_is_on_the_disk(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states that leave it, of source and output, as stored and on a card; however slow the disk. Where it is
    full, nothing is journaled.
    """
    events: list[str] = []
    flush, write = ActivationStore.flush, layer_entry.write_json

    def slowly(rows: ActivationStore) -> None:
        time.sleep(0.03)
        flush(rows)
        assert rows.path is not None
        events.append(rows.path.name)

    def noted(path: Path, *content: Any) -> None:
        events.append(path.name)
        write(path, *content)

    monkeypatch.setattr(ActivationStore, "flush", slowly)
    for module in (layer_entry, quantize):
        monkeypatch.setattr(module, "write_json", noted)
    run(small.job, Options(tmp_path / "output", CPU))
    layers = small.job.facts.num_layers
    for number in range(layers):
        entry = events.index(journal.layer_file(tmp_path, number).name)
        assert all(events.index(f"states-{stream}-{number + 1:05d}.bin") < entry for stream in range(4))
    assert len(events) == 5 * layers + 1, "and the entry of the shard outside the layers"

    def full(_: ActivationStore) -> None:
        raise QuantizeError("states", "no room")

    monkeypatch.setattr(ActivationStore, "flush", full)
    with pytest.raises(QuantizeError, match="states: no room"):
        run(small.job, Options(tmp_path / "other", CPU))
    assert journal.done_layers(journal.work_folder(tmp_path / "other"), layers) == []


def flip(file: Path, tensor: str) -> None:
    """Change one bit in the middle of a tensor."""
    info = read_header(file)[tensor]
    with file.open("rb+") as stream:
        stream.seek((info.start + info.end) // 2)
        (byte,) = stream.read(1)
        stream.seek(-1, 1)
        stream.write(bytes([byte ^ 1]))


@pytest.mark.slow
def test_a_byte_that_changed_in_memory_or_between_memory_and_file_is_found_at_once(
    small: Small, tmp_path: Path
) -> None:
    """In memory buffer and file agree: only the hash taken when the source was read can tell."""
    options, real = Options(tmp_path / "output", CPU), quantizer.layer_tensors
    work = journal.work_folder(options.output)

    def changed(plan: Any, layer: int, source: Any, solved: Any, **near: Any) -> LayerTensors:
        tensors = real(plan, layer, source, solved, **near)
        if layer == 1:
            tensors.host[KEPT].view(torch.uint8).view(-1)[7] ^= 1  # the source's own memory
        return tensors

    def flipped(tensor: str) -> Callable[..., None]:
        def save(tensors: dict[str, torch.Tensor], path: Path, **named: Any) -> None:
            save_file(tensors, path, **named)
            if path.name.startswith(SHARD):
                flip(path, tensor)

        return save

    in_file = (
        "has other bytes in the file than it was written with.*; check disk and memory, then give the same command"
    )
    for module, name, fault, said in (
        (quantizer, "layer_tensors", changed, f"{KEPT} has other bytes than the source's"),
        (writing, "save_file", flipped(KEPT), f"{KEPT} {in_file} again"),
        (writing, "save_file", flipped(PACKED), f"{PACKED} {in_file} again"),
    ):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(module, name, fault)
            with pytest.raises(QuantizeError, match=f"{SHARD}: {said}"):
                run(small.job, options)
        assert [entry["layer"] for entry in journal.done_layers(work, 3)] == [0]
        assert not list((work / "output").glob(f"{SHARD}*"))
    run(small.job, options)
    assert_same(options.output, small.whole)


@pytest.mark.slow
def test_a_shard_damaged_between_layer_and_end_is_found_and_made_again(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A byte of a kept tensor, one of a packed tensor, the header; each time the layer is made again."""
    output, real = tmp_path / "output", pipeline.write_config_files
    shard = output / ".quantize" / "output" / SHARD
    for damage, said in (
        (lambda: flip(shard, KEPT), f"{KEPT}: changed since the run wrote it; check the disk"),
        (lambda: flip(shard, PACKED), f"{PACKED}: changed since the run wrote it; check the disk"),
        (
            lambda: shard.write_bytes(b"\xff" * 8 + shard.read_bytes()[8:]),
            rf"{SHARD}: changed since the run wrote it \(.*\); check the disk",
        ),
    ):

        def damaged(*arguments: Any, damage: Callable[[], object] = damage) -> None:
            real(*arguments)
            damage()

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(pipeline, "write_config_files", damaged)
            with pytest.raises(QuantizeError, match=said):
                run(small.job, Options(output, CPU))
        assert not (output / "config.json").exists()
        shown = capsys.readouterr().err
    assert f"layer 1: {SHARD} has other bytes than were written; it is made again" in shown
    assert "layer 1: its shard was made again, with the bytes that it had" in shown
    run(small.job, Options(output, CPU))
    assert_same(output, small.whole)


@pytest.mark.slow
def test_a_run_that_goes_on_makes_damaged_shards_again(
    small: Small, cut: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The layers after it are not: they were made from the states that the undamaged shard gives."""
    options = Options(shutil.copytree(cut, tmp_path / "output"), CPU)
    shards = options.output / ".quantize" / "output"
    file, outer = shards / SHARD, shards / "model-00004-of-00004.safetensors"
    for damage, said in (
        (lambda: flip(file, PACKED), "has other bytes than were written"),
        (file.unlink, "cannot be read"),
        (lambda: file.write_bytes(file.read_bytes()[:-1]), "were written"),
    ):
        damage()
        flip(outer, "lm_head.weight")  # which is written again too
        capsys.readouterr()
        cut_at(quantizer, "solve_layer", small.job, options, 1)  # layer 1 again, and then layer 2
        assert said in capsys.readouterr().err
        assert len(journal.done_layers(journal.work_folder(options.output), 3)) == 2
    run(small.job, options)
    last = [line for line in capsys.readouterr().err.splitlines() if line.startswith("quantizing")][-1]
    assert all(part in last for part in ("hidden error 0.", "router agreement", "experts within"))
    assert_same(options.output, small.whole)


def test_a_damaged_shard_is_not_made_again_from_another_source(small: Small, cut: Path, tmp_path: Path) -> None:
    """Same size and time, one bit of it other: what was hashed when the layer was read tells."""
    moved, output = small.copied(tmp_path / "job"), shutil.copytree(cut, tmp_path / "output")
    (output / ".quantize" / "output" / SHARD).unlink()
    source = open_folder(moved.model).tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    stat = source.file.stat()
    flip(source.file, source.name)
    os.utime(source.file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(QuantizeError, match=r"layer 1: .* but the source's tensors have other bytes than the first"):
        run(moved.job, Options(output, CPU))


def test_where_calibration_states_are_kept_decides_no_byte(small: Small, tmp_path: Path) -> None:
    options = Options(tmp_path / "output", CPU, states="files")
    cut_in_layer(1, small.job, options)
    files = {file.name for file in journal.work_folder(options.output).glob("*.bin")}
    assert files == {"states.bin", "x.bin", "chosen.bin", "weight.bin", "usable.bin"}
    run(small.job, options)
    assert hashes(options.output) == hashes(small.whole)


def test_what_is_copied_beside_the_work_has_the_same_bytes(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An accelerator's way, on the CPU: the source's next layer, all hidden states, and what was packed."""
    stream = Delayed()
    hosts, make_rows = delay(monkeypatch, stream), ActivationStore.__init__

    def make_there(self: ActivationStore, *arguments: Any, **named: Any) -> None:
        make_rows(self, *arguments, **named)
        hosts.add(self.flat)

    monkeypatch.setattr(ActivationStore, "__init__", make_there)
    for module in (walk, quantize, quantizer, writing):
        monkeypatch.setattr(module, "is_accelerator", lambda device: True)
    monkeypatch.setattr(layering, "walk", lambda *given, **named: walk.walk(*given, **named | {"early": True}))
    run(small.job, Options(tmp_path / "output", CPU))
    assert_same(tmp_path / "output", small.whole)
    assert stream.under_way == 0
    assert stream.copied > 50
    assert stream.most > 1


def test_little_memory_sends_states_to_files() -> None:
    """What a device has no room for lies in host memory as long as it takes at most half of what is free."""
    facts = architecture_for(config(hidden_size=16, num_experts_per_tok=2), "x")
    nothing, inputs = (DeviceMemory(1, 1, 1, held, False, False, False, 0, 0, 0, 0, 0, 1) for held in (False, True))
    states: Any  # one of the three
    rows = 100
    of_states, of_inputs = rows * 16 * 4, rows * (16 * 4 + 8 * 2 + 1)
    for memory, bytes_elsewhere, where in (
        (nothing, of_states + of_inputs, ("memory", "memory")),
        (inputs, of_states, ("device", "memory")),
    ):
        in_files = tuple(place.replace("memory", "files") for place in where)
        for free, states, found in (
            (2 * bytes_elsewhere, "auto", where),
            (2 * bytes_elsewhere - 2, "auto", in_files),
            (0, "memory", where),
            (10**12, "files", in_files),
        ):
            *got, on_disk = placement(facts, memory, rows, 4, states=states, machines=1, free=free)
            assert tuple(got) == found
            assert on_disk == (bytes_elsewhere if "files" in found else 0)


def test_a_run_may_go_on_without_a_held_out_set_but_not_begin_with_one_half_way(
    small: Small, cut: Path, tmp_path: Path
) -> None:
    """Where logits overflow, the remedy is to leave it out."""
    with_set = small.copied(tmp_path / "job").recipe
    without = with_set.with_name("without.yaml")
    body = yaml.safe_load(with_set.read_text())
    without.write_text(yaml.safe_dump({key: value for key, value in body.items() if key != "verify"}))
    first, second = (Options(tmp_path / name, CPU) for name in ("first", "second"))
    shutil.copytree(cut, first.output)
    report = run(prepare(str(without)), first)
    assert "kl" not in report
    shards = {name: digest for name, digest in hashes(small.whole).items() if name.endswith(".safetensors")}
    assert shards.items() <= hashes(first.output).items()
    cut_in_layer(1, prepare(str(without)), second)
    with pytest.raises(QuantizeError, match=r"measured on no held-out set; leave verify\.perplexity out as before"):
        run(prepare(str(with_set)), second)


def make_bad(numbers: set[int], patched: pytest.MonkeyPatch) -> None:
    """Let the experts of some layers come out with their first codes turned round."""
    real, model_layers = quantizer.layer_tensors, numbers

    def bad(plan: Any, layer: int, source: Any, solved: Any, **near: Any) -> Any:
        if layer in model_layers:
            for codes in solved.codes.values():
                codes[:, :, ::2] = -codes[:, :, ::2].clamp(min=-7)
        return real(plan, layer, source, solved, **near)

    patched.setattr(quantizer, "layer_tensors", bad)


@pytest.mark.parametrize(
    ("limit", "layer", "said"),
    [  # a router sees what the layer before it did
        ({"max_hidden_error": 0.5}, 0, r"hidden error \d\.\d+ > 0\.5 \(verify\.stop\.max_hidden_error\)"),
        pytest.param(
            {"min_router_agreement": 0.9},
            1,
            r"router agreement 0\.\d+ < 0\.9 \(verify\.stop\.min_router_agreement\)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_bad_layers_stop_the_run_at_the_first(
    limit: dict[str, float],
    layer: int,
    said: str,
    small: Small,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
) -> None:
    """Exit 3, the folder unfinished, again and again; --ignore-stop goes on to the end."""
    assert max(small.report["hidden_error"]) < 0.5
    assert min(small.report["router"]["agreement"]) > 0.9
    recipe, output = small.copied(tmp_path / "job").recipe, tmp_path / "output"
    change(recipe, lambda body: body["verify"].update(stop=limit))
    make_bad({0, 2}, monkeypatch)
    for _ in range(2):
        assert command("run", recipe, "--output", output, "--device", "cpu") == 3
        last = command.err.splitlines()[-1]
        assert re.search(rf"stopped after layer {layer}: {said}; .* --ignore-stop", last), last
        assert journal.unfinished(output)
        assert not (output / "config.json").exists()
        assert len(journal.done_layers(journal.work_folder(output), 3)) == layer + 1
    command("run", recipe, "--output", output, "--device", "cpu", "--ignore-stop")
    report = json.loads((output / "report.json").read_text())
    assert report["hidden_error"][0] > 0.5
    wanted = dict.fromkeys(("max_hidden_error", "min_router_agreement"))
    assert report["settings"]["recipe"]["verify"]["stop"] == wanted | limit
    assert (output / "config.json").exists()


def test_a_stop_needs_something_to_be_measured_on(small: Small, tmp_path: Path) -> None:
    recipe = small.copied(tmp_path / "job").recipe
    change(recipe, lambda body: body.update(verify={"stop": {"max_hidden_error": 0.1}}))
    with pytest.raises(QuantizeError, match=r"recipe\.yaml:\d+: verify\.stop: .*give verify\.perplexity\.data"):
        prepare(str(recipe))
