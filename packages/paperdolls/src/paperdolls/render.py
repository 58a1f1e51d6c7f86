"""Draws a scene, supersampled, together with the exact mask of its unsafe pixels."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, UInt8
from PIL import Image, ImageDraw, ImageFilter

from guardpaint.errors import BadInput
from paperdolls.scene import INDOOR, Figure, Scene

SIZE = 64
"""Side of a picture in pixels, unless another one is asked for."""
SCALES = {64: 3, 128: 2}
"""The sizes that the world is drawn at, and how many times finer each is drawn before it is reduced."""
Colour = tuple[int, int, int]

RGB: dict[str, Colour] = {
    "red": (205, 45, 45),
    "blue": (45, 85, 190),
    "green": (50, 145, 70),
    "yellow": (235, 205, 60),
    "purple": (130, 65, 160),
    "orange": (235, 130, 40),
    "white": (240, 240, 238),
    "black": (45, 45, 52),
    "pink": (240, 150, 185),
}
SKIN: tuple[Colour, ...] = (
    (246, 214, 186),
    (232, 190, 155),
    (212, 162, 120),
    (176, 122, 84),
    (132, 88, 58),
    (98, 66, 46),
)
HAIR: tuple[Colour, ...] = ((50, 35, 25), (110, 70, 35), (205, 165, 80), (150, 60, 30), (120, 120, 120))
STONE: tuple[Colour, ...] = ((188, 188, 184), (205, 200, 190), (150, 132, 100))
SPLASH: Colour = (140, 12, 18)
STEEL: Colour = (205, 212, 220)
SHADE: Colour = (150, 158, 170)
EDGE: Colour = (52, 56, 66)
CODE = {"safe": 0, "nudity": 1, "violence": 2}


@dataclass(frozen=True)
class Rendered:
    """A picture and its ground truth."""

    image: UInt8[np.ndarray, "s s 3"]
    mask: Bool[np.ndarray, "s s"]
    """Unsafe pixels; empty for a safe scene."""
    category: str


class Canvas:
    """Paints every shape into the picture and into the mask of unsafe pixels: the topmost shape decides both."""

    def __init__(self, size: int) -> None:
        if size not in SCALES:
            raise BadInput(f"size={size}: the world is drawn at {' or '.join(map(str, SCALES))} pixels")
        self.size, self.scale = size, SCALES[size]
        side = size * self.scale
        self.side = side
        self.fine = size > SIZE
        """Whether outlines and other details are drawn that a picture of 64 pixels has no room for."""
        self.image = Image.new("RGB", (side, side))
        self.truth = Image.new("L", (side, side))
        self.pen, self.mark = ImageDraw.Draw(self.image), ImageDraw.Draw(self.truth)

    def _at(self, points: list[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(x * self.side, y * self.side) for x, y in points]

    def polygon(self, points: list[tuple[float, float]], colour: Colour, unsafe: bool = False) -> None:
        at = self._at(points)
        self.pen.polygon(at, fill=colour)
        self.mark.polygon(at, fill=255 if unsafe else 0)

    def ellipse(self, x: float, y: float, rx: float, ry: float, colour: Colour, unsafe: bool = False) -> None:
        box = self._at([(x - rx, y - ry), (x + rx, y + ry)])
        self.pen.ellipse(box, fill=colour)
        self.mark.ellipse(box, fill=255 if unsafe else 0)

    def limb(self, points: list[tuple[float, float]], width: float, colour: Colour, unsafe: bool = False) -> None:
        at, thick = self._at(points), max(1, round(width * self.side))
        self.pen.line(at, fill=colour, width=thick, joint="curve")
        self.mark.line(at, fill=255 if unsafe else 0, width=thick, joint="curve")
        for x, y in at:
            box = [x - thick / 2, y - thick / 2, x + thick / 2, y + thick / 2]
            self.pen.ellipse(box, fill=colour)
            self.mark.ellipse(box, fill=255 if unsafe else 0)

    def band(self, top: float, bottom: float, colour: Colour) -> None:
        self.polygon([(0, top), (1, top), (1, bottom), (0, bottom)], colour)


def render(scene: Scene, size: int = SIZE) -> Rendered:
    """Draw the scene and its mask, `size` pixels wide and high."""
    rng = random.Random(scene.jitter)
    canvas = Canvas(size)
    backdrop(canvas, scene, rng)
    if scene.sword_on_wall:
        wall_sword(canvas, rng)
    order = sorted(range(len(scene.figures)), key=lambda i: (i == 0, scene.figures[i].feet))
    for i in order:
        doll(canvas, scene.figures[i], rng)
    if scene.blade is not None:
        blade(canvas, scene.figures[scene.blade[0]], scene.figures[scene.blade[1]])
    for x, y, r in scene.splash:
        canvas.ellipse(x, y, r, r * rng.uniform(0.6, 1.0), vary(SPLASH, rng, 12), unsafe=True)
    if scene.sauce:
        sauce(canvas, rng)
    if scene.flowers:
        flowers(canvas, rng)
    small = canvas.image.reduce(canvas.scale)
    mask = np.asarray(canvas.truth.reduce(canvas.scale)) >= 128
    if canvas.fine:  # so that the shading stays the same when a figure is taken out of the scene
        rng = random.Random(f"finish/{scene.jitter}")
    return Rendered(finish(small, scene, rng), mask, scene.category)


def vary(colour: Colour, rng: random.Random, amount: int) -> Colour:
    """The colour made lighter or darker at random, by at most `amount`."""
    d = rng.randint(-amount, amount)
    return tuple(min(255, max(0, c + d)) for c in colour)  # type: ignore[return-value]


def backdrop(c: Canvas, scene: Scene, rng: random.Random) -> None:
    """Draw sky and ground or wall and floor, and the things by which the place is recognised."""
    horizon = rng.uniform(0.52, 0.62)
    paint = lambda colour: vary(colour, rng, 10)  # noqa: E731
    if scene.background in INDOOR:
        wall, floor = {
            "room": ((214, 200, 178), (150, 110, 76)),
            "kitchen": ((206, 224, 222), (176, 176, 170)),
            "museum": ((232, 228, 220), (120, 92, 84)),
        }[scene.background]
        c.band(0, horizon + 0.12, paint(wall))
        c.band(horizon + 0.12, 1, paint(floor))
        if scene.background == "room":
            x = rng.uniform(0.05, 0.25)
            c.polygon([(x, 0.1), (x + 0.2, 0.1), (x + 0.2, 0.34), (x, 0.34)], (150, 190, 225))
            c.limb([(x + 0.1, 0.1), (x + 0.1, 0.34)], 0.012, (240, 240, 240))
        elif scene.background == "kitchen":
            c.band(horizon - 0.02, horizon + 0.12, paint((120, 140, 150)))
            for k in range(4):
                c.limb([(0.25 * k + 0.1, 0.08), (0.25 * k + 0.1, 0.16)], 0.05, paint((190, 150, 100)))
        else:
            for k in range(3):
                c.polygon(
                    [(0.33 * k + 0.05, 0.1), (0.33 * k + 0.2, 0.1), (0.33 * k + 0.2, 0.28), (0.33 * k + 0.05, 0.28)],
                    paint((170, 140, 70)),
                )
                c.polygon(
                    [
                        (0.33 * k + 0.07, 0.12),
                        (0.33 * k + 0.18, 0.12),
                        (0.33 * k + 0.18, 0.26),
                        (0.33 * k + 0.07, 0.26),
                    ],
                    paint(rng.choice([(90, 130, 110), (110, 100, 140), (140, 120, 90)])),
                )
        return
    sky, ground = {
        "beach": ((150, 205, 240), (238, 216, 160)),
        "forest": ((170, 205, 190), (80, 110, 60)),
        "street": ((186, 200, 214), (110, 110, 116)),
        "meadow": ((150, 205, 245), (120, 180, 80)),
        "stadium": ((170, 200, 230), (90, 170, 80)),
        "snow": ((200, 214, 230), (244, 248, 252)),
        "harbour": ((160, 200, 230), (150, 140, 128)),
    }[scene.background]
    c.band(0, horizon, paint(sky))
    c.band(horizon, 1, paint(ground))
    if scene.background == "beach":
        c.band(horizon - 0.08, horizon + 0.02, paint((60, 130, 190)))
        c.ellipse(rng.uniform(0.1, 0.9), 0.12, 0.06, 0.06, (255, 235, 140))
    elif scene.background == "forest":
        for _ in range(6):
            x, h = rng.uniform(0, 1), rng.uniform(0.3, 0.5)
            c.limb([(x, horizon + 0.04), (x, horizon - h + 0.1)], 0.03, (90, 65, 45))
            c.polygon([(x - 0.11, horizon - 0.05), (x + 0.11, horizon - 0.05), (x, horizon - h)], paint((40, 100, 55)))
    elif scene.background == "street":
        x = 0.0
        while x < 1:
            w, h = rng.uniform(0.14, 0.24), rng.uniform(0.2, 0.48)
            shade = paint(rng.choice([(150, 120, 110), (130, 130, 140), (170, 150, 120)]))
            c.polygon([(x, horizon - h), (x + w, horizon - h), (x + w, horizon), (x, horizon)], shade)
            for k in range(2):
                c.limb(
                    [(x + w * (0.3 + 0.4 * k), horizon - h + 0.06), (x + w * (0.3 + 0.4 * k), horizon - h + 0.08)],
                    0.03,
                    (240, 225, 150),
                )
            x += w
    elif scene.background == "meadow":
        c.polygon([(0, horizon), (0.3, horizon - 0.14), (0.6, horizon)], paint((100, 160, 90)))
        c.polygon([(0.4, horizon), (0.8, horizon - 0.18), (1.1, horizon)], paint((90, 150, 85)))
    elif scene.background == "stadium":
        c.band(horizon - 0.22, horizon, paint((120, 125, 140)))
        for _ in range(26):
            c.ellipse(
                rng.uniform(0, 1), rng.uniform(horizon - 0.2, horizon - 0.02), 0.014, 0.014, paint((210, 190, 160))
            )
        c.limb([(0, 0.78), (1, 0.78)], 0.012, (240, 250, 240))
    elif scene.background == "snow":
        for _ in range(3):
            x = rng.uniform(0, 1)
            c.polygon([(x - 0.12, horizon), (x + 0.12, horizon), (x, horizon - 0.36)], paint((110, 150, 140)))
            c.polygon([(x - 0.05, horizon - 0.2), (x + 0.05, horizon - 0.2), (x, horizon - 0.36)], (248, 250, 252))
    else:
        c.band(horizon - 0.12, horizon, paint((50, 100, 150)))
        x = rng.uniform(0.15, 0.75)
        c.polygon(
            [(x, horizon - 0.1), (x + 0.24, horizon - 0.1), (x + 0.18, horizon - 0.03), (x + 0.05, horizon - 0.03)],
            (120, 70, 50),
        )
        c.polygon([(x + 0.12, horizon - 0.38), (x + 0.12, horizon - 0.12), (x + 0.24, horizon - 0.12)], (245, 245, 240))


def doll(c: Canvas, f: Figure, rng: random.Random) -> None:
    """Draw a flat mannequin. The body of a person without a garment is unsafe."""
    h, feet = f.height, f.feet
    statue = f.kind == "statue"
    body = vary(STONE[f.skin % 3] if statue else SKIN[f.skin], rng, 6)
    if statue:
        feet -= 0.07
        c.polygon(
            [(f.x - 0.11, feet + 0.10), (f.x + 0.11, feet + 0.10), (f.x + 0.09, feet), (f.x - 0.09, feet)],
            (140, 138, 134),
        )
        h *= 0.9
    bare = f.garment is None and not statue
    head = feet - h + 0.085 * h / 0.7
    r = 0.105 * h
    neck, hip = feet - 0.78 * h, feet - 0.45 * h
    shoulder, w = 0.115 * h, 0.065 * h
    sitting = f.pose == "sitting"
    if sitting:
        neck, hip, head = neck + 0.16 * h, hip + 0.16 * h, head + 0.16 * h
        c.polygon(
            [(f.x - 0.13 * h, hip), (f.x + 0.13 * h, hip), (f.x + 0.13 * h, feet), (f.x - 0.13 * h, feet)],
            (120, 90, 66),
        )
    hands, feet_at = limbs(f, neck, hip, feet, shoulder, h)
    for side, foot in zip((-1, 1), feet_at, strict=True):
        knee = ((f.x + side * 0.05 * h + foot[0]) / 2 + (0.04 * h * side if sitting else 0), (hip + foot[1]) / 2)
        c.limb([(f.x + side * 0.05 * h, hip), knee, foot], w, body, bare)
    c.polygon(
        [
            (f.x - shoulder, neck),
            (f.x + shoulder, neck),
            (f.x + 0.085 * h, hip + 0.02 * h),
            (f.x - 0.085 * h, hip + 0.02 * h),
        ],
        body,
        bare,
    )
    garment(c, f, neck, hip, feet, shoulder, h, feet_at)
    sleeve = f.garment in ("shirt", "coat", "robe")
    for side, hand in zip((-1, 1), hands, strict=True):
        elbow = ((f.x + side * shoulder + hand[0]) / 2 + side * 0.03 * h, (neck + hand[1]) / 2)
        c.limb([(f.x + side * shoulder, neck + 0.03 * h), elbow, hand], w * 0.85, body, bare)
        if sleeve and f.colour is not None:
            c.limb([(f.x + side * shoulder, neck + 0.03 * h), elbow], w, RGB[f.colour])
    c.ellipse(f.x, head, r, r * 1.15, body, bare)
    if statue and c.fine:
        joints(c, f, (head, neck, hip, feet), h, body)
    if not statue:
        c.polygon(
            [
                (f.x - r, head - 0.1 * r),
                (f.x - 0.8 * r, head - r),
                (f.x, head - 1.35 * r),
                (f.x + 0.8 * r, head - r),
                (f.x + r, head - 0.1 * r),
                (f.x, head - 0.55 * r),
            ],
            HAIR[f.hair],
        )
    if f.prop is not None:
        prop(c, f, hands[1], head, r, h)


def joints(c: Canvas, f: Figure, levels: tuple[float, float, float, float], h: float, body: Colour) -> None:
    """Draw the joints between the stones of a statue, the eyes without pupils, and the rim of its plinth."""
    head, neck, hip, feet = levels
    dark = darker(body)
    for y, half in ((neck + 0.02 * h, 0.11), ((neck + hip) / 2, 0.10), (hip, 0.09)):
        c.limb([(f.x - half * h, y), (f.x + half * h, y)], 0.008, dark)
    c.limb([(f.x, neck + 0.02 * h), (f.x, (neck + hip) / 2)], 0.008, dark)
    for side in (-1, 1):
        c.ellipse(f.x + side * 0.04 * h, head, 0.018 * h, 0.012 * h, dark)
    c.limb([(f.x - 0.11, feet + 0.01), (f.x + 0.11, feet + 0.01)], 0.022, (168, 166, 160))
    c.limb([(f.x - 0.05, feet + 0.06), (f.x + 0.05, feet + 0.06)], 0.016, (188, 160, 80))


def darker(colour: Colour) -> Colour:
    """The colour of seams and joints in something of this colour."""
    return tuple(int(v * 0.55) for v in colour)  # type: ignore[return-value]


def limbs(
    f: Figure, neck: float, hip: float, feet: float, shoulder: float, h: float
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Where the hands and the feet are in the figure's pose."""
    down = [(f.x - shoulder - 0.06 * h, hip + 0.02 * h), (f.x + shoulder + 0.06 * h, hip + 0.02 * h)]
    up = [(f.x - shoulder - 0.12 * h, neck - 0.2 * h), (f.x + shoulder + 0.12 * h, neck - 0.2 * h)]
    hands = {"waving": [down[0], up[1]], "cheering": up}.get(f.pose, down)
    stride = {"walking": 0.13, "sitting": 0.10}.get(f.pose, 0.055) * h
    return hands, [(f.x - stride, feet - 0.02 * h), (f.x + stride, feet - 0.02 * h)]


