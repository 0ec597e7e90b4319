"""The model's own tokenizer and chat template: from the content of a row to token ids.

No file says how a chat template reads a conversation: its habits are found by rendering small ones.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from importlib.metadata import version
from itertools import count, product
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import numpy as np
from jinja2 import TemplateSyntaxError
from numpy.typing import NDArray

from quantizers.system.errors import CalibrationError, first_line

from .row_formats import THOUGHTS, Content, Rejected, Turn, turn_of

# Keys of tokenizer_config.json that are true or false.
SWITCHES = {"add_bos_token", "add_eos_token", "add_prefix_space", "do_lower_case", "legacy", "split_special_tokens"}

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
    """The tokenizer of a checkpoint, a folder or a Hub id, loaded without questions on the terminal.

    A tokenizer with its own code, or of an unknown model type, is loaded without the model's config class, which may
    have code too, or be missing. Since version 5 transformers builds a tokenizer by the rules of its class, and of
    tokenizer.json takes the vocabulary alone. Where the two split a text in other ways, the file's rules hold: the
    model was trained with them.

    `note` takes what a user should know about it. Raises CalibrationError if there is none, it cannot be read, or it
    has code that may not run.
    """
    from transformers import AutoTokenizer, PreTrainedConfig, TokenizersBackend
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    try:
        with nullcontext() if Path(source).is_dir() else quiet():
            stored = get_tokenizer_config(source, revision=revision)
            _refuse_numbers_as_text(stored, source)
            own = custom_class(stored)
            if own is not None and not trust_remote_code:
                raise CalibrationError(
                    source,
                    f"its tokenizer is code of its own ({own}), which is not run",
                    "read it, and allow it with source.trust_remote_code: tokenizer in the recipe, or without a "
                    "recipe with --trust-remote-code",
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
        raise CalibrationError(
            source, f"no tokenizer can be read ({first_line(failure)})", "give a model's folder or Hub id"
        ) from failure


def _refuse_numbers_as_text(config: Mapping[str, Any], source: str) -> None:
    """Refuse a tokenizer_config.json that has as text what decides tokens: libraries would take "false" for true."""
    for key, value in config.items():
        if isinstance(value, str) and (key == "model_max_length" or key in SWITCHES):
            raise CalibrationError(
                f"{source}: tokenizer_config.json", f"{key} is {value!r}, which is text", "write it without quotes"
            )


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


def _custom_code(tokenizer: Any) -> list[str]:
    """Source code of a tokenizer that is not part of transformers, and of the modules next to it that it imports."""
    from transformers.dynamic_module_utils import get_relative_import_files

    if type(tokenizer).__module__.startswith("transformers."):
        return []
    file = inspect.getfile(type(tokenizer))
    return [Path(name).read_text(encoding="utf-8") for name in (file, *sorted(get_relative_import_files(file)))]


# For tokenizers without a template: a line for each turn, in the markup of Hermes-style data sets.
PLAIN = """\
{% if tools %}tools: {{ tools | tojson }}

{% endif %}{% for message in messages %}{{ message.role }}: \
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>
{% endif %}{{ message.content }}

