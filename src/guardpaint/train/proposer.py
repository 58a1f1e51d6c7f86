"""Train the tournament proposer on stored tournaments (offline) or on new ones that it plays itself (online).

guardpaint train mini-proposer --set rollouts=runs/rollouts --out runs/mini-proposer
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from jaxtyping import Float, Int
from torch import Tensor, nn

from guardpaint.config import CHOICES, GateSettings, GuardConfig
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
    f_gate: str | None = None
    """Faithfulness gate of the utility: absolute, relative or off. None: the gate of the guard that plays."""
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
        if self.f_gate is not None and self.f_gate not in CHOICES["f_gate"]:
            raise BadConfig(f"f_gate={self.f_gate!r}: choose {', '.join(CHOICES['f_gate'])}")
        if min(self.tournaments, self.candidates) < 1:
            raise BadConfig(f"tournaments={self.tournaments}, candidates={self.candidates}: both must be at least 1")


class InputSizes(NamedTuple):
    """What follows from the rollouts: lengths of the embeddings, and the most channels that a base's latents have."""

    text: int
    image: int
    channels: int


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
    delta: float
    """The margin δ of the utility."""
    noise_seed: int

    def encoded(self, model: TournamentProposer) -> Float[Tensor, "1 s"]:
        """The state as the proposer encodes it."""
        return model.encoder(self.text, self.latent, self.image, self.coverage, self.progress)


def utilities(row: Row, delta: float, gate: GateSettings) -> list[float]:
    """Utilities of a stored tournament's candidates under the margin `delta` and these gates."""
    rules = gate_rules(row["progress"], delta, gate.f_gate, gate.f_drop, gate.p_gate, row["control_F"])
    return [
        utility(s, row["control_S"], f, p, b, q, rules)
        for s, f, p, b, q in zip(row["S"], row["F"], row["P"], row["B"], row["Q"], strict=True)
    ]


def gate_of(rows: Sequence[Row], shape: ProposerTraining) -> GateSettings:
    """The gates to train under: those of the guard that played the tournaments; `shape` may name another F gate."""
    played: set[tuple[Any, ...]] = {tuple(r.get(f.name) for f in fields(GateSettings)) for r in rows}
    unknown = any(None in own for own in played)
    if len(played) > 1 or (unknown and shape.f_gate is None):
        what = "do not say under which gates they were played" if unknown else "were played under different gates"
        raise BadInput(f"the tournaments {what}; play them again with the guard that the proposer is for")
    gate = GuardConfig().gate if unknown else GateSettings(*played.pop())
    return gate if shape.f_gate is None else replace(gate, f_gate=shape.f_gate)


def stored(row: Row, delta: float, gate: GateSettings) -> PlayedTournament:
    """A stored tournament, with its utilities under the margin `delta` and these gates."""
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
        utility=torch.tensor(utilities(row, delta, gate)),
        embeds=torch.tensor(row["embeds"]).view(n, -1),
        delta=delta,
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
    return {**out, "effective": torch.tensor(share), "best": t.utility.max(), "delta": torch.tensor(t.delta)}


