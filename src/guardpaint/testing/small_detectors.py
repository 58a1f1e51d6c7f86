"""Small random-initialised image classifiers, image–text encoders and segmenters of the real transformers classes.

Each function returns a model with its processor; `saved` writes both as the folder that a hub repository would be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from guardpaint.errors import BadInput
from guardpaint.testing.small import clip_tokenizer, seeded, t5_tokenizer

SIDE = 32
LABELS = ("normal", "nsfw", "gore")
TEXT_TOKENS = 32


def vit(**shape: Any) -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return ViTForImageClassification(ViTConfig(image_size=SIDE, patch_size=8, **sizes, **shape))


def deit(**shape: Any) -> Any:
    from transformers import DeiTConfig, DeiTForImageClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return DeiTForImageClassification(DeiTConfig(image_size=SIDE, patch_size=8, **sizes, **shape))


def resnet(**shape: Any) -> Any:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", **shape)
    )


def convnext(**shape: Any) -> Any:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    sizes = {"num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1]}
    return ConvNextForImageClassification(ConvNextConfig(image_size=SIDE, **sizes, **shape))


def mobilenet(**shape: Any) -> Any:
    from transformers import MobileNetV1Config, MobileNetV1ForImageClassification

    return MobileNetV1ForImageClassification(
        MobileNetV1Config(image_size=SIDE, depth_multiplier=0.25, min_depth=4, **shape)
    )


def swin(**shape: Any) -> Any:
    from transformers import SwinConfig, SwinForImageClassification

    sizes = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
    return SwinForImageClassification(SwinConfig(image_size=SIDE, patch_size=4, **sizes, **shape))


CLASSIFIERS: dict[str, Callable[..., Any]] = {
    "vit": vit,
    "deit": deit,
    "resnet": resnet,
    "convnext": convnext,
    "mobilenet": mobilenet,
    "swin": swin,
}


def classifier(family: str, labels: Sequence[str] = LABELS, seed: int = 0, **shape: Any) -> tuple[Any, Any]:
    """An image classifier with these label names, and an image processor that squashes pictures to its input."""
    from transformers import ViTImageProcessorPil

    if family not in CLASSIFIERS:
        raise BadInput(f"classifier {family!r}: the small random ones are {', '.join(CLASSIFIERS)}")
    names = dict(enumerate(labels))
    with seeded(seed):
        model = CLASSIFIERS[family](id2label=names, label2id={n: i for i, n in names.items()}, **shape).eval()
    return model, ViTImageProcessorPil(size={"height": SIDE, "width": SIDE})


def clip(seed: int = 0) -> tuple[Any, Any]:
    """A CLIP model with its processor."""
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPProcessor

    with seeded(seed):
        model = CLIPModel(CLIPConfig(text_config=text_shape(), vision_config=vision_shape(), projection_dim=24)).eval()
    images = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    return model, CLIPProcessor(image_processor=images, tokenizer=clip_tokenizer())


def siglip(seed: int = 0) -> tuple[Any, Any]:
    """A SigLIP model with its processor."""
    from transformers import SiglipConfig, SiglipImageProcessorPil, SiglipModel, SiglipProcessor

    words = t5_tokenizer()
    with seeded(seed):
        text = {**text_shape(), "vocab_size": len(words), "projection_size": 32}
        model = SiglipModel(SiglipConfig(text_config=text, vision_config=vision_shape())).eval()
    images = SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    return model, SiglipProcessor(image_processor=images, tokenizer=words)


ENCODERS: dict[str, Callable[..., tuple[Any, Any]]] = {"clip": clip, "siglip": siglip}


def clipseg(seed: int = 0) -> tuple[Any, Any]:
    """A CLIPSeg segmenter with its processor."""
    from transformers import CLIPSegConfig, CLIPSegForImageSegmentation, CLIPSegProcessor, ViTImageProcessorPil

    with seeded(seed):
        config = CLIPSegConfig(
            text_config=text_shape(),
            vision_config=vision_shape(),
            projection_dim=24,
            extract_layers=[0, 1],
            reduce_dim=16,
            decoder_num_attention_heads=2,
            decoder_intermediate_size=32,
        )
        model = CLIPSegForImageSegmentation(config).eval()
    images = ViTImageProcessorPil(size={"height": SIDE, "width": SIDE})
    return model, CLIPSegProcessor(image_processor=images, tokenizer=clip_tokenizer())


def text_shape() -> dict[str, Any]:
    return {
        "vocab_size": 514,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": TEXT_TOKENS,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    }


def vision_shape() -> dict[str, Any]:
    return {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": 8,
    }


def saved(pair: tuple[Any, Any], folder: Path) -> Path:
    """The folder that a model and its processor were written to."""
    for part in pair:
        part.save_pretrained(folder)
    return folder