{% endfor %}"""


@dataclass(frozen=True)
class Habits:
    """Conventions of a chat template for the turns of a conversation."""

    parts: bool = False  # a turn's content is a list of typed parts
    thoughts: str | None = THOUGHTS[0]  # the key under which it reads an answer's thoughts; None to leave them out
    arguments: Literal["mapping", "text"] = "mapping"  # of a call; text is JSON
    ids: Literal["own", "named", "short"] = "own"  # of calls; named: `functions.NAME:NUMBER`; short: nine characters
    # The content of a turn of calls alone: the first DeepSeek-V3 and R1 write calls only where it is null.
    no_text: Literal["empty", "null", "missing"] = "empty"
    apart: bool = False  # it leaves out words beside calls: they become a turn of their own before them
    # It knows user and assistant alone, in turn: words of the system are the user's, and neighbouring turns of one role
    # are joined.
    folds: bool = False
    # It knows no calls: they and their results are told in words, in the markup of Hermes-style data sets.
    tells: bool = False


_ARGUMENTS = {"fruit": "quince"}
_ASKED, _ANSWERED = turn_of("user", "apricot"), turn_of("assistant", "cherry")
_RESULT = turn_of("tool", "damson")
_CALL = {"id": "call_1", "type": "function", "function": {"name": "pick_one", "arguments": _ARGUMENTS}}
# Conversations, and the ways to hand them over, the usual one first.
_PROBES: tuple[tuple[Sequence[Turn], Sequence[dict[str, Any]]], ...] = (
    ((_ASKED, _ANSWERED), ({}, {"parts": True})),
    ((turn_of("system", "bilberry"), _ASKED, _ANSWERED), ({}, {"folds": True})),
    ((_ASKED, _ANSWERED | {"reasoning_content": "sloe"}), [{"thoughts": key} for key in THOUGHTS]),
    (
        (_ASKED, turn_of("assistant", "", tool_calls=[_CALL]), _RESULT, _ANSWERED),
        [
            *(
                {"no_text": no_text, "arguments": arguments, "ids": ids}
                for no_text, arguments, ids in product(
                    ("empty", "null", "missing"), ("mapping", "text"), ("own", "named", "short")
                )
            ),
            {"tells": True},
        ],
    ),
    ((_ASKED, turn_of("assistant", "fig", tool_calls=[_CALL]), _RESULT, _ANSWERED), ({}, {"apart": True})),
)


def prepared_turns(turns: Sequence[Turn], habits: Habits) -> list[Turn]:
    """The turns of a conversation in the form that a template takes."""
    ready = list(_with_ids(turns, habits.ids))
    if habits.tells:
        ready = [_with_calls_in_words(turn) for turn in ready]
    if habits.folds:
        ready = _folded(ready)
    if habits.apart:
        ready = [half for turn in ready for half in _halves(turn)]
    return [_formed(turn, habits) for turn in ready]


def _with_ids(turns: Iterable[Turn], kind: str) -> Iterator[Turn]:
    """Give each call and its result an id: results without one belong to the calls before them, in their order."""
    number = 0
    waiting = list[str]()
    renamed = dict[str, str]()
    for turn in turns:
        added: Turn = {}
        if "tool_calls" in turn:
            added["tool_calls"], waiting = [], []
            for call in turn["tool_calls"]:
                named = f"functions.{call['function']['name']}:{number}"
                own, short = call.get("id", named), hashlib.sha256(named.encode()).hexdigest()[:9]
                renamed[own] = {"own": own, "named": named, "short": short}[kind]
                waiting.append(renamed[own])
                added["tool_calls"].append(call | {"id": renamed[own]})
                number += 1
        elif turn["role"] == "tool" and (waiting or str(turn.get("tool_call_id")) in renamed):
            added["tool_call_id"] = renamed.get(str(turn.get("tool_call_id"))) or waiting[0]
            waiting = [other for other in waiting if other != added["tool_call_id"]]
        yield turn | added


def _with_calls_in_words(turn: Turn) -> Turn:
    """A turn with its calls, or its result, told in its words."""
    if turn["role"] == "tool":
        return turn_of("user", f"<tool_response>\n{turn['content']}\n</tool_response>")
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in turn.get("tool_calls", ())]
    words = [*filter(None, [turn["content"]]), *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]
    return {key: value for key, value in turn.items() if key != "tool_calls"} | {"content": "\n".join(words)}


def _folded(turns: Iterable[Turn]) -> list[Turn]:
    """User and assistant turns in turn, where the calls between them allow it."""
    folded: list[Turn] = []
    for turn in turns:
        role = "user" if turn["role"] in ("system", "developer") else turn["role"]
        before = folded[-1] if folded else {}
        if role == before.get("role") != "tool" and "tool_calls" not in before:
            both = {
                key: [neighbour[key] for neighbour in (before, turn) if neighbour.get(key)]
                for key in ("content", THOUGHTS[0])
            }
            words = {key: "\n\n".join(texts) for key, texts in both.items() if texts}
            folded[-1] = before | turn | words | {"role": role}
        else:
            folded.append(turn | {"role": role})
    return folded


def _halves(turn: Turn) -> list[Turn]:
    """A turn's thoughts and words, and its calls, as two turns; the turn itself if it has not both."""
    if not ("tool_calls" in turn and turn["content"].strip()):
        return [turn]
    calls = {key: value for key, value in turn.items() if key != THOUGHTS[0]} | {"content": ""}
    return [{key: value for key, value in turn.items() if key != "tool_calls"}, calls]


