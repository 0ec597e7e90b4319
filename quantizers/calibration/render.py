"""The model's own tokenizer and chat template: from the content of a row to token ids."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantizers.system.errors import CalibrationError

from .row_formats import Content, Rejected


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


def load_tokenizer(source: str, revision: str = "main", trust_remote_code: bool = False) -> Any:
    """The tokenizer of a checkpoint, loaded without questions on the terminal.

    A tokenizer with its own code, or of an unknown model type, is loaded without the model's config class, which
    transformers would otherwise look up: that may have code too, or be missing.

    Args:
        source: a folder, or a Hub id.
        revision: of a Hub id.
        trust_remote_code: whether code of the tokenizer, from its repository, may run.

    Raises:
        CalibrationError: there is none, it cannot be read, or it has code that may not run.
    """
    from transformers import AutoTokenizer, PreTrainedConfig
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
            return AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=own is not None, **inert)
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


class Renderer:
    """A tokenizer with its chat template, from the arguments of `load_tokenizer`; threads may share it."""

    def __init__(self, source: str, revision: str = "main", trust_remote_code: bool = False) -> None:
        self._tokenizer: Any = load_tokenizer(source, revision, trust_remote_code)
        self._lock = Lock()

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template, so that it can render conversations."""
        return bool(self._tokenizer.chat_template)

    def tokens(self, content: Content) -> NDArray[np.int32]:
        """The whole content as token ids, int32 (T,), not truncated.

        Raises:
            Rejected: the chat template refuses the conversation, or the result has fewer than two tokens.
        """
        try:
            content.text.encode()
        except UnicodeEncodeError:
            raise Rejected("half of a surrogate pair") from None
        with self._lock:
            text = self._render(content) if content.turns else content.text
            ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) < 2:
            raise Rejected("fewer than 2 tokens")
        return np.asarray(ids, dtype=np.int32)

    def _render(self, content: Content) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(content.turns), tools=list(content.tools) or None, tokenize=False
            )
        except Exception as failure:  # a template is a program and can fail in any way
            problem = str(failure).strip().splitlines() or [type(failure).__name__]
            raise Rejected(f"the chat template refuses it: {problem[0]}") from None
        return text

    def text(self, tokens: NDArray[np.int32]) -> str:
        """Token ids as text, special tokens included."""
        decoded: str = self._tokenizer.decode(tokens.tolist())
        return decoded

    def fingerprint(self) -> str:
        """SHA-256 over all that decides the token ids: vocabulary, merges, normalization, chat template, own code."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        rules = backend.to_str() if backend else json.dumps(self._tokenizer.get_vocab(), sort_keys=True)
        template = json.dumps(self._tokenizer.chat_template, sort_keys=True)
        code = "".join(f"\0{text}" for text in custom_code(self._tokenizer))
        return hashlib.sha256(f"{rules}\0{template}{code}".encode()).hexdigest()


def scored_bytes(tokenizer: Any, tokens: Sequence[int]) -> int:
    """UTF-8 bytes of all tokens except the first, which is not scored. Losses per byte compare across tokenizers."""
    whole, first = (len(tokenizer.decode(part).encode()) for part in (list(tokens), list(tokens[:1])))
    return max(1, whole - first)
