"""Convert content into token ids with the model's own tokenizer and chat template."""

from __future__ import annotations

import hashlib
import json
from contextlib import nullcontext
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantizers.system.errors import CalibrationError

from .shapes import Content, Rejected


class Renderer:
    """A tokenizer with its chat template; threads may share it.

    Args:
        source: a folder, or a Hub id.
        revision: of a Hub id.
        trust_remote_code: whether code from the tokenizer's repository may run.

    Raises:
        CalibrationError: the tokenizer cannot be loaded.
    """

    def __init__(self, source: str, revision: str = "main", trust_remote_code: bool = False) -> None:
        from transformers import AutoTokenizer

        from .sources.hub import quiet

        try:
            with nullcontext() if Path(source).is_dir() else quiet():
                self._tokenizer: Any = AutoTokenizer.from_pretrained(
                    source, revision=revision, trust_remote_code=trust_remote_code
                )
        except Exception as failure:  # the library does not document what it raises
            problem = str(failure).strip().splitlines()[0] if str(failure).strip() else type(failure).__name__
            raise CalibrationError(
                f"{source}: no tokenizer can be read ({problem}); give a model's folder or Hub id"
            ) from failure
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
        """SHA-256 over everything that decides the token ids: vocabulary, merges, normalization, chat template."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        rules = backend.to_str() if backend else json.dumps(self._tokenizer.get_vocab(), sort_keys=True)
        template = json.dumps(self._tokenizer.chat_template, sort_keys=True)
        return hashlib.sha256(f"{rules}\0{template}".encode()).hexdigest()
