"""llm-compressor without its progress bars, its log on standard output, and its need for an accelerator.

The only file that replaces code of another project while it runs, since llm-compressor 0.14 has no option for it:
tqdm's bars would be mixed with our progress, and its cache pins memory even without an accelerator, which torch
refuses.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
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
    """No progress bars, no pinned memory without an accelerator, and no log but warnings, which go to Python's
    `logging`; afterwards all is as it was.

    llm-compressor logs through loguru; importing it removes whatever sinks there are and adds one on standard
    output. loguru has no public way to set its sinks aside, hence `_core`.
    """
    import torch
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
        with ExitStack() as stack:
            stack.enter_context(patch.object(tqdm, "__init__", hidden))
            if not torch.accelerator.is_available():
                from llmcompressor.pipelines.cache import IntermediatesCache

                stack.enter_context(patch.object(IntermediatesCache, "pin_memory", _leave_unpinned))
            yield
    finally:
        logger.remove()
        with core.lock:
            core.handlers, core.min_level = sinks


def _leave_unpinned(*_arguments: Any, **_named: Any) -> None:
    """Replaces `IntermediatesCache.pin_memory`."""


def _forward(message: Message) -> None:
    """A loguru sink: one record to the standard logger of the module that wrote it."""
    record = message.record
    if not record["message"].startswith(EXPECTED_WARNINGS):
        logging.getLogger(record["name"]).log(record["level"].no, "%s", record["message"])
