"""Opening public checkpoints: complete, finite, from safetensors, in fp32 unless it is said otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from guardpaint.errors import BadCheckpoint


def open_model(auto: Any, folder: Path, what: str, dtype: torch.dtype | str = torch.float32) -> Any:
    """A model of transformers, frozen; `dtype="auto"` keeps the precision that it is stored in.

    Weights that are missing, misshapen or not finite are an error. transformers itself would draw them at random, and
    a detector with a random head is an open door.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            model, loading = auto.from_pretrained(
                folder, dtype=dtype, use_safetensors=True, local_files_only=True, output_loading_info=True
            )
    except Exception as error:  # files from anywhere raise almost anything
        raise BadCheckpoint(f"{folder}: cannot be opened as {what} ({type(error).__name__}: {error})") from error
    absent = sorted(map(str, (*loading["missing_keys"], *loading["mismatched_keys"])))
    if absent:
        raise BadCheckpoint(f"{folder}: {len(absent)} weights of {what} are missing, such as {absent[0]}")
    for name, weight in model.state_dict().items():
        if weight.is_floating_point() and not torch.isfinite(weight).all():
            raise BadCheckpoint(f"{folder}: {name} holds NaN or infinity")
    return model.eval().requires_grad_(False)


def open_processor(processor_class: Any, folder: Path, what: str) -> Any:
    """The processor that a checkpoint's publisher saved beside the weights."""
    try:
        return processor_class.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise BadCheckpoint(f"{folder}: holds no processor for {what} ({type(error).__name__}: {error})") from error
