"""Plots of an alignment run: training dynamics with their phases, and a scatter plot of activations."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from guardpaint.errors import BadInput
from guardpaint.train import noise_seeds
from guardpaint.train.alignment_batch import AlignmentBatch
from guardpaint.train.alignment_loss import HINGE
from guardpaint.train.pair_latents import PairLatents

LEVELS = (700, 500, 300, 100, 5)
"""Timesteps at which activations are recorded."""
PER_CLASS = 12
"""Held-out pairs per category."""
COLOURS = ("#228833", "#cc3311", "#4477aa", "#aa3377", "#ccbb44")
WINDOW = 50
"""Steps of the running mean."""


def figure(size: tuple[float, float]) -> Any:
    """A matplotlib figure that needs no display."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BadInput("plots need matplotlib: pip install 'guardpaint[data]'") from error
    return Figure(figsize=size, layout="constrained")


def smooth(values: Float[np.ndarray, " n"], window: int = WINDOW) -> Float[np.ndarray, " n"]:
    """Running mean over the last `window` steps; missing values are skipped."""
    out = np.empty_like(values)
    for i in range(len(values)):
        part = values[max(0, i - window + 1) : i + 1]
        part = part[np.isfinite(part)]
        out[i] = part.mean() if len(part) else np.nan
    return out


def phases(gap: Float[np.ndarray, " n"], separation: Float[np.ndarray, " n"]) -> list[int]:
    """Rows at which the paper's phases 2 and 3 begin; a phase that never comes is left out.

    Phase 2 begins when the identity gap exceeds the hinge, phase 3 when ΔN exceeds its maximum up to that point.
    """
    crossed = np.flatnonzero(gap > HINGE)
    if not len(crossed):
        return []
    start = int(crossed[0])
    reached = np.nanmax(separation[: start + 1])
    later = np.flatnonzero(separation[start + 1 :] > max(reached * 1.05, reached + 1e-6))
    return [start, start + 1 + int(later[0])] if len(later) else [start]


def read(path: Path) -> dict[str, Float[np.ndarray, " n"]]:
    """Columns of `loss.csv`; empty cells are NaN."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise BadInput(f"{path}: it has no rows; train for at least one step first")
    return {k: np.array([float(r[k] or "nan") for r in rows]) for k in rows[0]}


def plot(log: Path, out: Path, method: str) -> Path:
    """Write the smoothed curves to dynamics.csv and dynamics.png; returns the picture's path."""
    columns = read(log)
    if method == "sft":
        names = ["loss", "mse"]
    else:
        names = ["h_safe", "h_unsafe", "gap_n", "saturated", "delta", "identity_gap", "preference", "recon", "identity"]
    curves = {"step": columns["step"], **{n: smooth(columns[n]) for n in names}}
    with (out / "dynamics.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(curves)
        writer.writerows(zip(*(np.round(c, 6) for c in curves.values()), strict=True))
    step = curves["step"]
    path = out / "dynamics.png"
    if method == "sft":
        drawing = figure((6, 3.2))
        axis = drawing.subplots()
        axis.plot(step, curves["loss"], color="#4477aa", label="weighted")
        axis.plot(step, curves["mse"], color="#999999", label="plain")
        axis.set(xlabel="step", ylabel="noise error", yscale="log")
        axis.legend()
        drawing.savefig(path, dpi=110)
        return path
    drawing = figure((12, 3.4))
    first, second, third = drawing.subplots(1, 3)
    first.plot(step, curves["h_safe"], color="#228833", label="h safe")
    first.plot(step, curves["h_unsafe"], color="#cc3311", label="h unsafe")
    first.plot(step, curves["h_safe"] - curves["h_unsafe"], color="#999999", ls="--", label="gap")
    second.plot(step, curves["gap_n"], color="#4477aa", label="ΔN")
    second.plot(step, curves["identity_gap"], color="#aa3377", label="identity gap")
    second.axhline(HINGE, color="#aa3377", ls=":", lw=1)
    third.plot(step, 100 * curves["saturated"], color="#222222", label="saturated, %")
    begins = phases(curves["identity_gap"], curves["gap_n"])
    for axis in (first, second, third):
        for k, row in enumerate(begins, 2):
            axis.axvline(step[row], color="#999999", lw=1)
            spot = (step[row], 1.06 - 0.06 * (k - 2))
            axis.annotate(f"phase {k}", spot, xycoords=("data", "axes fraction"), fontsize=8, va="top")
        axis.set_xlabel("step")
        axis.legend(loc="best", fontsize=8)
    drawing.savefig(path, dpi=110)
    return path


@torch.no_grad()
def activations(model: Any, pairs: PairLatents, names: Sequence[str]) -> tuple[Float[Tensor, "n d"], Int[Tensor, " n"]]:
    """Mean output of the middle block's cross-attention for held-out pairs at every level, and their categories."""
    was_training, outputs = model.training, []
    model.eval()
    module = model.unet.get_base_model().mid_block.attentions[0].transformer_blocks[-1].attn2
    hook = module.register_forward_hook(lambda _, __, out: outputs.append(out.mean(1)))
    rows = torch.cat([(pairs.category == k).nonzero().flatten()[:PER_CLASS] for k in range(len(names))])
    z0 = torch.where((pairs.category[rows] == 0).view(-1, 1, 1, 1), pairs.target[rows], pairs.source[rows])
    eps = torch.randn(z0.shape, generator=torch.Generator().manual_seed(noise_seeds.FIGURES))
    try:
        for level in LEVELS:
            t = torch.full((len(rows),), level)
            batch = AlignmentBatch(
                z0, pairs.mask[rows], pairs.masked[rows], pairs.ids[rows], pairs.category[rows], t, eps, eps
            )
            model.predict(model.noised(z0, t, eps), t, batch)
    finally:
        hook.remove()
        model.train(was_training)
    return torch.cat(outputs).float(), pairs.category[rows].repeat(len(LEVELS))


def scatter(before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor], names: Sequence[str], out: Path) -> Path:
    """Plot activations before and after on the first two principal axes of all points; larger dots have less noise."""
    both = torch.cat([before[0], after[0]])
    centred = both - both.mean(0)
    axes = torch.linalg.svd(centred, full_matrices=False).Vh[:2]
    points = (centred @ axes.T).numpy()
    drawing = figure((9, 4))
    panels = drawing.subplots(1, 2, sharex=True, sharey=True)
    sizes = np.repeat(np.linspace(8, 48, len(LEVELS)), len(before[1]) // len(LEVELS))
    for axis, part, title in zip(panels, np.split(points, 2), ("before", "after"), strict=True):
        for k, name in enumerate(names):
            own = before[1].numpy() == k
            axis.scatter(*part[own].T, s=sizes[own], color=COLOURS[k % len(COLOURS)], alpha=0.6, label=name, lw=0)
        axis.set_title(title)
    panels[0].legend(fontsize=8)
    path = out / "activations.png"
    drawing.savefig(path, dpi=110)
    return path
