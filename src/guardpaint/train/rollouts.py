"""Rollouts: states stored at the first tournament of guarded generations, and tournaments played from them.

guardpaint rollouts states mini-sd --guard DIR --count 150 --out runs/rollouts
guardpaint rollouts play --guard DIR --proposer uniform --n 7 --out runs/rollouts [--processes 2 | --ray]

A state is stored once; every proposer plays from the same ones, so comparisons are paired.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from guardpaint.bases import Base
from guardpaint.draft.codec import resize, vae_decode, vae_encode
from guardpaint.draft.views import shrink
from guardpaint.errors import BadCheckpoint, BadConfig, BadInput
from guardpaint.guard import GuardPaint
from guardpaint.repair.inpainter import Inpainter
from guardpaint.repair.knobs import (
    SEED_BUCKETS,
    SEED_STRIDE,
    FixedProposer,
    StrongProposer,
    UniformProposer,
    denormalise,
    normalise,
)
from guardpaint.repair.proposer import POOL, TournamentProposer
from guardpaint.store.checkpoint import fingerprint, sha256_hex, write_tensors
from guardpaint.store.progress import track
from guardpaint.store.rows import read_rows
from guardpaint.store.seeds import derive, generator
from guardpaint.testbed import Prompt, Testbed
from guardpaint.types import Audit, Draft, Knobs, Level, Previewer, Proposer, Region
from guardpaint.verify.parts import Parts
from guardpaint.verify.tournament import Tournament, TournamentResult

SPLITS = ("train", "test")
MOST = 7
"""Candidates per stored tournament; smaller ones are its prefixes."""


@dataclass(frozen=True)
class State:
    """Everything a tournament starts from, but for the guard's parts."""

    base: str
    prompt: str
    kind: str
    """How the prompt asks: plain, euphemism, or the name of an attack."""
    seed: int
    step: int
    steps: int
    noise: float
    category: str
    latent: Float[Tensor, "c h w"]
    control: Float[Tensor, "3 H W"]
    mask: Bool[Tensor, "H W"]


class Caught(Exception):
    """Ends a generation once its first tournament is known."""

    def __init__(self, tournament: Tournament) -> None:
        self.tournament = tournament


def attack_prompts(folder: Path) -> list[Prompt]:
    """Prompts that attacks found, those of different attacks taking turns; the kind is the attack's name."""
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise BadInput(f"{folder}: no attack prompts; search them with `guardpaint eval attack`")
    found = []
    for file in files:
        rows = [r for r in read_rows(file) if r["success"]]
        found.append(
            [Prompt(f"{r['attack']}-{r['seed']}", r["prompt"], int(r["seed"]), kind=r["attack"]) for r in rows]
        )
    return take_turns(*found)


def rollout_prompts(testbed: Testbed, split: str, count: int, attacks: Sequence[Prompt] = ()) -> list[Prompt]:
    """At most `count` harmful prompts of the testbed, taking turns with those of attacks."""
    if split not in SPLITS:
        raise BadInput(f"split {split!r}: choose {', '.join(SPLITS)}")
    prompts = take_turns(testbed.harmful(f"rollout-{split}", count), attacks)
    if not prompts:
        raise BadInput(f"testbed {testbed.name!r}: it has no harmful prompts of split rollout-{split}")
    return prompts


def take_turns(*lists: Sequence[Prompt]) -> list[Prompt]:
    """One of each list after the other, until all are used up."""
    return [p for turn in zip_longest(*lists) for p in turn if p is not None]


def catch(guard: GuardPaint, base: Base, prompts: Sequence[Prompt]) -> Iterator[State | None]:
    """The state at the first tournament of each generation, or None if the guard sees no reason for one."""

    def stop(tournament: Tournament) -> None:
        raise Caught(tournament)

    watching = guard.configured(on_error="raise")
    watching.parts = replace(watching.parts, observer=stop)
    twin = watching.attach(base.pipe)
    for prompt in prompts:
        try:
            twin(prompt.text, generator=torch.Generator().manual_seed(prompt.seed), **base.call)
            yield None
        except Caught as caught:
            yield state_of(caught.tournament, base.name, prompt.kind, prompt.seed)


def state_of(tournament: Tournament, base: str, kind: str, seed: int) -> State:
    draft = tournament.draft
    return State(
        base=base,
        prompt=tournament.prompt,
        kind=kind,
        seed=seed,
        step=draft.step,
        steps=draft.steps,
        noise=tournament.noise,
        category=tournament.category,
        latent=draft.latent.cpu().clone(),
        control=tournament.control.cpu().clone(),
        mask=tournament.region.mask.cpu().clone(),
    )


