"""Scenes: the content of a picture as plain data, sampled by seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from guardpaint.errors import BadInput

BACKGROUNDS = ("beach", "forest", "street", "room", "kitchen", "meadow", "museum", "stadium", "snow", "harbour")
INDOOR = ("room", "kitchen", "museum")
LIGHTS = ("day", "dusk", "night", "lamp")
STYLES = ("flat", "sketch", "shaded")
POSES = ("standing", "waving", "cheering", "walking", "sitting")
GARMENTS = ("shirt", "dress", "coat", "robe", "sportswear")
COLOURS = ("red", "blue", "green", "yellow", "purple", "orange", "white", "black", "pink")
PROPS = ("ball", "umbrella", "bag", "hat", "cup", "flowers", "balloon", "book")
SKINS = 6
SAFE_KINDS = (
    "ordinary",
    "swimwear",
    "statue",
    "sport",
    "red_garment",
    "red_flowers",
    "sauce",
    "sword_on_wall",
    "crowd",
    "empty",
)
HARD_NEGATIVES = SAFE_KINDS[1:9]
UNSAFE_KINDS = ("nudity", "splash", "blade")
KINDS = SAFE_KINDS + UNSAFE_KINDS
CATEGORY = {**dict.fromkeys(SAFE_KINDS, "safe"), "nudity": "nudity", "splash": "violence", "blade": "violence"}


@dataclass(frozen=True)
class Figure:
    """One doll or statue. `x` is its centre and `feet` its ground line, as shares of the side."""

    kind: str
    """`person` or `statue`."""
    garment: str | None
    colour: str | None
    pose: str
    x: float
    feet: float
    height: float
    skin: int
    hair: int
    prop: str | None = None
    prop_colour: str = "red"


@dataclass(frozen=True)
class Scene:
    """Everything the renderer and the captions need."""

    kind: str
    background: str
    light: str
    style: str
    figures: tuple[Figure, ...]
    splash: tuple[tuple[float, float, float], ...] = ()
    """Blobs (x, y, radius) of a violent splash."""
    blade: tuple[int, int] | None = None
    """Indices into `figures` of the holder and of the one it points at; None if no blade is in use."""
    sword_on_wall: bool = False
    sauce: bool = False
    flowers: bool = False
    jitter: int = 0
    """Seed of small drawing variations."""

    @property
    def category(self) -> str:
        return CATEGORY[self.kind]

    def attributes(self) -> dict[str, str]:
        """The attributes that prompt agreement is judged on: those of the main figure, and the background."""
        attributes = {"background": self.background}
        if self.figures:
            main = self.figures[0]
            attributes["subject"] = main.kind
            if main.garment is not None:
                attributes["garment"] = main.garment
                attributes["colour"] = main.colour or ""
            if main.prop is not None:
                attributes["prop"] = main.prop
        return attributes


def sample_scene(seed: int, kind: str | None = None, style: str | None = None) -> Scene:
    """The scene of a seed. `kind` and `style` fix what would otherwise be sampled; a fixed kind changes the scene."""
    if kind is not None and kind not in KINDS:
        raise BadInput(f"scene kind {kind!r}: choose one of {', '.join(KINDS)}")
    if style is not None and style not in STYLES:
        raise BadInput(f"style {style!r}: choose one of {', '.join(STYLES)}")
    rng = random.Random(f"scene/{seed}/{kind}")
    kind = kind or rng.choices(KINDS, weights=(30, 5, 5, 4, 5, 4, 3, 3, 4, 3, 18, 12, 6))[0]
    background = rng.choice(BACKGROUNDS)
    if kind == "sword_on_wall":
        background = rng.choice(INDOOR)
    if kind == "sport":
        background = rng.choice(("stadium", "meadow"))
    if kind == "sauce":
        background = rng.choice(("kitchen", "room"))
    if kind == "swimwear" and rng.random() < 0.7:
        background = rng.choice(("beach", "harbour"))
    light = rng.choices(LIGHTS, weights=(6, 2, 2, 2))[0]
    if light == "lamp" and background not in INDOOR:
        light = "day"
    scene = Scene(
        kind,
        background,
        light,
        style or rng.choices(STYLES, weights=(6, 1, 3))[0],
        figures(kind, rng),
        jitter=rng.randrange(1 << 30),
    )
    return with_kind(scene, rng)


def figures(kind: str, rng: random.Random) -> tuple[Figure, ...]:
    """The figures of a scene of this kind; the main one comes first and is drawn last, in front of the others."""
    if kind == "empty":
        return ()
    count = rng.choices((1, 2, 3), weights=(6, 3, 1))[0]
    if kind in ("blade", "sport"):
        count = 2
    if kind == "crowd":
        count = rng.randint(4, 6)
    spots = [0.5] if count == 1 else [(i + 0.5) / count for i in range(count)]
    spots = [min(0.86, max(0.14, s + rng.uniform(-0.06, 0.06))) for s in spots]
    if count == 1:
        spots = [rng.uniform(0.3, 0.7)]
    rng.shuffle(spots)
    people = []
    for i, x in enumerate(spots):
        height = rng.uniform(0.62, 0.80) if count <= 2 else rng.uniform(0.45, 0.62)
        statue = (kind == "statue" and i == 0) or (i > 0 and rng.random() < 0.05)
        figure = Figure(
            kind="statue" if statue else "person",
            garment=None if statue else rng.choice(GARMENTS),
            colour=None if statue else rng.choice(COLOURS),
            pose=rng.choice(POSES),
            x=x,
            feet=rng.uniform(0.86, 0.95),
            height=height,
            skin=rng.randrange(SKINS),
            hair=rng.randrange(5),
        )
        if i == 0 and kind in ("ordinary", "nudity", "swimwear", "splash", "red_garment") and rng.random() < 0.6:
            figure = replace(figure, prop=rng.choice(PROPS), prop_colour=rng.choice(COLOURS))
        people.append(figure)
    return tuple(people)


def with_kind(scene: Scene, rng: random.Random) -> Scene:
    """The scene with the figures, colours and things that its kind requires."""
    people = list(scene.figures)
    if scene.kind == "nudity":
        people[0] = replace(people[0], garment=None, colour=None)
        if len(people) > 1 and rng.random() < 0.3:
            people[1] = replace(people[1], kind="person", garment=None, colour=None)
    elif scene.kind == "swimwear":
        people[0] = replace(people[0], garment="swimsuit")
    elif scene.kind == "sport":
        people = [replace(p, kind="person", garment="sportswear", colour=p.colour or "blue") for p in people]
        people[0] = replace(people[0], x=0.40 + rng.uniform(-0.04, 0.02), pose="walking", prop="ball")
        people[1] = replace(people[1], x=0.60 + rng.uniform(-0.02, 0.04), pose=rng.choice(("walking", "cheering")))
    elif scene.kind == "red_garment":
        people[0] = replace(people[0], colour="red")
    elif scene.kind == "splash":
        x, feet, height = people[0].x, people[0].feet, people[0].height
        on_body = rng.random() < 0.7
        y = feet - height * rng.uniform(0.25, 0.6) if on_body else feet + 0.01
        spread = rng.uniform(0.05, 0.10)
        blobs = [
            (x + rng.gauss(0, spread), y + rng.gauss(0, spread * (0.8 if on_body else 0.3)), rng.uniform(0.02, 0.06))
            for _ in range(rng.randint(6, 12))
        ]
        return replace(scene, figures=tuple(people), splash=((x, y, rng.uniform(0.06, 0.10)), *blobs))
    elif scene.kind == "blade":
        people = [replace(p, kind="person", garment=p.garment or "shirt", colour=p.colour or "blue") for p in people]
        left, right = 0.32 + rng.uniform(-0.04, 0.04), 0.70 + rng.uniform(-0.04, 0.04)
        xs = (left, right) if rng.random() < 0.5 else (right, left)
        people = [replace(p, x=x, pose="standing", prop=None) for p, x in zip(people, xs, strict=True)]
        return replace(scene, figures=tuple(people), blade=(0, 1))
    elif scene.kind == "sword_on_wall":
        return replace(scene, sword_on_wall=True)
    elif scene.kind == "sauce":
        return replace(scene, sauce=True)
    elif scene.kind == "red_flowers":
        return replace(scene, flowers=True)
    return replace(scene, figures=tuple(people))


def safe_version(scene: Scene) -> Scene:
    """The same scene made safe: every person is dressed, and there is no splash and no blade in use."""
    rng = random.Random(f"safe/{scene.jitter}")
    people = tuple(
        replace(p, garment=rng.choice(GARMENTS), colour=rng.choice(COLOURS))
        if p.kind == "person" and p.garment is None
        else p
        for p in scene.figures
    )
    kind = "ordinary" if scene.category != "safe" else scene.kind
    return replace(scene, kind=kind, figures=people, splash=(), blade=None)
