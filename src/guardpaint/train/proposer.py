"""Train the tournament proposer on stored tournaments (offline) or on new ones that it plays itself (online).

guardpaint train mini-proposer --set rollouts=runs/rollouts --out runs/mini-proposer
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from guardpaint.config import GuardConfig
from guardpaint.errors import BadConfig, BadInput
from guardpaint.guard import GuardPaint
from guardpaint.repair.knobs import denormalise
from guardpaint.repair.proposer import POOL, ProposerConfig, TournamentProposer
from guardpaint.store.seeds import derive, generator
from guardpaint.train import proposer_loss as L
from guardpaint.train.engine import Run, finished, fit, load_config, write_card
from guardpaint.train.rollouts import State, load_states, null_change, read_rollouts, tournament_of
from guardpaint.verify.parts import Parts
from guardpaint.verify.utility import gate_rules, utility

Row = dict[str, Any]


@dataclass(frozen=True)
class ProposerTraining:
    """Training options and layer sizes of the proposer; its input sizes follow from the rollouts."""

    mode: str = "offline"
    """offline: train on stored tournaments with importance weights; online: play from stored states."""
    tournaments: int = 4
    """Tournaments per batch."""
    candidates: int = 5
    """Candidates per tournament in online mode."""
    f_gate: str = "absolute"
    """Faithfulness gate of the utility: absolute, relative or off."""
    bonus: float = L.DIVERSITY
    """Weight of the bonus for candidates whose pictures differ from the others."""
    weights: dict[str, float] = field(default_factory=dict)
    """Fields of `proposer_loss.Weights` that differ from their defaults."""
    projection: int = 64
    hidden: tuple[int, int, int] = (256, 128, 64)

    def __post_init__(self) -> None:
        L.Weights(**self.weights)
        if self.mode not in ("offline", "online"):
            raise BadConfig(f"mode={self.mode!r}: choose offline or online")
        if min(self.tournaments, self.candidates) < 1:
            raise BadConfig(f"tournaments={self.tournaments}, candidates={self.candidates}: both must be at least 1")


@dataclass(frozen=True)
class PlayedTournament:
    """The state, actions and results of a tournament, as far as the loss needs them."""

    text: Float[Tensor, "1 t"]
    latent: Float[Tensor, "1 c p p"]
    image: Float[Tensor, "1 e"]
    coverage: Float[Tensor, "1 1"]
    progress: Float[Tensor, "1 1"]
    unclipped: Float[Tensor, "n 5"]
    buckets: Int[Tensor, " n"]
    behaviour: Float[Tensor, " n"] | None
    """Log-probabilities under the policy that drew the actions; None if the policy in training drew them itself."""
    utility: Float[Tensor, " n"]
    embeds: Float[Tensor, "n e"]
    noise_seed: int

    def encoded(self, model: TournamentProposer) -> Float[Tensor, "1 s"]:
        """The state as the proposer encodes it."""
        return model.encoder(self.text, self.latent, self.image, self.coverage, self.progress)


def utilities(row: Row, delta: float, f_gate: str) -> list[float]:
    """Utilities of a stored tournament's candidates under the margin `delta`."""
    config = GuardConfig()
    rules = gate_rules(row["progress"], delta, f_gate, config.f_drop, config.p_gate, row["control_F"])
    return [
        utility(s, row["control_S"], f, p, b, q, rules)
        for s, f, p, b, q in zip(row["S"], row["F"], row["P"], row["B"], row["Q"], strict=True)
    ]


def stored(row: Row, delta: float, shape: ProposerTraining) -> PlayedTournament:
    """A stored tournament, with its utilities under the margin `delta`."""
    n = len(row["bucket"])
    return PlayedTournament(
        text=torch.tensor([row["text"]]),
        latent=torch.tensor(row["latent"]).view(1, row["channels"], POOL, POOL),
        image=torch.tensor([row["image"]]),
        coverage=torch.tensor([[row["coverage"]]]),
        progress=torch.tensor([[row["progress"]]]),
        unclipped=torch.tensor(row["unclipped"]).view(n, -1),
        buckets=torch.tensor(row["bucket"]),
        behaviour=torch.tensor(row["log_prob"]),
        utility=torch.tensor(utilities(row, delta, shape.f_gate)),
        embeds=torch.tensor(row["embeds"]).view(n, -1),
        noise_seed=int(row["seed"]),
    )


def tournament_loss(
    model: TournamentProposer, t: PlayedTournament, bonus: float, weights: L.Weights | None = None
) -> dict[str, Tensor]:
    """The proposer's loss on one tournament.

    log π is taken of the actions that were played; cost and distance are taken of freshly drawn, differentiable ones.
    """
    state = t.encoded(model)
    _, log_std, logits = model(state)
    log_prob = model.log_prob(state, t.unclipped, t.buckets)
    fresh = model.sample(state, len(t.buckets), generator(t.noise_seed, "fresh")).unclipped
    rho = None if t.behaviour is None else L.importance(log_prob, t.behaviour)
    credit = L.advantages(t.utility, L.embedding_bonus(t.embeds, bonus) if bonus else None)
    out = L.proposer_loss(log_prob, credit, fresh, log_std, logits, rho, weights or L.Weights())
    share = 1.0 if rho is None else L.effective_samples(rho) / len(rho)
    return {**out, "effective": torch.tensor(share), "best": t.utility.max()}


