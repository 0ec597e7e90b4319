"""The schema of what `quantize serve-check` writes and prints: a server's log-probabilities against our evaluation."""

from __future__ import annotations

from typing import Literal

from quantizers.system.keys import Part, key, maybe


class ServedModel(Part):
    """A checkpoint of the check."""

    model: str = key("Hub id, or the name of its folder")
    digest: str = key("SHA-256 over its config, headers and pieces of its shards, hexadecimal")


class Served(Part):
    """Figures over some texts; all scored positions, of long texts too."""

    samples: int = key("Texts", "texts")
    tokens: int = key("Scored tokens", "tokens")
    kl: dict[str, dict[str, float]] = key(
        "Mean, median, p99, p999 and max of candidate_server and source_server, which are lower bounds, and of "
        "source_candidate, as stored; without a source the first alone",
        "nats",
    )
    top1: float = key("Share of positions where server and our evaluation find the same token most likely", "share")
    outside: float = key("Mean probability outside the ids that the server returned, by our evaluation", "share")
    perplexity: dict[str, float] = key("Of source, candidate and server; without a source the latter two", "perplexity")


class ServedFigures(Served):
    """The same with categories."""

    categories: dict[str, Served] = key("By category of text")
    families: dict[str, Served] = key("By family of categories")


class AskedServer(Part):
    """The server that was asked."""

    kind: Literal["vLLM", "SGLang"] = key("Its program")
    version: str = key("As it says")
    model: str = key("Its id of the model")
    max_model_len: int | None = key("Longest text and answer; None where it does not say", "tokens")
    offline: bool = key("Whether it was a vLLM without a server")
    kernels: list[str] = key("Lines of its log that name a kernel or backend; without the log none")


class AskedTexts(Part):
    """The texts that were sent, as token ids."""

    name: str = key("Of the set")
    identity: str = key("SHA-256 over their token ids, hexadecimal")
    cut: int = key("Texts that are longer than the model or server takes, cut there", "texts")
    cut_tokens: int = key("Tokens that were cut off", "tokens")


class Verdict(Part):
    """Result of the check: the measured distance and its limit."""

    kind: Literal["exact", "as served", "none"] = key("Which limit was applied")
    distance: float = key("Mean KL(our evaluation of the candidate || server), a lower bound", "nats")
    limit: float | None = key("Its limit; None where none was applied", "nats")
    passed: bool = key("Whether it is within the limit, or there is none")
    said: list[str] = key("Why it may be beyond it, by what the figures show")


class ServeCheckReport(Part):
    """Report that `quantize serve-check` writes and, with --json, prints."""

    candidate: ServedModel = key("The checkpoint that is served")
    source: ServedModel | None = maybe("Its source; absent where none is known")
    server: AskedServer = key("The server")
    data: AskedTexts = key("The texts")
    top_k: int = key("Log-probabilities asked for at each position", "tokens")
    figures: ServedFigures = key("What was measured")
    verdict: Verdict = key("What that means")
    source_check: Verdict | None = maybe("The verdict of the record of the source; absent without --source-check")
    version: str = key("Of this program")
