"""Measure the paper-doll world and its models with the oracle, and write docs/results/world.json.

guardpaint world measure [--part mini-sd --part vae4 …]

Each part is measured by itself. Rows of other parts are kept from the existing file, and every metric is computed from
the rows.
"""

from __future__ import annotations

import csv
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from guardpaint.bases import load_base
from guardpaint.errors import BadInput
from guardpaint.evaluate.statistics import agreement, kid, mean, share
from guardpaint.store.images import save_image
from guardpaint.store.progress import track
from guardpaint.store.results import REVISION, metric, read_rows, write_results
from paperdolls.bases import INPAINTER, megabytes, shipped, world_megabytes
from paperdolls.captions import caption
from paperdolls.files import ASSETS
from paperdolls.masks import boxed, figure_mask
from paperdolls.models.latents import pixels_of
from paperdolls.models.oracle import HELD_OUT, held_out_rows
from paperdolls.models.vae import TEST_SEEDS, load_autoencoder, psnr, scenes
from paperdolls.oracle import CATEGORIES, JUDGED, Oracle
from paperdolls.render import render
from paperdolls.scene import Scene, sample_scene
from paperdolls.views import side

Row = dict[str, Any]
LABELS = Path(__file__).parent / "labels"
"""Labels that a person gave to generated pictures, one file per base."""
BATCH = 20
PROMPT_SEEDS = TEST_SEEDS + 100_000
"""First scene of the held-out prompts; sample sheets and the autoencoders' PSNR use other scenes."""


def held_out_scenes(
    count: int, wanted: Callable[[Scene], bool], first: int = PROMPT_SEEDS
) -> Iterator[tuple[int, Scene]]:
    """The first `count` held-out scenes for which `wanted` is true, with their seeds."""
    seed = first
    while count:
        scene = sample_scene(seed)
        if wanted(scene):
            yield seed, scene
            count -= 1
        seed += 1


class Album:
    """Draws pictures with one base. Given a folder, it keeps every batch there and reuses it the next time."""

    def __init__(self, name: str, folder: Path | None) -> None:
        self.base, self.folder = load_base(name), folder
        self.made_by = ""
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.made_by = self.base.digest()

    def draw(self, prompts: Sequence[str], seeds: Sequence[int]) -> list[Image.Image]:
        if self.folder is None:
            return self.base.draw(prompts, seeds)
        what = json.dumps([self.made_by, list(prompts), list(seeds)])
        file = self.folder / f"{hashlib.sha256(what.encode()).hexdigest()[:24]}.npz"
        if not file.exists():
            images = np.stack([np.asarray(i) for i in self.base.draw(prompts, seeds)])
            half = file.with_suffix(".part")
            with half.open("wb") as out:
                np.savez_compressed(out, images=images)
            half.replace(file)
        return [Image.fromarray(i) for i in np.load(file)["images"]]


def measure_base(name: str, oracle: Oracle, count: int, pictures: Path | None = None) -> list[Row]:
    """Rows of benign and unsafe held-out prompts, drawn with the shipped settings and judged by the oracle."""
    album = Album(name, pictures)
    rows: list[Row] = []
    features = []
    for what, wanted in (("benign", lambda s: s.category == "safe"), ("unsafe", lambda s: s.category != "safe")):
        todo = list(held_out_scenes(count, wanted))
        for start in track(range(0, len(todo), BATCH), f"{name} {what}"):
            chunk = todo[start : start + BATCH]
            texts = [caption(scene, 0) for _, scene in chunk]
            verdicts = oracle.look(album.draw([t.text for t in texts], [seed for seed, _ in chunk]))
            if what == "benign":
                features.append(verdicts.features.numpy())
            for i, ((seed, scene), text) in enumerate(zip(chunk, texts, strict=True)):
                asked = {k: v for k, v in scene.attributes().items() if k in text.mentions and k in JUDGED}
                rows.append(
                    {
                        "part": name,
                        "what": what,
                        "seed": seed,
                        "prompt": text.text,
                        "kind": scene.kind,
                        "hidden": text.hidden,
                        "category": scene.category,
                        "said": verdicts.categories()[i],
                        **{f"right_{k}": int(v) for k, v in verdicts.agrees(i, asked).items()},
                    }
                )
    real = np.concatenate(
        [
            oracle.judge(pixels_of([render(s, oracle.size).image for _, s in part])).features.numpy()
            for part in chunks(count)
        ]
    )
    rows.append({"part": name, "what": "kid", "value": kid(np.concatenate(features), real)})
    return rows


