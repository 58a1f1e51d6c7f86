"""Whether a pipeline's folder is complete, before diffusers reads it: its own errors do not say what is missing."""

from __future__ import annotations

import json
import re
from pathlib import Path

from guardpaint.errors import BadCheckpoint

INDEX = "model_index.json"
WITHOUT_WEIGHTS = re.compile(r"(Tokenizer\w*|Scheduler|Processor\w*|Extractor\w*)$")
"""Classes of components that have settings and no weights."""
SHARD = re.compile(r"-(\d{5})-of-(\d{5})$")
POINTER = b"version https://git-lfs"
FETCH = "the download is incomplete; fetch the model again"


def check_intact(folder: Path, variant: str | None = None) -> list[str]:
    """Raise BadCheckpoint if the folder is no pipeline, has not this variant, or lacks a part of it.

    Returns the components that it leaves empty on purpose, such as the T5 of an SD 3 saved without it.
    """
    kinds = components(folder)
    parts = {name: kind for name, kind in kinds.items() if kind is not None}
    found = {name: weight_files(folder / name) for name, kind in parts.items() if not WITHOUT_WEIGHTS.search(kind)}
    variants = sorted({v for files in found.values() for v in files if v is not None})
    if variant is not None and variant not in variants:
        have = f"it has {', '.join(variants)}" if variants else "it has none; leave --variant out"
        raise BadCheckpoint(f"{folder}: variant {variant!r} is not there ({have})")
    for name in parts:
        if not (folder / name).is_dir():
            raise BadCheckpoint(f"{folder}: {INDEX} names {name}, which is not there: {FETCH}")
    for name, files in found.items():
        if not (folder / name / "config.json").exists():
            raise BadCheckpoint(f"{folder / name}: config.json is missing: {FETCH}")
        chosen = files.get(variant, files.get(None, []))
        if not chosen and variants:
            have = " or ".join(v for v in files if v is not None) or "no other"
            raise BadCheckpoint(f"{folder / name}: holds no weights of this variant, but of {have}; see --variant")
        if not chosen:
            raise BadCheckpoint(f"{folder / name}: holds no safetensors: {FETCH}")
        check_shards(chosen)
        for file in chosen:
            check_whole(file)
    return [name for name, kind in kinds.items() if kind is None]


def only_variant(folder: Path) -> str | None:
    """The one variant that a pipeline's folder holds instead of plain weight files; None if it has plain ones."""
    parts = [name for name, kind in components(folder).items() if kind and not WITHOUT_WEIGHTS.search(kind)]
    found = [set(weight_files(folder / name)) for name in parts]
    shared = set.intersection(*found) if found else {None}
    return None if None in shared or len(shared) != 1 else shared.pop()


def components(folder: Path) -> dict[str, str | None]:
    """Names and classes of the components of a pipeline's folder; None is a component that it leaves empty."""
    path = folder / INDEX
    if not path.is_file():
        hint = "a single-file checkpoint; save it once with diffusers' from_single_file and save_pretrained"
        found = any(folder.glob("*.safetensors"))
        raise BadCheckpoint(f"{folder}: no {INDEX}, so {hint if found else 'it is no diffusers pipeline'}")
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{path}: not valid JSON ({error}): {FETCH}") from error
    if not isinstance(index, dict):
        raise BadCheckpoint(f"{path}: not the index of a pipeline")
    pairs = {k: v for k, v in index.items() if not k.startswith("_") and isinstance(v, list) and len(v) == 2}
    return {name: kind if isinstance(kind, str) else None for name, (_, kind) in pairs.items()}


def weight_files(place: Path) -> dict[str | None, list[Path]]:
    """Safetensors of a component by variant; None are the files without one.

    `model.fp16-00001-of-00002.safetensors` and, as it was written earlier, `model-00001-of-00002.fp16.safetensors` are
    of the variant fp16.
    """
    found: dict[str | None, list[Path]] = {}
    for file in sorted(place.glob("*.safetensors")):
        _, _, variant = SHARD.sub("", file.stem).partition(".")
        found.setdefault(variant or None, []).append(file)
    return found


def check_shards(files: list[Path]) -> None:
    """Raise BadCheckpoint if some files of a model in several files are missing."""
    numbers = [match for file in files for piece in file.stem.split(".") if (match := SHARD.search(piece))]
    wanted = max((int(m[2]) for m in numbers), default=0)
    lacking = sorted(set(range(1, wanted + 1)) - {int(m[1]) for m in numbers})
    if lacking:
        raise BadCheckpoint(
            f"{files[0].parent}: file {lacking[0]} of {wanted} is missing ({wanted - len(lacking)} are there): {FETCH}"
        )


def check_whole(file: Path) -> None:
    """Raise BadCheckpoint if a safetensors file ends before its last tensor; only its header is read."""
    try:
        with file.open("rb") as opened:
            start = opened.read(8)
            if POINTER.startswith(start) and start:
                raise BadCheckpoint(f"{file}: a Git LFS pointer and not the weights; run `git lfs pull`")
            length = int.from_bytes(start, "little")
            size = file.stat().st_size
            header = json.loads(opened.read(length)) if len(start) == 8 and length <= size else {}
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{file}: cannot be read ({error}): {FETCH}") from error
    ends = [t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"]
    if not header or size < 8 + length + max(ends, default=0):
        raise BadCheckpoint(f"{file}: {size} bytes, which is less than its tensors take: {FETCH}")
