"""A vLLM that answers lines of JSON instead of HTTP; server.py starts it with the interpreter that has a vLLM.

Its argument is the arguments of vllm.LLM. The first line that it writes says version and max_model_len; each one after
that is the `prompt_logprobs` of the token ids in the line that it read. It ends when nothing more can be read.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    """Load the model, then answer."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs on standard output
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    import vllm

    options = {"skip_tokenizer_init": True, "enable_prefix_caching": False} | json.loads(sys.argv[1])
    engine = vllm.LLM(**options)
    about = {"version": vllm.__version__, "max_model_len": engine.llm_engine.model_config.max_model_len}
    print(json.dumps(about), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        how = vllm.SamplingParams(max_tokens=1, temperature=0, detokenize=False, prompt_logprobs=asked["top_k"])
        (made,) = engine.generate([{"prompt_token_ids": asked["tokens"]}], how, use_tqdm=False)
        rows = [row and as_plain(row) for row in made.prompt_logprobs]  # that of the first token is None
        print(json.dumps(rows), file=answers, flush=True)


def as_plain(row: dict[int, Any]) -> dict[int, dict[str, float]]:
    """A position's log-probabilities by token, as vLLM's HTTP server writes them."""
    return {token: {"logprob": entry.logprob} for token, entry in row.items()}


if __name__ == "__main__":
    main()
