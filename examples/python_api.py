"""The tiny job from Python: quantize, evaluate the files again, verify them. `python examples/python_api.py FOLDER`"""

import sys

import quantizers

made = quantizers.run("tiny-minimax-m2-fp8-int4", sys.argv[1] if len(sys.argv) > 1 else "out/tiny")
print(f"gates passed: {made.passed}; KL {made.kl:.6f} nats, perplexity {made.perplexity:.4f}")
evaluated = quantizers.evaluate(made.source, made.folder, "held-out").candidates[0]
print(f"evaluated again, from the files alone: KL {evaluated.kl:.6f} nats, perplexity {evaluated.perplexity:.4f}")
verified = quantizers.verify(made.folder, made.source)
print(f"verified: {verified.passed}; differences {verified.differences}, misread by servers {verified.misread}")
