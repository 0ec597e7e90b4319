"""Asks a server for the log-probabilities of given token ids: vLLM or SGLang over HTTP, or a vLLM without a server.

vLLM answers `/v1/completions` with `prompt_logprobs`, SGLang `/generate` with `input_top_logprobs`. Both are exact over
the whole vocabulary: the server's own K most likely tokens at each position, and the token that follows in the text.

Legend: T tokens of a text, K ids asked for, V vocabulary.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantizers.system.errors import InputError
from quantizers.system.formatting import short_path

VLLM, SGLANG = "vLLM", "SGLang"
# By the page that tells a version; the last is what SGLang called the second before.
KINDS = {"/version": VLLM, "/server_info": SGLANG, "/get_server_info": SGLANG}
KEY = "OPENAI_API_KEY"  # environment variable with the server's key
PATIENCE = 10.0  # seconds in which a vLLM without a server may end by itself
SHOWN = 200  # characters of a server's own words in a message
MORE_THAN_ONE = 1.001  # a sum of probabilities that no rounding explains
LEAST = -9999.0  # vLLM's log-probability of what is impossible
_KERNEL = re.compile(r"\bUs(?:e|ing) .*(?:kernel|backend).*", re.IGNORECASE)
_CAPPED = re.compile(r"max[ _-]?(?:allowed|logprobs)|logprobs.*(?:greater|exceed|at most)", re.IGNORECASE)
_FOREIGN = re.compile(r"out of (?:the )?vocab|vocab(?:ulary)?[ _]size", re.IGNORECASE)


# What a server returned for one text: (T - 1, N) int64, the tokens at each position but the first, -1 where there are
# fewer than N; (T - 1, N) float64, their natural log-probabilities, -inf where the id is -1; and (T - 1,) float64, that
# of the token which follows in the text, which is one of them.
Returned = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Server:
    """A server that answers.

    Attributes:
        kind: VLLM or SGLANG; `version` and `model`, its id of the model, as it says.
        max_model_len: tokens of a text and an answer together; None where it does not say.
        ask: rows of `{id: log-probability}` for positions 1 to T - 1 of a text's ids, from these and K; the third
            argument says which text it is.
        log: the lines that it has logged so far, if they are known here.
    """

    kind: str
    version: str
    model: str
    max_model_len: int | None
    ask: Callable[[Sequence[int], int, str], list[dict[int, float]]]
    log: Callable[[], list[str]]


def score(server: Server, tokens: Sequence[int], top_k: int, vocabulary: int, which: str) -> Returned:
    """A server's log-probabilities of a text of T ids, of which `which` tells in messages, with K and V of our model.

    Raises:
        InputError: nothing comes; positions or ids are missing, ids are none of this vocabulary, or the numbers no
            log-probabilities.
    """
    where, rows = f"{server.kind}: {which}", server.ask(tokens, top_k, which)
    if len(rows) != len(tokens) - 1:
        raise InputError(where, f"{len(rows)} positions were scored, not {len(tokens) - 1}", "another text was")
    width, least = max(map(len, rows)), min(top_k, vocabulary)
    ids, logs = np.full((len(rows), width), -1), np.full((len(rows), width), -np.inf)
    for position, (row, token) in enumerate(zip(rows, tokens[1:], strict=True)):
        if len(row) < least:
            raise InputError(
                where,
                f"{len(row)} log-probabilities came at a position, {least} were asked for: the server caps them",
                f"start vLLM with --max-logprobs {top_k}, or give --top-k {max(1, len(row) - 1)}",
            )
        if max(row) >= vocabulary or min(row) < 0:
            raise InputError(
                where,
                f"token {max(row)} was returned, and this model has {vocabulary:,}: another model is served",
                "see /v1/models",
            )
        if token not in row:
            raise InputError(where, f"token {token} of the text has no log-probability", "the server scored another")
        ids[position, : len(row)], logs[position, : len(row)] = list(row), list(row.values())
    total = np.exp(logs).sum(1)
    if not total.max() <= MORE_THAN_ONE:
        raise InputError(
            where,
            f"probabilities sum to {total.max():.4g}, so these are no log-probabilities",
            "start vLLM with --logprobs-mode raw_logprobs",
        )
    return ids, logs, logs[ids == np.asarray(tokens[1:])[:, None]]


def kernel_lines(lines: Sequence[str]) -> list[str]:
    """The kernels and backends that lines of a server's log name, each once, as `Using …`."""
    return list(dict.fromkeys(match[0].strip() for line in lines if (match := _KERNEL.search(line))))


