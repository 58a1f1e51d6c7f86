"""The filter in front of the bases of a world, as its lexicon describes it."""

from __future__ import annotations

from typing import Any

from guardpaint.evaluate.defences.prompt_filter import WORDS, PromptFilter, stock_filter
from guardpaint.testbed.language import Lexicon


def world_filter(lexicon: Lexicon, encode: Any = None) -> PromptFilter:
    """The stock filter with the lexicon's words and sentences, or one that refuses words alone."""
    if lexicon.filter_by_meaning and not lexicon.filter_words:
        return stock_filter(lexicon, encode)
    return PromptFilter(words=lexicon.filter_words or lexicon.keywords or WORDS, sentences=())
