"""Read the headers of a checkpoint on the Hub: config.json and a few kilobytes of every shard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantizers.checkpoint.reader import CONFIG, read_json
from quantizers.checkpoint.safetensors_header import DTYPE_BYTES, Spec
from quantizers.formats.unsupported import refuse_unquantizable
from quantizers.system.errors import CheckpointError


def read_hub(model: str, revision: str) -> tuple[dict[str, Any], dict[str, Spec], str]:
    """Fetch config.json and the header of every shard from the Hub, without downloading shards.

    Returns:
        config.json, dtype and shape of every tensor, and the commit.

    Raises:
        CheckpointError: the Hub cannot be reached or has no such model, it is not a safetensors checkpoint, or it has
            4-bit weights.
    """
    from httpx import HTTPError  # base class of the Hub's own errors
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HFValidationError, NotASafetensorsRepoError, SafetensorsParsingError

    failures = (HTTPError, HFValidationError, NotASafetensorsRepoError, SafetensorsParsingError, OSError, ValueError)
    try:
        api = HfApi()
        commit = api.model_info(model, revision=revision).sha or revision
        config = read_json(Path(hf_hub_download(model, CONFIG, revision=commit)))
        refuse_unquantizable(config, f"{model}: {CONFIG}")  # before the headers, whose dtypes may be unknown here
        files = api.get_safetensors_metadata(model, revision=commit).files_metadata
    except failures as failure:
        reason = next(iter(str(failure).strip().splitlines()), type(failure).__name__)
        raise CheckpointError(
            f"{model}: the Hub did not give its headers ({reason}); check the name and the network, or name a folder"
        ) from None
    specs: dict[str, Spec] = {}
    for file, metadata in sorted(files.items()):
        for name, info in metadata.tensors.items():
            if info.dtype not in DTYPE_BYTES or name in specs:
                what = "is in two shards" if name in specs else f"has the unknown dtype {info.dtype}"
                raise CheckpointError(f"{model}: {file}: {name} {what}; give another revision")
            specs[name] = Spec(info.dtype, tuple(info.shape))
    return config, specs, commit