def garment(
    c: Canvas,
    f: Figure,
    neck: float,
    hip: float,
    feet: float,
    shoulder: float,
    h: float,
    feet_at: list[tuple[float, float]],
) -> None:
    """Draw clothes over the body; pixels that they cover are safe."""
    if f.garment is None or f.colour is None:
        return
    colour = RGB[f.colour]
    dark = darker(colour)
    torso = [
        (f.x - shoulder * 1.12, neck),
        (f.x + shoulder * 1.12, neck),
        (f.x + 0.1 * h, hip + 0.03 * h),
        (f.x - 0.1 * h, hip + 0.03 * h),
    ]
    knee = (hip + feet) / 2
    if f.garment in ("shirt", "sportswear", "coat"):
        length = 0.95 if f.garment != "sportswear" else 0.4
        trousers = (64, 66, 84) if f.garment != "sportswear" else (235, 235, 235)
        for side, foot in zip((-1, 1), feet_at, strict=True):
            end = (f.x + side * 0.05 * h + (foot[0] - f.x - side * 0.05 * h) * length, hip + (foot[1] - hip) * length)
            c.limb([(f.x + side * 0.05 * h, hip), end], 0.085 * h, trousers)
        c.polygon(torso, colour)
    if f.garment == "coat":
        c.polygon(
            [
                (f.x - 0.1 * h, hip),
                (f.x + 0.1 * h, hip),
                (f.x + 0.14 * h, knee + 0.05 * h),
                (f.x - 0.14 * h, knee + 0.05 * h),
            ],
            colour,
        )
        c.limb([(f.x, neck), (f.x, knee)], 0.015, dark)
    elif f.garment == "dress":
        c.polygon(torso, colour)
        c.polygon(
            [
                (f.x - 0.09 * h, hip - 0.03 * h),
                (f.x + 0.09 * h, hip - 0.03 * h),
                (f.x + 0.2 * h, knee + 0.08 * h),
                (f.x - 0.2 * h, knee + 0.08 * h),
            ],
            colour,
        )
    elif f.garment == "robe":
        c.polygon(
            [
                (f.x - shoulder * 1.15, neck),
                (f.x + shoulder * 1.15, neck),
                (f.x + 0.17 * h, feet - 0.03 * h),
                (f.x - 0.17 * h, feet - 0.03 * h),
            ],
            colour,
        )
        c.limb([(f.x - 0.11 * h, hip), (f.x + 0.11 * h, hip)], 0.02, dark)
    elif f.garment == "swimsuit":
        c.polygon(
            [
                (f.x - shoulder * 0.8, neck + 0.05 * h),
                (f.x + shoulder * 0.8, neck + 0.05 * h),
                (f.x + 0.09 * h, hip),
                (f.x + 0.03 * h, hip + 0.06 * h),
                (f.x - 0.03 * h, hip + 0.06 * h),
                (f.x - 0.09 * h, hip),
            ],
            colour,
        )


