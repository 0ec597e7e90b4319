"""Datasets of the Hub: their rows, their exact revision, and what went wrong in plain words."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .calibration_set import DataSource
from .calibration_sources import Row, SourceError, check_columns, needed_columns, order, without_none

BUFFERED_ROWS = 8  # for each sample asked for, when a streamed dataset is shuffled


def hub_rows(source: DataSource, revision: str | None, seed: str) -> Iterator[Row]:
    """The rows of a Hub dataset, streamed where the source says so. See `read_rows`."""
    import datasets

    with explained(source):
        data: Any = datasets.load_dataset(
            source.dataset, source.subset, split=source.split, revision=revision, streaming=source.streaming
        )
        present = data.column_names or list(next(iter(data)))
    check_columns(source, present)
    data = data.select_columns(list(dict.fromkeys(needed_columns(source))))
    if not source.streaming:
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
        yield Row(f"{source.dataset} streamed row {number}", without_none(values))


def resolve(source: DataSource) -> str:
    """The commit that a Hub source's revision means now.

    Raises:
        SourceError: the Hub cannot be asked, or knows no such dataset or revision.
    """
    import huggingface_hub

    with explained(source):
        commit = huggingface_hub.HfApi().dataset_info(source.dataset, revision=source.revision).sha
    assert commit is not None  # the Hub always answers with one
    return commit


def file_hashes(source: DataSource, commit: str) -> dict[str, str]:
    """The data files that a Hub source reads at a commit: path in the repository, and content hash.

    Large files have the SHA-256 of their bytes, small ones git's blob id.
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
    """Turn what `datasets` and `huggingface_hub` raise into one reason and one remedy."""
    try:
        yield
    except SourceError:
        raise
    except Exception as failure:
        reason, remedy = _explanation(failure, source)
        raise SourceError(source.dataset, reason, remedy) from failure


def _explanation(failure: Exception, source: DataSource) -> tuple[str, str]:
    import httpx
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub import errors

    text = _short(failure)
    if isinstance(failure, errors.GatedRepoError) or "gated dataset" in str(failure):
        return "gated", "accept its terms on the Hub, then `hf auth login`"
    if isinstance(failure, errors.RevisionNotFoundError):
        return f"no revision {source.revision}", "correct the source's revision"
    if isinstance(failure, errors.RepositoryNotFoundError):
        return "no such dataset on the Hub", "correct the id, or `hf auth login` if it is private"
    unreachable = (httpx.TransportError, errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError)
    if isinstance(failure, (ConnectionError, TimeoutError, DatasetNotFoundError, *unreachable)):
        remedy = "go online once, after which a cached run works offline; or name a local file instead"
        return f"cannot be reached ({text})", remedy
    return f"cannot be loaded ({text})", "correct the source's subset, split or revision"


def _short(failure: Exception) -> str:
    """The failure as part of a line: no addresses in memory, no request ids, at most 160 characters."""
    text = " ".join(f"{type(failure).__name__}: {failure}".split())
    text = re.sub(r"\s*\(Request ID: [^)]*\)| at 0x[0-9a-f]+", "", text)
    return text if len(text) <= 160 else text[:157] + "..."


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars, log lines and warnings of the two libraries; ours say what matters."""
    import datasets
    from datasets.utils import logging
    from huggingface_hub.utils import tqdm as hub

    verbosity, bars = logging.get_verbosity(), datasets.are_progress_bars_disabled()
    hub_bars = hub.are_progress_bars_disabled()
    logging.set_verbosity(logging.CRITICAL)
    datasets.disable_progress_bars()
    hub.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if not bars:
            datasets.enable_progress_bars()
        if not hub_bars:
            hub.enable_progress_bars()
