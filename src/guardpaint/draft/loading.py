"""Loading diffusers pipelines from folders: quietly, in fp32, with a LoRA beside them fused in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from guardpaint.errors import BadCheckpoint
from guardpaint.store.folders import refuse_pickles, resolve

LORA = "pytorch_lora_weights.safetensors"
"""File of a LoRA that belongs to the pipeline in the same folder."""


def load_pipeline(path: str | Path) -> Any:
    """A saved pipeline of any family, from a folder or the hub (`hub:owner/name`), in fp32, progress bar off."""
    import torch
    from diffusers import DiffusionPipeline

    folder = resolve(path)
    try:
        with without_bars():
            pipe = DiffusionPipeline.from_pretrained(
                folder, dtype=torch.float32, use_safetensors=True, local_files_only=True
            )
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise BadCheckpoint(f"{path}: not a saved pipeline ({error})") from error
    pipe.set_progress_bar_config(disable=True)
    return pipe


def load_tiny(folder: Path) -> Any:
    """A saved tiny decoder (TAESD)."""
    from diffusers import AutoencoderTiny

    refuse_pickles(folder)
    return AutoencoderTiny.from_pretrained(folder, use_safetensors=True, local_files_only=True).eval()


def fuse(pipe: Any, folder: Path, file: str = LORA) -> None:
    """Merge the LoRA of a folder into a pipeline; it may be for the denoiser alone."""
    import torch
    from diffusers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()  # it warns that there is nothing for the text encoders
    try:
        pipe.load_lora_weights(folder, weight_name=file, use_safetensors=True, local_files_only=True)
    finally:
        logging.set_verbosity(level)
    if not any(pipe.get_list_adapters().values()):
        raise BadCheckpoint(f"{folder / file}: has no weights for any part of a {type(pipe).__name__}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the last bits of a matrix product depend on the number of threads; weights must not
    try:
        pipe.fuse_lora()
    finally:
        torch.set_num_threads(threads)
    pipe.unload_lora_weights()


@contextmanager
def without_bars() -> Iterator[None]:
    """Switch the libraries' progress bars off inside a with block: small weights load in a blink."""
    from diffusers.utils import logging as diffusers_log
    from transformers.utils import logging as transformers_log

    shown = [log for log in (diffusers_log, transformers_log) if log.is_progress_bar_enabled()]
    for log in shown:
        log.disable_progress_bar()
    try:
        yield
    finally:
        for log in shown:
            log.enable_progress_bar()