def _formed(turn: Turn, habits: Habits) -> Turn:
    formed = {key: value for key, value in turn.items() if key != THOUGHTS[0]}
    if THOUGHTS[0] in turn and habits.thoughts:
        formed[habits.thoughts] = turn[THOUGHTS[0]]
    if habits.parts:
        formed["content"] = [{"type": "text", "text": turn["content"]}]
    if "tool_calls" in turn and habits.no_text != "empty" and not turn["content"].strip():
        formed["content"] = None
        if habits.no_text == "missing":
            del formed["content"]
    if habits.arguments == "text" and "tool_calls" in turn:
        formed["tool_calls"] = []
        for call in turn["tool_calls"]:
            arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            formed["tool_calls"].append(call | {"function": call["function"] | {"arguments": arguments}})
    return formed


def _parts(turns: Iterable[Turn], tools: Iterable[Any]) -> Iterator[tuple[str, list[str]]]:
    """The parts of a conversation that a template should show, such as `thoughts` or `call`, each with its words."""
    for turn in turns:
        words = {f"{turn['role']} turn": turn["content"], "thoughts": turn.get(THOUGHTS[0], "")}
        yield from ((what, [written.strip()]) for what, written in words.items() if written.strip())
        for call in turn.get("tool_calls", ()):
            yield "call", [call["function"]["name"]]
            yield "arguments", _leaves(call["function"]["arguments"])
    for tool in tools:
        match tool:
            case {"function": {"name": str(name)}}:
                yield "tool", [name]


def _leaves(value: Any) -> list[str]:
    """The texts and numbers within a value, as text."""
    if isinstance(value, (dict, list)):
        return [leaf for inner in (value.values() if isinstance(value, dict) else value) for leaf in _leaves(inner)]
    return [] if value is None or isinstance(value, bool) else [str(value)]


def left_out(turns: Iterable[Turn], tools: Iterable[Any], text: str) -> Counter[str]:
    """Count the parts of a conversation whose words are not in the rendered text, as they are or as JSON.

    Arguments of calls are not among them, which templates write in too many ways; see `unseen`.
    """
    parts = Counter((what, words[0]) for what, words in _parts(turns, tools) if what != "arguments")

    def shown(words: str) -> int:
        return max(text.count(words), text.count(json.dumps(words, ensure_ascii=False)[1:-1]))

    return Counter(what for (what, words), number in parts.items() for _ in range(number - shown(words)))


def unseen(turns: Iterable[Turn], tools: Iterable[Any], text: str) -> Counter[str]:
    """Count the parts of a conversation, each with words of its own, that are not whole in the rendered text."""
    return Counter(what for what, words in _parts(turns, tools) if not all(word in text for word in words))


