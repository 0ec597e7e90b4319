"""`quantize serve-check`: parse, call, print, exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quantizers.cli import common
from quantizers.cli.adapter import Call, command
from quantizers.system.formatting import text_table

if TYPE_CHECKING:
    from quantizers.serving.serve_check import ServeCheck

RECORD = "no limit was applied; where this is a source, its candidates take this file with --source-check"
HOW = (
    "no limit was applied: serve the source on the same server, run `quantize serve-check SOURCE --server URL "
    "--data SET --output source.json`, then this again with --source-check source.json; "
    "bfloat16 alone has a KL of about 1e-3"
)


@command("quantizers.serving.serve_check:serve_check")
def serve_check(call: Call) -> None:
    """Compare a server's log-probabilities with this program's evaluation of what it serves.

    Exit 3 if the server is beyond its limit. Token ids of the set are sent, so no template or tokenizer of the server
    matters. KL to the server is a lower bound, from the tokens that it returns. With --exact the limit is 1e-6; with
    --source-check twice the source's distance on the same server, and a tenth of KL(source || candidate).

    Example: quantize serve-check out/tiny --server http://127.0.0.1:8000 --data held-out
    """
    result: ServeCheck = call()
    report = result.as_dict()
    common.emit(report, call.as_json, f"{served_table(report)}\n\nwritten: {result.path}", passed=result.passed)


def served_table(report: dict[str, Any]) -> str:
    """Server, a row for each category (or family, if there are many) and one for all texts, and the verdict."""
    from quantizers.eval.fidelity.tables import CATEGORY_ROWS

    server = report["server"]
    figures = report["figures"]
    verdict = report["verdict"]
    longest = f", max_model_len {server['max_model_len']:,}" if server["max_model_len"] else ""
    names = {
        "candidate_server": "KL(ours || server)", "source_server": "KL(source || server)",
        "source_candidate": "KL(source || candidate)",
    }  # fmt: skip
    losses = [f"ppl {model}" for model in figures["perplexity"]]
    header = ("", "tokens", *(names[kind] for kind in figures["kl"]), "top-1", *losses)
    shown, rows = figures["categories" if len(figures["categories"]) <= CATEGORY_ROWS else "families"], []
    for name, row in [*shown.items(), ("all", figures)]:
        kl = (f"{row['kl'][kind]['mean']:.3g}" for kind in figures["kl"])
        perplexity = (f"{row['perplexity'][model]:.4f}" for model in figures["perplexity"])
        rows.append((name, f"{row['tokens']:,}", *kl, f"{row['top1']:.2%}", *perplexity))
    mine = figures["kl"]["candidate_server"]
    lines = [
        f"{server['kind']} {server['version']}{' offline' * server['offline']}, model {server['model']}{longest}",
        *server["kernels"],
        "",
        text_table(header, rows),
        "",
        f"ours: float32 evaluation of {report['candidate']['model']}; KL in nats, to the server a lower bound from "
        f"{report['top_k']} returned tokens, outside of which lies {figures['outside']:.2%} of the probability; "
        f"median {mine['median']:.2g}, p99 {mine['p99']:.2g}, max {mine['max']:.2g}",
    ]
    if cut := report["data"]["cut"]:
        lines.append(f"{cut} texts were cut, {report['data']['cut_tokens']:,} tokens were not measured")
    if verdict["limit"] is None:
        lines.append(HOW if "source" in report else RECORD)
    else:
        word = "within" if verdict["passed"] else "beyond"
        lines.append(f"{verdict['kind']}: {verdict['distance']:.3g} is {word} the limit of {verdict['limit']:.3g}")
    return "\n".join([*lines, *(f"  {line}" for line in verdict["said"])])
