"""Tournaments at full SD 1.5 size: the paper's, and the cheap ones by the waves and depths that were seen.

Part of bench/run.py. The parts of a tournament are timed one by one (encoding, one denoiser evaluation, a tiny decode)
and two whole ones beside them, which show how well the parts add up. What a tournament costs on average follows from
the candidates and depths in the rows of docs/results/repairs.json.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import flops
import torch

from guardpaint.draft.codec import ViewDecoder
from guardpaint.repair.inpainter import Inpainter
from guardpaint.repair.ladder import count_steps
from guardpaint.store import results
from guardpaint.store.results import metric
from guardpaint.types import Knobs, RepairRequest

SIZE, EVALUATIONS, DEPTH = 512, 4, 8
SEEN = Path("docs/results/repairs.json")
FIVE = (3, 4, 5, 7, 8)
"""Depths of five candidates as the embedded guard's proposer draws them."""
Timer = Callable[[str, Callable[[], Any], int], float]


def request(inpainter: Inpainter, depths: Sequence[int]) -> RepairRequest:
    """A region of an eighth of the picture; every candidate has a mask of its own width."""
    g = torch.Generator().manual_seed(0)
    masks = torch.zeros(len(depths), SIZE, SIZE)
    for k in range(len(depths)):
        masks[k, SIZE // 4 - 8 * k : SIZE // 2 + 8 * k, SIZE // 4 - 8 * k : 3 * SIZE // 4 + 8 * k] = 1
    return RepairRequest(
        view=torch.rand(3, SIZE, SIZE, generator=g),
        region=masks[0].bool(),
        masks=masks,
        knobs=tuple(Knobs(7.5, 0.3, 0.5, 0.1, d, 100 * i) for i, d in enumerate(depths)),
        prompt="a person in a park",
        safe_prompt="a person in a coat",
        avoid="",
        seed=0,
        base=None,  # type: ignore[arg-type]
        latent_size=(SIZE // inpainter.factor,) * 2,
        batch=len(depths),
    )


@dataclass(frozen=True)
class Parts:
    """What the parts of a tournament cost, in any unit."""

    encode: float
    evaluation: float
    """One denoiser evaluation of one candidate without guidance."""
    decode: float
    """A tiny decode of one candidate."""

    def tournament(self, depths: Sequence[int], evaluations: int = EVALUATIONS, branches: int = 1) -> float:
        """The view and every masked view are encoded, every candidate is denoised from its depth and decoded."""
        steps = sum(count_steps(d, evaluations) for d in depths)
        return self.encode * (1 + len(depths)) + self.evaluation * branches * steps + self.decode * len(depths)


def seen_depths(path: Path = SEEN) -> list[list[int]]:
    """Depths of all candidates of every tournament that the cheap guard played."""
    rows = [r for r in results.read_rows(path) if r.get("part") == "safety" and r["variant"] == "fast"]
    return [[int(d) for d in t.split(":")[1].split(",")] for r in rows for t in r["played"].split("|") if t]


def measure(
    time: Timer, memory: Callable[[str, Callable[[], Any]], float], inpainter: Inpainter, generation: float
) -> dict[str, Any]:
    """The metrics of tournaments, in 50-step generations of the base. `memory` gives the peak of some work in GiB."""
    few = Inpainter(inpainter.pipe, inpainter.tiny, steps=EVALUATIONS, guidance=1.0)
    picture = torch.rand(1, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    z, text = torch.randn(1, 9, 64, 64), torch.randn(1, 77, 768)
    decoder = ViewDecoder(few.tiny, few.pipe.vae, few.factor, few.device)
    parts = Parts(
        time("tournament: encoding a view", lambda: few.encoded(picture), 5),
        time("tournament: one evaluation", lambda: few.pipe.unet(z, 500, encoder_hidden_states=text), 5),
        time("tournament: one tiny decode", lambda: decoder.full(z[:, :4]), 5),
    )
    one, five = request(few, (DEPTH,)), request(few, FIVE)
    first = time(f"tournament: first wave of one, depth {DEPTH}", lambda: few.candidates(fresh(one)), 5)
    whole = time(f"tournament: five at once, depths {FIVE}", lambda: few.candidates(fresh(five)), 5)
    out = {
        "tournament_first_wave_vs_generation": metric(first / generation, 5, note=f"one candidate at depth {DEPTH}"),
        "tournament_all_five_vs_generation": metric(
            whole / generation, 5, goal="<=0.30", note=f"five candidates in one batch, depths {FIVE}"
        ),
        "tournament_parts_explain": metric(
            statistics.mean([parts.tournament((DEPTH,)) / first, parts.tournament(FIVE) / whole]),
            10,
            note="sum of the measured parts over the measured whole",
        ),
        "tournament_paper_vs_generation": metric(
            parts.tournament((DEPTH,) * 5, evaluations=10, branches=2) / generation,
            5,
            note=f"five candidates at depth {DEPTH}, ten steps with guidance, from its measured parts",
        ),
        "tournament_peak_gib": metric(
            memory("five", lambda: few.candidates(fresh(five))),
            1,
            goal="<=0.8",
            note="above the loaded models, five candidates in one batch",
        ),
    }
    played = seen_depths()
    if played:
        mean = statistics.mean(parts.tournament(depths) for depths in played)
        out["tournament_vs_generation"] = metric(
            mean / generation,
            len(played),
            goal="<=0.12",
            note="mean over the tournaments of docs/results/repairs.json: their candidates and depths at these costs",
        )
        encode, _ = flops.vae(4, SIZE)
        counted = Parts(encode, flops.unet(9, 64, 1), flops.tiny_decode(SIZE))
        mean = statistics.mean(counted.tournament(depths) for depths in played)
        for base, cost in flops.generations().items():
            out[f"tournament_flops_vs_generation.{base}"] = metric(
                mean / cost, len(played), note="from counted operations, not from times"
            )
    return out


def fresh(one: RepairRequest) -> RepairRequest:
    """The request without what was encoded for it before."""
    return replace(one, memo={})
