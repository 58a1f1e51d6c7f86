"""Which folder a name means, and that its weights are safetensors.

A name is a local folder. Only `hub:owner/name` (or `hub:owner/name@revision`) is downloaded, so that a path with a
typing error never turns into somebody else's model. A base model, which decides nothing about safety, may be named
by its hub id alone, if no folder has the owner's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from guardpaint.errors import BadCheckpoint

HUB = "hub:"
HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w.-][\w./-]*))?")
NOT_WEIGHTS = ("*.bin", "*.ckpt", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.msgpack", "*.h5", "*.onnx", "*.onnx_data")
"""Files that are never downloaded: pickles, which can run code when they are read, and weights of other frameworks."""
PICKLED = ("pytorch_model*.bin", "diffusion_pytorch_model*.bin", "pytorch_lora_weights*.bin", "*.ckpt", "*.pth", "*.pt")
CONVERT = (
    "only safetensors are loaded, because a pickle can run code. Convert it once where that does no harm: load the "
    "model with diffusers or transformers in a throw-away container and call model.save_pretrained(folder)"
)


def snapshot(repo: str, revision: str | None) -> Path:
    """The local copy of a hub repository, without pickles."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(repo, revision=revision, ignore_patterns=list(NOT_WEIGHTS)))


def resolve(name: str | Path, download: Callable[[str, str | None], Path] = snapshot) -> Path:
    """The folder that a name means. Raises BadCheckpoint if it is none, or if its weights are pickles."""
    text = str(name)
    if text.startswith(HUB):
        match = HUB_ID.fullmatch(text.removeprefix(HUB))
        if match is None:
            raise BadCheckpoint(f"{text}: not a hub id; write hub:owner/name or hub:owner/name@revision")
        try:
            folder = download(match["repo"], match["revision"])
        except Exception as error:
            raise BadCheckpoint(f"{text}: not to be had from the hub ({error})") from error
    else:
        folder = Path(text)
        problem = missing(folder)
        if problem or not text:
            raise BadCheckpoint(f"{text!r}: {problem or 'no name'}. A model on the hub is named hub:owner/name")
    refuse_pickles(folder)
    return folder


def base_name(name: str) -> str:
    """The name of a base model with `hub:` before it if it is a bare hub id, which no local folder begins."""
    owner = Path(name.split("/")[0])
    return HUB + name if HUB_ID.fullmatch(name) and not owner.exists() else name


def missing(path: Path) -> str:
    """Why a path is not a folder, with the first part of it that is not there; empty if it is one."""
    try:
        if path.is_dir():
            return ""
        if path.exists():
            return "not a directory"
        first = next(p for p in (*reversed(path.parents), path) if not p.exists())
    except (OSError, ValueError) as error:
        return f"not a directory ({error})"
    return "not a directory (it does not exist)" if first == path else f"not a directory ({first} does not exist)"


def refuse_pickles(folder: Path) -> None:
    """Raise BadCheckpoint if the folder, or one directly in it, has pickled weights and no safetensors."""
    for place in (folder, *(p for p in sorted(folder.iterdir()) if p.is_dir())):
        pickled = sorted({p.name for pattern in PICKLED for p in place.glob(pattern)})
        if pickled and not any(place.glob("*.safetensors")):
            raise BadCheckpoint(f"{place}: holds {', '.join(pickled[:3])} and no safetensors; {CONVERT}")
