"""What a dry run ends with: what was checked, and what remains to be done before an upload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from eval.report.model_card import front_matter
from quantizers.system.formatting import size

from .local_files import LocalFile
from .publish import Checks

State = Literal["done", "missing", "open"]
PATIENCE = 10.0  # seconds to wait for the Hub's answer


@dataclass(frozen=True)
class Point:
    """One point of the list: `open` is what could not be found out, or is decided later."""

    name: str
    state: State
    words: str


def checklist(
    report: dict[str, Any], files: list[LocalFile], checks: Checks, repo: str, private: bool | None
) -> list[Point]:
    """All points, in the order in which they are needed.

    Args:
        report: with what is known of its publication, see `card.described`.
    """
    gates, front = report["gates"], front_matter(report)
    passed = sum(gate["passed"] for gate in gates)
    source = "with it now" if checks.with_source else "with it when this was made; --thorough does it again"
    found = (
        Point("checks", "missing", f"{len(checks.problems)} fail: repair what differs, or give --force with a reason")
        if checks.problems
        else Point(
            "checks", "done", "each file has the hash in report.json, and vLLM, SGLang, transformers read it right"
        )
    )
    return [
        Point("files", "done", f"{len(files)}, {size(sum(file.size for file in files))}"),
        found,
        Point("source", "done", f"tensors were compared {source}"),
        Point("gates", "done" if passed == len(gates) else "missing", f"{passed} of {len(gates)} passed"),
        Point("card", "done", f"its commands will name {repo}, so README.md, report.html and report.json still change"),
        license_point(report, front),
        base_model_point(report, front),
        *_account(repo, private),
    ]


def license_point(report: dict[str, Any], front: dict[str, Any]) -> Point:
    """Whether the card says under which licence it is."""
    if front.get("license"):
        return Point("license", "done", str(front.get("license_name", front["license"])))
    said = report.get("experts", {}).get("card", {}).get("license", ())
    hint = f" (the experts' card says {', '.join(said)})" if said else ""
    return Point("license", "missing", f"the source names none{hint}; give --license NAME")


def base_model_point(report: dict[str, Any], front: dict[str, Any]) -> Point:
    """Whether the card says of which model on the Hub it is a quantization."""
    if front.get("base_model"):
        return Point("base_model", "done", str(front["base_model"]))
    said = report["source"].get("made_from", ())
    hint = f" (its card says that it was made from {', '.join(said)})" if said else ""
    return Point("base_model", "missing", f"the source was a folder{hint}; give --base-model OWNER/NAME")


def _account(repo: str, private: bool | None) -> list[Point]:
    """Whether there is a token, and whether the repository exists, as far as the Hub answers; nothing is sent to it."""
    from httpx import HTTPError
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    token = get_token()
    login = "log in with `hf auth login`, or set HF_TOKEN to one that may write"
    points = [Point("token", "done", "found") if token else Point("token", "missing", login)]
    as_new = {True: "private", False: "public", None: "with your account's default visibility"}[private]
    try:
        info = HfApi().model_info(repo, timeout=PATIENCE)
    except RepositoryNotFoundError:
        return [*points, Point("repository", "open", f"{repo}: none that you can see, so it will be made, {as_new}")]
    except HFValidationError:
        return [*points, Point("repository", "missing", f"{repo} is no name on the Hub; write it as owner/name")]
    except (HTTPError, OSError) as failure:
        status = getattr(getattr(failure, "response", None), "status_code", None)
        if token and status in (401, 403):
            return [Point("token", "missing", f"the Hub refuses it ({status}); {login}"), *points[1:]]
        return [*points, Point("repository", "open", f"{repo}: the Hub could not be asked whether it exists")]
    ignored = "; --private and --public change nothing" if private not in (None, info.private) else ""
    return [*points, Point("repository", "done", f"{repo} exists, {'private' if info.private else 'public'}{ignored}")]
