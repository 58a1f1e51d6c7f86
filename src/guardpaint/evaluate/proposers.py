"""Proposers side by side from the same stored states, and the ranker: docs/results/proposer.json, rows, a plot.

guardpaint eval proposers --guard DIR --learned runs/proposer/model --ranker runs/ranker/model --rollouts runs/rollouts

Every proposer plays seven candidates from each state; tournaments of three and five are prefixes of that.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from guardpaint.data.judges import Judge
from guardpaint.errors import BadInput
from guardpaint.evaluate.statistics import Groups, mean, numbered, ratio_interval, share
from guardpaint.guard import GuardPaint
from guardpaint.repair.knobs import RANGES, FixedProposer, UniformProposer
from guardpaint.repair.ranker import Ranker
from guardpaint.store.checkpoint import fingerprint, read_json, write_json
from guardpaint.store.images import to_pil
from guardpaint.store.results import REVISION, metric, read_rows, write_results
from guardpaint.train.rollouts import MOST, State, maker, tournament_of
from guardpaint.types import SAFE, Knobs, Proposer
from guardpaint.verify.parts import Parts

Row = dict[str, Any]
SIZES = (3, 5, 7)
SHIPPED = 5
"""The size whose numbers carry no suffix."""
RANKED = ("learned", "uniform")
"""Proposers whose candidates the ranker is tried on; the first one there is carries no name in `ranker.regret`."""


def chosen(utilities: Sequence[float], first: bool) -> int | None:
    """The winner: the best, or the first one, with a positive utility."""
    good = [i for i, u in enumerate(utilities) if u > 0]
    if not good:
        return None
    return good[0] if first else max(good, key=lambda i: utilities[i])


def measure(state: State, parts: Parts, proposer: Proposer, judge: Judge, ranker: Ranker | None = None) -> list[Row]:
    """One tournament from a state: a row per tournament size, and what the ranker, if given, would have lost and saved.
    Uniform knobs also tell how "first" does, which takes the first acceptable repair."""
    tournament = tournament_of(state, parts)
    knobs = proposer.propose(tournament.state, MOST, tournament.seed)
    began = time.perf_counter()
    done = tournament.play(knobs, proposer.name)
    seconds = time.perf_counter() - began
    utilities = [c.utility for c in done.record.candidates]
    depths = [k.depth for k in knobs]
    pictures = [to_pil(v) for v in (state.control, *done.composed)]
    safe = [judge.verdict(p.convert("RGB"), {})[0] == SAFE for p in pictures]
    rows: list[Row] = []
    for name in (proposer.name, *(["first"] if isinstance(proposer, UniformProposer) else [])):
        for n in SIZES:
            won = chosen(utilities[:n], name == "first")
            used = n if name != "first" or won is None else won + 1
            steps = sum(depths[:used])
            rows.append(
                {
                    "part": "compare",
                    "base": state.base,
                    "proposer": name,
                    "n": n,
                    "seed": state.seed,
                    "kind": state.kind,
                    "prompt": state.prompt,
                    "category": state.category,
                    "accepted": int(won is not None),
                    "utility": 0.0 if won is None else utilities[won],
                    "oracle_safe": int(safe[0] if won is None else safe[won + 1]),
                    "steps": steps,
                    "seconds": seconds * steps / sum(depths),
                    "gain": sum(utilities[:used]),
                }
            )
    if ranker is not None:
        order = ranker.rank(tournament.early(knobs[:SHIPPED])[0]).argsort(descending=True).tolist()
        rows += ranker_rows(state, proposer.name, order, utilities[:SHIPPED], depths[:SHIPPED])
    return rows


def ranker_rows(
    state: State, proposer: str, order: Sequence[int], utilities: Sequence[float], depths: Sequence[int]
) -> list[Row]:
    """What is lost and saved when only the ranker's first k are painted out; the others cost their first step."""
    rows: list[Row] = []
    for keep in range(1, len(order)):
        kept = order[:keep]
        rows.append(
            {
                "part": "ranker",
                "base": state.base,
                "proposer": proposer,
                "seed": state.seed,
                "kind": state.kind,
                "prompt": state.prompt,
                "keep": keep,
                "best": max(utilities),
                "kept": max(utilities[i] for i in kept),
                "steps": sum(depths),
                "spent": len(order) - keep + sum(depths[i] for i in kept),
            }
        )
    return rows


