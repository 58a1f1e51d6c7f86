"""Which folder a name means, and that its weights are safetensors.

A name is a local folder. Only `hub:owner/name` (or `hub:owner/name@revision`) is downloaded, so that a path with a
typing error never turns into somebody else's model. A base model, which decides nothing about safety, may be named
by its hub id alone, if no folder has the owner's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from guardpaint.errors import BadCheckpoint

HUB = "hub:"
REVISION = r"[\w.-][\w./-]*"
HUB_ID = re.compile(rf"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>{REVISION}))?")
NOT_WEIGHTS = ("*.bin", "*.ckpt", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.msgpack", "*.h5", "*.onnx", "*.onnx_data")
"""Files that are never downloaded: pickles, which can run code when they are read, and weights of other frameworks."""
PICKLED = ("pytorch_model*.bin", "diffusion_pytorch_model*.bin", "pytorch_lora_weights*.bin", "*.ckpt", "*.pth", "*.pt")
CONVERT = (
    "only safetensors are loaded, because a pickle can run code. Convert it once where that does no harm: load the "
    "model with diffusers or transformers in a throw-away container and call model.save_pretrained(folder)"
)


@dataclass(frozen=True)
class Access:
    """What the hub is asked for besides a repository's name."""

    revision: str | None = None
    token: str | None = field(default=None, repr=False)
    variant: str | None = None
    """Which of several sets of weight files is wanted, as in `model.fp16.safetensors`."""

    def more(self) -> dict[str, str]:
        """Token and variant as arguments of a download, if they are given."""
        return {k: v for k, v in (("token", self.token), ("variant", self.variant)) if v is not None}


def snapshot(repo: str, revision: str | None, token: str | None = None) -> Path:
    """The local copy of a hub repository, without pickles."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(repo, revision=revision, token=token, ignore_patterns=list(NOT_WEIGHTS)))


def resolve(name: str | Path, download: Callable[..., Path] = snapshot, access: Access | None = None) -> Path:
    """The folder that a name means. Raises BadCheckpoint if it is none, or if its weights are pickles.

    `download` is called with repository, revision and, if they are given, `token` and `variant`.
    """
    text, access = str(name), access or Access()
    if text.startswith(HUB):
        match = HUB_ID.fullmatch(text.removeprefix(HUB))
        if match is None:
            raise BadCheckpoint(f"{text}: not a hub id; write hub:owner/name or hub:owner/name@revision")
        if match["revision"] and access.revision not in (None, match["revision"]):
            raise BadCheckpoint(f"{text}: names another revision than {access.revision!r}; give only one of the two")
        revision = match["revision"] or access.revision
        try:
            folder = download(match["repo"], revision, **access.more())
        except Exception as error:
            raise BadCheckpoint(f"{text}: {refusal(error, match['repo'], revision, access.token)}") from error
    else:
        folder = Path(text)
        problem = missing(folder)
        if problem or not text:
            raise BadCheckpoint(f"{text!r}: {problem or 'no name'}. A model on the hub is named hub:owner/name")
        if access.revision is not None:
            raise BadCheckpoint(
                f"{text}: a folder has no revisions, so {access.revision!r} cannot be looked up; leave it out, or name "
                "the model as hub:owner/name"
            )
    refuse_pickles(folder)
    return folder


def refusal(error: BaseException, repo: str, revision: str | None, token: str | None, section: str = "") -> str:
    """Why a download failed and what to do about it; the token is never part of it.

    `section` is what the hub's pages of a kind begin with, as `datasets/`; those of models begin with nothing.
    """
    kinds = {cls.__name__ for link in causes(error) for cls in type(link).__mro__}
    page = f"https://huggingface.co/{section}{repo}"
    dataset = "DatasetNotFoundError" in kinds  # the library hides the hub's own error behind this one
    gated = "GatedRepoError" in kinds or (dataset and "gated" in str(error))
    if gated and token is None:
        return f"gated: accept its terms at {page}, then give a token with --token or in HF_TOKEN"
    if gated:
        return f"gated, and the account of this token has no access: accept its terms at {page}"
    if "RevisionNotFoundError" in kinds:
        return f"has no revision {revision!r}; its revisions are listed at {page}/commits/main"
    if "RepositoryNotFoundError" in kinds or dataset:
        return (
            "not on the hub, or private: check the name, and give a token with --token or in HF_TOKEN if it is private"
        )
    text = str(error) if token is None else str(error).replace(token, "…")
    return f"not to be had from the hub ({text})"


def causes(error: BaseException) -> list[Any]:
    """An error and the errors that it was raised from, the latest first."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    return chain


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