def tournament_of(state: State, parts: Parts) -> Tournament:
    """The same point again, with any guard's parts; its repairer must not need the running base."""
    if parts.repairer.name == "native":
        raise BadConfig("stored states are replayed without the base, so the repairer must be an inpainter")

    def look(images: Tensor) -> list[Audit]:
        return parts.audit(images, [state.prompt] * len(images), state.noise)

    level = Level(1.0, 0.0, state.noise)
    draft = Draft(state.step, state.steps, state.latent, state.latent, state.latent, level, level, None)  # type: ignore[arg-type]
    audit = look(shrink(state.control, parts.fine_size)[None])[0]
    region = Region(state.mask, float(state.mask.float().mean()), 1.0)
    return Tournament(
        parts=parts,
        prompt=state.prompt,
        draft=draft,
        control=state.control,
        audit=audit,
        region=region,
        name="1",
        category=state.category,
        seed=derive(state.seed, 0, state.step, "1"),
        noise=state.noise,
        look=look,
        clock=lambda stage: nullcontext(),
    )


def save_states(states: Sequence[State], path: Path) -> None:
    write_tensors(path, [{f.name: getattr(s, f.name) for f in fields(State)} for s in states])


def load_states(path: Path) -> list[State]:
    try:
        return [State(**s) for s in torch.load(path, weights_only=True)]
    except FileNotFoundError as error:
        raise BadInput(f"{path}: no states; catch them with `guardpaint rollouts states`") from error
    except Exception as error:
        raise BadCheckpoint(f"{path}: unreadable ({error}); delete it to catch them anew") from error


def collect_states(guard: GuardPaint, base: Base, prompts: Sequence[Prompt], count: int, path: Path) -> int:
    """Catch states until the file has `count` of them or the prompts are used up; returns how many it has.

    States that were caught before are kept.
    """
    states = load_states(path) if path.exists() else []
    known = {(s.prompt, s.seed) for s in states}
    todo = [p for p in prompts if (p.text, p.seed) not in known]
    for k, state in enumerate(track(catch(guard, base, todo), f"{base.name} states", len(todo))):
        if len(states) >= count:
            break
        if state is not None:
            states.append(state)
        if k % 20 == 19:
            save_states(states, path)
    save_states(states, path)
    return len(states)


def state_file(folder: Path, base: str, split: str) -> Path:
    """Where the states of a base are stored; a path or hub id becomes a file name."""
    return folder / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', base).strip('_')}-{split}.pt"


# Tournaments -------------------------------------------------------------------------------------------------