def averaged(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of every named value."""
    return {k: torch.stack([p[k] for p in parts]).mean() for k in parts[0]}


class Margin:
    """The margin δ by step: calibrated anew every hundred steps on null edits of all states played so far.

    It depends on (seed, step) alone, so that a resumed run has the margins of an uninterrupted one.
    """

    def __init__(
        self, picks: Callable[[int], Sequence[int]], change: Callable[[int], float], batches_per_step: int = 1
    ) -> None:
        self.picks = picks
        """The states that a batch plays."""
        self.change = change
        """ΔS of a state's null edit."""
        self.batches_per_step = batches_per_step
        """Batches of one optimiser step, over all processes."""
        self.changes: dict[int, float] = {}
        self.read = 0
        self.values = {0: L.FIRST_DELTA}

    def at(self, batch: int) -> float:
        """The margin of a batch."""
        block = batch // self.batches_per_step // L.RECALIBRATED
        for k in range(max(self.values) + 1, block + 1):
            until = k * L.RECALIBRATED * self.batches_per_step
            for state in (i for b in range(self.read, until) for i in self.picks(b)):
                if state not in self.changes:
                    self.changes[state] = self.change(state)
            self.read = until
            self.values[k] = L.recalibrated(self.values[k - 1], list(self.changes.values()))
        return self.values[block]


def picker(seed: int, label: str, total: int, count: int) -> Callable[[int], list[int]]:
    """For each batch, which of `total` states or tournaments it takes."""

    def picks(batch: int) -> list[int]:
        g = torch.Generator().manual_seed(derive(seed, label, batch))
        return torch.randint(total, (count,), generator=g).tolist()

    return picks


Batches = Callable[[int], list[PlayedTournament]]


def offline(
    rows: Sequence[Row], shape: ProposerTraining, gate: GateSettings, seed: int, batches_per_step: int = 1
) -> Batches:
    """Batches of random stored tournaments, by step."""
    picks = picker(seed, "tournaments", len(rows), shape.tournaments)
    margin = Margin(picks, lambda i: float(rows[i]["null_change"]), batches_per_step)
    return lambda step: [stored(rows[i], margin.at(step), gate) for i in picks(step)]


def online(
    states: Sequence[State],
    parts: Parts,
    model: TournamentProposer,
    shape: ProposerTraining,
    seed: int,
    batches_per_step: int = 1,
) -> Batches:
    """Batches of tournaments that the current policy plays from stored states, by step."""
    picks = picker(seed, "states", len(states), shape.tournaments)
    margin = Margin(picks, lambda i: null_change(tournament_of(states[i], parts)), batches_per_step)

    def batches(step: int) -> list[PlayedTournament]:
        delta = margin.at(step)
        return [live(states[i], parts, model, shape, delta, derive(seed, step, i)) for i in picks(step)]

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
        utility=torch.tensor(utilities(row, delta, model.config.gate or parts.config.gate)),
        embeds=torch.stack([a.image_embed for a in result.audits]),
        delta=delta,
        noise_seed=seed,
    )


def build(shape: ProposerTraining, sizes: InputSizes, gate: GateSettings, seed: int) -> TournamentProposer:
    """An untrained proposer, which names the gates that it will be trained under."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = ProposerConfig(*sizes, projection=shape.projection, hidden=shape.hidden, gate=gate)
        return TournamentProposer(config)


def run(
    config_file: Path, rollouts: Path, out: Path, minutes: float | None, guard: str | None = None, quiet: bool = False
) -> None:
    """Train a proposer in either mode and save it with its card."""
    shape, config = load_config(config_file, ProposerTraining)
    torch.set_num_threads(config.threads)
    per_step = config.accumulate * PartialState().num_processes
    if shape.mode == "offline":
        rows = read_rollouts(rollouts / "train", "uniform")
        sizes = InputSizes(len(rows[0]["text"]), len(rows[0]["image"]), max(r["channels"] for r in rows))
        gate = gate_of(rows, shape)
        model = build(shape, sizes, gate, config.seed)
        batches = offline(rows, shape, gate, config.seed, per_step)
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
        sizes = InputSizes(text, len(first.image_embed), max(int(s.latent.shape[0]) for s in states))
        gate = parts.config.gate if shape.f_gate is None else replace(parts.config.gate, f_gate=shape.f_gate)
        model = build(shape, sizes, gate, config.seed)
        batches = online(states, parts, model, shape, config.seed, per_step)
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
    seen = last_values(out)
    write_card(out, command, note, mode=shape.mode, tournaments=used, gate=asdict(gate), seen=seen, parameters=count)
    print(f"saved to {out / 'model'}; {seen}")


def last_values(out: Path, window: int = 50) -> dict[str, float]:
    """Means over the last steps in loss.csv: best utility, effective sample share, loss terms and margin."""
    import csv

    with (out / "loss.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))[-window:]
    names = ("best", "effective", "cost", "diversity", "entropy", "delta")
    return {n: round(sum(float(r[n]) for r in rows) / len(rows), 4) for n in names}
