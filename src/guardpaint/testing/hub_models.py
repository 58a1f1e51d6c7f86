"""Small random-initialised encoders of the published repositories that the paper's recipe names besides pipelines.

Each function returns a model with its processor.
"""

from __future__ import annotations

from typing import Any

from guardpaint.testing import small_detectors
from guardpaint.testing.small import clip_tokenizer
from guardpaint.testing.small_detectors import SIDE

RESNET_STEM, RESNET_STAGES, RESNET_DEPTHS = 16, (16, 32, 64, 128), (1, 1, 1, 1)
"""Channels and blocks of the stand-in for ResNet-101, which has 64, (256, 512, 1024, 2048) and (3, 4, 23, 3)."""
IMAGENET_CLASSES = 1000
WHOLE_WORDS = ("cloud", "river", "lantern", "meadow", "feather", "bottle", "garden", "window")
WORDS = 128
"""Most tokens of a text for BLIP."""


def resnet() -> tuple[Any, Any]:
    """A ResNet of four stages with bottlenecks and ImageNet's number of classes."""
    from transformers import ConvNextImageProcessorPil, ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=RESNET_STEM,
        hidden_sizes=list(RESNET_STAGES),
        depths=list(RESNET_DEPTHS),
        layer_type="bottleneck",
        num_labels=IMAGENET_CLASSES,
    )
    return ResNetForImageClassification(config).eval(), ConvNextImageProcessorPil(size={"shortest_edge": 224})


def worded_tokenizer() -> Any:
    """A CLIPTokenizer over single bytes and a few whole words, which attacks on a vocabulary need."""
    from transformers import CLIPTokenizer

    vocab, merges = dict(clip_tokenizer().get_vocab()), []
    for word in WHOLE_WORDS:
        pieces = [*word[:-1], f"{word[-1]}</w>"]
        for i in range(1, len(pieces)):
            left = "".join(pieces[:i])
            merges.append((left, pieces[i]))
            vocab.setdefault(left + pieces[i], len(vocab))
    return CLIPTokenizer(
        vocab=vocab, merges=list(dict.fromkeys(merges)), model_max_length=77, pad_token="<|endoftext|>"
    )


def clip() -> tuple[Any, Any]:
    """A CLIP that reads 77 tokens."""
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPProcessor

    words = worded_tokenizer()
    text = {**small_detectors.text_shape(), "max_position_embeddings": 77, "vocab_size": len(words)}
    config = CLIPConfig(text_config=text, vision_config=small_detectors.vision_shape(), projection_dim=24)
    images = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    return CLIPModel(config).eval(), CLIPProcessor(image_processor=images, tokenizer=words)


def blip() -> tuple[Any, Any]:
    """BLIP with its image–text matching head; its words are spelled."""
    from transformers import BertTokenizer, BlipConfig, BlipForImageTextRetrieval, BlipImageProcessorPil, BlipProcessor

    signs = [chr(c) for c in range(33, 127) if not chr(c).isupper()]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[ENC]", "[DEC]", *signs, *(f"##{s}" for s in signs)]
    tokenizer = BertTokenizer(vocab={w: i for i, w in enumerate(words)}, model_max_length=WORDS)
    text = {
        "vocab_size": len(words),
        "hidden_size": 32,
        "encoder_hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": WORDS,
        "pad_token_id": 0,
        "bos_token_id": 6,
        "sep_token_id": 3,
        "eos_token_id": 3,
    }
    config = BlipConfig(
        text_config=text,
        vision_config=small_detectors.vision_shape(),
        projection_dim=16,
        image_text_hidden_size=16,
    )
    images = BlipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    return BlipForImageTextRetrieval(config).eval(), BlipProcessor(images, tokenizer)
