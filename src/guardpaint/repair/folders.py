"""Folders of inpainting pipelines: opening them, merging a few-step adapter into them, saving them."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from guardpaint.draft.loading import LORA, fuse, without_bars
from guardpaint.draft.schedule import CLIPPING
from guardpaint.errors import BadCheckpoint, BadConfig, GuardPaintError
from guardpaint.repair.options import FLOW, Adapter
from guardpaint.store.checkpoint import fingerprint, read_json, sha256_hex, write_json
from guardpaint.store.folders import Access, resolve
from guardpaint.types import JsonDict

INDEX = "model_index.json"
MERGED = "adapter.json"
"""Names the adapter that is merged into the weights of the folder it lies in."""
CHECKERS: JsonDict = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
"""What a stock folder is loaded without: the guard judges what a repairer paints."""


def open_inpainting(folder: Path, dtype: Any, variant: str | None) -> Any:
    """An inpainting pipeline from a folder; of a text-to-image model the inpainting class that goes with it."""
    import diffusers

    index = read_json(folder / INDEX)
    if not isinstance(index, dict):
        raise BadCheckpoint(f"{folder / INDEX}: not the index of a pipeline")
    name = str(index.get("_class_name"))
    own: Any = getattr(diffusers, name, None)
    inpaints = isinstance(own, type) and takes_mask(own)
    opener: Any = own if inpaints else diffusers.DiffusionPipeline
    try:
        with without_bars(), quiet_loading():
            pipe = opener.from_pretrained(
                folder,
                dtype=dtype,
                variant=variant,
                use_safetensors=True,
                local_files_only=True,
                **(absent(own, index) if inpaints else {}),
                **(CHECKERS if "safety_checker" in index else {}),
            )
            return pipe if inpaints else diffusers.AutoPipelineForInpainting.from_pipe(pipe)
    except Exception as error:
        raise BadCheckpoint(f"{folder}: {name} does not open as an inpainting pipeline ({error})") from error


def absent(cls: type[Any], index: JsonDict) -> dict[str, None]:
    """Parts that a folder leaves out. Some classes, such as SD 3's, only load without them if they are told to."""
    parameters = inspect.signature(cls.__init__).parameters
    return {
        name: None
        for name, parameter in parameters.items()
        if name not in CHECKERS and (index.get(name) == [None, None] if name in index else parameter.default is None)
    }


def takes_mask(cls: type[Any]) -> bool:
    """Whether a class is that of an inpainting pipeline."""
    from diffusers import DiffusionPipeline

    return issubclass(cls, DiffusionPipeline) and "mask_image" in inspect.signature(cls.__call__).parameters


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Without diffusers' advice to keep the safety checker."""
    log = logging.getLogger("diffusers.pipelines")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def merged(folder: Path) -> Adapter | None:
    """The adapter that is merged into the weights of a folder."""
    return Adapter(**read_json(folder / MERGED)) if (folder / MERGED).exists() else None


def merge(pipe: Any, adapter: Adapter, token: str | None = None) -> None:
    """Merge an adapter's LoRA into a pipeline's weights; raises BadCheckpoint if it does not belong to this model."""
    folder = resolve(adapter.path, partial(one_file, adapter.file), Access(token=token))
    if not (folder / adapter.file).is_file():
        raise BadCheckpoint(f"{adapter.path}: has no {adapter.file}; name the adapter's file")
    try:
        fuse(pipe, folder, adapter.file)
    except GuardPaintError:
        raise
    except Exception as error:
        raise BadCheckpoint(f"{adapter.path}/{adapter.file}: not a LoRA for {type(pipe).__name__} ({error})") from error


def one_file(file: str, repo: str, revision: str | None, token: str | None = None) -> Path:
    """The local copy of one file of a hub repository, as a folder."""
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(repo, file, revision=revision, token=token)).parent


def merge_unless(pipe: Any, folder: Path, adapter: Adapter | None, token: str | None = None) -> None:
    """Merge an adapter into a pipeline loaded from a folder, unless that folder's weights have it already."""
    already = merged(folder)
    if already == adapter:
        return
    if already is not None:
        raise BadConfig(
            f"{folder}: has {already.path}/{already.file} for {already.scheduler} merged into its weights; "
            f"pass adapter={json.dumps(vars(already))}, or load the model without it"
        )
    if adapter is not None:
        merge(pipe, adapter, token)


def sampler(scheduler: Any, adapter: Adapter | None) -> Any:
    """The scheduler that a pipeline repairs with: its own, or the adapter's on the same noise schedule."""
    import diffusers

    if adapter is None:
        return scheduler
    name, own = adapter.scheduler, type(scheduler).__name__
    if name == own and name in FLOW:
        return scheduler
    if (name in FLOW) != own.startswith("FlowMatch"):
        raise BadConfig(f"adapter scheduler={name!r}: this pipeline samples by {own}, which it cannot replace")
    changes: JsonDict = {} if name == "LCMScheduler" else {"timestep_spacing": "trailing"}
    changes |= {s: False for s, classes in CLIPPING.items() if name in (*classes, "LCMScheduler", "TCDScheduler")}
    return getattr(diffusers, name).from_config(scheduler.config, **changes)


def denoiser_of(pipe: Any) -> Any:
    """The UNet or transformer of a pipeline."""
    parts = pipe.components
    return parts["unet"] if "unet" in parts else parts["transformer"]


def save_pipeline(pipe: Any, directory: str | Path, adapter: Adapter | None) -> None:
    """Save a whole pipeline; whatever LoRA was merged into it is part of its weights."""
    directory = Path(directory)
    linked = [p.name for p in directory.glob("*") if p.is_symlink()]
    if linked:
        raise BadCheckpoint(f"{directory}: {', '.join(linked)} are links; save to another folder")
    for stale in (LORA, MERGED):
        (directory / stale).unlink(missing_ok=True)
    pipe.save_pretrained(directory)
    if adapter is not None:
        write_json(directory / MERGED, vars(adapter))


def weights_digest(kind: str, module: Any | None, options: JsonDict) -> str:
    """SHA-256 over a part's kind, the weights of its network and its options."""
    weights = "" if module is None else fingerprint(module)
    return sha256_hex(json.dumps([kind, weights, options], sort_keys=True))
