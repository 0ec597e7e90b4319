"""For each shape an example row and what it means, for the documentation and for new sets.

The tests read every row with the code that reads real ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .set import DataSource, Shape
from .shapes import Content, read_row


@dataclass(frozen=True)
class Example:
    """One shape: what its columns hold, and a row with its columns' names."""

    about: str
    columns: tuple[str, ...]
    row: dict[str, Any]

    def content(self, shape: Shape) -> Content:
        """What becomes of the row."""
        source = DataSource(dataset="a.jsonl", columns=self.columns, shape=shape, samples=1, category="example")
        return read_row(self.row, source, "0")


_WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}

EXAMPLES: dict[Shape, Example] = {
    "text": Example(
        "One column: plain text, which the model reads without a chat template, unless the source has a `prompt`.",
        ("text",),
        {"text": "The harbour freezes in January, and the boats wait for spring."},
    ),
    "prompt-answer": Example(
        "Two columns: what is asked, and what is answered.",
        ("question", "answer"),
        {"question": "What is 17 · 3?", "answer": "51."},
    ),
    "chat": Example(
        "One column or two: a list of turns with `role` (system, developer, user, assistant, tool) and `content`, and "
        "the tools that may be called. An assistant's turn may have `reasoning_content` and `tool_calls`.",
        ("messages", "tools"),
        {
            "messages": [
                {"role": "user", "content": "Is it cold in Oslo?"},
                {
                    "role": "assistant",
                    "content": "",
                    "reasoning_content": "I should look it up.",
                    "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Oslo"}}}],
                },
                {"role": "tool", "content": "-4 °C"},
                {"role": "assistant", "content": "Yes, it is four degrees below zero."},
            ],
            "tools": [{"type": "function", "function": _WEATHER}],
        },
    ),
    "sharegpt": Example(
        "One column or two, as ShareGPT files have them: turns with `from` (system, human, gpt, function_call, tool, "
        "and their usual synonyms) and `value`, and tools. `<think>` and `<tool_call>` in an answer become the fields "
        "that a chat template knows.",
        ("conversations",),
        {
            "conversations": [
                {"from": "human", "value": "Name a prime above 20."},
                {"from": "gpt", "value": "<think>21 is 3 · 7, 22 is even.</think>23."},
            ]
        },
    ),
    "code-contests": Example(
        "The rows of `deepmind/code_contests`: one column, the task's name; `description` and `solutions` are read as "
        "well, and the seed decides which solution is taken.",
        ("name",),
        {
            "name": "Sum",
            "description": "Print the sum of two numbers.",
            "solutions": {"language": [3], "solution": ["print(sum(map(int, input().split())))"]},
        },
    ),
}
