"""Compare proposers from the same stored states, and measure the ranker: docs/results/proposer.json, rows, a plot.

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

from guardpaint.data.judges import Judge
from guardpaint.errors import BadInput
from guardpaint.evaluate.statistics import Groups, mean, numbered, ratio_interval, share
from guardpaint.guard import GuardPaint
from guardpaint.repair.knobs import RANGES, FixedProposer, UniformProposer
from guardpaint.repair.ranker import Ranker
from guardpaint.store.checkpoint import fingerprint, read_json, write_json
from guardpaint.store.images import to_pil
from guardpaint.store.progress import track
from guardpaint.store.results import REVISION, metric, read_rows, write_results
from guardpaint.train.rollouts import MOST, State, maker, tournament_of
from guardpaint.types import SAFE, Knobs, Proposer
from guardpaint.verify.parts import Parts

Row = dict[str, Any]
SIZES = (3, 5, 7)
SHIPPED = 5
"""The tournament size that ships; names of its metrics carry no suffix."""
RANKED = ("learned", "uniform")
"""Proposers whose candidates the ranker is tried on.

The metrics of the first one that was measured start with `ranker.`, those of the other with `ranker.NAME.`.
"""


def chosen(utilities: Sequence[float], first: bool) -> int | None:
    """Index of the winner: the best candidate, or the `first` one, with a positive utility; None if there is none."""
    good = [i for i, u in enumerate(utilities) if u > 0]
    if not good:
        return None
    return good[0] if first else max(good, key=lambda i: utilities[i])


def measure(state: State, parts: Parts, proposer: Proposer, judge: Judge, ranker: Ranker | None = None) -> list[Row]:
    """One tournament from a state: a row per tournament size, and rows of the ranker if one is given.

    A uniform proposer also gets rows of the rule "first", which takes the first acceptable repair and stops there.
    """
    tournament = tournament_of(state, parts)
    knobs = proposer.propose(tournament.state, MOST, tournament.seed)
    began = time.perf_counter()
    result = tournament.play(knobs, proposer.name)
    seconds = time.perf_counter() - began
    utilities = [c.utility for c in result.record.candidates]
    depths = [k.depth for k in knobs]
    pictures = [to_pil(v) for v in (state.control, *result.composed)]
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
    """Rows of the utility and the steps that remain if only the ranker's first k candidates are finished.

    The other candidates still cost their first step, which the ranker looks at.
    """
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
    """Lead of one proposer over each other one from the same states; the goal is an interval above 0."""
    out: Row = {}
    own = {(row_state(r), r["proposer"]): r for r in rows if int(r["n"]) == SHIPPED}
    others = [p for p in dict.fromkeys(r["proposer"] for r in rows) if p != ours]
    for base, other in product((*dict.fromkeys(r["base"] for r in rows), "all"), others):
        both = [s for s, who in own if who == ours and base in (s[0], "all") and (s, other) in own]
        if not both:
            continue
        which = numbered([s[1] for s in both], len(both))  # resample scenes, which several bases share
        scenes = int(which.max()) + 1
        picks = np.random.default_rng(0).integers(scenes, size=(2000, scenes))
        picks = np.vstack([np.arange(scenes), picks])  # the first line is the data themselves
        sums = {
            (who, name): np.bincount(which, [float(own[s, who].get(name, 1.0)) for s in both])[picks].sum(1)
            for who, name in product((ours, other), ("utility", "oracle_safe", "steps", "states"))
        }
        for name in ("utility", "oracle_safe", "utility_per_step"):
            of, under = name.removesuffix("_per_step"), "steps" if name.endswith("_per_step") else "states"
            mine, theirs = (sums[who, of] / sums[who, under] for who in (ours, other))
            low, high = np.percentile((mine - theirs)[1:], [2.5, 97.5])
            lead = float(mine[0] - theirs[0])
            key = f"{base}.{ours}_over_{other}.{name}"
            out[key] = metric(lead, len(both), goal=">0", ci=(float(low), float(high)), sure=True)
    return out


def ratio(over: Sequence[float], under: Sequence[float], goal: str | None = None, groups: Groups = None) -> Row:
    """Σ over / Σ under as a reported metric; its interval resamples items or groups. No value if Σ under is 0."""
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
    """`optimised`, cached in a file; another guard, other states or another number of trials start a new search."""
    names = repr([(s.base, s.seed, s.kind) for s in states])
    key = maker(guard, FixedProposer(), trials, names)
    kept = read_json(file) if file.exists() else {}
    if kept.get("key") == key:
        return FixedProposer(Knobs(**kept["knobs"]), name="optimised")
    proposer = optimised(states, guard.parts, trials)
    write_json(file, {"key": key, "trials": trials, "states": len(states), "knobs": asdict(proposer.knobs)})
    return proposer


def dependence(rows: Sequence[Mapping[str, Any]], path: Path, bins: int = 8) -> Path:
    """Plot mean utility, with its 95 % band, over each knob's range; `rows` are tournaments with uniform knobs."""
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
    """The proposers to compare, the stored states that they play from, and the judge."""

    guard: GuardPaint
    states: Mapping[str, Sequence[State]]
    """The stored states of each base."""
    proposers: Sequence[Proposer]
    judge: Judge
    ranker: Ranker | None = None


def run(comparison: Comparison, path: Path) -> Row:
    """Measure every state that the same guard and proposer have not played yet; write results and return the metrics.

    Stored rows of another guard, or of states that no longer exist, are dropped. Rows of proposers that are not part of
    this comparison are kept.
    """
    guard, states, ranker = comparison.guard, comparison.states, comparison.ranker
    current = {state_key(s) for own in states.values() for s in own}
    guard_key = maker(guard, FixedProposer(), MOST, comparison.judge.identity)
    kept = [r for r in read_rows(path) if r.get("guard") == guard_key and row_state(r) in current]
    for proposer in comparison.proposers:
        proposer_key = maker(guard, proposer, MOST)
        tried = ranker if proposer.name in RANKED else None
        ranker_key = fingerprint(tried) if tried is not None else ""
        kept = [r for r in kept if played_by(r) != proposer.name or r["maker"] == proposer_key]
        if tried is not None:  # tournaments that another ranker saw are played again
            theirs = [r for r in kept if r["part"] == "ranker" and r["proposer"] == proposer.name]
            ranked = {row_state(r) for r in theirs if r["ranker"] == ranker_key}
            kept = [r for r in kept if played_by(r) != proposer.name or row_state(r) in ranked]
        measured = {row_state(r) for r in kept if played_by(r) == proposer.name}
        for base, own in states.items():
            todo = [s for s in own if state_key(s) not in measured]
            for k, state in enumerate(track(todo, description=f"{base} {proposer.name}"), 1):
                rows = measure(state, guard.parts, proposer, comparison.judge, tried)
                origin = {"guard": guard_key, "maker": proposer_key, "ranker": ranker_key, "git": REVISION}
                kept += [{**r, **origin} for r in rows]
                if k % 20 == 0:
                    write_results(path, metrics(kept), kept, seed=0)
    results = metrics(kept)
    write_results(path, results, kept, seed=0)
    return results


def state_key(state: State) -> tuple[str, str, str]:
    """What identifies a state: base, seed and prompt."""
    return state.base, str(state.seed), state.prompt


def row_state(row: Row) -> tuple[str, str, str]:
    """The key of the state that a row was played from."""
    return str(row["base"]), str(row["seed"]), str(row.get("prompt"))


def played_by(row: Row) -> str:
    """The proposer that produced this row: rows of "first" come from uniform knobs."""
    return "uniform" if row["proposer"] == "first" else str(row["proposer"])