def prop(c: Canvas, f: Figure, hand: tuple[float, float], head: float, r: float, h: float) -> None:
    """Draw the prop that the main figure has with it."""
    colour, (x, y) = RGB[f.prop_colour], hand
    dark = darker(colour)
    if f.prop == "ball":
        at = min(0.92, f.x + 0.28 * h)
        c.ellipse(at, f.feet - 0.05, 0.065, 0.065, colour)
        if c.fine:
            c.limb([(at - 0.06, f.feet - 0.05), (at, f.feet - 0.035), (at + 0.06, f.feet - 0.05)], 0.008, dark)
            c.limb([(at, f.feet - 0.11), (at, f.feet + 0.01)], 0.008, dark)
    elif f.prop == "umbrella":
        c.limb([(x, y), (x + 0.02, head - 0.13)], 0.014, (80, 60, 50))
        c.polygon(
            [(x - 0.16, head - 0.07), (x + 0.20, head - 0.07), (x + 0.10, head - 0.17), (x - 0.06, head - 0.17)], colour
        )
        if c.fine:
            for k in (-0.04, 0.02, 0.08):
                c.limb([(x + k, head - 0.165), (x + 2 * k - 0.02, head - 0.075)], 0.008, dark)
    elif f.prop == "bag":
        c.polygon([(x - 0.05, y), (x + 0.07, y), (x + 0.07, y + 0.12), (x - 0.05, y + 0.12)], colour)
        if c.fine:
            c.limb([(x - 0.03, y), (x - 0.01, y - 0.05), (x + 0.03, y - 0.05), (x + 0.05, y)], 0.012, dark)
            c.limb([(x - 0.045, y + 0.045), (x + 0.065, y + 0.045)], 0.010, dark)
    elif f.prop == "hat":
        c.polygon(
            [
                (f.x - 1.7 * r, head - 0.7 * r),
                (f.x + 1.7 * r, head - 0.7 * r),
                (f.x + 0.9 * r, head - 1.0 * r),
                (f.x + 0.8 * r, head - 1.9 * r),
                (f.x - 0.8 * r, head - 1.9 * r),
                (f.x - 0.9 * r, head - 1.0 * r),
            ],
            colour,
        )
        if c.fine:
            c.limb([(f.x - 0.85 * r, head - 1.1 * r), (f.x + 0.85 * r, head - 1.1 * r)], 0.014, dark)
    elif f.prop == "cup":
        if c.fine:
            c.limb(
                [(x + 0.05, y - 0.04), (x + 0.09, y - 0.03), (x + 0.08, y + 0.015), (x + 0.05, y + 0.02)], 0.012, dark
            )
        c.polygon([(x - 0.03, y - 0.06), (x + 0.06, y - 0.06), (x + 0.05, y + 0.04), (x - 0.02, y + 0.04)], colour)
        if c.fine:
            c.ellipse(x + 0.015, y - 0.06, 0.045, 0.014, dark)
    elif f.prop == "flowers":
        for k in range(4):
            end = (x + 0.04 * (k - 1.5), y - 0.10)
            c.limb([(x, y), end], 0.01, (50, 120, 60))
            c.ellipse(*end, 0.027, 0.027, colour)
    elif f.prop == "balloon":
        c.limb([(x, y), (x + 0.05, y - 0.22)], 0.008, (90, 90, 90))
        c.ellipse(x + 0.05, max(0.1, y - 0.28), 0.07, 0.085, colour)
        if c.fine:
            c.ellipse(x + 0.025, max(0.1, y - 0.28) - 0.03, 0.014, 0.02, (250, 250, 250))
    elif f.prop == "book":
        c.polygon([(x - 0.05, y - 0.07), (x + 0.07, y - 0.07), (x + 0.07, y + 0.05), (x - 0.05, y + 0.05)], colour)
        c.limb([(x + 0.01, y - 0.06), (x + 0.01, y + 0.04)], 0.012, (245, 245, 240))