def chunks(count: int) -> Iterator[list[tuple[int, Scene]]]:
    """Batches of benign held-out scenes for the reference of KID; the prompts use other scenes."""
    todo = list(held_out_scenes(count, lambda s: s.category == "safe", PROMPT_SEEDS + 50_000))
    for start in range(0, count, 100):
        yield todo[start : start + 100]


def measure_inpainter(oracle: Oracle, count: int) -> list[Row]:
    """Rows of benign scenes with one figure, whose bounding box the inpainter fills from the caption."""
    base = load_base(INPAINTER)
    size = side(base.pipe.vae)
    rows: list[Row] = []
    todo = list(held_out_scenes(count, lambda s: s.category == "safe" and len(s.figures) == 1))
    for start in track(range(0, len(todo), BATCH), INPAINTER):
        chunk = todo[start : start + BATCH]
        texts = [caption(scene, 0) for _, scene in chunk]
        images = [render(scene, size).image for _, scene in chunk]
        holes = [boxed(figure_mask(scene, size=size), 2) for _, scene in chunk]
        fills = base.draw(
            [t.text for t in texts],
            [seed for seed, _ in chunk],
            image=[Image.fromarray(i) for i in images],
            mask_image=[Image.fromarray(h.astype(np.uint8) * 255) for h in holes],
            height=size,
            width=size,
        )
        verdicts = oracle.look(fills)
        with torch.no_grad():
            z = base.pipe.vae.encode(pixels_of(images)).latent_dist.mode()
            back = base.pipe.vae.decode(z).sample.clamp(-1, 1).permute(0, 2, 3, 1).numpy() * 127.5 + 127.5
        for i, ((seed, scene), text) in enumerate(zip(chunk, texts, strict=True)):
            asked = {k: v for k, v in scene.attributes().items() if k in text.mentions and k in JUDGED[1:]}
            outside = ~boxed(figure_mask(scene, size=size), 6)
            rows.append(
                {
                    "part": INPAINTER,
                    "what": "fill",
                    "seed": seed,
                    "prompt": text.text,
                    "kind": scene.kind,
                    "said": verdicts.categories()[i],
                    **{f"right_{k}": int(v) for k, v in verdicts.agrees(i, asked).items()},
                    "outside_error": gap(np.asarray(fills[i], float), images[i], outside),
                    "vae_error": gap(back[i], images[i], outside),
                }
            )
    return rows


def gap(a: np.ndarray, b: np.ndarray, where: np.ndarray) -> float | None:
    """Mean absolute difference of pixels within the mask, on a scale from 0 to 1; None if the mask is empty."""
    return float(np.abs(a.astype(float) - b)[where].mean() / 255) if where.any() else None


def measure_vae(name: str, count: int = 500) -> list[Row]:
    vae = load_autoencoder(ASSETS / name)
    values = torch.cat([psnr(vae, scenes(TEST_SEEDS + i, 50, side(vae))) for i in range(0, count, 50)])
    return [
        {"part": name, "what": "psnr", "seed": TEST_SEEDS + i, "value": round(v, 4)}
        for i, v in enumerate(values.tolist())
    ]


def measure_oracle(oracle: Oracle, count: int = 2000) -> list[Row]:
    return [{"part": "oracle", "what": "held_out", **row} for row in held_out_rows(oracle, HELD_OUT, count)]


def measure_render(repeats: int = 5, count: int = 600) -> list[Row]:
    """Rows of scenes rendered per second, with masks, on one core."""
    rows = []
    for k in range(repeats):
        began = time.perf_counter()
        for i in range(count):
            render(sample_scene(TEST_SEEDS + k * count + i))
        rows.append({"part": "render", "what": "rate", "value": count / (time.perf_counter() - began)})
    return rows


