"""What an auditor starts from: a pretrained image backbone, and a tokenizer trained on the captions of its views."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from guardpaint.audit.model import AuditorConfig, AuditorScorer
from guardpaint.audit.text import load_tokenizer, save_tokenizer, trained_tokenizer
from guardpaint.errors import BadCheckpoint, BadConfig
from guardpaint.store.folders import CONVERT, base_name, resolve

TOKENIZER = "tokenizer.json"
RESNET = ("stem_channels", "stage_channels", "stage_depths", "layer_type")
"""Fields of an auditor's configuration that its backbone decides."""
SAME = ("hidden_act", "downsample_in_first_stage", "downsample_in_bottleneck", "num_channels")
"""Settings of a ResNet that an auditor's configuration does not name, so they must have their defaults."""


@dataclass(frozen=True)
class Start:
    """Where the weights of a new auditor come from; without any of these they are random."""

    warm: Path | None = None
    """Folder of an auditor that is trained further."""
    backbone: str = ""
    """Folder or hub id of a pretrained ResNet."""


def pretrained_backbone(name: str) -> Any:
    """The ResNet of a folder or a hub repository (`microsoft/resnet-101`), without the head that classifies."""
    from transformers import ResNetConfig, ResNetModel

    try:
        folder = resolve(base_name(name))
        model, found = ResNetModel.from_pretrained(
            folder, use_safetensors=True, local_files_only=True, output_loading_info=True, dtype=torch.float32
        )
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        raise BadCheckpoint(f"backbone {name}: not a ResNet with safetensors ({error}); {CONVERT}") from error
    if found["missing_keys"]:
        missing = sorted(found["missing_keys"])
        raise BadCheckpoint(f"backbone {name}: {len(missing)} weights of a ResNet are missing, such as {missing[0]}")
    plain = ResNetConfig()
    other = [key for key in SAME if getattr(model.config, key) != getattr(plain, key)]
    if other:
        values = ", ".join(f"{key}={getattr(model.config, key)!r}" for key in other)
        raise BadConfig(f"backbone {name}: {values}; an auditor's backbone has the defaults of a ResNet")
    return model


def shape_of(backbone: Any) -> dict[str, Any]:
    """The fields RESNET of an auditor's configuration, as a ResNet has them."""
    config = backbone.config
    values = int(config.embedding_size), tuple(config.hidden_sizes), tuple(config.depths), str(config.layer_type)
    return dict(zip(RESNET, values, strict=True))


def run_tokenizer(out: Path, captions: Sequence[str], size: int) -> Tokenizer:
    """The tokenizer of a run: trained on the captions when the run begins, read from its folder when it resumes."""
    path = out / TOKENIZER
    if path.exists():
        return load_tokenizer(path)
    tokenizer = trained_tokenizer(captions, size)
    save_tokenizer(tokenizer, path)
    return tokenizer


def warm_auditor(folder: Path, shape: AuditorConfig, started: Sequence[str]) -> AuditorScorer:
    """An auditor that is trained further.

    Its shape must be the wanted one, except for the fields `started`, which its own start decided, and for quality
    pooling, class weights and sizes, which are replaced.
    """
    auditor = AuditorScorer.from_pretrained(folder).float().train()
    shape = replace(shape, **{name: getattr(auditor.config, name) for name in started})
    kept = replace(
        auditor.config, quality_pool=shape.quality_pool, class_weights=shape.class_weights, sizes=shape.sizes
    )
    if kept != shape:
        raise BadConfig(f"{folder}: its shape differs from the config's; use the config it was trained with")
    auditor.config, auditor.sizes = shape, shape.sizes
    return auditor


def new_auditor(shape: AuditorConfig, seed: int, tokenizer: Tokenizer | None, backbone: str) -> AuditorScorer:
    """An auditor with random weights and, if one is named, a pretrained backbone, whose shape replaces that of `shape`.

    With a trained tokenizer the vocabulary has its size.
    """
    pretrained = pretrained_backbone(backbone) if backbone else None
    if pretrained is not None:
        shape = replace(shape, **shape_of(pretrained))
    if tokenizer is not None:
        shape = replace(shape, vocab_size=tokenizer.get_vocab_size())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        auditor = AuditorScorer(shape, tokenizer)
    if pretrained is not None:
        auditor.backbone.load_state_dict(pretrained.state_dict())
    return auditor
