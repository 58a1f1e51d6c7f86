"""Stand-ins for hub repositories: small, random-initialised, with the classes and the file layout of the real ones.

    folder = build("stable-diffusion-v1-5/stable-diffusion-v1-5", Path("hub"))     # hub/stable-diffusion-v1-5/…

The product opens such a folder exactly as it opens the published repository, so that a recipe can be rehearsed without
a network. What such a model draws or says means nothing. Layouts are those of the publishers as far as they decide what
is read: components, classes, variants such as `model.fp16.safetensors`, files in several pieces, precision.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from guardpaint.draft.loading import TINY_DECODERS, without_bars, without_warnings
from guardpaint.errors import BadInput
from guardpaint.store.checkpoint import read_json, write_json
from guardpaint.testing import hub_models, small_detectors, small_vlms
from guardpaint.testing import hub_pipelines as pipelines
from guardpaint.testing.small import LATENT_CHANNELS, seeded


@dataclass(frozen=True)
class Layout:
    """A published repository: what is in it, and in which files."""

    make: Callable[[int], Any]
    """Makes a pipeline, a model, or a model with its processor, from a seed."""
    dtype: str = "float32"
    """Precision of the files that are read without `--variant`."""
    variant: bool = False
    """Whether there is a second set of weights in half precision, as in `model.fp16.safetensors`."""
    pieces: tuple[str, ...] = ()
    """Components whose weights are in several files; `MODEL` where there is one model and no pipeline."""
    gated: bool = False
    """Whether the publisher asks for an agreement first."""


def drawn(make: Callable[..., Any], *values: Any, **more: Any) -> Callable[[int], Any]:
    """A builder that draws its weights from a seed."""

    def build(seed: int) -> Any:
        with seeded(seed):
            return make(*values, **more)

    return build


def takes_seed(make: Callable[..., Any], *values: Any) -> Callable[[int], Any]:
    """A builder of `small_vlms` or `small_detectors`, which have seeds of their own."""
    return lambda seed: make(*values, seed=seed)


MODEL = ""
SD3_PIECES, FLUX_PIECES = ("text_encoder_3", "transformer"), ("text_encoder_2", "transformer")
LAYOUTS: dict[str, Layout] = {
    "stable-diffusion-v1-5/stable-diffusion-v1-5": Layout(drawn(pipelines.sd), variant=True),
    "stable-diffusion-v1-5/stable-diffusion-inpainting": Layout(drawn(pipelines.sd, inpaints=True), variant=True),
    "stabilityai/stable-diffusion-xl-base-0.9": Layout(drawn(pipelines.sdxl), variant=True, gated=True),
    "stabilityai/stable-diffusion-xl-base-1.0": Layout(drawn(pipelines.sdxl), variant=True),
    "stabilityai/sdxl-turbo": Layout(drawn(pipelines.sdxl, turbo=True), variant=True),
    "diffusers/stable-diffusion-xl-1.0-inpainting-0.1": Layout(drawn(pipelines.sdxl, inpaints=True), variant=True),
    "stabilityai/stable-diffusion-3.5-medium": Layout(
        drawn(pipelines.sd35), "float16", pieces=("text_encoder_3",), gated=True
    ),
    "stabilityai/stable-diffusion-3.5-large-turbo": Layout(
        drawn(pipelines.sd35, dual_layers=()), "float16", pieces=SD3_PIECES, gated=True
    ),
    "black-forest-labs/FLUX.1-dev": Layout(drawn(pipelines.flux), "bfloat16", pieces=FLUX_PIECES, gated=True),
    "black-forest-labs/FLUX.1-schnell": Layout(
        drawn(pipelines.flux, guided=False), "bfloat16", pieces=FLUX_PIECES, gated=True
    ),
    **{
        repository: Layout(drawn(pipelines.tiny_decoder, LATENT_CHANNELS[family]))
        for family, repository in TINY_DECODERS.items()
    },
    "OpenGVLab/InternVL3_5-8B-HF": Layout(takes_seed(small_vlms.internvl), "bfloat16", pieces=(MODEL,)),
    "Qwen/Qwen2.5-VL-7B-Instruct": Layout(takes_seed(small_vlms.qwen25), "bfloat16", pieces=(MODEL,)),
    "Qwen/Qwen3-VL-8B-Instruct": Layout(takes_seed(small_vlms.qwen3), "bfloat16", pieces=(MODEL,)),
    "google/shieldgemma-2-4b-it": Layout(takes_seed(small_vlms.shieldgemma), "bfloat16", pieces=(MODEL,), gated=True),
    "IDEA-Research/grounding-dino-base": Layout(takes_seed(small_vlms.grounding_dino)),
    "microsoft/resnet-101": Layout(drawn(hub_models.resnet)),
    "openai/clip-vit-large-patch14": Layout(drawn(hub_models.clip)),
    "Salesforce/blip-itm-base-coco": Layout(drawn(hub_models.blip)),
    "google/siglip-base-patch16-384": Layout(takes_seed(small_detectors.siglip)),
    "CIDAS/clipseg-rd64-refined": Layout(takes_seed(small_detectors.clipseg)),
    "Falconsai/nsfw_image_detection": Layout(takes_seed(small_detectors.classifier, "vit", ("normal", "nsfw"))),
}
"""Repository → its stand-in."""


def build(repository_id: str, folder: Path, *, seed: int = 0) -> Path:
    """Write the stand-in for a hub repository to `folder`/OWNER/NAME and return that folder."""
    if repository_id not in LAYOUTS:
        raise BadInput(f"repository {repository_id!r}: stand-ins are known for {', '.join(sorted(LAYOUTS))}")
    layout, out = LAYOUTS[repository_id], folder / repository_id
    shutil.rmtree(out, ignore_errors=True)
    found = layout.make(seed)
    model, *processors = found if isinstance(found, tuple) else (found,)
    with without_bars(), without_warnings():
        write_weights(model, out, layout, layout.dtype)
        for processor in processors:
            processor.save_pretrained(out)
        if layout.variant:
            with tempfile.TemporaryDirectory() as place:
                write_weights(model, Path(place), layout, "float16", "fp16")
                for file in Path(place).rglob("*.safetensors*"):
                    shutil.move(file, out / file.relative_to(place))
    published_names(out)
    return out


def write_weights(model: Any, out: Path, layout: Layout, dtype: str, variant: str | None = None) -> None:
    """Save a model or a pipeline in one precision; what the layout names is saved in several files."""
    import torch
    from torch import nn

    components = getattr(model, "components", {MODEL: model})
    modules: dict[str, Any] = {name: part for name, part in components.items() if isinstance(part, nn.Module)}
    for module in modules.values():
        module.to(getattr(torch, dtype))
    model.save_pretrained(out, variant=variant)
    for name in layout.pieces:
        for file in (out / name).glob("*.safetensors"):
            file.unlink()
        size = sum(t.numel() * t.element_size() for t in modules[name].state_dict().values())
        modules[name].save_pretrained(out / name, variant=variant, max_shard_size=size // 2 + 1)


# Names of files ---------------------------------------------------------------------------------------------------


def published_names(out: Path) -> None:
    """Bring the files of processors and tokenizers to the names and keys that publishers use."""
    for file in sorted(out.rglob("processor_config.json")):
        split_processor(file)
    for file in sorted(out.rglob("preprocessor_config.json")):
        values = read_json(file)
        for key in ("image_processor_type", "feature_extractor_type"):
            if key in values:
                values[key] = values[key].removesuffix("Pil")
        write_json(file, values)
    for file in sorted(out.rglob("tokenizer.json")):
        if read_json(file.with_name("tokenizer_config.json")).get("tokenizer_class") == "CLIPTokenizer":
            split_tokenizer(file)


def split_processor(file: Path) -> None:
    """Published processors keep the settings for pictures in preprocessor_config.json."""
    values = read_json(file)
    pictures = values.pop("image_processor", None)
    if pictures is None:
        return
    write_json(file.with_name("preprocessor_config.json"), {**pictures, "processor_class": values["processor_class"]})
    if set(values) == {"processor_class"}:
        file.unlink()
    else:
        write_json(file, values)


def split_tokenizer(file: Path) -> None:
    """Published CLIP tokenizers are a vocabulary and a list of merges."""
    model = read_json(file)["model"]
    write_json(file.with_name("vocab.json"), model["vocab"])
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    file.with_name("merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")
    file.unlink()
