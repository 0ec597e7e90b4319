"""Requests to the Hub, for every room: a range of bytes, when a request is made again, and what a failure means.

huggingface_hub makes the requests, with the token of its login. Its `HfFileSystem` does not read files here: it asks
for a revision and a listing before the first byte, reads ahead (three times the bytes for headers), waits without a
word, and takes the answer of a server that serves no ranges for the range.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from threading import Event
from typing import TYPE_CHECKING, Literal, TypeVar

from .errors import CheckpointError, HubUnavailable, InputError, QuantizeError, first_line

if TYPE_CHECKING:
    import httpx

PIECE = 1 << 26  # bytes of one request, at most, where much of a file is read
PAUSES = (10.0, 60.0, 300.0, 900.0, 1800.0)  # seconds before long work makes a request again
LATER = (408, 409, 412, 429)  # statuses below 500 with which a request may succeed later
UNSAID = 60.0  # seconds to wait where the Hub does not say how long
LONGEST = 600.0  # seconds without a byte of an upload or its answer; the library itself would wait for good
AGAIN = "give the same command again, which resumes"
READER = "log in with `hf auth login`, or set HF_TOKEN"
LOGIN = f"{READER} to one with write access"

Kind = Literal[
    "gated",
    "no revision",
    "no repository",
    "no file",
    "limited",  # 429
    "server's error",
    "cut",  # the connection broke, or nothing more came
    "not reached",
    "offline",  # by HF_HUB_OFFLINE
    "other",
]
Result = TypeVar("Result")


# Requests -----------------------------------------------------------------------------------------------------------


def range_answer(
    repo: str,
    path: str,
    commit: str,
    start: int,
    end: int,
    *,
    timeout: float,
    dataset: bool = False,
    retries: bool = False,
) -> httpx.Response:
    """The answer to a request for bytes `start` to `end` of a file: of status 206, or what else a server sends.

    Args:
        timeout: seconds to wait for an answer, or for its next bytes.
        dataset: whether it is the repository of a data set, else that of a model.
        retries: let the library ask again after a lost connection, a 429 and a 5xx; nothing is said then.

    Raises:
        Exception: the library's, see `kind_of`; with `retries` also for a last 429 or 5xx.
    """
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, http_backoff

    url = hf_hub_url(repo, path, revision=commit, repo_type="dataset" if dataset else "model")
    headers = {**build_hf_headers(), "Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    if retries:
        return http_backoff("GET", url, headers=headers, timeout=timeout)
    return get_session().get(url, headers=headers, timeout=timeout, follow_redirects=True)


def persist(
    request: Callable[[], Result], pause_after: Callable[[Exception], tuple[float, str] | None], stopped: Event
) -> Result:
    """The result of a request, made again after each pause; a pause is announced on standard error.

    Args:
        pause_after: the seconds to wait after a failure, and the line that announces it; None to raise the failure.
        stopped: ends the waiting when it is set: the last failure is raised.
    """
    while True:
        try:
            return request()
        except Exception as failure:
            pause = pause_after(failure)
            if pause is None or stopped.is_set():
                raise
            seconds, line = pause
            print(line, file=sys.stderr, flush=True)
            if stopped.wait(seconds):
                raise


def retried(request: Callable[[], Result], stopped: Event) -> Result:
    """The result of a request of long work; where the Hub is unavailable, it is made again after each of `PAUSES`.

    Raises:
        HubUnavailable: it still is, or `stopped` was set meanwhile.
    """
    pauses = iter(PAUSES)

    def pause_after(failure: Exception) -> tuple[float, str] | None:
        if not isinstance(failure, HubUnavailable) or (seconds := next(pauses, None)) is None:
            return None
        return seconds, f"{failure.without_remedy}; trying again in {seconds:g} s"

    return persist(request, pause_after, stopped)


# Failures -----------------------------------------------------------------------------------------------------------


def kind_of(failure: Exception) -> Kind:
    """The kind of failure that an exception of the library means."""
    from httpx import ConnectError, TransportError
    from huggingface_hub import errors

    kinds: tuple[tuple[type[Exception], Kind], ...] = (  # a class before those that it inherits from
        (errors.GatedRepoError, "gated"),
        (errors.RevisionNotFoundError, "no revision"),
        (errors.RepositoryNotFoundError, "no repository"),
        (errors.EntryNotFoundError, "no file"),
        (errors.OfflineModeIsEnabled, "offline"),
        (ConnectError, "not reached"),
        (TransportError, "cut"),
        (ConnectionError, "not reached"),
        (TimeoutError, "not reached"),
    )
    status = status_of(failure) or 0
    by_status: Kind = "limited" if status == 429 else "server's error" if status >= 500 else "other"
    return next((kind for exception, kind in kinds if isinstance(failure, exception)), by_status)


def status_of(failure: Exception) -> int | None:
    """The status of the Hub's answer; None if it did not answer."""
    status: int | None = getattr(getattr(failure, "response", None), "status_code", None)
    return status


