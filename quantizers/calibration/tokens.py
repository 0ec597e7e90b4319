"""Convert content into token ids with the model's own tokenizer and chat template."""

from __future__ import annotations

import hashlib
import json
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .shapes import Content, Rejected
from .tokenizer import load_tokenizer, own_code


class Renderer:
    """A tokenizer with its chat template; threads may share it.

    Args:
        source: a folder, or a Hub id.
        revision: of a Hub id.
        trust_remote_code: whether code of the tokenizer, from its repository, may run.

    Raises:
        CalibrationError: see `load_tokenizer`.
    """

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
        code = "".join(f"\0{text}" for text in own_code(self._tokenizer))
        return hashlib.sha256(f"{rules}\0{template}{code}".encode()).hexdigest()
