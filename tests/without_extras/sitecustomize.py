"""Python in which packages of extras cannot be imported, where this folder is on PYTHONPATH; not matplotlib."""

import sys

for _package in ("llmcompressor", "accelerate", "gguf", "py3langid"):
    sys.modules[_package] = None  # an import of it fails
