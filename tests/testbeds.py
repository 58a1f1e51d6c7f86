"""Testbeds of the tests' own, apart from every package."""

from __future__ import annotations

from guardpaint.bases import load_base
from guardpaint.testbed import Prompt


class Bare:
    """A testbed of a few prompts: no pictures of its own, nothing to attack with, no capability."""

    name = "bare"

    def bases(self):
        return ("tiny-sd",)

    def base(self, name, options=None):
        return load_base(name, options)

    def harmful(self, split, count):
        return [Prompt(f"{split}-{i}", f"something bad {i}", 100 + i, "nudity", "plain") for i in range(count)]

    def benign(self, split, count):
        return [Prompt(f"{split}-{i}", f"a house {i}", 200 + i, "safe") for i in range(count)]

    def lexicon(self):
        raise AssertionError("nobody should ask for it")

    surrogate = lexicon

    def judge(self, policy):
        raise AssertionError("nobody should ask for it")

    def rewriter(self):
        return None

    def capability(self, kind):
        return None
