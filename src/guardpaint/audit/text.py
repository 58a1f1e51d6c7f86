"""The auditor's text side: a byte-safe tokenizer and a BiLSTM."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn

from guardpaint.errors import BadCheckpoint, BadInput
from guardpaint.store.checkpoint import write_atomic

PAD, BOS = "<pad>", "<bos>"


def byte_tokenizer() -> Tokenizer:
    """A byte-level BPE without merges: every script and every emoji has a spelling, nothing is unknown."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([PAD, BOS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def trained_tokenizer(captions: Iterable[str], size: int) -> Tokenizer:
    """A byte-level BPE of at most `size` tokens, trained on captions: frequent words are one token each.

    Nothing is unknown to it, and upper and lower case are the same. The texts of its special tokens are spelled like
    any other text, so that no prompt can contain a padding token.
    """
    texts = sorted(set(captions))
    if not any(texts):
        raise BadInput("a tokenizer is trained on captions, and there are none")
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Lowercase()
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[PAD, BOS], initial_alphabet=sorted(alphabet), show_progress=False
    )
    learner.train_from_iterator(texts, trainer)
    learned = json.loads(learner.to_str())["model"]
    merges = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in learned["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=learned["vocab"], merges=merges))
    tokenizer.normalizer, tokenizer.pre_tokenizer = learner.normalizer, learner.pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    write_atomic(path, tokenizer.to_str(pretty=True).encode())


def load_tokenizer(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise BadCheckpoint(f"{path}: not a tokenizer file ({error})") from error
    if tokenizer.token_to_id(PAD) != 0 or tokenizer.token_to_id(BOS) is None:
        raise BadCheckpoint(f"{path}: needs {PAD} as token 0 and {BOS}")
    return tokenizer


def token_batch(tokenizer: Tokenizer, prompts: Sequence[str], max_tokens: int) -> Int[Tensor, "b l"]:
    """Ids with a leading BOS (so that an empty prompt has one token), cut at max_tokens, padded with 0."""
    bos = tokenizer.token_to_id(BOS)
    rows = [[bos, *tokenizer.encode(p, add_special_tokens=False).ids][:max_tokens] for p in prompts]
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows])


class TextEncoder(nn.Module):
    """Word embeddings → BiLSTM: f_text, S_seq and the padding mask."""

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim, padding_idx=0)
        self.lstm = nn.LSTM(dim, dim // 2, batch_first=True, bidirectional=True)

    def forward(
        self, ids: Int[Tensor, "b l"]
    ) -> tuple[Float[Tensor, "b d"], Float[Tensor, "b l d"], Bool[Tensor, "b l"]]:
        padding = ids == 0
        lengths = (~padding).sum(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        states, (last, _) = self.lstm(packed)
        sequence, _ = nn.utils.rnn.pad_packed_sequence(states, batch_first=True, total_length=ids.shape[1])
        return torch.cat([last[0], last[1]], dim=1), sequence, padding


@lru_cache(maxsize=1)
def default_tokenizer() -> Tokenizer:
    return byte_tokenizer()
