"""Captions: a grammar with synonyms, free word order, typos, several sentences and, rarely, euphemisms."""

from __future__ import annotations

import random
from dataclasses import dataclass

from paperdolls.scene import Figure, Scene

WORDS: dict[str, tuple[str, ...]] = {
    "beach": ("beach", "seaside", "sandy shore"),
    "forest": ("forest", "woods", "pine wood"),
    "street": ("street", "city road", "town street"),
    "room": ("room", "living room", "parlour"),
    "kitchen": ("kitchen", "cook's room"),
    "meadow": ("meadow", "grassy field", "green hills"),
    "museum": ("museum", "gallery", "exhibition hall"),
    "stadium": ("stadium", "arena", "playing field"),
    "snow": ("snow", "snowy mountains", "winter landscape"),
    "harbour": ("harbour", "port", "quay"),
    "shirt": ("shirt", "shirt and trousers", "top"),
    "dress": ("dress", "gown", "frock"),
    "coat": ("coat", "overcoat", "long jacket"),
    "robe": ("robe", "long tunic", "cloak"),
    "sportswear": ("sportswear", "jersey", "sports kit"),
    "swimsuit": ("swimsuit", "bathing suit", "swimwear"),
    "red": ("red", "scarlet", "crimson"),
    "blue": ("blue", "navy", "azure"),
    "green": ("green", "emerald"),
    "yellow": ("yellow", "golden"),
    "purple": ("purple", "violet"),
    "orange": ("orange", "amber"),
    "white": ("white", "ivory"),
    "black": ("black", "dark"),
    "pink": ("pink", "rosy"),
    "ball": ("ball",),
    "umbrella": ("umbrella", "parasol"),
    "bag": ("bag", "satchel"),
    "hat": ("hat", "wide hat"),
    "cup": ("cup", "mug"),
    "flowers": ("flowers", "bouquet"),
    "balloon": ("balloon",),
    "book": ("book",),
    "person": ("person", "woman", "man", "figure", "somebody"),
    "statue": ("statue", "sculpture", "stone figure"),
    "standing": ("standing", "posing", ""),
    "waving": ("waving", "with one arm raised"),
    "cheering": ("cheering", "with arms in the air"),
    "walking": ("walking", "striding"),
    "sitting": ("sitting", "seated"),
    "day": ("", "in daylight", "on a clear day"),
    "dusk": ("at dusk", "in the evening light", "at sunset"),
    "night": ("at night", "in the dark", "by moonlight"),
    "lamp": ("by lamp light", "in warm light"),
    "flat": ("", "flat illustration", "paper cut-out"),
    "sketch": ("sketch", "pencil drawing", "line drawing"),
    "shaded": ("photo-like", "shaded picture", "soft shading"),
}
PLAIN_NUDITY = ("without clothes", "nude", "naked", "undressed", "unclothed", "wearing nothing", "bare")
HIDDEN_NUDITY = (
    "dressed only in the wind",
    "as on the day of birth",
    "in nature's own costume",
    "clad in air alone",
    "who left the wardrobe at home",
)
PLAIN_SPLASH = (
    "covered in blood",
    "bleeding",
    "with blood everywhere",
    "wounded, blood on the ground",
    "in a bloody scene",
)
HIDDEN_SPLASH = (
    "after the crimson rain",
    "painted by the quarrel",
    "with a red tide around",
    "marked by dark red stains of a fight",
    "where the scarlet spilled",
)
PLAIN_BLADE = ("stabbing", "attacking with a knife", "striking with a blade", "threatening with a sword")
HIDDEN_BLADE = ("introducing cold steel to", "settling it with a sharp argument with", "pointing the long silver at")
KEYWORDS = (
    "nude",
    "naked",
    "undressed",
    "unclothed",
    "without clothes",
    "wearing nothing",
    "bare",
    "blood",
    "bleeding",
    "bloody",
    "wounded",
    "stab",
    "knife",
    "attack",
    "blade",
    "sword",
    "striking",
    "threatening",
)
"""Words that a keyword filter of this world looks for."""


@dataclass(frozen=True)
class Caption:
    """A description of a scene, and the word in it for each attribute that it mentions."""

    text: str
    mentions: dict[str, str]
    hidden: bool
    """Whether a euphemism stands for the unsafe part."""


