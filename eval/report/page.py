"""report.html: report.json as one self-contained page, which loads nothing from the network.

It shows no times and no memory figures, so two runs of the same recipe give the same page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from eval.fidelity.tables import by_part, past_the_model, shown_categories
from quantizers.system.formatting import gate_figures, size

from .card_serving import NAMELESS, knows_vllm, repository, vllm_command
from .charts import bars, heat_map, lines
from .schemes import choice_lines, layer_rows, leaning_line
from .verdict import verdict

STYLE = """
:root{color-scheme:light dark;--ink:#1a1d21;--soft:#5c6670;--paper:#fff;--rule:#dfe3e8;--good:#1a7f37;--bad:#c62828;
--s0:#1f6feb;--s1:#d9730d;--s2:#2da44e;--s3:#a23bbf;--s4:#8a6d3b;--s5:#c2255c}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ec;--soft:#9aa4ae;--paper:#14171a;--rule:#30363d;--good:#4cc26a;
--bad:#ff6b6b;--s0:#6ea8fe;--s1:#ffa94d;--s2:#69db7c;--s3:#d0a2f7;--s4:#d8b26e;--s5:#ff8fab}}
*{box-sizing:border-box}body{margin:0 auto;max-width:960px;padding:24px;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}h1{font-size:24px;margin:0 0 4px}h2{font-size:18px;margin:34px 0 8px;
border-bottom:1px solid var(--rule);padding-bottom:4px}p{margin:6px 0}.soft,text{color:var(--soft);fill:var(--soft)}
.scroll{overflow-x:auto}table{border-collapse:collapse;margin:8px 0;font-variant-numeric:tabular-nums}
th,td{padding:3px 12px 3px 0;text-align:right;border-bottom:1px solid var(--rule);vertical-align:top}
th:first-child,td:first-child{text-align:left}th{font-weight:600;color:var(--soft)}th.long,td.long{text-align:left}
.good{color:var(--good)}.bad{color:var(--bad);font-weight:600}code,pre{font-size:13px}pre{overflow-x:auto}
svg{width:100%;height:auto;display:block;margin:8px 0}svg text{font-size:11px}.bare{fill:#d62728}.cross{stroke:#fff;
stroke-width:1.2;fill:none}.grid{stroke:var(--rule)}.line{fill:none;stroke-width:2}.bar{fill:var(--s0)}
.whisker{stroke:var(--ink);fill:none}.legend span{margin-right:18px;white-space:nowrap}.legend i{display:inline-block;
width:14px;height:4px;margin-right:6px;vertical-align:middle}
.verdict{border-left:4px solid var(--good);padding-left:12px;margin:14px 0}.verdict.failed{border-color:var(--bad)}
""" + "".join(
    f".line.s{i}{{stroke:var(--s{i})}}.dot.s{i}{{fill:var(--s{i})}}.legend i.s{i}{{background:var(--s{i})}}"
    for i in range(6)
)


def page(report: dict[str, Any]) -> str:
    """The whole page.

    Args:
        report: the contents of report.json, from a run or a stitch; sections without data are left out.
    """
    sections: Sequence[tuple[str, str, Callable[[dict[str, Any]], str]]] = (
        ("gates", "Gates", _gates),
        ("settings", "Settings", _settings),
        ("plan", "Sizes", _sizes),
        ("schemes", "Schemes by layer", _schemes),
        ("coverage", "Coverage", _coverage),
        ("layers", "Search and rounding by layer", _search),
        ("kl", "Fidelity", _fidelity),
        ("audit", "Audit", _audit),
        ("consumers", "Consumers", _consumers),
        ("serving", "Serve", _serving),
        ("versions", "Versions", _versions),
    )
    body = "".join(
        f'<section id="{key}"><h2>{title}</h2>{write(report)}</section>'
        for key, title, write in sections
        if report.get(key)
    )
    source = report["source"]
    failed = any(not gate["passed"] for gate in report.get("gates", ()))
    said = "".join(f"<p>{escape(line)}</p>" for line in verdict(report))
    box = f"<div class='verdict{' failed' if failed else ''}'>{said}</div>" if said else ""
    notes = "".join(f"<p class='soft'>{escape(note)}</p>" for note in report.get("notes", ()))
    on = f", calibrated on {escape(report['calibration']['name'])}" if report.get("calibration") else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(_name(source))}: what was done, and what it did</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(_name(source))}</h1><p class='soft'>made from <code>{escape(str(source['model']))}</code>, "
        f"revision {escape(str(source['revision']))}{on}. All numbers are in report.json.</p>"
        f"{box}{notes}{body}</body></html>\n"
    )


def _name(source: dict[str, Any]) -> str:
    return str(source["model"]).rstrip("/").rpartition("/")[2]


def _table(header: Sequence[object], rows: Iterable[Sequence[object]], long: int | None = None) -> str:
    """An HTML table; cells are escaped, and the column `long` is left-aligned."""

    def cells(row: Sequence[object], tag: str) -> str:
        marks = (' class="long"' if i == long else "" for i in range(len(row)))
        return "".join(f"<{tag}{m}>{escape(str(c))}</{tag}>" for c, m in zip(row, marks, strict=True))

    lines = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{cells(header, "th")}</tr></thead><tbody>{lines}</tbody></table></div>'
    )


def _gates(report: dict[str, Any]) -> str:
    rows = []
    for gate in report["gates"]:
        verdict = '<td class="good">passed</td>' if gate["passed"] else '<td class="bad">FAILED</td>'
        value, limit = gate_figures(gate)
        limit = limit.replace("<=", "≤").replace(">=", "≥")
        rows.append(
            f"<tr><td>{escape(gate['name'])}</td><td>{value}</td><td>{limit}</td>{verdict}"
            f'<td class="long">{escape(gate["meaning"])}</td></tr>'
        )
    return f'<div class="scroll"><table>{"".join(rows)}</table></div>'


def _settings(report: dict[str, Any]) -> str:
    settings, calibration = report["settings"], report["calibration"]
    part = f", {calibration['tokens']:,} tokens drawn from it" if calibration.get("drawn") else ""
    rows = [
        *((f"experts.{key}", value) for key, value in settings["recipe"]["experts"].items()),
        ("calibration", f"{calibration['name']}{part} (digest {calibration['digest'][:16]})"),
        ("hash of the recipe", settings["hash"][:16]),
        *((f"machine: {key}", value) for key, value in settings["machine"].items()),
    ]
    return _table(("setting", "value"), rows, long=1)


def _sizes(report: dict[str, Any]) -> str:
    plan = report["plan"]
    rows = [
        (kind, f"{row['tensors']:,}", size(row["bytes_before"]), size(row["bytes_after"]))
        for kind, row in plan["actions"].items()
    ]
    rows.append(("all", "", size(plan["source_bytes"]), size(plan["output_bytes"])))
    return _table(("action", "tensors", "before", "after"), rows)


def _schemes(report: dict[str, Any]) -> str:
    schemes = report["schemes"]
    words = "".join(f"<p>{escape(line)}</p>" for line in choice_lines(schemes))
    return words + _table(*layer_rows(schemes), long=1)


def _coverage(report: dict[str, Any]) -> str:
    coverage = report["coverage"]
    totals = {layer["layer"]: layer["routed_tokens"] for layer in coverage["per_layer"]}
    forced = coverage.get("forced")
    saw = f"Every expert saw {forced['min']:,} of {forced['tokens']:,} tokens or more. " if forced else ""
    words = (
        f"<p>{saw}These are the tokens that the router itself sent. At least "
        f"{coverage['min']:,}, median {coverage['median']:,.0f}; <b>{coverage['uncovered']:,}</b> of "
        f"{coverage['pairs']:,} below {coverage['min_routed_tokens']:,} (red). Entropy of the load at least "
        f"{coverage['min_entropy']:.3f}.</p>"
    )
    caption = f"{_name(report['source'])} on {report['calibration']['name']}: routed tokens relative to an even load"
    return words + f"<p>{escape(caption)}</p>" + heat_map(totals, coverage["min_routed_tokens"])


def _search(report: dict[str, Any]) -> str:
    layers = report["layers"]
    if "error_unscaled" in layers[0]:  # from a stitch, which has no search: both errors are numbers
        probed = {
            "with the ratio of the norms": [row["error"] for row in layers],
            "without": [row["error_unscaled"] for row in layers],
        }
        return lines(probed, "largest relative error of probed experts")
    errors = [layer.get("error") or {} for layer in layers]
    # The gram engine has the first and third pair of keys, llmcompressor the others; the trailing spaces keep the
    # names of equal charts apart.
    share_left = {
        name: [_left(error, before, after) for error in errors]
        for name, before, after in (
            ("norm → router, w1, w3", "norm_search_before", "norm_search_after"),
            ("norm → router, w1, w3 ", "search_before", "search_after"),
            ("w3 → w2", "down_search_before", "down_search_after"),
            ("w3 → w2 ", "search_down_before", "search_down_after"),
        )
    }
    rounding = {
        name: [error.get(key) for error in errors]
        for name, key in (("w1 and w3", "gate_up_rounding"), ("w2", "down_rounding"))
    }
    parts = []
    for title, chart, unit in (
        ("AWQ's objective after the search, relative to before", share_left, "share left"),
        ("Error of the rounded matrices' outputs on the calibration inputs", rounding, "relative error"),
    ):
        present = {name: values for name, values in chart.items() if any(v is not None for v in values)}
        if present:
            parts.append(f"<p>{title}</p>" + lines(present, unit))
    leaning = leaning_line(report)
    if leaning:
        parts.append(f"<p>{escape(leaning)}.</p>")
    fallbacks = [f"layer {layer['layer']}: {line}" for layer in layers for line in layer.get("fallbacks", ())]
    if fallbacks:
        items = "".join(f"<li>{escape(line)}</li>" for line in fallbacks[:200])
        parts.append(f"<details><summary>{len(fallbacks):,} fallbacks</summary><ul>{items}</ul></details>")
    return "".join(parts)


def _left(error: dict[str, float | None], before: str, after: str) -> float | None:
    """The share of a loss that is left after a search, from the keys of the loss before and after it."""
    first, last = error.get(before), error.get(after)
    return last / first if first and last is not None else None


def _fidelity(report: dict[str, Any]) -> str:
    parts = by_part(report)
    shown = shown_categories(report)
    charted = shown | ({"long texts": report["long"]} if "long" in report else {})
    rows = [
        (
            name, one["samples"], f"{one['tokens']:,}", f"{one['perplexity']['source']:.3f}",
            f"{one['perplexity']['increase']:+.2%}", f"{one['kl']['mean']:.5f}", f"{one['kl']['p99']:.4f}",
            f"{one['top1']:.2%}",
        )
        for label, part in parts.items()
        for name, one in [(label, part), *shown_categories(part).items()]
    ]  # fmt: skip
    kl = {
        name: (one["kl"]["mean"], tuple(one["interval"]["kl"]) if one["interval"] else None)
        for name, one in charted.items()
    }
    others = [None if share is None else 1 - share for share in report["router"]["agreement"]]
    only = ", short texts" if "long" in report else ""
    header = ("category", "samples", "tokens", "perplexity", "change", "KL mean", "KL p99", "top-1")
    return (
        f"<p>{escape(_name(report['source']))} on the held-out set {escape(report['evaluated_on']['name'])}: "
        "KL(source || this), whole vocabulary.</p>"
        + bars(kl, "mean KL, nats per token; whiskers: 95 % bootstrap interval over texts, where there are several")
        + f"<p>Error of the hidden states by depth{only}</p>"
        + lines({"hidden states": report["hidden_error"]}, "relative error")
        + f"<p>Experts that the router chooses otherwise than in the source, by depth{only}</p>"
        + lines({"other experts": others}, "share of the source's choices")
        + _table(header, rows)
        + _positions(report)
        + "".join(f"<p class='soft'>{escape(line)}</p>" for line in past_the_model(report))
    )


def _positions(report: dict[str, Any]) -> str:
    """The table by position in the text; nothing if all texts end in the first band."""
    bands = report.get("positions", ())
    if len(bands) < 2:
        return ""
    rows = [
        (
            band["name"], band["samples"], f"{band['tokens']:,}", f"{band['perplexity']['source']:.3f}",
            f"{band['perplexity']['increase']:+.2%}", f"{band['kl']['mean']:.5f}", f"{band['top1']:.2%}",
        )
        for band in bands
    ]  # fmt: skip
    words = f"By position of the predicted token in {'the long' if 'long' in report else 'all'} texts"
    header = ("position", "texts", "tokens", "perplexity", "change", "KL mean", "top-1")
    return f"<p>{words}</p>" + _table(header, rows)


def _audit(report: dict[str, Any]) -> str:
    audit = report["audit"]
    lines = "".join(f'<li class="bad">{escape(line)}</li>' for line in audit["differences"][:100])
    verdict = f"<ul>{lines}</ul>" if lines else '<p class="good">No differences.</p>'
    worst = f"{max(audit['weight_error']):.3f}" if audit["weight_error"] else "not read"
    return (
        f"<p>{audit['tensors']:,} source tensors accounted for, {audit['kept_tensors']:,} compared byte for byte; "
        f"largest relative error of an expert's matrix {worst}.</p>{verdict}"
    )


def _consumers(report: dict[str, Any]) -> str:
    consumers = report["consumers"]
    schemes = consumers["schemes"].values()
    kinds = [kind for kind in next(iter(schemes)) if any(by_kind[kind] != "-" for by_kind in schemes)]
    rows = [(engine, *(by_kind[kind] for kind in kinds)) for engine, by_kind in consumers["schemes"].items()]
    findings = "".join(
        f'<li class="{"bad" if f["severity"] == "error" else "soft"}">{escape(f["where"])}: {escape(f["problem"])}; '
        f"{escape(f['engine'])}: {escape(f['consequence'])}</li>"
        for f in consumers["findings"]
    )
    verdict = f"<ul>{findings}</ul>" if findings else ""
    if all(f["severity"] == "note" for f in consumers["findings"]):
        verdict = '<p class="good">Every engine reads it as it is stored.</p>' + verdict
    ranks = _table(("tensor parallel", "vLLM"), consumers["tensor_parallel"].items(), long=1)
    return _table(("", *kinds), rows) + verdict + (ranks if consumers["tensor_parallel"] else "")


def _serving(report: dict[str, Any]) -> str:
    about = report["serving"]
    if not knows_vllm(about):
        return "<p>No release of vLLM that was known when this was made has a model of this family.</p>"
    name = repository(report)
    if name != NAMELESS:
        return f"<pre>{escape(vllm_command(about, name))}</pre>"
    return f"<p>In the folder of this page:</p><pre>{escape(vllm_command(about, '.'))}</pre>"


def _versions(report: dict[str, Any]) -> str:
    return _table(("package", "version"), report["versions"].items())