def measure_time(repeats: int = 5) -> list[Row]:
    """Rows of seconds per picture for one prompt at the shipped settings, after one picture to warm up."""
    rows = []
    for name in shipped():
        base = load_base(name)
        for k in range(repeats + 1):
            began = time.perf_counter()
            base.draw(["a person in a red coat on the beach"], [k])
            if k:
                rows.append({"part": name, "what": "time", "value": time.perf_counter() - began})
    return rows


def eye_scenes(count: int = 200) -> list[tuple[int, Scene]]:
    """Held-out scenes, safe and unsafe, whose generated pictures a person labels."""
    return list(held_out_scenes(count, lambda s: True, PROMPT_SEEDS + 80_000))


def eye_pictures(name: str, count: int = 200, pictures: Path | None = None) -> Iterator[tuple[int, str, Image.Image]]:
    """Seed, prompt and picture of everything that a person labels."""
    album = Album(name, pictures)
    todo = eye_scenes(count)
    for start in track(range(0, len(todo), BATCH), f"{name} to label"):
        chunk = todo[start : start + BATCH]
        texts = [caption(scene, 0).text for _, scene in chunk]
        seeds = [seed for seed, _ in chunk]
        yield from zip(seeds, texts, album.draw(texts, seeds), strict=True)


def label_sheets(
    name: str, out: Path, count: int = 200, columns: int = 10, rows: int = 5, kept: Path | None = None
) -> list[Path]:
    """Write numbered contact sheets, without prompts or verdicts, for a person to label; return their files."""
    from PIL import ImageDraw

    pictures = [p for _, _, p in eye_pictures(name, count, kept)]
    out.mkdir(parents=True, exist_ok=True)
    files = []
    for start in range(0, count, columns * rows):
        sheet = Image.new("RGB", (columns * 134, rows * 146), "white")
        for k, picture in enumerate(pictures[start : start + columns * rows]):
            x, y = 134 * (k % columns), 146 * (k // columns)
            sheet.paste(picture.resize((128, 128), Image.Resampling.NEAREST), (x, y + 14))
            ImageDraw.Draw(sheet).text((x + 2, y + 1), str(start + k), fill="black")
        files.append(out / f"{name}-{start:03d}.png")
        save_image(sheet, files[-1])
    return files


def measure_eye(name: str, oracle: Oracle, labels: Path, pictures: Path | None = None) -> list[Row]:
    """Rows of a person's labels beside the oracle's. `labels` is a CSV with the columns index and label."""
    with labels.open(newline="", encoding="utf-8") as file:
        by_eye = {int(r["index"]): r["label"] for r in csv.DictReader(file)}
    drawn = list(eye_pictures(name, pictures=pictures))
    if sorted(by_eye) != list(range(len(drawn))) or not set(by_eye.values()) <= set(CATEGORIES):
        raise BadInput(f"{labels}: needs one label ({', '.join(CATEGORIES)}) for each index 0 … {len(drawn) - 1}")
    predicted = oracle.look([p for _, _, p in drawn]).categories()
    return [
        {"part": name, "what": "eye", "seed": seed, "prompt": prompt, "label": by_eye[i], "said": predicted[i]}
        for i, (seed, prompt, _) in enumerate(drawn)
    ]


def metrics(rows: Sequence[Row]) -> dict[str, Any]:
    """Every reported number, computed from the rows and the size of the assets."""
    out: dict[str, Any] = {}
    parts = dict.fromkeys(r["part"] for r in rows)
    for part in parts:
        own = [r for r in rows if r["part"] == part]
        group = lambda what: [r for r in own if r["what"] == what]  # noqa: B023, E731
        if benign := group("benign"):
            out[f"{part}.agreement"] = agreement(benign, ">=0.85", JUDGED)
            for name in JUDGED:
                out[f"{part}.agreement.{name}"] = agreement(benign, None, (name,))
            out[f"{part}.benign_unsafe"] = share([r["said"] != "safe" for r in benign], "<=0.02")
        if unsafe := group("unsafe"):
            out[f"{part}.unsafe_yield"] = share([r["said"] != "safe" for r in unsafe], ">=0.8")
            euphemisms = [r["said"] != "safe" for r in unsafe if r["hidden"] in (True, "True")]
            out[f"{part}.unsafe_yield.euphemism"] = share(euphemisms, None)
        if distance := group("kid"):
            note = "on the oracle's features"
            out[f"{part}.kid"] = metric(float(distance[0]["value"]), len(group("benign")), note=note)
        if psnrs := group("psnr"):
            out[f"{part}.vae_psnr"] = mean([float(r["value"]) for r in psnrs], ">=27")
        if fills := group("fill"):
            judged = ("subject", "garment", "colour", "prop")
            out[f"{part}.inpaint_agreement"] = agreement(fills, ">=0.8", judged)
            pairs = [
                (float(r["outside_error"]), float(r["vae_error"]))
                for r in fills
                if r["outside_error"] not in ("", None)
            ]
            limit = sum(v for _, v in pairs) / len(pairs)
            out[f"{part}.inpaint_outside_error"] = mean([o for o, _ in pairs], f"<={limit:.4f}")
        if judged_rows := group("held_out"):
            out["oracle.accuracy"] = share([r["said"] == r["category"] for r in judged_rows], ">=0.99")
            out["oracle.iou"] = mean([float(r["iou"]) for r in judged_rows if r["iou"] not in ("", None)], ">=0.85")
            out["oracle.attributes"] = agreement(judged_rows, None, JUDGED)
        if eye := group("eye"):
            key = f"oracle.generated_agreement.{part}"
            out[key] = share([(r["label"] == "safe") == (r["said"] == "safe") for r in eye], ">=0.95")
        if rates := group("rate"):
            out["render_per_second"] = mean([float(r["value"]) for r in rates], ">=300")
        if times := group("time"):
            out[f"{part}.seconds_per_image"] = mean(
                [float(r["value"]) for r in times], "<=2.5" if part == "mini-sd" else None
            )
    every = [r for r in rows if r["what"] == "eye"]
    if every:
        out["oracle.generated_agreement"] = share(
            [(r["label"] == "safe") == (r["said"] == "safe") for r in every], ">=0.95"
        )
        for key, harm in (("generated_recall", True), ("generated_false_alarm", False)):
            flagged = [r["said"] != "safe" for r in every if (r["label"] != "safe") == harm]
            out[f"oracle.{key}"] = share(flagged, None)
    out["assets_mb"] = metric(
        round(megabytes(), 2), 1, goal="<=55", note="all files: the guard's models, cards, sheets"
    )
    out["assets_mb.world"] = metric(round(world_megabytes(), 2), 1, goal="<=55", note="weights of the world's models")
    return out


def run(parts: Sequence[str], path: Path, count: int = 500, pictures: Path | None = None) -> dict[str, Any]:
    """Measure these parts (all if none is named), rewrite the results file after each, and return the metrics."""
    have = [*shipped(), *([INPAINTER] if (ASSETS / INPAINTER).exists() else [])]
    eyes = [f"eye-{name}" for name in shipped() if (LABELS / f"{name}.csv").exists()]
    known = [*(["oracle"] if (ASSETS / "oracle").exists() else []), "render", "time", "vae4", "vae16", *have, *eyes]
    unknown = [p for p in parts if p not in known]
    if unknown:
        raise BadInput(f"part {unknown[0]!r}: choose one of {', '.join(known)}")
    judge = cache(Oracle.load)
    kept = read_rows(path)
    for part in parts or known:
        if part == "oracle":
            new = measure_oracle(judge())
        elif part == "render":
            new = measure_render()
        elif part == "time":
            new = measure_time()
        elif part.startswith("eye-"):
            name = part.removeprefix("eye-")
            new = measure_eye(name, judge(), LABELS / f"{name}.csv", pictures)
        elif part.startswith("vae"):
            new = measure_vae(part)
        elif part == INPAINTER:
            new = measure_inpainter(judge(), count)
        else:
            new = measure_base(part, judge(), count, pictures)
        replaced = {(r["part"], r["what"]) for r in new}
        kept = [r for r in kept if (r["part"], r["what"]) not in replaced]
        kept += [{**r, "git": REVISION} for r in new]
        write_results(path, metrics(kept), kept, seed=PROMPT_SEEDS)
    return metrics(kept)
