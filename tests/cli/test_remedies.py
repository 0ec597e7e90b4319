"""Every remedy is followed to the letter, and gets past its error without meeting another."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
from commands import Command
from remedies import followed
from tiny import write_job

from quantizers.system.errors import QuantizeError

WORK = "the work begins"  # up to here a second try must get
COMPARE = "compare R --calibration embedded --calibration held-out --draws 1"

# A command that is refused; where its remedy names no option, key or command itself, `=>` and what it asks for.
LINES = (
    """
plan R --set experts
plan R --set .bits=4
plan R --set keep= => plan R --set keep=everything-else
plan R --set experts.budget=1GB --set experts.bits=4
plan R --set experts.budget=1GB --set experts.bits=4 --set experts.group_size=64
plan R --set experts.budget=1MB --set experts.bits_per_weight=5
plan R --set experts.budget=12
plan R --set experts.budget=lots
plan R --set experts.budget=1kB
plan R --set experts.bits_per_weight=0.1
plan R --set experts.tensor_parallel=2
plan R --set experts.tensor_parallel=2 --set experts.bits=8 --set experts.group_size=64
plan R --set experts.budget=1MB --set experts.tensor_parallel=64
plan R --set experts.activations=4 --set experts.bits=8 => plan R --set experts.activations=4 --set experts.format=nvfp4
plan R --set experts.activations=4 --set experts.bits=8 => plan R --set experts.bits=8
plan R --set experts.format=nvfp4 --set experts.bits=4
plan R --set experts.format=nvfp4 --set experts.scales_sign=positive
plan R --set experts.format=nvfp4 --set experts.engine=llmcompressor
plan R --set experts.format=nvfp4 --set experts.budget=1MB
plan R --set experts.budget=1MB --set experts.engine=llmcompressor
plan R --set experts.awq=false --set experts.awq.grid=9
plan R --set experts.awq.grid=9 --set experts.awq=false --set experts.awq.duo_scaling=false
plan R --set experts.group_size=128
plan R --set verify.as_served=[ampere] --set verify.perplexity=null
plan R --set verify.stop.max_hidden_error=0.1 --set verify.perplexity=null
plan R --set verify.stop=null
plan R --set unknown=1
plan R --set source.revision=0123
plan R --set source.revision=1e5
plan R --set source.revision=true
plan R --set verify.as_served=ampere
plan R --set calibration.without=x
plan R --set 'experts.bits="4"' => plan R --set experts.bits=4
plan R --set 'source.trust_remote_code="true"' => plan R --set source.trust_remote_code=true
plan R --set attention=fp8
plan R --set keep=a --set keep=everything-else => plan R --set keep=everything-else
plan R --calibration embedded --set calibration=held-out => plan R --set calibration=held-out
plan R --calibration experts.bits=8 => plan R --calibration embedded
plan R --device-memory 1MB
plan R --device-memory 12
plan R --output elsewhere
plan R --output elsewhere --set experts.budget=1MB
plan R --context 100
plan R --vram 2x96
plan R --vram 2xA100X => plan R --vram 2x96GiB
plan R --vram 2x96GiB --tp 2
plan R --vram 4x96GiB --tp 3
plan R --vram 2x96GiB --nodes 2 => plan R --nodes 2
plan R --vram 2x96GiB --nodes 2 => plan R --vram 2x96GiB
plan R --source nowhere => plan R --source model
plan MiniMaxAI/MiniMax-M2.1 => plan minimax-m2.1-bf16-int4
plan model
plan recipe => plan recipe.yaml
new model new.yaml --context 100
new model other.yaml --vram 2x96
compare R --calibration embedded => COMPARE
compare R --calibration embedded --calibration held-out --calibration experts.bits=3
compare R --calibration embedded --calibration embedded --calibration held-out => COMPARE
COMPARE --draws 2 --at-most 1 => COMPARE --draws 2 --at-most 3
COMPARE --layers first:9 => COMPARE --layers first:2
COMPARE --set verify=null
COMPARE --set experts.budget=1MB
COMPARE --set experts.bits_per_weight=5 --set experts.tensor_parallel=1
COMPARE --set 'experts={budget: 1MB}'
COMPARE --set experts.budget=1MB --set verify=null
compare budget.yaml --calibration embedded --calibration held-out
compare budget.yaml --calibration embedded --calibration held-out --set experts.budget=2MB
calibration why embedded --recipe budget.yaml
coverage R --source model --model model => coverage R --source model
coverage R --calibration embedded --data held-out
coverage R --compare embedded held-out --data held-out
coverage R --compare embedded held-out --saliency
coverage R --output elsewhere => coverage R --saliency --output elsewhere
coverage R --output elsewhere => coverage R
coverage R --min-routed-tokens 5 --max-uncovered 0.5
coverage --model model --data embedded --set experts.bits=3 => coverage --model model --data embedded
coverage --model model => coverage --model model --data embedded
imatrix --model model => imatrix --model model --data embedded
eval model model --data held-out --as-served amper
eval model model --data held-out --stream
eval model model/config.json --data held-out => eval model model --data held-out
verify model => verify model --source model
plan R --hub
plan R --vram 2x96GiB --tensors => plan R --tensors
plan R --vram 2x96GiB --device-memory 1GiB => plan R --device-memory 1GiB
doctor --source model => doctor R --source model
doctor --set experts.bits=4 => doctor R --set experts.bits=4
doctor R --source model --stream
eval model model --data held-out --picture a.png --no-picture => eval model model --data held-out --no-picture
verify model --source model --revision main
COMPARE --set calibration.tokens=9 --tokens 8 => COMPARE --tokens 8
COMPARE --set calibration=embedded
COMPARE --set verify.perplexity.data=held-out --data held-out => COMPARE --data held-out
coverage R --compare embedded held-out --max-uncovered 0.5
calibration diff embedded held-out --yaml --recipe R => calibration diff embedded held-out --yaml
calibration diff held-out held-out --tokenizer model --recipe R => calibration diff held-out held-out --tokenizer model
calibration freeze held-out frozen --tokenizer model --recipe R => calibration freeze held-out frozen --tokenizer model
run R --window 1GB => run R
run R --stream
run R --stream --source model
run R --private => run R
calibration new texts.jsonl => calibration new mine.yaml --data calibration.jsonl
calibration check embedded --category code => calibration check embedded --category code --show 1
""".replace("COMPARE", COMPARE)
    .strip()
    .splitlines()
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    recipe = write_job(folder, layers=2)
    text = recipe.read_text()
    (folder / "budget.yaml").write_text(text.replace("experts:\n", "experts:\n  budget: 1MB\n  tensor_parallel: 2\n"))
    return folder


@pytest.mark.parametrize("line", LINES)
def test_a_remedy_is_followed(line: str, job: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    def begins(*_: object) -> None:
        raise QuantizeError("", WORK)

    monkeypatch.chdir(job)
    for module in ("commands.evaluate", "commands.verify", "sets.compare", "sets.coverage", "llama_cpp.imatrix"):
        monkeypatch.setattr(f"quantizers.{module}.choose_device", begins)
    monkeypatch.setattr("quantizers.pipeline.pipeline.run", begins)
    failing, _, meant = line.replace(" R", " recipe.yaml").partition(" => ")
    words = shlex.split(failing)
    assert command(*words, "--json") == 2
    answer = json.loads(command.out)
    errors = answer.get("errors") or [answer["error"]]
    for again in [shlex.split(meant)] if meant else followed(words, errors):
        code = command(*again)
        assert code == 0 or WORK in command.err, (again, command.err)


@pytest.mark.parametrize(
    ("variable", "value", "line"),
    [
        ("OMP_NUM_THREADS", "4.0", "OMP_NUM_THREADS: '4.0' is no number of threads, 1 to 1,024; unset it, or set OMP"),
        (
            "HF_HUB_DOWNLOAD_TIMEOUT",
            "10.0",
            "HF_HUB_DOWNLOAD_TIMEOUT=10.0: is no whole number of seconds; unset it, or ",
        ),
    ],
)
def test_an_environment_variable_that_is_no_number_is_named(
    variable: str, value: str, line: str, job: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.chdir(job)
    monkeypatch.setenv(variable, value)
    assert command("coverage", "recipe.yaml", "--no-picture", "--device", "cpu") == 2
    assert command.err.splitlines()[-1].startswith(f"quantize: {line}")


@pytest.mark.parametrize(("key", "value"), [("model_max_length", "2048"), ("add_bos_token", "false")])
def test_a_tokenizers_setting_as_text_is_named(
    key: str, value: str, job: Path, tmp_path: Path, command: Command
) -> None:
    folder = shutil.copytree(job / "model", tmp_path / "model")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    assert command("calibration", "check", job / "calibration.yaml", "--tokenizer", folder) == 2
    assert f"tokenizer_config.json: {key} is {value!r}, which is text; write it without quotes" in command.err


def test_yaml_that_reads_as_another_type_says_what_to_write(job: Path, command: Command) -> None:
    text = (job / "recipe.yaml").read_text()
    wrong = text.replace("model: model", "model: model\n  revision: 0123").replace("experts:", "experts:\n  bits: '4'")
    (job / "wrong.yaml").write_text(wrong)
    assert command("plan", job / "wrong.yaml") == 2
    bits, revision = command.err.splitlines()
    assert bits.endswith("experts.bits: should be 2, 3, 4, 5, 6 or 8, not '4'; write it without quotes")
    assert revision.endswith("source.revision: should be a valid string, not 123; put it in quotes")