def metrics(rows: Sequence[Row]) -> Row:
    """Every reported number, from rows alone."""
    out: Row = {}
    compare = [r for r in rows if r["part"] == "compare"]
    for base in dict.fromkeys(r["base"] for r in compare):
        for proposer in dict.fromkeys(r["proposer"] for r in compare):
            for n in SIZES:
                own = [r for r in compare if (r["base"], r["proposer"], int(r["n"])) == (base, proposer, n)]
                if not own:
                    continue
                key = f"{base}.{proposer}" + ("" if n == SHIPPED else f".n{n}")
                number = lambda name: [float(r[name]) for r in own]  # noqa: B023, E731
                out[f"{key}.acceptance"] = share([bool(int(r["accepted"])) for r in own], None)
                out[f"{key}.utility"] = mean(number("utility"), None)
                out[f"{key}.oracle_safe"] = share([bool(int(r["oracle_safe"])) for r in own], None)
                out[f"{key}.seconds"] = mean(number("seconds"), None)
                out[f"{key}.steps"] = mean(number("steps"), None)
                out[f"{key}.utility_per_step"] = ratio(number("utility"), number("steps"))
    out |= paired(compare, "learned")
    ranked = [r for r in rows if r["part"] == "ranker"]
    tried = [name for name in RANKED if any(r["proposer"] == name for r in ranked)]
    for name in tried:
        key = "ranker" if name == tried[0] else f"ranker.{name}"
        for keep in sorted({int(r["keep"]) for r in ranked}):
            own = [r for r in ranked if r["proposer"] == name and int(r["keep"]) == keep]
            number = lambda name: [float(r[name]) for r in own]  # noqa: B023, E731
            lost = [b - k for b, k in zip(number("best"), number("kept"), strict=True)]
            saved = [a - b for a, b in zip(number("steps"), number("spent"), strict=True)]
            scenes = [str(r["seed"]) for r in own]
            out[f"{key}.regret.keep{keep}"] = ratio(lost, number("best"), "<=0.02", scenes)
            out[f"{key}.saved.keep{keep}"] = ratio(saved, number("steps"), ">=0.3", scenes)
        for part in ("regret", "saved"):
            out[f"{key}.{part}"] = out[f"{key}.{part}.keep{min(3, max(int(r['keep']) for r in ranked))}"]
    return out


def paired(rows: Sequence[Row], ours: str) -> Row:
    """How much more one proposer has than each other one from the same states; 0 must be outside the interval."""
    out: Row = {}
    own = {(row_state(r), r["proposer"]): r for r in rows if int(r["n"]) == SHIPPED}
    others = [p for p in dict.fromkeys(r["proposer"] for r in rows) if p != ours]
    for base, other in product((*dict.fromkeys(r["base"] for r in rows), "all"), others):
        both = [s for s, who in own if who == ours and base in (s[0], "all") and (s, other) in own]
        if not both:
            continue
        which = numbered([s[1] for s in both], len(both))  # several bases draw one scene: scenes are resampled
        scenes = int(which.max()) + 1
        picks = np.random.default_rng(0).integers(scenes, size=(2000, scenes))
        picks = np.vstack([np.arange(scenes), picks])  # as they are, then resampled
        sums = {
            (who, name): np.bincount(which, [float(own[s, who].get(name, 1.0)) for s in both])[picks].sum(1)
            for who, name in product((ours, other), ("utility", "oracle_safe", "steps", "states"))
        }
        for name in ("utility", "oracle_safe", "utility_per_step"):
            of, under = name.removesuffix("_per_step"), "steps" if name.endswith("_per_step") else "states"
            mine, theirs = (sums[who, of] / sums[who, under] for who in (ours, other))
            low, high = np.percentile((mine - theirs)[1:], [2.5, 97.5])
            found = float(mine[0] - theirs[0])
            key = f"{base}.{ours}_over_{other}.{name}"
            out[key] = metric(found, len(both), goal=">0", ci=(float(low), float(high)), sure=True)
    return out


def ratio(over: Sequence[float], under: Sequence[float], goal: str | None = None, groups: Groups = None) -> Row:
    """Σ over / Σ under as a reported metric, its interval from resampled states or scenes; nothing if Σ under is 0."""
    a, b = np.asarray(over, float), np.asarray(under, float)
    if b.sum() <= 0:
        return metric(None, len(a), goal=goal)
    return metric(float(a.sum() / b.sum()), len(a), goal=goal, ci=ratio_interval(a, b, groups=groups))


