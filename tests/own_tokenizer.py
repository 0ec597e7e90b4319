"""A tokenizer with code of its own, as Kimi-K2's: a Python class beside the model, and its data in tiktoken.model.

Its model has code of its own too, for a model type that transformers does not know; it leaves a file when it runs.
"""

from __future__ import annotations

import json
from pathlib import Path

from calibration_tokenizer import TEMPLATE

CLASS = """\
import os

from transformers.tokenization_utils import PreTrainedTokenizer

from .words import first_id


class ByteTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file, **kwargs):
        self.first = first_id(vocab_file)
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return self.first + 256

    def get_vocab(self):
        return {f"<{number}>": self.first + number for number in range(256)} | self.added_tokens_encoder

    def _tokenize(self, text):
        return [f"<{byte}>" for byte in text.encode()]

    def _convert_token_to_id(self, token):
        return self.first + int(token[1:-1])

    def _convert_id_to_token(self, number):
        return f"<{number - self.first}>"

    def convert_tokens_to_string(self, tokens):
        return bytes(int(token[1:-1]) for token in tokens).decode()
"""
WORDS = """\
def first_id(file):
    with open(file) as stream:
        return int(stream.read())
"""
FIRST = 20  # the id of byte 0
FILES = ("tiktoken.model", "tokenization_own.py", "tokenizer_config.json", "words.py")


def write_own_tokenizer(folder: Path, ran: Path) -> Path:
    """Write the tokenizer's files into a folder, instead of any that it has.

    Args:
        ran: a file that the model's code leaves when it runs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").unlink(missing_ok=True)
    (folder / "tokenization_own.py").write_text(CLASS)
    (folder / "words.py").write_text(WORDS)
    (folder / "tiktoken.model").write_text(str(FIRST))
    settings = {
        "tokenizer_class": "ByteTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_own.ByteTokenizer", None]},
        "chat_template": TEMPLATE,
        "eos_token": "[end]",
        "additional_special_tokens": ["[turn]"],
        "added_tokens_decoder": {
            str(number): {"content": word, "special": True, "lstrip": False, "rstrip": False, "normalized": False}
            for number, word in enumerate(("[end]", "[turn]"))
        },
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "configuration_own.py").write_text(
        "from pathlib import Path\n\nfrom transformers import DeepseekV3Config\n\n"
        f"Path({str(ran)!r}).touch()\n\n\nclass OwnConfig(DeepseekV3Config):\n    model_type = 'kimi_k2'\n"
    )
    config = folder / "config.json"
    own = json.loads(config.read_text()) if config.exists() else {"model_type": "kimi_k2"}
    own["auto_map"] = {"AutoConfig": "configuration_own.OwnConfig"}
    config.write_text(json.dumps(own))
    return folder


def own_ids(text: str) -> list[int]:
    """What it makes of a text without special tokens."""
    return [FIRST + byte for byte in text.encode()]