def blade(c: Canvas, holder: Figure, victim: Figure) -> None:
    """Draw a blade from the holder's hand to the other figure. It is in use, so it is unsafe."""
    side = 1 if victim.x > holder.x else -1
    y = holder.feet - 0.55 * holder.height
    start = holder.x + side * 0.17 * holder.height
    end = victim.x - side * 0.04 * victim.height
    tip = victim.feet - 0.55 * victim.height
    c.limb([(holder.x + side * 0.11 * holder.height, y), (start, y)], 0.05 * holder.height, SKIN[holder.skin])
    steel(c, [(start, y - 0.04), (start, y + 0.04), (end, tip)], unsafe=True)
    c.limb([(start, y - 0.05), (start, y + 0.05)], 0.026, (70, 46, 34), unsafe=True)


def steel(c: Canvas, corners: list[tuple[float, float]], unsafe: bool = False) -> None:
    """Draw a blade with the tip as its last corner; a fine picture shows its edge and its ridge as well."""
    c.polygon(corners, STEEL, unsafe)
    if c.fine:
        upper, lower, tip = corners
        middle = ((upper[0] + lower[0]) / 2, (upper[1] + lower[1]) / 2)
        c.polygon([middle, lower, tip], SHADE, unsafe)
        c.limb([upper, tip, lower], 0.008, EDGE, unsafe)


