"""Small CLIP and T5 tokenizers trained on the world's captions. The CLIP one falls back to bytes for unknown text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from paperdolls.captions import caption
from paperdolls.scene import sample_scene

START, END = "<|startoftext|>", "<|endoftext|>"
SUFFIX = "</w>"


def world_captions(first: int, count: int) -> Iterable[str]:
    """Captions of consecutive scenes, with more euphemisms than in the training data."""
    for i in range(count):
        yield caption(sample_scene(first + i), first + i, euphemism=0.3).text


def train_tokenizer(texts: Iterable[str], merges: int = 1000, length: int = 64) -> Any:
    """A transformers CLIPTokenizer whose vocabulary is the byte alphabet, with and without word end, and the merges."""
    from transformers import CLIPTokenizer

    alphabet = sorted(ByteLevel.alphabet())
    letters = [START, END, *alphabet, *(a + SUFFIX for a in alphabet)]
    empty = CLIPTokenizer(vocab={t: i for i, t in enumerate(letters)}, merges=[]).backend_tokenizer
    words: Counter[tuple[str, ...]] = Counter()
    for text in texts:
        for word, _ in empty.pre_tokenizer.pre_tokenize_str(empty.normalizer.normalize_str(text)):
            words[(*word[:-1], word[-1] + SUFFIX)] += 1
    learned = learn_merges(words, merges)
    vocab = {t: i for i, t in enumerate(dict.fromkeys([*letters, *("".join(m) for m in learned)]))}
    return CLIPTokenizer(vocab=vocab, merges=learned, model_max_length=length, pad_token=END)


def train_t5_tokenizer(texts: Iterable[str], length: int = 64, least: int = 3) -> Any:
    """A transformers T5Tokenizer whose pieces are the words seen at least `least` times and all single letters.

    Words are scored by their frequency.
    """
    from transformers import T5Tokenizer

    words: Counter[str] = Counter()
    for text in texts:
        words.update(w for w in (word.strip(".,:;") for word in text.split()) if w)
    total = sum(words.values())
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -8.0)]
    pieces += [(chr(c), -12.0) for c in range(33, 127)]
    pieces += [
        (f"▁{w}", math.log(n / total)) for w, n in sorted(words.items(), key=lambda x: (-x[1], x[0])) if n >= least
    ]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=length)


def captions_cut(tokenizer: Any, first: int, count: int = 10_000) -> int:
    """How many captions, one of each scene from `first` on, are longer than the tokenizer's length and so are cut."""
    texts = [caption(sample_scene(first + i), i).text for i in range(count)]
    return sum(len(ids) > tokenizer.model_max_length for ids in tokenizer(texts, truncation=False).input_ids)


def learn_merges(words: Counter[tuple[str, ...]], count: int) -> list[tuple[str, str]]:
    """Byte-pair merges, most frequent first; ties are broken alphabetically, so that training is repeatable."""
    merges: list[tuple[str, str]] = []
    current = dict(words)
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, times in current.items():
            for pair in pairwise(word):
                pairs[pair] += times
        if not pairs:
            break
        best = min(pairs, key=lambda p: (-pairs[p], p))
        merges.append(best)
        merged: dict[tuple[str, ...], int] = {}
        for word, times in current.items():
            new = joined(word, best)
            merged[new] = merged.get(new, 0) + times
        current = merged
    return merges


def joined(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    """The word with every occurrence of the pair merged into one symbol."""
    out: list[str] = []
    i = 0
    while i < len(word):
        if word[i : i + 2] == pair:
            out.append(word[i] + word[i + 1])
            i += 2
        else:
            out.append(word[i])
            i += 1
    return tuple(out)
