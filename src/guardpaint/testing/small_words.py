"""A small random CLIP text encoder whose vocabulary has whole words, as a published one has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from guardpaint.testing.small import TEXT_WIDTH, seeded

WORDS = (
    "apple", "arrow", "autumn", "basket", "beach", "bell", "bench", "bird", "boat", "bottle", "branch", "bread",
    "bridge", "brook", "candle", "castle", "chair", "cherry", "circle", "cloud", "coat", "coin", "corner", "cotton",
    "curtain", "desk", "door", "dove", "drum", "evening", "feather", "fence", "field", "flower", "fog", "forest",
    "garden", "gate", "glass", "grass", "guitar", "hill", "house", "island", "ivory", "jacket", "kettle", "key",
    "ladder", "lake", "lamp", "lantern", "leaf", "lemon", "letter", "maple", "market", "meadow",
    "mirror", "moon", "morning", "mountain",
    "needle", "ocean", "orange", "paper", "path", "pearl", "pencil", "piano", "pillow", "plate", "pocket", "pond",
    "purple", "rain", "ribbon", "river", "road", "robin", "rope", "rose", "sail", "sand", "shadow", "shelf", "ship",
    "silver", "snow", "song", "spoon", "spring", "star", "stone", "street", "summer", "table", "thread", "tower",
    "train", "tree", "valley", "velvet", "village", "violin", "wall", "water", "wheel", "wind", "window", "winter",
    "wood", "wool", "yellow",
)  # fmt: skip
"""Everyday words, enough for a search among them to be worth something."""


def merges_of(words: Iterable[str]) -> list[tuple[str, str]]:
    """Byte-pair merges, the most frequent pair first, until each of these words is one symbol."""
    current = [[*word[:-1], word[-1] + "</w>"] for word in dict.fromkeys(words)]
    merges: list[tuple[str, str]] = []
    while pairs := Counter(pair for word in current for pair in pairwise(word)):
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for word in current:
            i = 0
            while i + 1 < len(word):
                if (word[i], word[i + 1]) == best:
                    word[i : i + 2] = ["".join(best)]
                i += 1
    return merges


def word_tokenizer(words: Iterable[str]) -> Any:
    """A real CLIPTokenizer over single bytes in which each of these words is one token."""
    from transformers import CLIPTokenizer

    alphabet, merges = sorted(ByteLevel.alphabet()), merges_of(words)
    tokens = ["<|startoftext|>", "<|endoftext|>", *alphabet, *(a + "</w>" for a in alphabet), *map("".join, merges)]
    return CLIPTokenizer(
        vocab={token: i for i, token in enumerate(dict.fromkeys(tokens))},
        merges=merges,
        model_max_length=77,
        pad_token="<|endoftext|>",
    )


def word_encoder(seed: int = 0, words: Sequence[str] = WORDS, layers: int = 2) -> tuple[Any, Any]:
    """Such a tokenizer and a random encoder for it; both have `save_pretrained`."""
    from transformers import CLIPTextConfig, CLIPTextModel

    tokenizer = word_tokenizer(words)
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=77,
        projection_dim=TEXT_WIDTH,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        initializer_factor=5.0,
    )
    with seeded(seed):
        return tokenizer, CLIPTextModel(config).eval()
