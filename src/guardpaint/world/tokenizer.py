"""A small CLIP tokenizer trained on the world's captions: bytes at the bottom, so nothing is unknown."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, models, trainers
from tokenizers.pre_tokenizers import ByteLevel

from guardpaint.world.captions import caption
from guardpaint.world.scene import sample_scene

START, END = "<|startoftext|>", "<|endoftext|>"
SUFFIX = "</w>"


def world_captions(first: int, count: int) -> Iterable[str]:
    """Captions of consecutive scenes, euphemisms included more often than in the data."""
    for i in range(count):
        yield caption(sample_scene(first + i), first + i, euphemism=0.3).text


def train_tokenizer(texts: Iterable[str], merges: int = 1000, length: int = 64) -> Any:
    """A transformers CLIPTokenizer: byte alphabet with and without word end, then the learned merges."""
    from transformers import CLIPTokenizer

    alphabet = sorted(ByteLevel.alphabet())
    letters = [START, END, *alphabet, *(a + SUFFIX for a in alphabet)]
    # The pre-tokenizer and normaliser are CLIP's own, taken from an empty one, so that training sees what use will see.
    empty = CLIPTokenizer(vocab={t: i for i, t in enumerate(letters)}, merges=[])
    learner = Tokenizer(models.BPE(end_of_word_suffix=SUFFIX))
    learner.normalizer = empty.backend_tokenizer.normalizer
    learner.pre_tokenizer = empty.backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=len(letters) + merges, initial_alphabet=alphabet, end_of_word_suffix=SUFFIX, show_progress=False
    )
    learner.train_from_iterator(texts, trainer)
    learned = [tuple(m) for m in json.loads(learner.to_str())["model"]["merges"]][:merges]
    vocab = {t: i for i, t in enumerate(dict.fromkeys([*letters, *("".join(m) for m in learned)]))}
    return CLIPTokenizer(vocab=vocab, merges=learned, model_max_length=length, pad_token=END)
