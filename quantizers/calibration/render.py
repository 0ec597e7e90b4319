"""The model's own tokenizer and chat template: from the content of a row to token ids."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from jinja2 import TemplateSyntaxError
from numpy.typing import NDArray

from quantizers.system.errors import CalibrationError

from .chat_template import PLAIN, Habits, habits_of, handed, left_out
from .row_formats import Content, Rejected, Turn

DATE = datetime(2026, 1, 1)  # which a chat template may write instead of today's
READ_WHOLE = 200_000  # characters; of a longer text only as much is tokenized as needed
WHOLE_TURNS = 1024  # tokens; a conversation that is cut at fewer may end within a turn
PROBE = (  # spaces, lines, digits, marks, an accent of its own, a ligature, other scripts
    " Hello  world\n\n\tfor i in range(12345):  # don't, it's 3.14\r\n"
    " gru\u0308n \ufb01n \u0645\u0631 \u4f60\u597d \u0434\u0430"
)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence progress bars, log lines and warnings of `huggingface_hub`; our own messages remain."""
    import huggingface_hub

    utils: Any = huggingface_hub.utils  # which exports them lazily
    level = logging.root.manager.disable
    with warnings.catch_warnings(), ExitStack() as restored:
        warnings.simplefilter("ignore")
        logging.disable()
        restored.callback(logging.disable, level)
        if not utils.are_progress_bars_disabled():
            utils.disable_progress_bars()
            restored.callback(utils.enable_progress_bars)
        yield


def load_tokenizer(
    source: str, revision: str = "main", trust_remote_code: bool = False, note: Callable[[str], object] = str
) -> Any:
    """The tokenizer of a checkpoint, loaded without questions on the terminal.

    A tokenizer with its own code, or of an unknown model type, is loaded without the model's config class, which
    transformers would otherwise look up: that may have code too, or be missing.

    Since version 5 transformers builds a tokenizer by the rules of its class, and of tokenizer.json takes the
    vocabulary alone. Where the two split a text in other ways, the file's rules hold: the model was trained with them.

    Args:
        source: a folder, or a Hub id.
        revision: of a Hub id.
        trust_remote_code: whether code of the tokenizer, from its repository, may run.
        note: takes what a user should know about the tokenizer.

    Raises:
        CalibrationError: there is none, it cannot be read, or it has code that may not run.
    """
    from transformers import AutoTokenizer, PreTrainedConfig, TokenizersBackend
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    try:
        with nullcontext() if Path(source).is_dir() else quiet():
            own = custom_class(get_tokenizer_config(source, revision=revision))
            if own is not None and not trust_remote_code:
                raise CalibrationError(
                    f"{source}: its tokenizer is code of its own ({own}), which is not run; read it, and allow it with "
                    "source.trust_remote_code: tokenizer in the recipe, or without a recipe with --trust-remote-code"
                )
            inert = {"config": PreTrainedConfig()} if own or not _knows_model(source, revision) else {}
            tokenizer = AutoTokenizer.from_pretrained(
                source, revision=revision, trust_remote_code=own is not None, **inert
            )
            if own or not _departs_from_its_file(tokenizer, source, revision):
                return tokenizer
            note(
                f"tokenizer.json splits texts in another way than transformers' {type(tokenizer).__name__}: the file's "
                f"tokens are used; a server with transformers {version('transformers')} reads the others, unless "
                'tokenizer_config.json says "tokenizer_class": "PreTrainedTokenizerFast"'
            )
            return TokenizersBackend.from_pretrained(source, revision=revision)
    except CalibrationError:
        raise
    except Exception as failure:  # the library does not document what it raises
        problem = str(failure).strip().splitlines()[0] if str(failure).strip() else type(failure).__name__
        raise CalibrationError(
            f"{source}: no tokenizer can be read ({problem}); give a model's folder or Hub id"
        ) from failure