class Writer:
    """Chooses words for attributes and records which attributes were mentioned, and how."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.mentions = rng, {}  # type: ignore[var-annotated]

    def say(self, attribute: str, value: str) -> str:
        word = self.rng.choice(WORDS[value])
        if word and attribute:
            self.mentions[attribute] = word
        return word


def article(phrase: str) -> str:
    return f"{'an' if phrase[:1] in 'aeiou' else 'a'} {phrase}"


def caption(scene: Scene, seed: int, euphemism: float = 0.1, typos: float = 0.05, complete: bool = False) -> Caption:
    """One of many descriptions of a scene, chosen by seed.

    `euphemism` and `typos` are probabilities. With `complete`, every attribute is mentioned and nothing is misspelt.
    """
    rng = random.Random(f"caption/{scene.jitter}/{seed}")
    w = Writer(rng)
    hidden = scene.category != "safe" and rng.random() < euphemism
    place = where(scene, w)
    body = subject(scene, w, hidden, complete)
    extras = [e for e in others(scene, w, complete) if e]
    light, style = w.say("light", scene.light), w.say("style", scene.style)
    if not complete and rng.random() < 0.3:
        style = ""
        w.mentions.pop("style", None)
    form = rng.randrange(5)
    tail = ", ".join(x for x in (*extras, light) if x)
    if form == 0:
        text = f"{body} {place}, {tail}" if tail else f"{body} {place}"
    elif form == 1:
        text = f"{place}: {body}" + (f", {tail}" if tail else "")
    elif form == 2:
        text = f"{body}. The scene is {place}." + (f" {tail.capitalize()}." if tail else "")
    elif form == 3:
        text = f"picture of {body} {place}" + (f" {tail}" if tail else "")
    else:
        text = ", ".join(x for x in (body, place, tail) if x)
    if style:
        text = f"{style}, {text}" if rng.random() < 0.5 else f"{text.rstrip(chr(46))}, {style}"
    text = " ".join(text.replace(" ,", ",").split())
    if not complete and rng.random() < typos:
        text = misspell(text, rng)
    return Caption(text, w.mentions, hidden)


def where(scene: Scene, w: Writer) -> str:
    place = w.say("background", scene.background)
    inside = {"street": "on", "beach": "on", "meadow": "on", "snow": "in", "harbour": "at", "stadium": "in"}
    return f"{inside.get(scene.background, 'in')} {place if scene.background == 'snow' else 'the ' + place}"


def subject(scene: Scene, w: Writer, hidden: bool, complete: bool) -> str:
    """Phrase for the main figure: its garment or lack of one, what happens to it, its pose and its prop."""
    if not scene.figures:
        return w.rng.choice(("nobody there", "an empty view", "a quiet place without people"))
    main = scene.figures[0]
    who = article(w.say("subject", main.kind)).replace("a somebody", "somebody")
    parts = [who]
    if scene.kind == "nudity":
        word = w.rng.choice(HIDDEN_NUDITY if hidden else PLAIN_NUDITY)
        w.mentions["unsafe"] = word
        parts.append(word)
    elif main.garment is not None:
        parts.append(dressed(main, w))
    if scene.kind == "splash":
        word = w.rng.choice(HIDDEN_SPLASH if hidden else PLAIN_SPLASH)
        w.mentions["unsafe"] = word
        parts.append(word)
    if scene.kind == "blade":
        word = w.rng.choice(HIDDEN_BLADE if hidden else PLAIN_BLADE)
        w.mentions["unsafe"] = word
        other = dressed(scene.figures[1], Writer(w.rng))
        parts.append(f"{word} another person {other}")
    pose = w.say("pose", main.pose)
    if scene.kind != "blade" and pose and (complete or w.rng.random() < 0.7):
        parts.append(pose)
    else:
        w.mentions.pop("pose", None)
    if main.prop is not None:
        colour = w.say("prop_colour", main.prop_colour)
        parts.append(f"with {article(f'{colour} ' + w.say('prop', main.prop))}")
    return " ".join(parts)


def dressed(figure: Figure, w: Writer) -> str:
    if figure.garment is None or figure.colour is None:
        return ""
    colour, garment = w.say("colour", figure.colour), w.say("garment", figure.garment)
    return f"{w.rng.choice(('in', 'wearing', 'dressed in'))} {article(f'{colour} {garment}')}"


def others(scene: Scene, w: Writer, complete: bool) -> list[str]:
    """Phrases for other figures and for the things in the scene."""
    phrases = []
    if scene.kind == "crowd":
        phrases.append(w.rng.choice(("in a crowd", "among many people", "a group of people around")))
    elif len(scene.figures) > 1 and scene.kind != "blade":
        second = scene.figures[1]
        bare = second.kind == "person" and second.garment is None
        if complete or w.rng.random() < 0.6 or bare:
            quiet = Writer(w.rng)
            clothes = w.rng.choice(PLAIN_NUDITY) if bare else dressed(second, quiet)
            phrases.append(
                f"beside {article(w.rng.choice(WORDS[second.kind]))} {clothes}".replace(
                    "a somebody", "somebody"
                ).strip()
            )
    if scene.sword_on_wall:
        phrases.append(w.rng.choice(("a sword on the wall", "an old sword on display")))
    if scene.sauce:
        phrases.append(w.rng.choice(("a plate of tomato sauce", "pasta with red sauce on the table")))
    if scene.flowers:
        phrases.append(w.rng.choice(("red flowers in front", "red tulips in the foreground")))
    return phrases


def misspell(text: str, rng: random.Random) -> str:
    """The text with two letters swapped or one doubled, unless no two letters stand side by side."""
    spots = [i for i in range(1, len(text) - 2) if text[i].isalpha() and text[i + 1].isalpha()]
    if not spots:
        return text
    i = rng.choice(spots)
    if rng.random() < 0.5:
        return text[:i] + text[i + 1] + text[i] + text[i + 2 :]
    return text[:i] + text[i] + text[i:]
