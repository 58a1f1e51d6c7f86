"""Measure how well the seam metric on the auditor's backbone ranks composites, compared with LPIPS-VGG.

    python bench/seam.py --weights DIR [--auditor DIR] --out docs/results/seam.json

Composites are patches of photographs pasted into others, with varied feather, brightness and noise. Both metrics rate
each of them; the result is the Spearman rank correlation. The folder of --weights holds lpips_vgg.safetensors.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from scipy.stats import bootstrap, spearmanr
from skimage import data

from guardpaint.audit.model import AuditorScorer
from guardpaint.audit.regions import soft_mask
from guardpaint.draft.codec import resize
from guardpaint.store.results import metric, require_clean, write_results
from guardpaint.testing import small
from guardpaint.verify.seam import BackboneSeam, LpipsVGG, PixelSeam, seam_quality
from guardpaint.verify.tournament import compose

PHOTOGRAPHS = ("astronaut", "chelsea", "coffee", "rocket")
SIZE = 128


def photographs() -> list[torch.Tensor]:
    images = []
    for name in PHOTOGRAPHS:
        picture = torch.from_numpy(getattr(data, name)()).permute(2, 0, 1)[None].float() / 255
        side = min(picture.shape[-2:])
        images.append(resize(picture[..., :side, :side], (SIZE, SIZE))[0])
    return images


def composites(count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict]]:
    """Tuples of candidate, control, mask and settings, from a mild touch-up to a foreign patch."""
    rng = np.random.default_rng(seed)
    pictures, made = photographs(), []
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--auditor", type=Path, help="auditor checkpoint; default: the small random-initialised one")
    parser.add_argument("--out", default="docs/results/seam.json")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    require_clean(args.out)
    auditor = AuditorScorer.from_pretrained(args.auditor) if args.auditor else small.auditor()
    metrics = {
        "lpips_vgg": LpipsVGG.from_file(args.weights / "lpips_vgg.safetensors"),
        "backbone": BackboneSeam(auditor),
        "pixels": PixelSeam(),
    }
    rows = []
    for candidate, control, mask, settings in composites(args.count, args.seed):
        q = {n: float(seam_quality(m, candidate[None], control, mask[None])) for n, m in metrics.items()}
        rows.append({**settings, **q})
    results = {}
    reference = np.array([r["lpips_vgg"] for r in rows])
    for name in ("backbone", "pixels"):
        other = np.array([r[name] for r in rows])
        interval = bootstrap(
            (reference, other), lambda x, y: spearmanr(x, y).statistic, paired=True, vectorized=False,
            n_resamples=500, rng=np.random.default_rng(0),
        ).confidence_interval  # fmt: skip
        rho = float(spearmanr(reference, other).statistic)
        weights = "trained" if args.auditor else "random-initialised"
        note = (
            f"Spearman against LPIPS-VGG; {weights} auditor"
            if name == "backbone"
            else "plain colour distance, for comparison"
        )
        results[f"seam.rank_correlation.{name}"] = metric(
            rho, len(rows), ci=(float(interval.low), float(interval.high)), note=note
        )
        print(f"{name}: Spearman {rho:.3f} [{interval.low:.3f}, {interval.high:.3f}] over {len(rows)} composites")
    write_results(args.out, results, rows, args.seed)


if __name__ == "__main__":
    main()
