"""Measure how well the seam metrics that need no download rank composites, compared with LPIPS-VGG.

    python bench/seam.py --weights DIR [--auditor DIR]

Composites are patches of pictures pasted into others, with varied feather, brightness and noise: of photographs, and of
paper dolls, which the embedded auditor was trained on. All metrics rate each of them; the result is the Spearman rank
correlation with LPIPS-VGG. The folder of --weights holds lpips_vgg.safetensors.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from intervals import column, interval
from recipe_results import OUT, write
from scipy.stats import spearmanr
from skimage import data

from guardpaint.audit.model import AuditorScorer
from guardpaint.audit.regions import soft_mask
from guardpaint.draft.codec import resize
from guardpaint.store.images import as_pixels
from guardpaint.store.results import metric, require_clean, write_results
from guardpaint.testbed import KnownPictures, need, open_testbed
from guardpaint.testing import small
from guardpaint.verify.lpips import LpipsAlex, LpipsVGG
from guardpaint.verify.seam import BackboneSeam, PixelSeam, seam_quality
from guardpaint.verify.tournament import compose

PHOTOGRAPHS = ("astronaut", "chelsea", "coffee", "rocket")
SIZE = 128
AUDITOR = Path("packages/paperdolls/src/paperdolls/assets/mini-auditor")
NAMES = {
    "lpips_alex": "LPIPS-Alex",
    "backbone": "features of the trained auditor",
    "backbone_random": "features of a random-initialised auditor",
    "pixels": "plain colour distance",
}


def photographs() -> list[torch.Tensor]:
    images = []
    for name in PHOTOGRAPHS:
        picture = torch.from_numpy(getattr(data, name)()).permute(2, 0, 1)[None].float() / 255
        side = min(picture.shape[-2:])
        images.append(resize(picture[..., :side, :side], (SIZE, SIZE))[0])
    return images


def dolls(count: int = 24) -> list[torch.Tensor]:
    world = need(open_testbed("paperdolls"), KnownPictures, "bench/seam.py")
    images = as_pixels([p.image for p in world.pictures("seams", count, "ordinary")])
    return list(resize(images, (SIZE, SIZE)))


def composites(
    pictures: list[torch.Tensor], count: int, seed: int
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict]]:
    """Tuples of candidate, control, mask and settings, from a mild touch-up to a foreign patch."""
    rng, made = np.random.default_rng(seed), []
    for _ in range(count):
        a, b = rng.choice(len(pictures), 2, replace=False)
        control = pictures[a]
        top, left = rng.integers(8, SIZE // 2, 2)
        h, w = rng.integers(SIZE // 6, SIZE // 2, 2)
        region = torch.zeros(SIZE, SIZE, dtype=torch.bool)
        region[top : top + h, left : left + w] = True
        mix, gain, noise, feather = rng.random(), rng.uniform(0.6, 1.4), rng.uniform(0, 0.2), rng.random()
        g = torch.Generator().manual_seed(int(rng.integers(2**31)))
        painted = (
            torch.lerp(control, pictures[b], mix) * gain + noise * torch.randn(3, SIZE, SIZE, generator=g)
        ).clamp(0, 1)
        mask = soft_mask(region, 0.2, feather)
        made.append(
            (
                compose(control, painted[None], mask[None])[0],
                control,
                mask,
                {"mix": mix, "gain": gain, "noise": noise, "feather": feather},
            )
        )
    return made


def against_vgg(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Spearman correlation of the trained auditor's seam metric, and of LPIPS-Alex, with LPIPS-VGG."""
    found = {}
    for name, key in (("backbone", "spearman_trained"), ("lpips_alex", "spearman_alex")):
        for pictures in ("photographs", "dolls"):
            own = [r for r in rows if r["pictures"] == pictures]
            if not own:
                continue
            ours, reference = column(own, name), column(own, "lpips_vgg")

            def rho(of: np.ndarray, a: np.ndarray = ours, b: np.ndarray = reference) -> float:
                return float(spearmanr(a[of], b[of]).statistic)

            note = f"rank correlation with LPIPS-VGG over composites of {pictures}"
            suffix = "" if pictures == "photographs" else f".{pictures}"
            value = rho(np.arange(len(own)))
            found[f"{key}{suffix}"] = metric(value, len(own), ci=interval(rho, len(own)), goal=">=0.8", note=note)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--auditor", type=Path, default=AUDITOR, help="checkpoint of the trained auditor")
    parser.add_argument("--out", type=Path, default=Path("docs/results/seam.json"))
    parser.add_argument("--recipe", type=Path, default=OUT)
    parser.add_argument("--count", type=int, default=200, help="composites of photographs, and of dolls")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    require_clean(args.out)
    torch.set_num_threads(1)
    metrics = {
        "lpips_vgg": LpipsVGG.from_file(args.weights / "lpips_vgg.safetensors"),
        "lpips_alex": LpipsAlex.load(),
        "backbone": BackboneSeam(AuditorScorer.from_pretrained(args.auditor)),
        "backbone_random": BackboneSeam(small.auditor()),
        "pixels": PixelSeam(),
    }
    rows = []
    for pictures, images in (("photographs", photographs()), ("dolls", dolls())):
        for candidate, control, mask, settings in composites(images, args.count, args.seed):
            q = {n: float(seam_quality(m, candidate[None], control, mask[None])) for n, m in metrics.items()}
            rows.append({"pictures": pictures, **settings, **q})
    results = {}
    for pictures in ("photographs", "dolls"):
        own = [r for r in rows if r["pictures"] == pictures]
        reference = np.array([r["lpips_vgg"] for r in own])
        for name, what in NAMES.items():
            other = np.array([r[name] for r in own])

            def rho(of: np.ndarray, a: np.ndarray = reference, b: np.ndarray = other) -> float:
                return float(spearmanr(a[of], b[of]).statistic)

            key = f"seam.rank_correlation.{name}" + ("" if pictures == "photographs" else f".{pictures}")
            value, ci = rho(np.arange(len(own))), interval(rho, len(own))
            note = f"Spearman against LPIPS-VGG over composites of {pictures}; {what}"
            results[key] = metric(value, len(own), ci=ci, note=note)
            print(f"{pictures} {name}: Spearman {value:.3f} [{ci[0]:.3f}, {ci[1]:.3f}] over {len(own)} composites")
    write_results(args.out, results, rows, args.seed)
    write("seam", against_vgg(rows), rows, args.recipe)


if __name__ == "__main__":
    main()
