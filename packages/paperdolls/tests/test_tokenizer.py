"""The world's tokenizer: compact on captions, lossless on everything."""

from __future__ import annotations

import pytest

from guardpaint.train.catalogue import load_model
from paperdolls.models.vae import TEST_SEEDS, TRAIN_SEEDS
from paperdolls.tokenizer import captions_cut, train_t5_tokenizer, train_tokenizer, world_captions


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(world_captions(0, 2000), merges=600)


def test_captions_are_short_and_fit(tokenizer):
    texts = list(world_captions(50_000, 300))
    lengths = [len(tokenizer(t).input_ids) for t in texts]
    words = [len(t.split()) for t in texts]
    assert sum(lengths) / sum(words) < 2.2
    assert max(lengths) <= 64


@pytest.mark.parametrize(
    "text", ["a person in a red dress", "zyzzyva", "кот и пёс", "שלום", "日本の海", "🐈 on a 🪑", "n̈aïve"]
)
def test_nothing_is_unknown(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False).input_ids
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert ids and end not in ids


def test_round_trip(tmp_path, tokenizer):
    from transformers import CLIPTokenizer

    tokenizer.save_pretrained(tmp_path)
    again = CLIPTokenizer.from_pretrained(tmp_path)
    text = "a person wearing a scarlet gown on the seaside, at dusk"
    assert again(text).input_ids == tokenizer(text).input_ids
    assert again.decode(again(text).input_ids, skip_special_tokens=True).replace(" ", "") == text.replace(" ", "")


def test_training_is_deterministic(tokenizer):
    again = train_tokenizer(world_captions(0, 2000), merges=600)
    assert again.get_vocab() == tokenizer.get_vocab()


def test_merges_by_hand():
    """'aab' ×2, 'ab' ×1: (a, b) occurs 3 times, (a, a) twice; then (a, ab) twice."""
    from collections import Counter

    from paperdolls.tokenizer import learn_merges

    words = Counter({("a", "a", "b"): 2, ("a", "b"): 1})
    assert learn_merges(words, 2) == [("a", "b"), ("a", "ab")]
    assert learn_merges(words, 99) == [("a", "b"), ("a", "ab")], "nothing left to merge"


@pytest.mark.parametrize(("learned", "read"), [(2_000, 500), pytest.param(12_000, 10_000, marks=pytest.mark.slow)])
def test_the_models_at_128_pixels_read_whole_captions(learned, read):
    """With 24 tokens, the length of mini-sd3 at 64 pixels, nearly half of the captions lose their end."""
    texts = list(world_captions(TRAIN_SEEDS, learned))
    clip, t5 = train_tokenizer(texts, length=48), train_t5_tokenizer(texts, length=64)
    assert captions_cut(clip, TEST_SEEDS, read) == 0 and captions_cut(t5, TEST_SEEDS, read) == 0
    assert captions_cut(train_tokenizer(texts, length=24), TEST_SEEDS, 500) > 200
    bases = [load_model(f"mini-{name}-128").last.config["model"] for name in ("sd", "sdxl", "sd3", "flux", "inpaint")]
    assert all(b.get("tokens", 48) == 48 for b in bases)
    assert all(b["other_tokens"] == 64 for b in bases if b["family"] in ("sd3", "flux"))
