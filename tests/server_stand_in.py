"""A vLLM or an SGLang on the loopback interface: its answers of log-probabilities, and what goes wrong there."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

Logs = Callable[[list[int]], Tensor]  # (T, V) log-probabilities of what follows each of T tokens


def logs_of(model: Any) -> Logs:
    """Those of a whole model of transformers; each text is computed once."""
    known: dict[tuple[int, ...], Tensor] = {}

    @torch.no_grad()
    def logs(tokens: list[int]) -> Tensor:
        if tuple(tokens) not in known:
            out = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
            known[tuple(tokens)] = torch.log_softmax(out.float(), dim=-1)
        return known[tuple(tokens)]

    return logs


@dataclass
class ServerStandIn:
    """Use as a context manager.

    Attributes:
        logs: of the model that it serves.
        kind: vllm or sglang.
        key: that a client must show.
        max_logprobs: of more than so many vLLM answers 400.
        given: of more than so many no more are returned, as a broken proxy would.
        changed: what is made of the JSON that answers a text; or status and bytes in its place.
        info: what it says besides its version.
        stalls: whether texts get no answer until the block ends.
        texts: the ids that were sent.
    """

    logs: Logs
    kind: str = "vllm"
    version: str = "0.32.0"
    model: str = "served"
    max_model_len: int = 4096
    key: str = ""
    max_logprobs: int = 20
    given: int = 1 << 30
    changed: Callable[[Any], Any] = lambda answer: answer
    stalls: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    texts: list[list[int]] = field(default_factory=list)
    release: Event = field(default_factory=Event)

    def __enter__(self) -> ServerStandIn:
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                """Nothing on standard error."""

            def do_GET(self) -> None:
                self.answer(stand_in.about(self.path))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if stand_in.key and self.headers.get("Authorization") != f"Bearer {stand_in.key}":
                    shown = self.headers.get("Authorization")
                    return self.answer((401, {"error": {"message": f"Unauthorized: {shown}"}}))
                return self.answer(stand_in.scored(self.path, body))

            def answer(self, found: tuple[int, Any]) -> None:
                status, data = found
                raw = data if isinstance(data, bytes) else json.dumps(data).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def about(self, path: str) -> tuple[int, Any]:
        """What a GET of this path finds."""
        pages = {
            "/v1/models": {"data": [{"id": self.model, "max_model_len": self.max_model_len}]},
            {"vllm": "/version", "sglang": "/get_server_info"}.get(self.kind, "/"): {"version": self.version}
            | self.info,
        }
        return (200, pages[path]) if path in pages else (404, {"detail": "Not Found"})

    def scored(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """What a POST of a text answers."""
        vllm = self.kind == "vllm"
        assert path == ("/v1/completions" if vllm else "/generate")
        tokens, top = (
            (body["prompt"], body["prompt_logprobs"]) if vllm else (body["input_ids"], body["top_logprobs_num"])
        )
        if self.stalls:
            self.release.wait(60)
        if vllm and top > self.max_logprobs:
            said = f"Requested prompt logprobs of {top}, which is greater than max allowed: {self.max_logprobs}"
            return 400, {"error": {"message": said, "code": 400}}
        logs = self.logs(tokens)
        if max(tokens) >= logs.shape[1]:
            return 400, {"error": {"message": f"Token id {max(tokens)} is out of vocabulary", "code": 400}}
        assert len(tokens) + body.get("max_tokens", 1) <= self.max_model_len
        self.texts.append(tokens)
        values, ids = logs[:-1].topk(min(top, self.given, logs.shape[1]))
        rows = [list(zip(*row, strict=True)) for row in zip(values.tolist(), ids.tolist(), strict=True)]
        own = [(float(logs[n, token]), token) for n, token in enumerate(tokens[1:])]
        if vllm:
            assert self.model == body["model"]
            entries = [{i: {"logprob": x, "rank": 0, "decoded_token": "?"} for x, i in [first, *row]}
                       for first, row in zip(own, rows, strict=True)]  # fmt: skip
            answer: Any = {"choices": [{"text": "", "prompt_logprobs": [None, *entries]}]}
        else:
            assert (body["return_logprob"], body["logprob_start_len"]) == (True, 0)
            answer = {
                "text": "",
                "meta_info": {
                    "input_token_logprobs": [(None, tokens[0], None), *((x, i, None) for x, i in own)],
                    "input_top_logprobs": [None, *([(x, i, None) for x, i in row] for row in rows)],
                },
            }
        made = self.changed(json.loads(json.dumps(answer)))
        return made if isinstance(made, tuple) else (200, made)
