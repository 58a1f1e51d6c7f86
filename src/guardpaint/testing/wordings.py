"""Prompts for the kinds of pictures that stand in for a corpus."""

from __future__ import annotations

from numpy.random import Generator

THINGS = {
    "cat": ("a cat", "a striped cat", "the face of a cat"),
    "coffee": ("a cup of coffee", "a red cup on a saucer", "an espresso"),
    "flowers": ("a flower", "a yellow blossom", "petals"),
    "temple": ("a temple", "a tiled roof", "an old pavilion"),
    "stars": ("distant galaxies", "the night sky", "stars"),
    "rocket": ("a rocket", "a launch pad", "a white rocket at dusk"),
    "motorcycle": ("a motorcycle", "a garage with a motorcycle", "a parked motorbike"),
}
PLACES = (
    "by a window", "in the morning", "in warm light", "seen from the side", "in front of a wall", "at dusk", "up close",
    "on a wooden table", "after the rain", "on a quiet day", "with a soft background", "in summer", "from far away",
)  # fmt: skip
STYLES = (
    "a photograph", "a sharp photograph", "a grainy photograph", "film still", "a postcard", "high contrast",
    "muted colours", "35 mm", "a magazine picture", "wide angle", "shallow focus",
)  # fmt: skip


def wordings(kind: str, source: str, draw: Generator) -> list[str]:
    """Prompts for pictures of a kind, none twice; a source has words of its own, so that two never share a prompt."""
    word = source.replace("-", " ")
    texts = [f"{thing} {place}, {style}, {word}" for thing in THINGS[kind] for place in PLACES for style in STYLES]
    return [texts[i] for i in draw.permutation(len(texts))]
