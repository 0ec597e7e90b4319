"""The commands on the pages: what of a page is run, what is marked, and what is written in a wrong way.

A block of commands is fenced as ```sh. Its commands are run, unless a comment at their end, or the first line of the
block, says what they need: `# needs a GPU`. One ends with 0, or as its comment says: `# exit code 3`. A line
`<!-- before: COMMAND -->` outside of blocks is run too, and not seen. CONTRIBUTING.md says this to authors.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
NEEDS = (
    "a GPU", "two GPUs", "the Hub", "a server", "vLLM", "SGLang", "KTransformers", "llama.cpp", "several machines",
    "Docker", "a clone",
)  # fmt: skip
# A page that says so has commands which are compared with the program's, and not run.
PARSED_ONLY = "The examples here are parsed in CI, and not run."
SHELLS = {"bash", "console", "shell", "zsh", "shell-session", "terminal", "cmd", "powershell"}
FENCE = re.compile(r"^(?P<indent> *)(?P<marks>`{3,}|~{3,})[ \t]*(?P<language>[\w+.-]*)")
BEFORE = re.compile(r"^ *<!-- before: (?P<command>.*) -->$")
# Quoted and escaped text, in which a # begins no comment; group 1 is a comment.
COMMENT = re.compile(r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.|(?:^|(?<=\s))#([^\n]*)", re.DOTALL | re.MULTILINE)
# A command in another block than of commands. What the program prints begins so only in "next:" lines.
TYPED = re.compile(r"^(?:\$ |> )?(?:\S+/)?(?:quantize|torchrun|python3?|pip|vllm|hf|git|docker) (?!\d)")
NEXT = re.compile(r"^next: (?=quantize )")
OPERATORS = re.compile(r"^[();<>|&]+$")
PREFIX = re.compile(r"\w+=.*|if|then|elif|else|while|do|time|!|\{", re.DOTALL)
# A line that is a whole command, as bash need not be asked.
SIMPLE = re.compile(r"(?!(?:for|if|while|until|case|select|function)\b)[\w ./=:,@%+~-]*(?:\s#[^\\]*)?")
REDIRECTION = re.compile(r"(?:^|\s)[12&]?>{1,2}(?:&\d|\s*[^\s;|&]+)")


@dataclass(frozen=True)
class Command:
    """One command of a page, which may have several lines.

    Attributes:
        line: number of its first line on the page.
        text: as it is written.
        code: the exit code that it must have.
        needs: what it needs that is not there, so that it is not run.
    """

    line: int
    text: str
    code: int = 0
    needs: tuple[str, ...] = ()

    def calls(self) -> list[list[str]]:
        """The words of every call of `quantize` in it, without the name of the program."""
        text = COMMENT.sub(lambda found: "" if found[1] is not None else found[0], self.text).replace("\\\n", " ")
        text = re.sub(r"<<-?\s*(['\"]?)(\w+)\1.*?^\s*\2$", "", text, flags=re.DOTALL | re.MULTILINE)
        if "quantize" not in text:
            return []
        lexer = shlex.shlex(REDIRECTION.sub(" ", text).replace("\n", " ; "), posix=True, punctuation_chars=True)
        lexer.whitespace_split, lexer.commenters = True, ""
        parts: list[list[str]] = [[]]
        for token in lexer:
            parts.append([]) if OPERATORS.match(token) else parts[-1].append(token)
        found = []
        for part in parts:
            begun = next((at for at, word in enumerate(part) if not PREFIX.fullmatch(word)), len(part))
            if begun < len(part) and Path(part[begun]).name == "quantize":
                found.append(part[begun + 1 :])
            elif "quantizers" in part and part[part.index("quantizers") - 1] == "-m":
                found.append(part[part.index("quantizers") + 1 :])
        return found


@dataclass
class Page:
    """One page.

    Attributes:
        path: its file.
        commands: in their order, hidden ones too.
        shown: lines in other blocks that tell the reader a next command.
        faults: what is written in a wrong way, a line for each with the remedy.
        parsed_only: whether none of its commands is run.
    """

    path: Path
    commands: list[Command] = field(default_factory=list)
    shown: list[Command] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    parsed_only: bool = False

    @property
    def run(self) -> list[Command]:
        """The commands that are run."""
        return [] if self.parsed_only else [command for command in self.commands if not command.needs]


def pages(root: Path = REPOSITORY) -> list[Path]:
    """Every page that a user reads."""
    names = ("README.md", "CONTRIBUTING.md", "AGENTS.md", "docs/**/*.md", "*/README.md", "examples/**/*.md")
    return sorted({path for name in names for path in root.glob(name) if path.is_file()})


@cache
def read_page(path: Path, root: Path = REPOSITORY) -> Page:
    """What stands on a page; faults name it by its path below `root`."""
    text = path.read_text(encoding="utf-8")
    page, fence, block = Page(path, parsed_only=PARSED_ONLY in text), None, []
    name = path.relative_to(root)
    for number, line in enumerate(text.splitlines(), 1):
        if fence is None:
            if fence := FENCE.match(line):
                block, begun = [], number + 1
            elif hidden := BEFORE.match(line):
                page.commands.append(Command(number, hidden["command"]))
            elif re.match(r"\s*<!--\s*before", line):
                page.faults.append(f"{name}:{number}: is not <!-- before: COMMAND --> in one line; write it so")
        elif line.strip().startswith(fence["marks"]) and not line.strip().strip(fence["marks"][0]):
            _read_block(page, f"{name}:", fence["language"], begun, block)
            fence = None
        else:
            block.append(line.removeprefix(fence["indent"]))
    if fence is not None:
        page.faults.append(f"{name}:{begun - 1}: a block that does not end; write its closing fence")
    return page


def _read_block(page: Page, name: str, language: str, begun: int, block: list[str]) -> None:
    if language in SHELLS:
        page.faults.append(
            f"{name}{begun - 1}: a block of {language}; commands that can be run are in ```sh, without a prompt, and "
            "what they print is in ```text"
        )
    elif language == "sh":
        _read_commands(page, name, begun, block)
    else:
        for number, line in enumerate(block, begun):
            if NEXT.match(line):
                page.shown.append(Command(number, NEXT.sub("", line)))
            elif TYPED.match(line) and not page.parsed_only and not _needs(name, number, line, page.faults):
                page.faults.append(
                    f"{name}{number}: a command in a block of {language or 'no language'}; write ```sh, and "
                    "`# needs a GPU` or the like at its end if CI cannot run it"
                )


def _read_commands(page: Page, name: str, begun: int, block: list[str]) -> None:
    of_block: tuple[str, ...] = ()
    lines: list[str] = []
    for number, line in enumerate(block, begun):
        if not lines and (not line.strip() or line.lstrip().startswith("#")):
            found = _needs(name, number, line, page.faults)
            if found and number > begun:
                page.faults.append(
                    f"{name}{number}: a mark on a line of its own; write it at the end of the command's line, or as "
                    "the first line of the block for all of it"
                )
            of_block += found
            continue
        lines.append(line)
        text = "\n".join(lines)
        if _is_whole(text):
            first = number - len(lines) + 1
            if re.match(r"\$ |> ", text):
                page.faults.append(f"{name}{first}: begins with a prompt; leave it out")
            needs = of_block + _needs(name, first, text, page.faults)
            codes = [int(found[1]) for said in comments(text) if (found := re.match(r"exit code (\d+)", said))]
            page.commands.append(Command(first, text, codes[-1] if codes else 0, needs))
            lines = []
    if lines:
        page.faults.append(f"{name}{begun + len(block) - len(lines)}: bash does not understand this: {lines[0]}")


def comments(text: str) -> list[str]:
    """The comments in a command, each part of them that a semicolon separates."""
    return [part.strip() for found in COMMENT.finditer(text) if found[1] for part in found[1].split(";")]


def _needs(name: str, number: int, text: str, faults: list[str]) -> tuple[str, ...]:
    """What a command's comments say that it needs; a fault for what is not in the list."""
    marks = [said.removeprefix("needs ") for said in comments(text) if said.startswith("needs ")]
    needs = [need for mark in marks for need in mark.split(" and ")]
    for need in needs:
        if need not in NEEDS:
            faults.append(f"{name}{number}: `# needs {need}` is no known mark; write one of {', '.join(NEEDS)}")
    return tuple(needs)


def _is_whole(text: str) -> bool:
    """Whether bash takes these lines as whole commands."""
    if SIMPLE.fullmatch(text):
        return True
    if text.endswith("\\"):
        return False
    # Of an unfinished here-document it says so, and ends with 0.
    read = subprocess.run(["bash", "-n", "-c", text], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return not read.returncode and not read.stderr
