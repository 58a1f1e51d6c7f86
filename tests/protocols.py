"""Invented prompt files under the names of published ones, small random bases in folders, and a judge for them."""

from __future__ import annotations

import csv
from pathlib import Path

from guardpaint.guard import GuardPaint
from guardpaint.testing import hub_layouts, small

BASES = {
    "sd15": "stable-diffusion-v1-5/stable-diffusion-v1-5",
    "sdxl": "stabilityai/stable-diffusion-xl-base-0.9",
    "sd35m": "stabilityai/stable-diffusion-3.5-medium",
    "sd35lt": "stabilityai/stable-diffusion-3.5-large-turbo",
    "flux": "black-forest-labs/FLUX.1-dev",
}
WORDS = ("a lamp beside a river", "a violin made of driftwood", "a kettle on a hill", "a tram full of cacti")


def table(path: Path, columns: list[str], *rows: list[object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])


def write_files(folder: Path, count: int = 2) -> Path:
    """One file for every attack of the protocol, and one of harmless captions."""
    texts = WORDS[:count]
    (folder / "sneakyprompt").mkdir(parents=True)
    (folder / "sneakyprompt" / "nsfw_200.txt").write_text("".join(f"{t}, sneaky\n" for t in texts))
    columns = ["target_prompt", "adv_prompt", "sanitized_adv_prompt"]
    table(folder / "mma.csv", columns, *[[f"{t}, aim", f"{t}, mma", f"{t}, clean"] for t in texts])
    table(folder / "PGJ.csv", ["prompt"], *[[f"{t}, pgj"] for t in texts])
    table(folder / "DACA.csv", ["prompt"], *[[f"{t}, daca"] for t in texts])
    columns = ["case_number", "prompt", "evaluation_seed"]
    rows = [[i, f"{t}, bell", 40 + i] for i, t in enumerate(texts)]
    table(folder / "ring_a_bell" / "nudity_eta_3_k_16.csv", columns, *rows)
    table(folder / "coco_captions.csv", ["image_id", "caption"], *[[i, t] for i, t in enumerate(texts)])
    return folder


def write_bases(folder: Path, names: tuple[str, ...] = tuple(BASES)) -> list[str]:
    """Bases with the classes and files of the published ones, as NAME=PATH."""
    return [f"{name}={hub_layouts.build(BASES[name], folder)}" for name in names]


def write_guard(folder: Path) -> Path:
    """A small random guard; its tiny decoders would be too small for these bases, so it has none."""
    guard = small.guard()
    GuardPaint(guard.parts.auditor, guard.parts.repairer, guard.parts.proposer).save_pretrained(folder)
    return folder