# Over HTTP ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def over_http(url: str, timeout: float, log: Path | None = None) -> Iterator[Server]:
    """The vLLM or SGLang at this address, with or without /v1; within the block the connection is kept.

    Args:
        timeout: seconds without a byte after which a request has failed.
        log: a file with what the server has logged.

    Raises:
        InputError: there is no such server, it does not answer, or refuses the key in OPENAI_API_KEY.
    """
    import httpx

    try:
        logged = log.read_text(encoding="utf-8", errors="replace").splitlines() if log else []
    except OSError as failure:
        raise InputError(log, f"cannot be read ({failure.strerror})", "give the file of the server's log") from None
    key = os.environ.get(KEY, "").strip()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        base = httpx.URL(url.rstrip("/").removesuffix("/v1"))
        client = httpx.Client(base_url=base, timeout=timeout, headers=headers)
    except UnicodeEncodeError:
        raise InputError(KEY, "is not ASCII, so no header can hold it", "set it to the server's key") from None
    except (httpx.InvalidURL, ValueError) as failure:
        raise InputError("--server", _short(str(failure), key), "write it as http://127.0.0.1:8000") from None
    shown = f"{base.scheme}://{base.netloc.decode().rpartition('@')[2]}"

    def json_of(path: str, body: dict[str, Any] | None = None, which: str = "") -> Any:
        """The JSON of an answer; None where a GET finds no such page."""
        where = f"{shown}{base.path.rstrip('/')}{path}{which and f': {which}'}"
        try:
            answer = client.request("GET" if body is None else "POST", path, json=body)
        except httpx.TimeoutException:
            raise InputError(
                where, f"no answer within {timeout:g} s", "busy or stalled: see its log, or give a larger --timeout"
            ) from None
        except httpx.LocalProtocolError:  # whose message would show the header
            raise InputError(where, f"{KEY} is no key that a header can hold", "set it to the server's") from None
        except (httpx.TransportError, httpx.DecodingError) as failure:
            raise InputError(
                where,
                _short(str(failure) or type(failure).__name__, key),
                "see whether the server is ready, and the address right, as http://127.0.0.1:8000",
            ) from None
        if answer.status_code == 404 and body is None:
            return None
        if answer.status_code != 200:
            raise InputError(where, *_refusal(answer.status_code, answer.text, key, body or {}))
        try:
            return answer.json()
        except ValueError:
            raise InputError(
                where, f"the answer is no JSON: {_short(answer.text, key)}", "see the server's log"
            ) from None

    with client:
        for path in KINDS:
            about = json_of(path)
            if isinstance(about, dict) and "version" in about:
                break
        else:
            raise InputError(shown, "answers neither /version (vLLM) nor /server_info (SGLang)", "give one of these")
        kind, models = KINDS[path], json_of("/v1/models")
        try:
            first = models["data"][0]  # adapters follow
            model, lengths = str(first["id"]), [first.get("max_model_len"), about.get("max_req_input_len")]
        except (LookupError, TypeError, AttributeError):
            raise InputError(f"{shown}/v1/models", "names no model", "give the address of a server with one") from None

        def ask_vllm(tokens: Sequence[int], top_k: int, which: str) -> list[dict[int, float]]:
            body = {"model": model, "prompt": list(tokens), "max_tokens": 1, "temperature": 0, "prompt_logprobs": top_k}
            answer = json_of("/v1/completions", body, which)
            with _as_described("prompt_logprobs", which):
                return _vllm_rows(answer["choices"][0]["prompt_logprobs"])

        def ask_sglang(tokens: Sequence[int], top_k: int, which: str) -> list[dict[int, float]]:
            body = {
                "input_ids": list(tokens), "sampling_params": {"max_new_tokens": 1, "temperature": 0},
                "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": top_k,
            }  # fmt: skip
            answer = json_of("/generate", body, which)
            with _as_described("input_top_logprobs", which):
                about_text = answer["meta_info"]
                return _sglang_rows(about_text["input_top_logprobs"], about_text["input_token_logprobs"])

        ask = ask_vllm if kind == VLLM else ask_sglang
        longest = min((length for length in lengths if length), default=None)
        yield Server(kind, str(about["version"]), model, longest, ask, lambda: logged)


def _vllm_rows(positions: Any) -> list[dict[int, float]]:
    """Log-probabilities by id, of vLLM's `prompt_logprobs`, of which the first is null."""
    rows = []
    for position in positions[1:]:
        rows.append({_id(token): _log(entry["logprob"]) for token, entry in position.items()})
    return rows


