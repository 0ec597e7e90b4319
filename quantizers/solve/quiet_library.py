"""llm-compressor without its progress bars and its log on standard output."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    from loguru import Message

# Warnings about what is meant here: a layer has no embeddings and no lm_head, a router has no scheme, and the
# device is the caller's choice.
EXPECTED_WARNINGS = (
    "Attempted to disable lm_head",
    "Cannot check embeddings",
    "No accelerator available",
    "Unable to find quantization scheme for targeted layer",
)


@contextmanager
def quiet_library() -> Iterator[None]:
    """No progress bars, and no log but warnings, which go to Python's `logging`; then all is as it was.

    llm-compressor logs through loguru; importing it removes whatever sinks there are and adds one on standard
    output. loguru has no public way to set its sinks aside, hence `_core`.
    """
    from loguru import logger
    from tqdm import tqdm

    shown = tqdm.__init__

    def hidden(bar: Any, *args: Any, **options: Any) -> None:
        shown(bar, *args, **options | {"disable": True})

    core: Any = logger._core  # type: ignore[attr-defined]  # hidden from types, see above
    with core.lock:
        sinks = core.handlers, core.min_level
        core.handlers, core.min_level = {}, float("inf")
    try:
        with redirect_stdout(StringIO()):
            import llmcompressor  # noqa: F401  # its sink is added now, and removed by the next line
        logger.remove()
        logger.add(_forward, level="WARNING", format="{message}")
        with patch.object(tqdm, "__init__", hidden):
            yield
    finally:
        logger.remove()
        with core.lock:
            core.handlers, core.min_level = sinks


def _forward(message: Message) -> None:
    """A loguru sink: one record to the standard logger of the module that wrote it."""
    record = message.record
    if not record["message"].startswith(EXPECTED_WARNINGS):
        logging.getLogger(record["name"]).log(record["level"].no, "%s", record["message"])