def marked(content: Content) -> Content:
    """A conversation of the same form, in which every text, name and value is a word of its own."""
    numbers = count()

    def mark(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: mark(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [mark(inner) for inner in value]
        written = isinstance(value, str) and value.strip()
        return f"mark{next(numbers)}x" if written or type(value) in (int, float) else value

    turns = []
    for turn in content.turns:
        words = {key: mark(turn[key]) for key in ("content", THOUGHTS[0]) if key in turn}
        if "tool_calls" in turn:
            words["tool_calls"] = [call | {"function": mark(call["function"])} for call in turn["tool_calls"]]
        turns.append(turn | words)
    tools = []
    for tool in content.tools:
        match tool:
            case {"function": {"name": str()} as function}:
                tools.append(tool | {"function": function | {"name": mark("name")}})
            case _:
                tools.append(tool)
    return Content(tuple(turns), tuple(tools), "")


@dataclass(frozen=True)
class Rendered:
    """The content of a row as the model reads it."""

    tokens: NDArray[np.int32]  # (T,), 2 <= T <= the length that was asked for
    truncated: int  # how many tokens were cut off
    left_out: tuple[str, ...] = ()  # what the chat template does not show, see `left_out` and `unseen`


class Renderer:
    """A tokenizer with its chat template, from the arguments of `load_tokenizer`; threads may share it."""

    def __init__(self, source: str, revision: str = "main", trust_remote_code: bool = False) -> None:
        self._notes: set[str] = set()
        self.tokenizer: Any = load_tokenizer(source, revision, trust_remote_code, self._notes.add)
        self._lock = Lock()

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user about the contents rendered so far."""
        return tuple(sorted(self._notes))

    def render(self, content: Content, length: int) -> Rendered:
        """The content as token ids, cut at `length`.

        Plain text begins with the tokens that the tokenizer puts before every text, such as BOS, and special tokens
        within it are text. A long conversation is cut at the end of a turn, if half of the length or more is left.
        Raises Rejected if the chat template refuses the conversation, or the result has fewer than two tokens.
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
        lost = Counter[str]()
        if content.turns:
            text, habits = self._conversation(content)
            plain = not self.tokenizer.chat_template
            lost = left_out(content.turns, content.tools, text) | self._unseen(content, habits)
        ids, total = self._ids(text, length, plain)
        return Rendered(np.asarray(ids[:length], np.int32), max(0, total - length), tuple(lost.elements()))

    def _unseen(self, content: Content, habits: Habits) -> Counter[str]:
        """Count the parts that the template leaves out whatever their words are, which may stand elsewhere as well."""
        same = marked(content)
        try:
            return unseen(same.turns, same.tools, self._apply(same.turns, same.tools, habits))
        # A template is a program and can fail in any way, here at words that are not those of the conversation. Then
        # `left_out` alone counts, and the set's notes say so.
        except Exception:
            self._notes.add(
                "the chat template refuses some conversations in other words: of these, what it leaves out is counted "
                "only where the same words do not stand elsewhere"
            )
            return Counter()

    def _at_a_turn(self, content: Content, length: int, cut: Rendered) -> Rendered:
        """The first turns that fit, if they have half of the length or more, else `cut`."""

        def first(turns: int) -> Rendered:
            try:
                return self._rendered(replace(content, turns=content.turns[:turns]), length)
            except Rejected:  # such as a system turn alone
                return Rendered(cut.tokens[:0], 0)

        whole = first(bisect_right(range(1, len(content.turns)), 0, key=lambda turns: first(turns).truncated))
        lost = len(cut.tokens) + cut.truncated - len(whole.tokens)
        return replace(whole, truncated=lost) if 2 * len(whole.tokens) >= length else cut

    def _ids(self, text: str, length: int, plain: bool) -> tuple[list[int], int]:
        """At least the first `length` token ids of a text, if it has as many, and how many it has, which is estimated
        where a long text is read only as far as needed.
        """
        characters, special = READ_WHOLE, {"split_special_tokens": True} if plain else {}
        before = self._before if plain else []
        while True:
            encoded = self.tokenizer(text[:characters], add_special_tokens=False, verbose=False, **special)
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
        whole, text = (self.tokenizer("a", add_special_tokens=s)["input_ids"] for s in (True, False))
        starts = range(len(whole) - len(text) + 1)
        return list(whole[: next((start for start in starts if whole[start : start + len(text)] == text), 0)])

    @cached_property
    def _habits(self) -> Habits:
        """The habits with which the template shows most of some small conversations."""
        habits = Habits()
        for turns, ways in _PROBES:
            lost = [self._lost(turns, replace(habits, **way)) for way in ways]
            habits = replace(habits, **ways[lost.index(min(lost))])
        return habits

    def _lost(self, turns: Sequence[Turn], habits: Habits) -> float:
        """Count the parts of a conversation that are not shown; arguments printed as a Python dict count as one."""
        try:
            text = self._apply(turns, (), habits)
        # A template is a program and can fail in any way. These habits are then not chosen; if none works,
        # `_conversation` rejects the sample with the reason.
        except Exception:
            return float("inf")
        return unseen(turns, (), text).total() + (str(_ARGUMENTS) in text)

    def _conversation(self, content: Content) -> tuple[str, Habits]:
        """A conversation as text, in the form that the template shows best, or else in another that it accepts."""
        usual, problem = self._habits, ""
        other = replace(usual, arguments="text" if usual.arguments == "mapping" else "mapping")
        together, thoughtless = replace(usual, apart=False), replace(usual, thoughts=None)
        for habits in dict.fromkeys((usual, together, replace(usual, folds=True), other, thoughtless)):
            try:
                text = self._apply(content.turns, content.tools, habits)
            except TemplateSyntaxError as failure:
                problem = f"line {failure.lineno}: {failure}"
                raise CalibrationError("", f"the chat template cannot be read ({problem})", "correct it") from None
            except Exception as failure:  # a template is a program and can fail in any way
                problem = problem or first_line(failure)
            else:
                self._note(content.turns, habits)
                return text, habits
        raise Rejected(f"the chat template refuses it: {problem}")

    def _note(self, turns: Sequence[Turn], habits: Habits) -> None:
        if not self.tokenizer.chat_template:
            self._notes.add("the tokenizer has no chat template: each turn begins with its role's name")
        elif habits.tells and any(turn["role"] == "tool" or "tool_calls" in turn for turn in turns):
            self._notes.add("the chat template knows no tool calls: they and their results are told in words")
        elif habits.apart and any("tool_calls" in turn and turn["content"].strip() for turn in turns):
            self._notes.add("the chat template leaves out words beside calls: they are a turn of their own before them")
        if habits.folds and any(turn["role"] in ("system", "developer") for turn in turns):
            self._notes.add("the chat template refuses system turns: their words stand in the user's turns")

    def _apply(self, turns: Sequence[Turn], tools: Sequence[Any], habits: Habits) -> str:
        templates: Any = self.tokenizer.chat_template or PLAIN
        if isinstance(templates, dict):
            calls = tools or any("tool_calls" in turn for turn in turns)
            names = ["tool_use", "default", *templates] if calls else ["default", *templates]
            templates = next(templates[name] for name in names if name in templates)
        from transformers.utils.chat_template_utils import _compile_jinja_template

        # An argument of this name would do in transformers 5.17; 5.24 makes text of it. A template is compiled once.
        _compile_jinja_template(templates).globals["strftime_now"] = self._date
        text: str = self.tokenizer.apply_chat_template(
            prepared_turns(turns, habits),
            tools=list(tools) or None,
            chat_template=templates,
            tokenize=False,
            add_generation_prompt=False,  # some tokenizers with own code add one by default
        )
        return text

    def _date(self, form: str) -> str:
        """The date that a template writes: always the same, so that the tokens are."""
        self._notes.add(f"the chat template writes the date: always {DATE:%d %B %Y}, not today's")
        return DATE.strftime(form)

    def fingerprint(self) -> str:
        """SHA-256 over all that decides the token ids: vocabulary, merges, normalization, special tokens, template,
        own code, and versions of the libraries.
        """
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        rules = backend.to_str() if backend else json.dumps(self.tokenizer.get_vocab(), sort_keys=True)
        special = {name: str(token) for name, token in self.tokenizer.special_tokens_map.items()}
        versions = [version(library) for library in ("transformers", "tokenizers", "jinja2")]
        settings = json.dumps([self.tokenizer.chat_template, special, self._before, versions], sort_keys=True)
        code = "".join(f"\0{text}" for text in _custom_code(self.tokenizer))
        return hashlib.sha256(f"{rules}\0{settings}{code}".encode()).hexdigest()


def scored_bytes(tokenizer: Any, tokens: Sequence[int]) -> int:
    """UTF-8 bytes of all tokens except the first, which is not scored. Losses per byte compare across tokenizers."""
    whole, first = (len(tokenizer.decode(ids).encode()) for ids in (list(tokens), list(tokens[:1])))
    return max(1, whole - first)
