"""The version, in the one place that has it: pyproject.toml and `quantizers.__version__` read it from here."""

__version__ = "0.1.0.dev0"
