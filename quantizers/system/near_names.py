"""Suggestions for a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MOST = 3  # names suggested where several begin with what was given
BEGUN = 3  # letters that say anything


def did_you_mean(name: str, known: Iterable[str], most: int = MOST) -> str:
    """` (did you mean group_size?)` for a name near to a known one, else nothing.

    Near are the names that begin with it, if it has three letters: `most` of them, shortest first. If none
    does, it is the one most like it. Upper and lower case are alike.
    """
    names = {one.lower(): one for one in known}
    begun = sorted(
        (one for one in names if len(name) >= BEGUN and one.startswith(name.lower())), key=lambda one: (len(one), one)
    )
    near = begun[:most] or difflib.get_close_matches(name.lower(), names, n=1)
    return f" (did you mean {' or '.join(names[one] for one in near)}?)" if near else ""