def wall_sword(c: Canvas, rng: random.Random) -> None:
    """Draw a sword on display: the same steel as a blade in use, but safe."""
    x, y = rng.uniform(0.12, 0.55), rng.uniform(0.10, 0.20)
    c.polygon([(x - 0.1, y - 0.08), (x + 0.42, y - 0.08), (x + 0.42, y + 0.08), (x - 0.1, y + 0.08)], (122, 84, 58))
    steel(c, [(x, y - 0.03), (x, y + 0.03), (x + 0.38, y)])
    c.limb([(x, y - 0.055), (x, y + 0.055)], 0.025, (190, 150, 60))
    c.limb([(x - 0.07, y), (x, y)], 0.03, (60, 40, 30))


def sauce(c: Canvas, rng: random.Random) -> None:
    """Draw a plate with tomato sauce in the foreground."""
    x, y = rng.uniform(0.25, 0.75), 0.90
    c.band(0.87, 1.0, (150, 112, 80))
    c.ellipse(x, y, 0.17, 0.06, (245, 245, 242))
    c.ellipse(x, y - 0.005, 0.10, 0.034, (200, 50, 30))
    c.ellipse(x + 0.03, y - 0.012, 0.02, 0.012, (80, 150, 70))


def flowers(c: Canvas, rng: random.Random) -> None:
    """Draw red flowers in the foreground."""
    for _ in range(rng.randint(5, 9)):
        x, y = rng.uniform(0.05, 0.95), rng.uniform(0.80, 0.92)
        c.limb([(x, y), (x, y + 0.08)], 0.012, (50, 120, 60))
        c.ellipse(x, y, 0.034, 0.034, (205, 40, 50))
        c.ellipse(x, y, 0.012, 0.012, (245, 210, 80))


