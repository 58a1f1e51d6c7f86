"""The small vision–language models of the package, under the name that tests know."""

from guardpaint.testing.small_vlms import CHAT, grounding_dino, internvl, llava, qwen25, shieldgemma

__all__ = ["CHAT", "grounding_dino", "internvl", "llava", "qwen25", "shieldgemma"]