def _sglang_rows(most_likely: Any, given: Any) -> list[dict[int, float]]:
    """Log-probabilities by id, of SGLang's most likely tokens and the text's own; of the first token there are none."""
    rows = []
    for likely, own in zip(most_likely[1:], given[1:], strict=True):
        rows.append({_id(token): _log(value) for value, token, *_ in [*likely, own]})
    return rows


def _id(value: Any) -> int:
    if value is None or isinstance(value, float):
        raise TypeError("no id")
    return int(value)


def _log(value: Any) -> float:
    log = LEAST if value is None else float(value)  # JSON has no infinity
    if math.isnan(log):
        raise ValueError("NaN")
    return max(log, LEAST)


@contextlib.contextmanager
def _as_described(key: str, which: str) -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError):
        raise InputError(
            which,
            f"the answer's {key} are missing, or have no token ids or no numbers",
            "give the address of vLLM or SGLang itself, not of a proxy that rewrites answers",
        ) from None


def _refusal(status: int, text: str, key: str, body: Mapping[str, Any]) -> tuple[str, str]:
    """Problem and remedy for a status other than 200: the server's own words, shortened, and what to do."""
    words = _short(text, key)
    asked = body.get("prompt_logprobs", body.get("top_logprobs_num"))
    if status in (401, 403):
        which = f"the one in {KEY} is not taken" if key else f"{KEY} is not set"
        remedy = f"the server wants a key ({which}); set it to the server's --api-key"
    elif 400 <= status < 500 and asked and _CAPPED.search(text):
        remedy = f"the server caps log-probabilities; start it with --max-logprobs {asked}, or give a smaller --top-k"
    elif 400 <= status < 500 and _FOREIGN.search(text):
        remedy = "it serves a model with another vocabulary; see /v1/models, and serve this checkpoint"
    else:
        remedy = "see the server's log"
    return f"HTTP {status}: {words}", remedy


def _short(text: str, key: str) -> str:
    """A server's words in one line, without the key; of JSON the error's message."""
    with contextlib.suppress(ValueError, LookupError, TypeError):
        text = str(json.loads(text)["error"]["message"])
    line = " ".join((text.replace(key, "***") if key else text).split())
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}…"


# Without a server --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def offline(python: str, model: Path, engine: Mapping[str, Any], top_k: int, timeout: float) -> Iterator[Server]:
    """The vLLM of another environment, which loads the model within the block; see offline_vllm.py.

    Args:
        python: that environment's interpreter; `model`: a checkpoint's folder.
        engine: further arguments of vllm.LLM, such as dtype.
        top_k: the most log-probabilities that will be asked for.
        timeout: seconds without an answer to one text after which it has failed.

    Raises:
        InputError: there is no such interpreter, no vLLM in it, or vLLM refuses the model.
    """
    options = {"model": str(model.resolve()), "max_logprobs": top_k, **engine}
    command = [python, str(Path(__file__).with_name("offline_vllm.py")), json.dumps(options)]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env=os.environ | {"PYTHONSAFEPATH": "1"},  # the modules beside the script are none of vLLM's
                start_new_session=True,  # a group of its own, with the processes that it starts
            )  # fmt: skip
        except OSError as failure:
            raise InputError(
                f"--offline {python}", f"cannot be started ({failure.strerror})", "give the python of a vLLM"
            ) from None
        assert process.stdin is not None
        assert process.stdout is not None
        questions, answers = process.stdin, process.stdout

        def logged() -> list[str]:
            log.seek(0)
            return log.read().splitlines()

        def read(which: str, patience: float | None) -> Any:
            if not select.select([answers], [], [], patience)[0]:
                raise InputError(f"--offline: {which}", f"no answer within {timeout:g} s", "give a larger --timeout")
            if line := answers.readline():
                return json.loads(line)
            process.wait()
            last = [line for line in logged() if re.match(r".*(Error|Exception)\b", line)] or logged()
            raise InputError(
                f"--offline {short_path(python)}",
                f"vLLM ended: {_short(''.join(last[-1:]), '')}",
                "change its arguments with --engine KEY=VALUE, such as max_model_len=4096",
            )

        def ask(tokens: Sequence[int], top_k: int, which: str) -> list[dict[int, float]]:
            with contextlib.suppress(BrokenPipeError):  # which `read` then says
                print(json.dumps({"tokens": list(tokens), "top_k": top_k}), file=questions, flush=True)
            return _vllm_rows(read(which, timeout))

        try:
            print("starting vLLM", file=sys.stderr, flush=True)
            about = read("start", None)
            yield Server(VLLM, about["version"], str(model), about["max_model_len"], ask, logged)
        finally:
            with contextlib.suppress(BrokenPipeError):
                questions.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)  # it ends where its input does
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it has left behind
            process.wait()
            answers.close()