def reason_of(failure: Exception) -> str:
    """The reason that the Hub, or else the library, gives for a failure, in one line without the token."""
    from huggingface_hub import get_token

    words = first_line(Exception(getattr(failure, "server_message", None) or failure))
    return re.sub(r"Bearer [^'\"]*|hf_[A-Za-z0-9]{10,}", "***", words.replace(get_token() or "\0", "***"))


def is_transient(failure: Exception) -> bool:
    """Whether the same request may succeed later."""
    status = status_of(failure)
    return not isinstance(failure, ValueError) if status is None else status in LATER or status >= 500


def seconds_asked_for(failure: Exception) -> float:
    """The seconds that the Hub asks to wait, where its answer has the status 429."""
    from huggingface_hub.utils import parse_ratelimit_headers

    headers: Mapping[str, str] = getattr(getattr(failure, "response", None), "headers", {})
    limit, after = parse_ratelimit_headers(headers), headers.get("Retry-After", "")
    if limit is not None and not limit.remaining:
        return limit.reset_in_seconds + 1.0
    return float(after) if after.isdecimal() else UNSAID


# One-line errors ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def hub_errors(model: str, what: str, revision: str, *, begun: bool = True) -> Iterator[None]:
    """Turn the library's exceptions, for `what` is read of a model, into one line that says what to do.

    `begun` says whether the same command would go on from here; else a name or the network may be wrong from the start.

    Raises:
        CheckpointError: the model, its revision or file is not there, or access is refused.
        HubUnavailable: the Hub does not answer.
    """
    from httpx import HTTPError

    try:
        yield
    except (HTTPError, OSError, ValueError) as failure:
        kind, reason = kind_of(failure), reason_of(failure)
        if kind == "gated":
            raise CheckpointError(
                model,
                f"is gated, and the Hub refuses {what}",
                f"accept its terms on https://huggingface.co/{model}, and {READER}",
            ) from None
        if kind == "no revision":
            raise CheckpointError(
                model,
                f"the Hub has no revision {revision}, or no longer",
                "give another one, with --fresh if a run was begun",
            ) from None
        if begun and kind not in ("no repository", "no file"):
            raise HubUnavailable(f"{model}: {what}", f"the Hub stopped answering ({reason})", AGAIN) from None
        raise CheckpointError(
            model, f"the Hub did not give {what} ({reason})", "check the name and the network, or name a folder"
        ) from None


@contextlib.contextmanager
def upload_errors(repo: str, remedy: str = "") -> Iterator[None]:
    """Turn the library's exceptions, while something is uploaded, into one line; and let no request be endless.

    Args:
        remedy: what else a user can do if access is refused.

    Raises:
        InputError: access is refused.
        HubUnavailable: the same request may succeed later.
        QuantizeError: any other failure.
    """
    from httpx import HTTPError, Timeout
    from huggingface_hub import get_session

    get_session().timeout = Timeout(LONGEST)
    try:
        yield
    except (HTTPError, OSError, RuntimeError, ValueError) as failure:
        status, reason = status_of(failure), reason_of(failure)
        if status in (401, 403):
            raise InputError(
                repo,
                f"the Hub refuses this ({status}: {reason})",
                "log in with `hf auth login` to an account with write access and "
                f"room{f', or {remedy}' if remedy else ''}",
            ) from None
        if is_transient(failure):
            raise HubUnavailable(repo, f"the upload stopped ({reason})", AGAIN) from None
        raise QuantizeError(repo, f"the upload stopped ({reason})", AGAIN) from None