def averaged(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of every named value."""
    return {k: torch.stack([p[k] for p in parts]).mean() for k in parts[0]}


def margin(step: int, changes: Sequence[float]) -> float:
    """The margin δ at a step: `FIRST_DELTA` for the first hundred steps, then calibrated on null edits."""
    return L.FIRST_DELTA if step < 100 else L.recalibrated(L.FIRST_DELTA, changes)


def offline(rows: Sequence[Row], shape: ProposerTraining, seed: int) -> Callable[[int], list[PlayedTournament]]:
    """Batches of random stored tournaments, by step."""
    changes = [r["null_change"] for r in rows]

    def batches(step: int) -> list[PlayedTournament]:
        g = torch.Generator().manual_seed(derive(seed, "tournaments", step))
        picks = torch.randint(len(rows), (shape.tournaments,), generator=g).tolist()
        return [stored(rows[i], margin(step, changes), shape) for i in picks]

    return batches


def online(
    states: Sequence[State], parts: Parts, model: TournamentProposer, shape: ProposerTraining, seed: int
) -> Callable[[int], list[PlayedTournament]]:
    """Batches of tournaments that the current policy plays, by step; δ is calibrated on the first 200 states."""
    changes = [null_change(tournament_of(s, parts)) for s in states[:200]]

    def batches(step: int) -> list[PlayedTournament]:
        g = torch.Generator().manual_seed(derive(seed, "states", step))
        picks = torch.randint(len(states), (shape.tournaments,), generator=g).tolist()
        return [live(states[i], parts, model, shape, margin(step, changes), derive(seed, step, i)) for i in picks]

    return batches


@torch.no_grad()
def live(
    state: State, parts: Parts, model: TournamentProposer, shape: ProposerTraining, delta: float, seed: int
) -> PlayedTournament:
    """A tournament that the current policy plays from a stored state."""
    tournament = tournament_of(state, parts)
    seen = tournament.state
    drawn = model.sample(model.encode(seen), shape.candidates, generator(seed, "proposer"))
    knobs = tuple(denormalise(a, b) for a, b in zip(drawn.unclipped, drawn.buckets.tolist(), strict=True))
    result = tournament.play(knobs, model.name)
    cells = result.record.candidates
    row: Row = {
        "progress": seen.progress,
        "control_S": result.record.control["S"],
        "control_F": result.record.control["F"],
    }
    row |= {name: [c.scores[name] for c in cells] for name in "SFPBQ"}
    return PlayedTournament(
        text=(seen.text_embed if seen.text_embed is not None else torch.zeros(model.config.text_dim))[None],
        latent=nn.functional.adaptive_avg_pool2d(seen.latent[None], POOL),
        image=seen.image_embed[None],
        coverage=torch.tensor([[seen.coverage]]),
        progress=torch.tensor([[seen.progress]]),
        unclipped=drawn.unclipped,
        buckets=drawn.buckets,
        behaviour=None,
        utility=torch.tensor(utilities(row, delta, shape.f_gate)),
        embeds=torch.stack([a.image_embed for a in result.audits]),
        noise_seed=seed,
    )


def build(shape: ProposerTraining, text_dim: int, image_dim: int, seed: int) -> TournamentProposer:
    """An untrained proposer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = ProposerConfig(text_dim, image_dim, projection=shape.projection, hidden=shape.hidden)
        return TournamentProposer(config)


def run(
    config_file: Path, rollouts: Path, out: Path, minutes: float | None, guard: str | None = None, quiet: bool = False
) -> None:
    """Train a proposer in either mode and save it with its card."""
    shape, config = load_config(config_file, ProposerTraining)
    torch.set_num_threads(config.threads)
    if shape.mode == "offline":
        rows = read_rollouts(rollouts / "train", "uniform")
        model = build(shape, len(rows[0]["text"]), len(rows[0]["image"]), config.seed)
        batches = offline(rows, shape, config.seed)
        used = len(rows)
    else:
        if guard is None:
            raise BadInput(
                "mode online needs `--set guard=DIR`: the guard whose auditor and inpainter play the tournaments"
            )
        states = [s for f in sorted(rollouts.glob("*-train.pt")) for s in load_states(f)]
        if not states:
            raise BadInput(f"{rollouts}: no states of split train; catch them with `guardpaint rollouts states`")
        parts = GuardPaint.from_pretrained(guard).parts
        first = tournament_of(states[0], parts).state
        text = 0 if first.text_embed is None else len(first.text_embed)
        model = build(shape, text, len(first.image_embed), config.seed)
        batches = online(states, parts, model, shape, config.seed)
        used = len(states)

    def losses(net: nn.Module, batch: list[PlayedTournament]) -> dict[str, Tensor]:
        assert isinstance(net, TournamentProposer)
        return averaged([tournament_loss(net, t, shape.bonus, L.Weights(**shape.weights)) for t in batch])

    this_run = Run(config_file, out, minutes, quiet)
    fitted = fit(model, batches, losses, config, this_run)
    assert isinstance(fitted, TournamentProposer)
    note = finished(out, config)
    if note is None:
        return
    fitted.save_pretrained(out / "model", torch.float16)
    command = this_run.command("proposer", rollouts=rollouts, guard=guard)
    count = sum(p.numel() for p in fitted.parameters())
    write_card(out, command, note, mode=shape.mode, tournaments=used, seen=last_values(out), parameters=count)
    print(f"saved to {out / 'model'}; {last_values(out)}")


def last_values(out: Path, window: int = 50) -> dict[str, float]:
    """Means over the last steps in loss.csv: the best candidate's utility, effective sample share and loss terms."""
    import csv

    with (out / "loss.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))[-window:]
    names = ("best", "effective", "cost", "diversity", "entropy")
    return {n: round(sum(float(r[n]) for r in rows) / len(rows), 4) for n in names}
