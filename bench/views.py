"""Measure the views that audits are made on, with real tiny decoders and photographs.

    GUARDPAINT_WEIGHTS=../shared/weights python bench/views.py --out docs/results/views.json
    python bench/views.py --sheet docs/images/views.png      (a picture of the views instead of numbers)

Quality is the PSNR on photographs that the shipped readouts were not fitted on:
`view_db` a view at 224 px, `glance_db` one at 128 px, each against the whole tiny decode of the same latents shrunk to
that size; `shrunken_db` the same for pictures of shrunken latents; `synthetic_db` and `synthetic_glance_db` with
readouts fitted on synthetic pictures; `full_db` the whole tiny decode against the photograph, both shrunk to 224 px.
`perfect_denoiser.max_error.<scheduler>` is the largest error of the loop's own arithmetic with a denoiser that knows
the clean latent. Times are those of one view and one auditor pass, relative to one step of classifier-free guidance at
SD 1.5 size; they want an idle machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderTiny
from PIL import Image, ImageDraw
from torch import Tensor

from guardpaint.draft.codec import ViewDecoder, audit_size, resize
from guardpaint.draft.early_exit import SIDE, SYNTHETIC, EarlyExits, fitted
from guardpaint.draft.natural import natural_pictures
from guardpaint.draft.readouts import decoded, latents_of
from guardpaint.store.results import metric, require_clean, write_results
from guardpaint.testing import perfect
from guardpaint.testing.photographs import HELD_OUT, fitting, photograph
from guardpaint.train.readouts import decibels

FAMILIES = {"sd": "taesd", "sdxl": "taesdxl", "sd3": "taesd3", "flux": "taef1"}
VIEW, GLANCE = 224, 128
GOALS = {(512, "view_db"): ">=30", (512, "glance_db"): ">=25", (1024, "view_db"): ">=25", (1024, "glance_db"): ">=25"}
"""At 1024 px both come from the exit at a quarter."""
CPU = torch.device("cpu")
Found = tuple[dict[str, Any], list[dict[str, Any]]]
"""Metrics, and the rows that they were computed from."""


def load(folder: Path, name: str) -> Any:
    return AutoencoderTiny.from_pretrained(
        folder / name, torch_dtype=torch.float32, use_safetensors=True, local_files_only=True
    ).eval()


def shrunken(tiny: Any, z: Tensor, size: tuple[int, int]) -> Tensor:
    """The picture of shrunken latents: how coarse views were made before."""
    return resize(decoded(tiny, F.interpolate(z, size=(size[0] // 8, size[1] // 8), mode="area")), size)


@torch.no_grad()
def quality(folder: Path, sides: list[int]) -> Found:
    """Decibels of views for every family, photograph and size; one picture in each size is not square."""
    rows: list[dict[str, Any]] = []
    for family, name in FAMILIES.items():
        tiny = load(folder, name)
        shipped = ViewDecoder(tiny, None, 8, CPU)
        assert shipped.exits is not None and shipped.exits.readouts.card["pictures"] == "photographs"
        guessed = EarlyExits(tiny, fitted(tiny, natural_pictures(SYNTHETIC, SIDE), "synthetic"))
        synthetic = ViewDecoder(tiny, None, 8, CPU, exits=guessed)
        for side in sides:
            for photo in HELD_OUT:
                size = (side, side * 3 // 2) if photo == "flower" else (side, side)
                image = fitting(photograph(photo), *size)[None]
                z = latents_of(tiny, image)
                whole = shipped.full(z)
                row: dict[str, Any] = {"family": family, "photograph": photo, "height": size[0], "width": size[1]}
                for label, pixels in (("view", VIEW), ("glance", GLANCE)):
                    shown = audit_size(*size, pixels)
                    wanted = resize(whole, shown)
                    row[f"{label}_path"] = shipped.path(size, pixels)
                    row[f"{label}_db"] = decibels(shipped.at(z, pixels), wanted)
                    other = "synthetic_db" if label == "view" else "synthetic_glance_db"
                    row[other] = decibels(synthetic.at(z, pixels), wanted)
                shown = audit_size(*size, VIEW)
                row["shrunken_db"] = decibels(shrunken(tiny, z, shown), resize(whole, shown))
                row["full_db"] = decibels(resize(whole, shown), resize(image, shown))
                rows.append(row)
                print(row, flush=True)
    metrics: dict[str, Any] = {}
    for family in FAMILIES:
        for side in sides:
            own = [r for r in rows if r["family"] == family and r["height"] == side]
            for key in ("glance_db", "view_db", "full_db", "shrunken_db", "synthetic_db", "synthetic_glance_db"):
                goal = GOALS.get((side, key))
                value = statistics.mean(r[key] for r in own)
                metrics[f"{family}.{side}.{key}"] = metric(value, len(own), goal=goal)
    return metrics, rows


def timed(work: Callable[[], Any], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return seconds


@torch.no_grad()
def times(folder: Path, repeats: int) -> Found:
    """A view and a glance of a 512 px picture with one auditor pass each, measured beside a step of the base."""
    from run import full_unet

    from guardpaint.audit.model import AuditorConfig, AuditorScorer

    unet, auditor = full_unet(4), AuditorScorer(AuditorConfig()).eval()
    latents, words = torch.zeros(2, 4, 64, 64), torch.zeros(2, 77, 768)
    decoder = ViewDecoder(load(folder, "taesd"), None, 8, CPU)

    def look(pixels: int) -> None:
        auditor.audit(decoder.at(latents[:1], pixels), ["a photograph of a cat in a garden"], 0.1)

    parts: dict[str, Callable[[], Any]] = {
        "step": lambda: unet(latents, 500, encoder_hidden_states=words),
        "view": lambda: look(VIEW),
        "glance": lambda: look(GLANCE),
        "whole_tiny": lambda: decoder.full(latents[:1]),
    }
    for part in ("view", "glance", "whole_tiny"):
        parts[part]()
    rows = [
        {"part": part, "run": k, "seconds": timed(work, 1)[0]} for k in range(repeats) for part, work in parts.items()
    ]
    middle = {p: statistics.median(r["seconds"] for r in rows if r["part"] == p) for p in parts}
    metrics = {
        "view_vs_step": metric(middle["view"] / middle["step"], repeats, goal="<=0.06"),
        "glance_vs_step": metric(middle["glance"] / middle["step"], repeats, goal="<=0.02"),
        "whole_tiny_vs_step": metric(middle["whole_tiny"] / middle["step"], repeats, note="without an auditor pass"),
    }
    return metrics, rows


@torch.no_grad()
def sheet(folder: Path, path: Path) -> None:
    """Photographs in rows; in columns the photograph, the whole decode, both exits, and shrunken latents."""
    tiny = load(folder, "taesdxl")
    decoder = ViewDecoder(tiny, None, 8, CPU)
    titles = ("photograph", "whole decode", "view, exit 1/2", "glance, exit 1/4", "shrunken latents")
    lines = []
    for photo in ("astronaut", "rocket", "flower"):
        image = fitting(photograph(photo), 512, 512)[None]
        z = latents_of(tiny, image)
        size = (VIEW, VIEW)
        glance = F.interpolate(decoder.at(z, GLANCE), size=size, mode="nearest")
        shown = [
            resize(image, size),
            resize(decoder.full(z), size),
            decoder.at(z, VIEW),
            glance,
            shrunken(tiny, z, size),
        ]
        lines.append(torch.cat([s[0] for s in shown], dim=2))
    pixels = (torch.cat(lines, dim=1).permute(1, 2, 0).clamp(0, 1) * 255).round().byte().numpy()
    page = Image.new("RGB", (pixels.shape[1], pixels.shape[0] + 18), "white")
    page.paste(Image.fromarray(pixels), (0, 18))
    draw = ImageDraw.Draw(page)
    for k, title in enumerate(titles):
        draw.text((k * VIEW + 4, 3), title, fill="black")
    page.quantize(128, dither=Image.Dither.FLOYDSTEINBERG).save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="docs/results/views.json")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sides", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--sheet", help="write a picture of views here and measure nothing")
    args = parser.parse_args()
    folder = Path(os.environ.get("GUARDPAINT_WEIGHTS", "../shared/weights"))
    torch.set_num_threads(1)
    if args.sheet:
        return sheet(folder, Path(args.sheet))
    require_clean(args.out)
    metrics: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for found, more in (quality(folder, args.sides), perfect.measured(), times(folder, args.repeats)):
        metrics |= found
        rows += more
    write_results(args.out, metrics, rows, seed=0)
    for name, value in metrics.items():
        print(f"{name:32s} {value['value']:.4f}")


if __name__ == "__main__":
    main()