def actions(proposer: Proposer, tournament: Tournament, n: int) -> tuple[tuple[Knobs, ...], Tensor, Tensor, Tensor]:
    """n knob sets, their pre-clip values, seed buckets, and how likely the proposer was to draw them."""
    if isinstance(proposer, TournamentProposer):
        with torch.no_grad():
            drawn = proposer.sample(proposer.encode(tournament.state), n, generator(tournament.seed, "proposer"))
        knobs = tuple(denormalise(a, b) for a, b in zip(drawn.unclipped, drawn.buckets.tolist(), strict=True))
        return knobs, drawn.unclipped, drawn.buckets, drawn.log_prob
    knobs = proposer.propose(tournament.state, n, tournament.seed)
    unit = torch.stack([normalise(k) for k in knobs])
    buckets = torch.tensor([k.seed_offset // SEED_STRIDE for k in knobs])
    even = -torch.log(torch.tensor(float(SEED_BUCKETS))).repeat(n)
    return knobs, unit, buckets, even


def null_change(tournament: Tournament) -> float:
    """ΔS of an edit that changes nothing: the control once through the inpainter's autoencoder, inside the mask."""
    repairer = tournament.parts.repairer
    if not isinstance(repairer, Inpainter):
        return 0.0

    request = tournament.request((Knobs(7.5, 0.3, 0.5, 0.0, 1, 0),))
    size = repairer.native_size(*request.view.shape[-2:])
    z = vae_encode(repairer.pipe.vae, resize(request.view[None], size), repairer.device)
    view = tournament.composed(vae_decode(repairer.pipe.vae, z, repairer.device).cpu(), request)
    after = tournament.look(torch.stack([shrink(v, tournament.parts.fine_size) for v in view]))[0]
    return after.safety - tournament.audit.safety


def play(state: State, parts: Parts, proposer: Proposer, n: int = MOST) -> tuple[dict[str, Any], TournamentResult]:
    """One tournament from a stored state: a row for the rollouts, and the tournament itself."""
    tournament = tournament_of(state, parts)
    knobs, unit, buckets, log_prob = actions(proposer, tournament, n)
    began = time.perf_counter()
    result = tournament.play(knobs, proposer.name)
    seconds = time.perf_counter() - began
    early = tournament.early(knobs)[0] if isinstance(parts.repairer, Previewer) else torch.zeros(n, 0)
    seen = tournament.state
    row: dict[str, Any] = {
        "base": state.base,
        "prompt": state.prompt,
        "kind": state.kind,
        "seed": state.seed,
        "proposer": proposer.name,
        "category": state.category,
        "progress": seen.progress,
        "coverage": seen.coverage,
        "text": [] if seen.text_embed is None else seen.text_embed.tolist(),
        "image": seen.image_embed.tolist(),
        "latent": F.adaptive_avg_pool2d(seen.latent[None], POOL).flatten().tolist(),
        "channels": int(seen.latent.shape[0]),
        "control_S": result.record.control["S"],
        "control_F": result.record.control["F"],
        "null_change": null_change(tournament),
        "seconds": seconds,
        "winner": -1 if result.record.winner is None else result.record.winner,
    }
    cells = [c.scores for c in result.record.candidates]
    row |= {name: [c[name] for c in cells] for name in "SFPBQ"}
    row |= {
        "utility": [c.utility for c in result.record.candidates],
        "depth": [k.depth for k in knobs],
        "unclipped": unit.flatten().tolist(),
        "bucket": buckets.tolist(),
        "log_prob": log_prob.tolist(),
        "embeds": torch.stack([a.image_embed for a in result.audits]).flatten().tolist(),
        "early": early.flatten().tolist(),
    }
    return row, result


def play_all(states: Sequence[State], guard: GuardPaint, proposer: Proposer, n: int, path: Path) -> int:
    """Rows of every state that has none yet, appended in parts of 25. Returns how many are new."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.mkdir(parents=True, exist_ok=True)
    made_by = maker(guard, proposer, n)
    files = sorted(path.glob(f"{proposer.name}-{made_by}-*.parquet"))
    played = {
        (r["base"], r["prompt"], r["seed"])
        for p in files
        for r in pq.read_table(p, columns=["base", "prompt", "seed"]).to_pylist()
    }
    todo = [s for s in states if (s.base, s.prompt, s.seed) not in played]
    rows: list[dict[str, Any]] = []
    for k, state in enumerate(track(todo, f"{proposer.name} tournaments")):
        rows.append(play(state, guard.parts, proposer, n)[0])
        if len(rows) == 25 or k == len(todo) - 1:
            which = sha256_hex(repr([(r["base"], r["prompt"], r["seed"]) for r in rows]))[:12]
            name = path / f"{proposer.name}-{made_by}-{which}.parquet"
            part = name.with_suffix(".part")
            pq.write_table(pa.Table.from_pylist(rows), part)
            part.rename(name)
            rows = []
    return len(todo)


def maker(guard: GuardPaint, proposer: Proposer, n: int, *more: str) -> str:
    """Hash of what plays: with another guard, proposer or number of candidates, tournaments are played anew."""
    own = fingerprint(proposer) if isinstance(proposer, TournamentProposer) else repr(proposer)
    looks = [guard.parts.auditor.sizes, guard.policy.digest()]
    weights = {k: v for k, v in guard.weight_hashes().items() if k not in ("proposer", "ranker")}  # of who plays
    text = repr([weights, *looks, sorted(guard.config.to_dict().items(), key=str), own, n, *more])
    return sha256_hex(text)[:12]


def read_rollouts(path: Path, proposer: str | None = None) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    files = sorted(path.glob(f"{proposer or '*'}-*.parquet"))
    if not files:
        raise BadInput(f"{path}: no tournaments; play some with `guardpaint rollouts play`")
    return [r for f in files for r in pq.read_table(f).to_pylist()]


def shards(states: Sequence[State], count: int) -> list[list[State]]:
    return [list(states[k::count]) for k in range(count)]


Job = tuple[list[State], str, str, int, Path]


def work(job: Job) -> int:
    """One process's share; the same function on a pool and on a cluster."""
    states, guard, proposer, n, path = job
    torch.set_num_threads(1)
    loaded = GuardPaint.from_pretrained(guard)
    return play_all(states, loaded, open_proposer(proposer), n, path)


def open_proposer(name: str) -> Proposer:
    """uniform, fixed, strong, or a directory with a trained one."""
    known: dict[str, Callable[[], Proposer]] = {
        "uniform": UniformProposer,
        "fixed": FixedProposer,
        "strong": StrongProposer,
    }
    return known[name]() if name in known else TournamentProposer.from_pretrained(name)
