"""A model on a Hub on the loopback interface, in shards of which it is known what lies in them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Event, Thread
from types import TracebackType

import tiny
from calibration_tokenizer import write_tokenizer
from hub_stand_in import HubStandIn
from safetensors.torch import load_file, save_file

MODEL = "org/tiny"


def resharded(model: Path, groups: Iterable[Sequence[str]]) -> None:
    """Write a checkpoint again with these tensors in its shards."""
    tensors = {name: one for shard in model.glob("*.safetensors") for name, one in load_file(shard).items()}
    for shard in model.glob("*.safetensors"):
        shard.unlink()
    groups, weight_map = list(groups), dict[str, str]()
    for number, names in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        save_file({name: tensors[name] for name in names}, model / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    assert weight_map.keys() == tensors.keys()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def in_order(model: Path, shards: int) -> list[list[str]]:
    """The names of a checkpoint in the order of its layers, in as many groups of about the same number."""
    names = list(tiny.tensors(json.loads((model / "config.json").read_text())))
    return [names[len(names) * n // shards : len(names) * (n + 1) // shards] for n in range(shards)]


def job_on_the_hub(folder: Path, layers: int = 6, shards: int = 9) -> dict[str, bytes]:
    """A recipe of a model on the Hub, and its sets, in `folder`; the model's files, which lie in `model` too."""
    recipe = tiny.write_job(folder, layers=layers)
    resharded(folder / "model", in_order(folder / "model", shards))
    write_tokenizer(folder / "model")
    local = folder / "local.yaml"
    recipe.rename(local)
    recipe.write_text(local.read_text().replace("model: model", f"model: {MODEL}"))
    return {path.name: path.read_bytes() for path in (folder / "model").iterdir()}


def sent(hub: HubStandIn) -> int:
    """Bytes of the model's shards that the Hub has sent."""
    return sum(count for name, count in hub.sent.items() if name.startswith(MODEL) and name.endswith(".safetensors"))


class Watching:
    """The largest sum of a folder's files, looked at all the time. Use as a context manager.

    A file may go, and another come, between the looks at the two: a sum counts if the next is no smaller.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.largest, self._end = folder, 0, Event()

    def __enter__(self) -> Watching:
        self._thread = Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        before = 0
        while not self._end.wait(0.0005):
            total = 0
            with contextlib.suppress(FileNotFoundError):  # of the folder, removed while it is read
                for file in self.folder.glob("*"):
                    with contextlib.suppress(FileNotFoundError):
                        total += file.stat().st_size
            self.largest = max(self.largest, min(before, total))
            before = total