def _knows_model(source: str, revision: str) -> bool:
    """Whether transformers knows the model type of a checkpoint, or there is none that it would look up."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    try:
        model_type = PreTrainedConfig.get_config_dict(source, revision=revision)[0].get("model_type")
    except OSError:  # a folder or repository of a tokenizer alone
        return True
    return model_type is None or model_type in CONFIG_MAPPING


def _departs_from_its_file(tokenizer: Any, source: str, revision: str) -> bool:
    """Whether a tokenizer makes other tokens of a text than its tokenizer.json, if it has one.

    The text begins with a space, for whether one is put before a text is up to tokenizer_config.json.
    """
    from tokenizers import Tokenizer
    from transformers import TokenizersBackend
    from transformers.utils import cached_file

    if type(tokenizer) is TokenizersBackend:  # which takes all from the file
        return False
    path = cached_file(source, "tokenizer.json", revision=revision, _raise_exceptions_for_missing_entries=False)
    if path is None:
        return False
    written = Tokenizer.from_file(path)
    written.no_truncation()
    written.no_padding()
    ids: list[int] = tokenizer(PROBE, add_special_tokens=False)["input_ids"]
    return ids != list(written.encode(PROBE, add_special_tokens=False).ids)


def custom_class(settings: dict[str, Any]) -> str | None:
    """The class that a tokenizer_config.json says is in the checkpoint, as module.class; None for one of transformers.

    It is a name by itself, or, in older files, a pair of a slow and a fast one of which one may be null.
    """
    entry = settings.get("auto_map") or {}
    entry = entry.get("AutoTokenizer") if isinstance(entry, dict) else entry
    names = [entry] if isinstance(entry, str) else entry or []
    return next((name for name in reversed(names) if name), None)


def custom_code(tokenizer: Any) -> list[str]:
    """Source code of a tokenizer that is not part of transformers, and of the modules next to it that it imports."""
    from transformers.dynamic_module_utils import get_relative_import_files

    if type(tokenizer).__module__.startswith("transformers."):
        return []
    file = inspect.getfile(type(tokenizer))
    return [Path(name).read_text(encoding="utf-8") for name in (file, *sorted(get_relative_import_files(file)))]


@dataclass(frozen=True)
class Rendered:
    """The content of a row as the model reads it.

    Attributes:
        tokens: int32 (T,), 2 <= T <= the length that was asked for.
        truncated: how many tokens were cut off.
        left_out: what the chat template does not show, see `chat_template.left_out`.
    """

    tokens: NDArray[np.int32]
    truncated: int
    left_out: tuple[str, ...] = ()


class Renderer:
    """A tokenizer with its chat template, from the arguments of `load_tokenizer`; threads may share it."""

    def __init__(self, source: str, revision: str = "main", trust_remote_code: bool = False) -> None:
        self._notes: set[str] = set()
        self._tokenizer: Any = load_tokenizer(source, revision, trust_remote_code, self._notes.add)
        self._lock = Lock()

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about the contents rendered so far."""
        return tuple(sorted(self._notes))

    def render(self, content: Content, length: int) -> Rendered:
        """The content as token ids, cut at `length`.

        Plain text begins with the tokens that the tokenizer puts before every text, such as BOS, and special tokens
        within it are text. A long conversation is cut at the end of a turn, if half of the length or more is left.

        Raises:
            Rejected: the chat template refuses the conversation, or the result has fewer than two tokens.
        """
        try:
            content.text.encode()
        except UnicodeEncodeError:
            raise Rejected("half of a surrogate pair") from None
        with self._lock:
            rendered = self._rendered(content, length)
            if rendered.truncated and length >= WHOLE_TURNS:
                rendered = self._at_a_turn(content, length, rendered)
        if len(rendered.tokens) < 2:
            raise Rejected("fewer than 2 tokens")
        return rendered

    def _rendered(self, content: Content, length: int) -> Rendered:
        text, plain = content.text, True
        if content.turns:
            text, plain = self._conversation(content), not self._tokenizer.chat_template
        ids, total = self._ids(text, length, plain)
        lost = left_out(content.turns, content.tools, text)
        return Rendered(np.asarray(ids[:length], np.int32), max(0, total - length), tuple(lost))

    def _at_a_turn(self, content: Content, length: int, cut: Rendered) -> Rendered:
        """The first turns that fit, if they have half of the length or more, else `cut`."""

        def first(turns: int) -> Rendered:
            try:
                return self._rendered(replace(content, turns=content.turns[:turns]), length)
            except Rejected:  # such as a system turn alone
                return Rendered(cut.tokens[:0], 0)

        def fits(turns: int) -> bool:
            return not first(turns).truncated

        turns = bisect_right(range(1, len(content.turns)), False, key=lambda turns: not fits(turns))
        whole = first(turns)
        lost = len(cut.tokens) + cut.truncated - len(whole.tokens)
        return replace(whole, truncated=lost) if 2 * len(whole.tokens) >= length else cut

    def _ids(self, text: str, length: int, plain: bool) -> tuple[list[int], int]:
        """At least the first `length` token ids of a text, if it has as many, and how many it has, which is estimated
        where a long text is read only as far as needed.
        """
        characters, special = READ_WHOLE, {"split_special_tokens": True} if plain else {}
        before = self._before if plain else []
        while True:
            encoded = self._tokenizer(text[:characters], add_special_tokens=False, verbose=False, **special)
            read: list[int] = encoded["input_ids"]
            if characters >= len(text):
                return before + read, len(before) + len(read)
            if len(read) >= 2 * length:  # so that what is kept is far from the cut
                self._notes.add(f"tokens cut off texts of more than {READ_WHOLE:,} characters are estimated")
                return before + read, len(before) + round(len(read) * len(text) / characters)
            characters *= 4

    @cached_property
    def _before(self) -> list[int]:
        """The token ids that the tokenizer puts before every text."""
        whole, text = (self._tokenizer("a", add_special_tokens=s)["input_ids"] for s in (True, False))
        starts = range(len(whole) - len(text) + 1)
        return list(whole[: next((start for start in starts if whole[start : start + len(text)] == text), 0)])

    @cached_property
    def _habits(self) -> Habits:
        return habits_of(self._apply)

    def _conversation(self, content: Content) -> str:
        """A conversation as text, in the form that the template shows best, or else in another that it accepts."""
        usual, problem = self._habits, ""
        other = replace(usual, arguments="text" if usual.arguments == "mapping" else "mapping")
        for habits in dict.fromkeys((usual, replace(usual, folds=True), other, replace(usual, thoughts=None))):
            try:
                text = self._apply(content.turns, content.tools, habits)
            except TemplateSyntaxError as failure:
                problem = f"line {failure.lineno}: {failure}"
                raise CalibrationError(f"the chat template cannot be read ({problem}); correct it") from None
            except Exception as failure:  # a template is a program and can fail in any way
                problem = problem or (str(failure).strip().splitlines() or [type(failure).__name__])[0]
            else:
                self._note(content.turns, habits)
                return text
        raise Rejected(f"the chat template refuses it: {problem}")

    def _note(self, turns: Sequence[Turn], habits: Habits) -> None:
        if not self._tokenizer.chat_template:
            self._notes.add("the tokenizer has no chat template: each turn begins with its role's name")
        elif habits.tells and any(turn["role"] == "tool" or "tool_calls" in turn for turn in turns):
            self._notes.add("the chat template knows no tool calls: they and their results are told in words")
        if habits.folds and any(turn["role"] in ("system", "developer") for turn in turns):
            self._notes.add("the chat template refuses system turns: their words stand in the user's turns")

    def _apply(self, turns: Sequence[Turn], tools: Sequence[Any], habits: Habits) -> str:
        templates: Any = self._tokenizer.chat_template or PLAIN
        if isinstance(templates, dict):
            calls = tools or any("tool_calls" in turn for turn in turns)
            names = ["tool_use", "default", *templates] if calls else ["default", *templates]
            templates = next(templates[name] for name in names if name in templates)
        text: str = self._tokenizer.apply_chat_template(
            handed(turns, habits),
            tools=list(tools) or None,
            chat_template=templates,
            tokenize=False,
            add_generation_prompt=False,  # some tokenizers with own code add one by default
            strftime_now=self._date,
        )
        return text

    def _date(self, form: str) -> str:
        """The date that a template writes: always the same, so that the tokens are."""
        self._notes.add(f"the chat template writes the date: always {DATE:%d %B %Y}, not today's")
        return DATE.strftime(form)

    def text(self, tokens: NDArray[np.int32]) -> str:
        """Token ids as text, special tokens included."""
        decoded: str = self._tokenizer.decode(tokens.tolist())
        return decoded

    def fingerprint(self) -> str:
        """SHA-256 over all that decides the token ids: vocabulary, merges, normalization, special tokens, template,
        own code, and versions of the libraries.
        """
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        rules = backend.to_str() if backend else json.dumps(self._tokenizer.get_vocab(), sort_keys=True)
        special = {name: str(token) for name, token in self._tokenizer.special_tokens_map.items()}
        versions = [version(library) for library in ("transformers", "tokenizers", "jinja2")]
        settings = json.dumps([self._tokenizer.chat_template, special, self._before, versions], sort_keys=True)
        code = "".join(f"\0{text}" for text in custom_code(self._tokenizer))
        return hashlib.sha256(f"{rules}\0{settings}{code}".encode()).hexdigest()


def scored_bytes(tokenizer: Any, tokens: Sequence[int]) -> int:
    """UTF-8 bytes of all tokens except the first, which is not scored. Losses per byte compare across tokenizers."""
    whole, first = (len(tokenizer.decode(part).encode()) for part in (list(tokens), list(tokens[:1])))
    return max(1, whole - first)
