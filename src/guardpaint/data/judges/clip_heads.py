"""Judges that are a CLIP image encoder with a small published head: Q16 and the multi-headed classifier.

    q16:prompts.p                   the learned prompts of github.com/ml-research/Q16
    multiheaded:checkpoints/multi-headed   the heads of github.com/YitingQu/unsafe-diffusion

Both were learned on CLIP ViT-L/14, which is read from the hub unless another place is named after a #. The heads are
published as pickles; they are read without running any code in them.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from guardpaint.audit.checkpoints import open_model, open_processor
from guardpaint.data.judges.opinion import UNNAMED, Explained, Opinion, named_by, worst_harm
from guardpaint.draft.loading import on_machine
from guardpaint.errors import BadCheckpoint, BadConfig
from guardpaint.policy import Policy
from guardpaint.store.checkpoint import fingerprint, load_strict, read_tensors, sha256_hex
from guardpaint.store.folders import resolve

CLIP = "hub:openai/clip-vit-large-patch14"
HEADS = {
    "sexual": ("nudity", "sexual"),
    "violent": ("violence", "violent"),
    "disturbing": ("violence", "disturbing"),
    "hateful": ("hateful", "hate"),
    "political": ("political",),
}
"""The published heads, and the categories of a policy that each may stand for."""
ARRAY_PARTS = {
    ("_reconstruct", "numpy.core.multiarray"),
    ("_reconstruct", "numpy._core.multiarray"),
    ("ndarray", "numpy"),
    ("dtype", "numpy"),
    ("encode", "_codecs"),
}
"""All that the pickle of an array needs."""


class ImageEncoder:
    """CLIP's projected embeddings of pictures."""

    def __init__(self, model: Any, processor: Any) -> None:
        self.model, self.processor = model.eval(), processor

    @classmethod
    def from_pretrained(cls, path: str) -> ImageEncoder:
        from transformers import AutoImageProcessor, CLIPModel

        folder = resolve(path)
        processor = open_processor(AutoImageProcessor, folder, "a CLIP image encoder")
        return cls(on_machine(open_model(CLIPModel, folder, "a CLIP image encoder")), processor)

    @property
    def width(self) -> int:
        return int(self.model.config.projection_dim)

    @torch.no_grad()
    def embed(self, image: Image.Image) -> Float[Tensor, " d"]:
        pixels = self.processor(images=image, return_tensors="pt")["pixel_values"]
        seen = self.model.vision_model(torch.as_tensor(pixels).to(self.model.device)).pooler_output
        return self.model.visual_projection(seen)[0].float().cpu()


class Q16Judge(Explained):
    """Q16: the picture is unsafe if the second of two learned prompts is closer to it than the first.

    It says that a picture is inappropriate and not why, so its category is `unsafe`.
    """

    def __init__(self, encoder: ImageEncoder, prompts: Float[Tensor, "2 d"], spec: str = "") -> None:
        if tuple(prompts.shape) != (2, encoder.width):
            raise BadCheckpoint(f"Q16 prompts of shape {tuple(prompts.shape)}: this CLIP needs (2, {encoder.width})")
        self.encoder, self.prompts, self.spec = encoder, nn.functional.normalize(prompts.float(), dim=-1), spec

    @classmethod
    def open(cls, where: str, policy: Policy) -> Q16Judge:
        path, clip = place(where, "q16:PROMPTS")
        return cls(ImageEncoder.from_pretrained(clip), read_array(path), f"q16:{where}")

    @property
    def identity(self) -> str:
        prompts = sha256_hex(self.prompts.numpy().tobytes())
        return json.dumps(["q16", fingerprint(self.encoder.model), prompts])

    def opinion(self, image: Image.Image) -> Opinion:
        embed = nn.functional.normalize(self.encoder.embed(image), dim=-1)
        chance = float((100 * self.prompts @ embed).softmax(-1)[1])
        return worst_harm({UNNAMED: chance}, 0.5, json.dumps({"inappropriate": round(chance, 6)}))


