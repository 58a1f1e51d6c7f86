"""Null-text reinsertion with an embedding for every remaining step, compared with a single one.

    python bench/nulltext.py [--base mini-sd --base mini-sdxl] [--count 60] [--out docs/results/recipe.json]

Every scene is drawn three times with the same prompt and seed: without a repair, and with the same repair, painted by
the embedded guard's inpainter where its auditor points, put back at the same step by each of the two rules. What is
measured is how far the end of the trajectory is from the repair inside the mask and from the picture without a repair
outside of it, and how long the steps from the repair on took.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from intervals import column, interval
from recipe_results import OUT, write
from torch import Tensor

from guardpaint.audit.regions import mine
from guardpaint.bases import Base
from guardpaint.draft.codec import vae_decode
from guardpaint.draft.tap import tapped
from guardpaint.draft.views import LatentView, shrink
from guardpaint.guard import GuardPaint
from guardpaint.loop.call import CallSetup, GuardedCall, LastStep
from guardpaint.loop.context import Repair
from guardpaint.loop.step import edit_of
from guardpaint.reinsert.apply import reinsert
from guardpaint.repair.knobs import FixedProposer
from guardpaint.store.progress import track
from guardpaint.store.results import metric, require_clean
from guardpaint.store.seeds import derive
from guardpaint.testbed import Prompt, open_testbed
from guardpaint.types import Audit, Draft, Edit
from guardpaint.verify.tournament import Tournament

RULES = ("null_text", "null_text_single")
Row = dict[str, Any]


class Reinserts(GuardedCall):
    """A guarded call that audits nothing and puts one repair back after a step, by one rule; None: no repair."""

    def __init__(self, setup: CallSetup, prompt: str, step: int, rule: str | None, repair: Repair | None) -> None:
        super().__init__(setup, [prompt])
        self.prompt, self.step, self.rule, self.repair = prompt, step, rule, repair
        self.edit: Edit | None = None
        self.began = 0.0

    @torch.no_grad()
    def after_step(self, output: Tensor, timestep: Any, sample: Tensor, stepped: Tensor) -> Tensor:
        state = self.state
        step, state.index, state.stepped = state.index, state.index + 1, True
        state.last = LastStep(output, sample, stepped)
        self.ensure(len(stepped))
        if step != self.step:
            return stepped
        draft = self.drafts(step)[0]
        if self.rule is None:
            self.repair = self.painted(draft)
            return stepped
        assert self.repair is not None
        self.began = time.perf_counter()
        self.edit = edit_of(self.repair, draft)
        alpha, seed = 1.0 - draft.after.noise, derive(state.images[0].seed, 0, step)
        done = reinsert(self.rule, draft, self.edit, self.setup.family, hold=1.0, alpha=alpha, seed=seed)
        assert done.rule == self.rule, done.note
        return self.accept(0, done, self.edit, draft)[None].to(stepped.dtype)

    def painted(self, draft: Draft) -> Repair | None:
        """A repair of the largest region that the auditor points to; None if it is calm."""
        parts, noise = self.setup.parts, draft.before.noise
        control = LatentView(self.decoder, draft.x0, "x0", noise).full()

        def look(images: Tensor) -> list[Audit]:
            return parts.audit(images, [self.prompt] * len(images), noise)

        audit = look(shrink(control, parts.fine_size)[None])[0]
        finding = parts.finding(audit, draft.progress)
        size = (int(control.shape[-2]), int(control.shape[-1]))
        regions = mine(audit.adv_map, size, parts.config, draft.progress)
        if finding is None or not regions:
            return None
        seed = self.state.images[0].seed
        tournament = Tournament(
            parts, self.prompt, draft, control, audit, regions[0], "1", finding.category, seed, noise, look,
            lambda stage: nullcontext(),
        )  # fmt: skip
        knobs = FixedProposer().propose(tournament.state, 1, seed)
        request = tournament.request(knobs)
        view = tournament.composed(parts.repairer.candidates(request), request)[0]
        return Repair(view, request.masks[0], audit)


def drawn(
    guard: GuardPaint, base: Base, prompt: Prompt, step: int, rule: str | None, repair: Repair | None
) -> tuple[Reinserts, Tensor, float]:
    """One picture: the call, its final latent, and the seconds from the repair on."""
    setup = guard.open(base.pipe, door="attach", prompts=[prompt.text], seeds=lambda i, n: (prompt.seed, i)).setup
    call = Reinserts(setup, prompt.text, step, rule, repair)
    generator = torch.Generator().manual_seed(prompt.seed)
    with tapped(base.pipe, setup.family, call):
        latent = base.pipe(prompt.text, generator=generator, **{**base.call, "output_type": "latent"}).images
    seconds = time.perf_counter() - call.began
    assert not call.state.images[0].errors, call.state.images[0].errors
    return call, latent[0].float(), seconds


def psnr(a: Tensor, b: Tensor, where: Tensor) -> float:
    """Peak signal-to-noise ratio in dB over the pixels that are True."""
    return float(-10 * (((a - b) ** 2)[:, where].mean().clamp_min(1e-10)).log10())


@torch.no_grad()
def compare(guard: GuardPaint, base: Base, prompt: Prompt, progress: float) -> list[Row]:
    """The rows of one scene, one for each rule; none if the auditor finds nothing to repair."""
    steps = base.settings.steps
    step = round(progress * steps) - 1
    first, plain, _ = drawn(guard, base, prompt, step, None, None)
    repair = first.repair
    if repair is None:
        return []
    vae, device = base.pipe.vae, base.pipe._execution_device
    before = vae_decode(vae, plain[None], device)[0]
    rows = []
    for rule in RULES:
        call, latent, seconds = drawn(guard, base, prompt, step, rule, repair)
        assert call.edit is not None
        mask, z0 = call.edit.mask, call.edit.z0
        picture, wanted = vae_decode(vae, latent[None], device)[0], vae_decode(vae, z0[None], device)[0]
        error = ((latent - z0) ** 2).mean(0)
        changed = ((latent - plain) ** 2).mean(0)
        rows.append(
            {
                "base": base.name,
                "seed": prompt.seed,
                "prompt": prompt.text,
                "rule": rule,
                "steps": steps,
                "left": steps - 1 - step,
                "coverage": float(mask.mean()),
                "inside": float((error * mask).sum() / mask.sum()),
                "outside": float(changed[mask == 0].mean()),
                "psnr_inside": psnr(picture, wanted, repair.mask > 0.5),
                "psnr_outside": psnr(picture, before, repair.mask == 0),
                "seconds": seconds,
            }
        )
    return rows


def metrics(rows: Sequence[Row]) -> dict[str, Any]:
    """What one embedding for each remaining step changes against a single one, on the same scenes and repairs."""
    found: dict[str, Any] = {}
    bases = list(dict.fromkeys(r["base"] for r in rows))
    for base in ("", *bases):
        own = [r for r in rows if base in ("", r["base"])]
        pairs: dict[tuple[str, str], dict[str, Row]] = {}
        for r in own:
            pairs.setdefault((r["base"], str(r["seed"])), {})[r["rule"]] = r
        both = [p for p in pairs.values() if {"null_text", "null_text_single"} <= set(p)]
        if not both:
            continue
        many, one = ([p[rule] for p in both] for rule in ("null_text", "null_text_single"))
        end = f".{base}" if base else ""

        def ratio(name: str, a: Sequence[Row] = many, b: Sequence[Row] = one) -> Callable[[np.ndarray], float]:
            over, under = column(a, name), column(b, name)
            return lambda of: float(over[of].sum() / under[of].sum())

        def gain(name: str, a: Sequence[Row] = many, b: Sequence[Row] = one) -> Callable[[np.ndarray], float]:
            difference = column(a, name) - column(b, name)
            return lambda of: float(difference[of].mean())

        for key, statistic, note in (
            ("per_step_over_single", ratio("inside"),
             "latent error inside the mask against the repair: mean with an embedding per step / with one"),
            ("outside_ratio", ratio("outside"), "the same for the change outside the mask against no repair"),
            ("psnr_outside_gain", gain("psnr_outside"), "dB outside the mask against the picture without a repair"),
            ("psnr_inside_gain", gain("psnr_inside"), "dB inside the mask against the decoded repair"),
            ("seconds_ratio", ratio("seconds"), "time of the steps from the repair on"),
        ):  # fmt: skip
            whole = np.arange(len(both))
            found[f"{key}{end}"] = metric(statistic(whole), len(both), ci=interval(statistic, len(both)), note=note)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", action="append", help="UNet base; repeat (default: mini-sd, mini-sdxl)")
    parser.add_argument("--count", type=int, default=60, help="scenes with a repair on each base")
    parser.add_argument(
        "--progress", type=float, default=0.8, help="share of the steps done when the repair is put back"
    )
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    require_clean(args.out)
    torch.set_num_threads(1)
    world, guard = open_testbed("paperdolls"), GuardPaint.embedded()
    rows: list[Row] = []
    for name in args.base or ("mini-sd", "mini-sdxl"):
        base, found = world.base(name), 0
        base.pipe.set_progress_bar_config(disable=True)
        for prompt in track(world.harmful("rollout-test", 3 * args.count), f"{name} scenes"):
            if found >= args.count:
                break
            new = compare(guard, base, prompt, args.progress)
            found += bool(new)
            rows += new
        print(f"{name}: {found} scenes")
    found = metrics(rows)
    write("nulltext", found, rows, args.out)
    for name, value in found.items():
        print(name, round(value["value"], 4), value.get("ci"))


if __name__ == "__main__":
    main()