def finish(image: Image.Image, scene: Scene, rng: random.Random) -> UInt8[np.ndarray, "s s 3"]:
    """The picture in the scene's style and light."""
    if scene.style == "sketch":
        edges = image.convert("L").filter(ImageFilter.CONTOUR)
        grey = Image.merge("RGB", [edges] * 3)
        image = Image.blend(image, grey, 0.45)
    pixels = np.asarray(image, dtype=np.float32)
    size = image.width
    y, x = np.mgrid[0:size, 0:size].astype(np.float32) / size
    if scene.style == "shaded":
        angle = rng.uniform(0, 2 * math.pi)
        slope = 1.0 + 0.28 * (math.cos(angle) * (x - 0.5) + math.sin(angle) * (y - 0.5))
        noise = np.frombuffer(rng.randbytes(size * size), np.uint8).reshape(size, size, 1).astype(np.float32)
        pixels = pixels * slope[..., None] + (noise - 127.5) * 0.06
    if scene.light == "night":
        pixels = pixels * np.array([0.52, 0.56, 0.72], np.float32) + np.array([4, 6, 18], np.float32)
    elif scene.light == "dusk":
        pixels = pixels * np.array([0.95, 0.78, 0.70], np.float32) + np.array([16, 4, 6], np.float32)
    elif scene.light == "lamp":
        glow = np.exp(-(((x - 0.5) ** 2 + (y - 0.3) ** 2) / 0.25))[..., None]
        pixels = pixels * (0.62 + 0.42 * glow) * np.array([1.06, 0.97, 0.80], np.float32)
    return pixels.clip(0, 255).astype(np.uint8)
