"""The checklist at the end of a dry run: done and missing steps before an upload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from eval.report.model_card import front_matter
from quantizers.system.formatting import size

from .checks import Checks, LocalFile

State = Literal["done", "missing", "open"]
PATIENCE = 10.0  # seconds to wait for the Hub's answer


@dataclass(frozen=True)
class Point:
    """One step; `open` if its state is unknown, or decided later."""

    name: str
    state: State
    words: str


def checklist(
    report: dict[str, Any], files: list[LocalFile], checks: Checks, repo: str, private: bool | None
) -> list[Point]:
    """All steps in order.

    Args:
        report: from `publication.with_publication`.
    """
    gates, front = report["gates"], front_matter(report)
    passed = sum(gate["passed"] for gate in gates)
    compared = "now" if checks.with_source else "when it was made; --thorough repeats it"
    found = (
        Point("checks", "missing", f"{len(checks.problems)} fail: repair the output, or give --force with a reason")
        if checks.problems
        else Point("checks", "done", "file hashes match report.json; no problems for vLLM, SGLang, transformers")
    )
    return [
        Point("files", "done", f"{len(files)}, {size(sum(file.size for file in files))}"),
        found,
        Point("source", "done", f"tensors compared with the source {compared}"),
        Point("gates", "done" if passed == len(gates) else "missing", f"{passed} of {len(gates)} passed"),
        Point("card", "done", f"its commands will name {repo}; README.md, report.html and report.json will change"),
        license_point(report, front),
        base_model_point(report, front),
        *_account(repo, private),
    ]


def license_point(report: dict[str, Any], front: dict[str, Any]) -> Point:
    """Whether the card names a licence."""
    if front.get("license"):
        return Point("license", "done", str(front.get("license_name", front["license"])))
    said = report.get("experts", {}).get("card", {}).get("license", ())
    hint = f" (the experts' card says {', '.join(said)})" if said else ""
    return Point("license", "missing", f"the source names none{hint}; give --license NAME")


def base_model_point(report: dict[str, Any], front: dict[str, Any]) -> Point:
    """Whether the card names the model on the Hub that was quantized."""
    if front.get("base_model"):
        return Point("base_model", "done", str(front["base_model"]))
    said = report["source"].get("made_from", ())
    hint = f" (made from {', '.join(said)} according to its card)" if said else ""
    return Point("base_model", "missing", f"the source was a folder{hint}; give --base-model OWNER/NAME")


def _account(repo: str, private: bool | None) -> list[Point]:
    """Whether there is a token and a repository, as far as the Hub answers; nothing is uploaded."""
    from httpx import HTTPError
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    token = get_token()
    login = "log in with `hf auth login`, or set HF_TOKEN to one with write access"
    points = [Point("token", "done", "found") if token else Point("token", "missing", login)]
    as_new = {True: "as private", False: "as public", None: "with default visibility"}[private]
    try:
        info = HfApi().model_info(repo, timeout=PATIENCE)
    except RepositoryNotFoundError:
        return [*points, Point("repository", "open", f"{repo}: not found; will be created {as_new}")]
    except HFValidationError:
        return [*points, Point("repository", "missing", f"{repo} is not a valid name; write it as owner/name")]
    except (HTTPError, OSError) as failure:
        status = getattr(getattr(failure, "response", None), "status_code", None)
        if token and status in (401, 403):
            return [Point("token", "missing", f"the Hub refuses it ({status}); {login}"), *points[1:]]
        return [*points, Point("repository", "open", f"{repo}: the Hub did not answer")]
    ignored = "; --private and --public have no effect" if private not in (None, info.private) else ""
    return [*points, Point("repository", "done", f"{repo} exists, {'private' if info.private else 'public'}{ignored}")]
