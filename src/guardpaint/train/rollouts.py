"""Store the states in which guarded generations start their first tournament, and play tournaments from them.

guardpaint rollouts states mini-sd --guard DIR --count 150 --out runs/rollouts
guardpaint rollouts play --guard DIR --proposer uniform --n 7 --out runs/rollouts [--processes 2 | --ray]

All proposers play from the same stored states, so comparisons between them are paired.
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
from guardpaint.draft.loading import chosen_device
from guardpaint.draft.options import LoadOptions
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
from guardpaint.verify.seam import BackboneSeam
from guardpaint.verify.tournament import Tournament, TournamentResult

SPLITS = ("train", "test")
MOST = 7
"""Candidates per stored tournament; its first k candidates are a tournament of size k."""


@dataclass(frozen=True)
class State:
    """The inputs of a tournament except for the guard's parts."""

    base: str
    prompt: str
    kind: str
    """Kind of prompt: plain, euphemism, or the name of an attack."""
    seed: int
    step: int
    steps: int
    noise: float
    category: str
    latent: Float[Tensor, "c h w"]
    control: Float[Tensor, "3 H W"]
    mask: Bool[Tensor, "H W"]


class Caught(Exception):
    """Carries the first tournament of a generation out of it, which ends the generation."""

    def __init__(self, tournament: Tournament) -> None:
        self.tournament = tournament


def attack_prompts(folder: Path) -> list[Prompt]:
    """Successful prompts of an attack search, alternating between the files of the folder; `kind` names the attack."""
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise BadInput(f"{folder}: no attack prompts; search for some with `guardpaint eval attack`")
    prompts = []
    for file in files:
        rows = [r for r in read_rows(file) if r["success"]]
        prompts.append(
            [Prompt(f"{r['attack']}-{r['seed']}", r["prompt"], int(r["seed"]), kind=r["attack"]) for r in rows]
        )
    return take_turns(*prompts)


def rollout_prompts(testbed: Testbed, split: str, count: int, attacks: Sequence[Prompt] = ()) -> list[Prompt]:
    """At most `count` harmful prompts of the testbed, alternating with those of attacks."""
    if split not in SPLITS:
        raise BadInput(f"split {split!r}: choose {', '.join(SPLITS)}")
    prompts = take_turns(testbed.harmful(f"rollout-{split}", count), attacks)
    if not prompts:
        raise BadInput(f"testbed {testbed.name!r}: it has no harmful prompts of split rollout-{split}")
    return prompts


def take_turns(*lists: Sequence[Prompt]) -> list[Prompt]:
    """The lists interleaved: one prompt of each in turn, until all are used up."""
    return [p for turn in zip_longest(*lists) for p in turn if p is not None]


def catch(guard: GuardPaint, base: Base, prompts: Sequence[Prompt]) -> Iterator[State | None]:
    """Per prompt, the state at the first tournament of its generation, or None if there is no tournament."""

    def stop(tournament: Tournament) -> None:
        raise Caught(tournament)

    watching = guard.configured(on_error="raise")
    watching.parts = replace(watching.parts, observer=stop)
    twin = watching.to(base.pipe._execution_device).attach(base.pipe)
    for prompt in prompts:
        try:
            twin(prompt.text, generator=torch.Generator().manual_seed(prompt.seed), **base.call)
            yield None
        except Caught as caught:
            yield state_of(caught.tournament, base.name, prompt.kind, prompt.seed)


def state_of(tournament: Tournament, base: str, kind: str, seed: int) -> State:
    """The state from which a tournament can be replayed."""
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
    """A tournament from a stored state with the parts of any guard whose repairer works without the base."""
    if parts.repairer.name == "native":
        raise BadConfig(
            "repairer='native': stored states are replayed without the base, so the repairer must be an inpainter"
        )

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
    """The states of a file."""
    try:
        return [State(**s) for s in torch.load(path, weights_only=True)]
    except FileNotFoundError as error:
        raise BadInput(f"{path}: no states; catch them with `guardpaint rollouts states`") from error
    except Exception as error:
        raise BadCheckpoint(f"{path}: unreadable ({error}); delete it to catch its states again") from error


def collect_states(guard: GuardPaint, base: Base, prompts: Sequence[Prompt], count: int, path: Path) -> int:
    """Catch states until the file has `count` of them or the prompts are used up; returns how many it has.

    States that the file already has are kept.
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
    """The file for the states of a base; a base named by path or hub id is turned into a file name."""
    return folder / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', base).strip('_')}-{split}.pt"


# Tournaments -------------------------------------------------------------------------------------------------


def actions(proposer: Proposer, tournament: Tournament, n: int) -> tuple[tuple[Knobs, ...], Tensor, Tensor, Tensor]:
    """n sets of knobs, their values before clipping, their seed buckets and their log-probabilities."""
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
    """ΔS of a null edit: the masked area only passes through the inpainter's autoencoder."""
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
    """Play one tournament from a stored state; returns its row for the rollouts and its result."""
    tournament = tournament_of(state, parts)
    knobs, unit, buckets, log_prob = actions(proposer, tournament, n)
    began = time.perf_counter()
    result = tournament.play(knobs, proposer.name)
    seconds = time.perf_counter() - began
    config = parts.config
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
        "f_gate": config.f_gate,
        "f_drop": config.f_drop,
        "p_gate": config.p_gate,
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
    """Play from every state that has no row yet and write rows in files of 25; returns the number of new rows."""
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
    """Hash of guard, proposer and number of candidates, which names their rollout files."""
    own = fingerprint(proposer) if isinstance(proposer, TournamentProposer) else repr(proposer)
    looks = [guard.parts.auditor.sizes, guard.policy.digest()]
    if not isinstance(guard.parts.seam, BackboneSeam):  # the auditor's weights are hashed already
        looks.append(guard.parts.seam.name)
    weights = {
        k: v for k, v in guard.weight_hashes().items() if k not in ("proposer", "ranker")
    }  # the player is hashed as `own`
    text = repr([weights, *looks, sorted(guard.config.to_dict().items(), key=str), own, n, *more])
    return sha256_hex(text)[:12]


def read_rollouts(path: Path, proposer: str | None = None) -> list[dict[str, Any]]:
    """All rows in a folder of rollouts, or those of one proposer."""
    import pyarrow.parquet as pq

    files = sorted(path.glob(f"{proposer or '*'}-*.parquet"))
    if not files:
        raise BadInput(f"{path}: no tournaments; play some with `guardpaint rollouts play`")
    return [r for f in files for r in pq.read_table(f).to_pylist()]


def shards(states: Sequence[State], count: int) -> list[list[State]]:
    """The states split into `count` lists of about equal length."""
    return [list(states[k::count]) for k in range(count)]


Job = tuple[list[State], str, str, int, Path, str | None]
"""States, guard checkpoint, proposer, number of candidates, folder for the rows, device or None."""


def work(job: Job) -> int:
    """Play one process's share of the states; returns the number of new rows."""
    states, guard, proposer, n, path, device = job
    torch.set_num_threads(1)
    loaded = GuardPaint.from_pretrained(guard).to(chosen_device(LoadOptions(device=device)))
    return play_all(states, loaded, open_proposer(proposer), n, path)


def open_proposer(name: str) -> Proposer:
    """The proposer `uniform`, `fixed` or `strong`, or a trained one from its directory."""
    known: dict[str, Callable[[], Proposer]] = {
        "uniform": UniformProposer,
        "fixed": FixedProposer,
        "strong": StrongProposer,
    }
    return known[name]() if name in known else TournamentProposer.from_pretrained(name)
