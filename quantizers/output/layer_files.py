"""A JSON file for each layer that is done, from which work on a model resumes: of `eval`, and of draws compared."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantizers.system.files import write_json


@dataclass(frozen=True)
class LayerFiles:
    """The files `layer-00003.json` in an existing folder."""

    folder: Path

    def _path(self, number: int) -> Path:
        return self.folder / f"layer-{number:05d}.json"

    def read(self, layers: int) -> list[Any]:
        """Load the results of the finished layers in order, up to the first of `layers` that has no file."""
        done = next((number for number in range(layers) if not self._path(number).exists()), layers)
        return [json.loads(self._path(number).read_text()) for number in range(done)]

    def write(self, number: int, result: Any) -> None:
        """Keep the result of a layer: from here on it is done."""
        write_json(self._path(number), result)
