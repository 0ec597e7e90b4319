"""What a model says before and after: greedy answers of a source and its output to the same questions, side by side.

    python benchmarks/answers.py SOURCE OUTPUT --tokens 60

Both are loaded by transformers, the output through compressed-tensors, and computed in float32. The questions are in
three languages and code; --ask asks others. A ▲ stands before the first token that differs: what follows an early
difference depends on it, and says little of quality. That is what KL is for, and beside each answer stands the mean KL
of the next token while the answers are the same.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

ASKED = (
    "What is the capital of France?",
    "Why is the sky blue? Answer in one sentence.",
    "Quelle est la capitale de l'Italie ?",
    "¿Cuál es la capital de España?",
    "Write a Python function that returns the sum of a list of numbers.",
)
MARK = "▲"


@dataclass(frozen=True)
class Answers:
    """The answers of both models to a question.

    Attributes:
        source, output: token ids, without those of the question.
        same: the number of tokens before the first difference.
        kl: mean KL(source || output) over the tokens up to the first difference, nats; of the next token each.
    """

    question: str
    source: list[int]
    output: list[int]
    same: int
    kl: float


def load(folder: Path) -> Any:
    """A checkpoint by transformers, in float32; a quantized one is decompressed."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import CompressedTensorsConfig

    quantized = "quantization_config" in json.loads((folder / "config.json").read_text())
    more = {"quantization_config": CompressedTensorsConfig(run_compressed=False)} if quantized else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more).float().eval()


def answer(model: Any, asked: torch.Tensor, most: int) -> list[int]:
    """The greedy answer to token ids (1, T), at most so many tokens."""
    with torch.no_grad():
        made = model.generate(
            asked, attention_mask=torch.ones_like(asked), max_new_tokens=most, do_sample=False, num_beams=1
        )
    tokens: list[int] = made[0, asked.shape[1] :].tolist()
    return tokens


def compared(question: str, tokenizer: Any, models: Sequence[Any], most: int) -> Answers:
    """Ask both models a question in the tokenizer's chat template."""
    chat = [{"role": "user", "content": question}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = asked["input_ids"]
    source, output = (answer(model, ids, most) for model in models)
    pairs = enumerate(zip_longest(source, output))
    same = next((n for n, (ours, theirs) in pairs if ours != theirs), len(source))
    both = torch.cat([ids, torch.tensor([source[:same]], dtype=ids.dtype)], dim=1)
    with torch.no_grad():
        logs = [model(both).logits[0, ids.shape[1] - 1 :].float().log_softmax(-1) for model in models]
    kl = (logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean()
    return Answers(question, source, output, same, float(kl))


def shown(answers: Answers, tokenizer: Any, width: int) -> str:
    """A question, and both answers side by side, each in a column of `width` letters."""

    def text(tokens: list[int]) -> list[str]:
        before = tokenizer.decode(tokens[: answers.same], skip_special_tokens=True)
        after = tokenizer.decode(tokens[answers.same :], skip_special_tokens=True)
        whole = before + (MARK if answers.source != answers.output else "") + after
        return [piece for line in whole.splitlines() for piece in textwrap.wrap(line, width) or [""]]

    rows = zip_longest(text(answers.source), text(answers.output), fillvalue="")
    head = f"{answers.question}  [{answers.same} tokens alike, KL {answers.kl:.4f}]"
    return "\n".join([head, *(f"  {left:<{width}}  {right}".rstrip() for left, right in rows)])


def main() -> None:
    """Ask both models all questions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a folder")
    parser.add_argument("output", type=Path, help="a folder")
    parser.add_argument("--ask", nargs="+", default=ASKED, metavar="QUESTION", help="instead of those in this file")
    parser.add_argument("--tokens", type=int, default=60, help="of an answer, at most")
    parser.add_argument("--width", type=int, default=54, help="of a column")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    given = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(given.source)
    models = [load(given.source), load(given.output)]
    every = [compared(question, tokenizer, models, given.tokens) for question in given.ask]
    if given.json:
        decoded = [
            vars(answers) | {key: tokenizer.decode(getattr(answers, key)) for key in ("source", "output")}
            for answers in every
        ]
        print(json.dumps(decoded, indent=1))
        return
    print(f"  {given.source.name:<{given.width}}  {given.output.name}\n")
    print("\n\n".join(shown(answers, tokenizer, given.width) for answers in every))


if __name__ == "__main__":
    main()