class MultiHeadedJudge(Explained):
    """Five classifiers of one CLIP embedding; the picture is unsafe if any of them says so."""

    def __init__(self, encoder: ImageEncoder, heads: dict[str, nn.Module], policy: Policy, spec: str = "") -> None:
        self.encoder, self.policy, self.spec = encoder, policy, spec
        self.heads = nn.ModuleDict(heads).eval()

    @classmethod
    def open(cls, where: str, policy: Policy) -> MultiHeadedJudge:
        folder, clip = place(where, "multiheaded:FOLDER")
        encoder = ImageEncoder.from_pretrained(clip)
        heads = {name: head_from(head_file(folder, name), encoder.width) for name in HEADS}
        return cls(encoder, heads, policy, f"multiheaded:{where}")

    @property
    def identity(self) -> str:
        weights = [fingerprint(self.encoder.model), fingerprint(self.heads)]
        return json.dumps(["multiheaded", *weights, list(self.policy.names)])

    @torch.no_grad()
    def opinion(self, image: Image.Image) -> Opinion:
        embed = self.encoder.embed(image)[None]
        scores = {name: float(head(embed).sigmoid()) for name, head in self.heads.items()}
        harms: dict[str, float] = {}
        for name, score in scores.items():
            category = named_by(self.policy, *HEADS[name])
            harms[category] = max(score, harms.get(category, 0.0))
        return worst_harm(harms, 0.5, json.dumps({n: round(s, 6) for n, s in scores.items()}))


def place(where: str, form: str) -> tuple[Path, str]:
    """The path of a head and the CLIP that it belongs to, from PATH#CLIP."""
    path, _, clip = where.partition("#")
    if not Path(path).exists():
        raise BadConfig(f"judge {form.partition(':')[0]}:{where}: no {path}; write {form}#CLIP with published weights")
    return Path(path), clip or CLIP


def head_file(folder: Path, name: str) -> Path:
    """The file of one head, under any of the names that its publishers use."""
    names = [f"{name}{more}{end}" for end in (".safetensors", ".pt") for more in ("", "_head")]
    found = [folder / n for n in names if (folder / n).exists()]
    if not found:
        raise BadCheckpoint(f"{folder}: no head for {name}; a multi-headed classifier has {', '.join(HEADS)}, as .pt")
    return found[0]


def head_from(path: Path, width: int) -> nn.Module:
    """A published head: linear, ReLU, dropout, batch norm, linear."""
    state = read_state(path)
    hidden = int(state["0.weight"].shape[0]) if isinstance(state.get("0.weight"), Tensor) else 1
    head = nn.Sequential(
        nn.Linear(width, hidden), nn.ReLU(), nn.Dropout(0.5), nn.BatchNorm1d(hidden), nn.Linear(hidden, 1)
    )
    load_strict(head, state, path)
    return head.eval()


def read_state(path: Path) -> dict[str, Any]:
    """The weights in a safetensors file, or in a .pt file whose pickle may hold nothing but tensors."""
    if path.suffix == ".safetensors":
        return dict(read_tensors(path))
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises almost anything on files from anywhere
        raise BadCheckpoint(f"{path}: cannot be read as weights ({type(error).__name__})") from error
    return state if isinstance(state, dict) else {"": state}


def read_array(path: Path) -> Tensor:
    """One array from .npy, .safetensors, .pt, or a pickle that holds nothing but an array or lists of numbers."""
    if path.suffix == ".npy":
        try:
            return torch.from_numpy(np.load(path, allow_pickle=False)).float()
        except ValueError as error:
            raise BadCheckpoint(f"{path}: not an array ({error})") from error
    if path.suffix in (".safetensors", ".pt"):
        arrays = list(read_state(path).values())
        if len(arrays) != 1 or not isinstance(arrays[0], Tensor):
            raise BadCheckpoint(f"{path}: holds {len(arrays)} values; one array of two prompts is needed")
        return arrays[0].float()
    try:
        with path.open("rb") as file:
            return torch.as_tensor(np.asarray(ArrayUnpickler(file).load(), np.float32))
    except (pickle.UnpicklingError, ValueError, TypeError, EOFError, AttributeError, ImportError) as error:
        raise BadCheckpoint(f"{path}: not an array ({error})") from error


class ArrayUnpickler(pickle.Unpickler):
    """Reads the pickle of an array and refuses everything else, so that a file can run no code."""

    def find_class(self, module: str, name: str) -> Any:
        if (name, module) not in ARRAY_PARTS:
            raise BadCheckpoint(f"its pickle asks for {module}.{name}; only arrays are read")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)