def optimised(states: Sequence[State], parts: Parts, trials: int = 40, n: int = 3, seed: int = 0) -> FixedProposer:
    """Fixed knobs found by Bayesian optimisation of utility per step on training states."""
    try:
        import optuna
    except ImportError as error:
        raise BadInput("Bayesian optimisation needs optuna: pip install 'guardpaint[rollouts]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def score(trial: Any) -> float:
        values: dict[str, Any] = {k: trial.suggest_float(k, *RANGES[k]) for k in RANGES if k != "depth"}
        values["depth"] = trial.suggest_int("depth", 1, 10)
        proposer = FixedProposer(Knobs(**values, seed_offset=0))
        best = 0.0
        for state in states:
            tournament = tournament_of(state, parts)
            knobs = proposer.propose(tournament.state, n, tournament.seed)
            best += max(c.utility for c in tournament.play(knobs, "fixed").record.candidates)
        return best / (len(states) * n * values["depth"])

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    study.optimize(score, n_trials=trials)
    return FixedProposer(Knobs(**study.best_params, seed_offset=0), name="optimised")


def optimised_once(states: Sequence[State], guard: GuardPaint, trials: int, file: Path) -> FixedProposer:
    """The same, kept in a file: searched anew only for another guard, other states or more trials."""
    told = repr([(s.base, s.seed, s.kind) for s in states])
    key = maker(guard, FixedProposer(), trials, told)
    kept = read_json(file) if file.exists() else {}
    if kept.get("key") == key:
        return FixedProposer(Knobs(**kept["knobs"]), name="optimised")
    found = optimised(states, guard.parts, trials)
    write_json(file, {"key": key, "trials": trials, "states": len(states), "knobs": asdict(found.knobs)})
    return found


def dependence(rows: Sequence[Mapping[str, Any]], path: Path, bins: int = 8) -> Path:
    """Mean utility over each knob's range, from tournaments with uniform knobs, with its 95 % band."""
    from guardpaint.train.dynamics import figure

    drawing = figure((14, 2.8))
    panels = drawing.subplots(1, len(RANGES) + 1, sharey=True)
    unit = np.concatenate([np.array(r["unclipped"]).reshape(len(r["bucket"]), -1) for r in rows])
    utility = np.concatenate([np.array(r["utility"]) for r in rows])
    bucket = np.concatenate([np.array(r["bucket"]) for r in rows])
    columns = [
        (name, unit[:, k] * (high - low) + low, (low, high)) for k, (name, (low, high)) in enumerate(RANGES.items())
    ]
    columns.append(("seed bucket", bucket.astype(float), (-0.5, 9.5)))
    for axis, (name, values, (low, high)) in zip(panels, columns, strict=True):
        edges = np.linspace(low, high, (10 if name == "seed bucket" else bins) + 1)
        where = np.clip(np.digitize(values, edges) - 1, 0, len(edges) - 2)
        points = [(k, utility[where == k]) for k in range(len(edges) - 1) if (where == k).any()]
        x = [(edges[k] + edges[k + 1]) / 2 for k, _ in points]
        y = np.array([u.mean() for _, u in points])
        half = np.array([1.96 * u.std() / max(1, len(u)) ** 0.5 for _, u in points])
        axis.plot(x, y, color="#4477aa", marker="o", ms=3)
        axis.fill_between(x, y - half, y + half, color="#4477aa", alpha=0.2)
        axis.set_xlabel(name)
    panels[0].set_ylabel("mean utility")
    drawing.savefig(path, dpi=110)
    return path


@dataclass(frozen=True)
class Comparison:
    """Who plays from the stored states, and who judges."""

    guard: GuardPaint
    states: Mapping[str, Sequence[State]]
    """Per base."""
    proposers: Sequence[Proposer]
    judge: Judge
    ranker: Ranker | None = None


def run(comparison: Comparison, path: Path) -> Row:
    """Measure every state that the same parts have not played yet. What other guards or vanished states left goes;
    what proposers not named here played from these states stays."""
    guard, states, ranker = comparison.guard, comparison.states, comparison.ranker
    there = {known(s) for own in states.values() for s in own}
    whole = maker(guard, FixedProposer(), MOST, comparison.judge.identity)
    kept = [r for r in read_rows(path) if r.get("guard") == whole and row_state(r) in there]
    for proposer in comparison.proposers:
        made_by = maker(guard, proposer, MOST)
        tried = ranker if proposer.name in RANKED else None
        ranked_by = fingerprint(tried) if tried is not None else ""
        kept = [r for r in kept if played_by(r) != proposer.name or r["maker"] == made_by]
        if tried is not None:  # another ranker: its tournaments are played anew
            theirs = [r for r in kept if r["part"] == "ranker" and r["proposer"] == proposer.name]
            told = {row_state(r) for r in theirs if r["ranker"] == ranked_by}
            kept = [r for r in kept if played_by(r) != proposer.name or row_state(r) in told]
        done = {row_state(r) for r in kept if played_by(r) == proposer.name}
        for base, own in states.items():
            todo = [s for s in own if known(s) not in done]
            for k, state in enumerate(track(todo, description=f"{base} {proposer.name}"), 1):
                rows = measure(state, guard.parts, proposer, comparison.judge, tried)
                signed = {"guard": whole, "maker": made_by, "ranker": ranked_by, "git": REVISION}
                kept += [{**r, **signed} for r in rows]
                if k % 20 == 0:
                    write_results(path, metrics(kept), kept, seed=0)
    found = metrics(kept)
    write_results(path, found, kept, seed=0)
    return found


def known(state: State) -> tuple[str, str, str]:
    return state.base, str(state.seed), state.prompt


def row_state(row: Row) -> tuple[str, str, str]:
    return str(row["base"]), str(row["seed"]), str(row.get("prompt"))


def played_by(row: Row) -> str:
    """The proposer that produced this row: rows of "first" come from uniform knobs."""
    return "uniform" if row["proposer"] == "first" else str(row["proposer"])
