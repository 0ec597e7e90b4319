"""Hub datasets: their rows, their exact revision, and readable error messages."""

from __future__ import annotations

import hashlib
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .rows import (
    Row,
    SourceError,
    Unreachable,
    check_columns,
    needed_columns,
    order,
    without_none,
)
from .set import DataSource

BUFFERED_ROWS = 8  # rows in the shuffle buffer of a streamed dataset, per sample asked for
TIMEOUT = 10.0  # seconds to wait for the Hub's answer about one dataset


def hub_rows(source: DataSource, revision: str, seed: str) -> Iterator[Row]:
    """The rows of a Hub dataset, streamed if the source says so. See `read_rows`."""
    import datasets

    with explained(source):
        data: Any = datasets.load_dataset(
            source.dataset, source.subset, split=source.split, revision=revision, streaming=source.streaming
        )
    columns = needed_columns(source)
    if not source.streaming:
        check_columns(source, data.column_names)
        data = data.select_columns(list(dict.fromkeys(columns)))
        for index in order(len(data), source, seed):
            yield Row(f"{source.dataset} row {index + 1}", without_none(data[index]))
        return
    if source.samples != "all":
        number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "big")
        data = data.shuffle(seed=number, buffer_size=BUFFERED_ROWS * source.samples)
    stream = enumerate(data, 1)
    while True:
        with explained(source):
            number, values = next(stream, (0, None))
        if values is None:
            return
        check_columns(source, values)
        yield Row(f"{source.dataset} streamed row {number}", without_none({c: values[c] for c in columns}))


def resolve(source: DataSource) -> str:
    """The commit to which a Hub source's revision points now.

    Raises:
        Unreachable: the Hub cannot be reached.
        SourceError: the Hub has no such dataset or revision.
    """
    import huggingface_hub

    with explained(source):
        hub = huggingface_hub.HfApi()
        commit = hub.dataset_info(source.dataset, revision=source.revision, timeout=TIMEOUT).sha
    assert commit is not None  # the Hub always returns one
    return commit


def file_hashes(source: DataSource, commit: str) -> dict[str, str]:
    """The data files that a Hub source reads at a commit: from path in the repository to content hash.

    The hash of a large file is the SHA-256 of its bytes, that of a small file its git blob id.
    """
    import datasets
    import huggingface_hub

    with explained(source):
        builder = datasets.load_dataset_builder(source.dataset, source.subset, revision=commit)
        files = builder.config.data_files or {}
        if source.split not in files:
            raise ValueError(f"no split {source.split}; it has {', '.join(sorted(files))}")
        paths = sorted(url.partition(f"@{commit}/")[2] for url in files[source.split])
        infos = huggingface_hub.HfApi().get_paths_info(source.dataset, paths, revision=commit, repo_type="dataset")
        return {
            info.path: f"sha256:{info.lfs.sha256}" if info.lfs else f"git:{info.blob_id}"
            for info in sorted(infos, key=lambda info: info.path)
            if isinstance(info, huggingface_hub.RepoFile)
        }


@contextmanager
def explained(source: DataSource) -> Iterator[None]:
    """Turn exceptions of `datasets` and `huggingface_hub` into a SourceError with a reason and a remedy."""
    try:
        yield
    except SourceError:
        raise
    except Exception as failure:
        raise _explanation(failure, source) from failure


def _explanation(failure: Exception, source: DataSource) -> SourceError:
    import httpx
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub import errors

    name = source.dataset
    if isinstance(failure, errors.GatedRepoError) or "gated dataset" in str(failure):
        return SourceError(name, "gated", "accept its terms on the Hub, then `hf auth login`")
    missing_revision = re.match(r"Revision '([^']+)' doesn't exist", str(failure))
    if missing_revision or isinstance(failure, errors.RevisionNotFoundError):
        remedy = "correct the source's revision, or lock the set again"
        return SourceError(name, f"no revision {missing_revision[1] if missing_revision else source.revision}", remedy)
    if isinstance(failure, (errors.RepositoryNotFoundError, DatasetNotFoundError)):
        remedy = "correct the id, or `hf auth login` if it is private"
        return SourceError(name, "no such dataset on the Hub", remedy)
    overloaded = isinstance(failure, errors.HfHubHTTPError) and failure.response.status_code in (429, *range(500, 600))
    if overloaded or isinstance(failure, (ConnectionError, TimeoutError, httpx.TransportError)):
        remedy = (
            "check the network, or take the shipped set embedded, which needs none (with a recipe: "
            "--calibration embedded)"
        )
        offline = isinstance(failure, errors.OfflineModeIsEnabled)
        return Unreachable(name, "HF_HUB_OFFLINE is set" if offline else _short(failure), remedy)
    reason = f"cannot be loaded ({_short(failure)})"
    return SourceError(name, reason, "correct the source's subset, split or revision")


def _short(failure: Exception) -> str:
    """The failure as part of a line: without memory addresses and request ids, at most 160 characters."""
    text = " ".join(f"{type(failure).__name__}: {failure}".split())
    text = re.sub(r"\s*\(Request ID: [^)]*\)| at 0x[0-9a-f]+", "", text)
    return text if len(text) <= 160 else text[:157] + "..."


@contextmanager
def quiet() -> Iterator[None]:
    """Silence progress bars, log lines and warnings of the two libraries; our own messages say what matters."""
    import datasets.utils.logging
    import huggingface_hub.utils.logging
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    loggers = (datasets.utils.logging, huggingface_hub.utils.logging)
    levels = [logger.get_verbosity() for logger in loggers]
    bars, hub_bars = not datasets.are_progress_bars_disabled(), not are_progress_bars_disabled()
    for logger in loggers:
        logger.set_verbosity(logging.CRITICAL)
    datasets.disable_progress_bars()
    disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.set_verbosity(level)
        if bars:
            datasets.enable_progress_bars()
        if hub_bars:
            enable_progress_bars()
