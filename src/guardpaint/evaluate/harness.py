"""From names on a command line to suites, bases and defences; and the files a run leaves behind."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from guardpaint.store.checkpoint import fingerprint, read_json, write_json
from guardpaint.cli.generate import load_base
from guardpaint.errors import BadInput
from guardpaint.evaluate import page, summary
from guardpaint.evaluate import run as runner
from guardpaint.evaluate.attacks.search import ATTACKS
from guardpaint.evaluate.defences import embedding_projection, guarded, post_hoc, prompt_filter, sld
from guardpaint.evaluate.defences.base import Base, Defence, base_hash, short_hash
from guardpaint.evaluate.defences.negative_prompt import NegativePrompt
from guardpaint.evaluate.defences.undefended import Undefended
from guardpaint.data.judges import Judge, open_judge
from guardpaint.evaluate.real_metrics import PromptMetric, open_metric
from guardpaint.policy import Policy
from guardpaint.store.results import write_results
from guardpaint.store.jobs import spread
from guardpaint.guard import GuardPaint
from guardpaint.train.align import open_inpainter

FREE: dict[str, Callable[[], Defence]] = {
    "undefended": Undefended,
    "negative_prompt": NegativePrompt,
    "prompt_filter": prompt_filter.stock_filter,
    "sld": sld.SafeLatentDiffusion,
    "embedding_projection": embedding_projection.EmbeddingProjection,
}
POST_HOC = {
    "post_hoc_block": post_hoc.PostHoc,
    "post_hoc_regenerate": post_hoc.PostHocRegenerate,
    "post_hoc_blur": post_hoc.PostHocBlur,
    "post_hoc_inpaint": post_hoc.PostHocInpaint,
}
GUARDED = ("ours", "paper", "ours_ladder_off")
ABLATIONS: dict[str, tuple[str, ...]] = {
    "size": tuple(f"ours:candidates={n},audits={x}" for n in (1, 3, 5, 7) for x in (2, 4, 6, 8)),
    "view": ("ours", "ours:view=stepped"),
    "gates": ("ours", "ours:f_gate=off", "ours:p_gate=off", "ours:f_gate=relative", "ours:f_gate=absolute"),
    "selection": ("ours", "ours:selection=first"),
    "moment": ("ours", "ours:audits=1,audit_start=1.0"),  # the same guard that looks at the last step alone
    "mask": ("ours:mask_threshold=calibrated", "ours:mask_threshold=percentile"),
    "reinsertion": tuple(
        f"ours:reinsertion={rule},audits=8"  # from 70 % on: in the very last steps rules hardly differ
        for rule in ("held_substitution", "x0_substitution", "direct_blend", "ddpm_noise", "ddim_inversion",
                     "null_text", "flow_ode")
    ),
}  # fmt: skip
"""What is compared: `--defence ablation:NAME` runs every member."""
DEFENCES = (*FREE, *POST_HOC, *GUARDED)
SEARCHED = "mini-sd"
"""Attack prompts found on this base are transferred to the others; what was found on another carries its name."""


def expanded(names: Sequence[str]) -> list[str]:
    """Defences by name; an ablation stands for all of its members."""
    out: list[str] = []
    for name in names:
        kind, _, which = name.partition(":")
        if kind == "ablation":
            if which not in ABLATIONS:
                raise BadInput(f"ablation {which!r}: choose among {', '.join(ABLATIONS)}")
            out += ABLATIONS[which]
        else:
            out.append(name)
    return list(dict.fromkeys(out))


def changed(guard: GuardPaint, text: str) -> GuardPaint:
    """The guard under other settings: "candidates=3,view=stepped"."""
    settings: dict[str, Any] = {}
    known = guard.config.to_dict()
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in known or not value:
            raise BadInput(f"setting {part!r}: write NAME=VALUE with a setting of the guard's configuration")
        kind = type(known[name])
        try:
            settings[name] = kind(value) if kind in (int, float) else value
        except ValueError as error:
            raise BadInput(f"setting {part!r}: {name} is a number") from error
    return guard.configured(**settings)


def open_defence(name: str, guard: GuardPaint | None) -> tuple[Defence, str]:
    """A defence and a hash of what it is made of. Baselines hash their file too; the guard's own code is in no hash,
    and each row names its revision instead.

    `ours:candidates=3,audits=4` changes settings of the guard; `ours@DIR` takes the guard of that folder.
    """
    if name in FREE:
        free = FREE[name]()
        fields = {k: str(v) for k, v in vars(free).items() if not k.startswith("_")}
        return free, short_hash(name, fields, inspect.getsource(inspect.getmodule(type(free)) or type(free)))
    whole, _, options = name.partition(":")
    kind, _, folder = whole.partition("@")
    if kind not in DEFENCES or ((options or folder) and kind not in GUARDED):
        raise BadInput(f"defence {name!r}: choose among {', '.join(DEFENCES)}")
    if folder:
        guard = open_guard(str(Path(folder).resolve()) if Path(folder).is_dir() else folder)
    if guard is None:
        raise BadInput(f"defence {name!r} needs --guard: the checkpoint whose auditor looks")
    asked = guard
    if kind in GUARDED:
        variant = guarded.variants(guard)[kind]
        asked = ready = changed(variant.guard, options)
        own_rule = any(o.startswith("reinsertion=") for o in options.split(","))
        rules = None if own_rule else variant.reinsertion
        made: Defence = replace(variant, guard=ready, name=name, reinsertion=rules)
        used = [type(part).__name__ for part in (ready.parts.repairer, ready.parts.proposer)]
        settings = {**ready.config.to_dict(), "policy": ready.policy.to_dict(), "rules": rules, "parts": used}
    else:
        extra = {"pipe": open_inpainter("mini-inpaint")} if name == "post_hoc_inpaint" else {}
        made = POST_HOC[name](guard.parts, **extra)
        settings = {**guard.config.to_dict(), "policy": guard.policy.to_dict(), "code": inspect.getsource(post_hoc)}
        settings |= {k: fingerprint(pipe.unet) for k, pipe in extra.items()}
    decoders = {k: fingerprint(v) for k, v in guard.decoders.items()}
    return made, short_hash(settings, asked.weight_hashes(), list(guard.parts.auditor.sizes), decoders)


def open_suites(
    suite: str, n: int | None, attacks: Path, searched: str, file_format: str | None
) -> tuple[list[list[runner.Case]], list[str]]:
    """Cases of every suite meant; n None: all there are (no benign ones: any number of those could be made)."""
    if suite == "benign":
        return [runner.benign_suite(n or 0)], []
    if suite == "attacks" or suite in ATTACKS:
        names = list(ATTACKS) if suite == "attacks" else [suite]
        named = [(a, a if searched == SEARCHED else f"{a}@{searched}") for a in names]
        return [runner.attack_suite(attacks / f"{a}-{searched}.jsonl", n, called) for a, called in named], []
    if Path(suite).exists():
        cases, notes = runner.file_suite(Path(suite), file_format, n)
        return [cases], notes
    raise BadInput(f"suite {suite!r}: write benign, attacks, {', '.join(ATTACKS)}, or the path of a prompt file")


def run(
    suite: str,
    bases: Sequence[str],
    defences: Sequence[str],
    guard: str | None,
    n: int,
    attacks: Path,
    searched: str,
    file_format: str | None,
    out: Path,
    pictures: int | None,
    judge_name: str = "oracle",
    measured_by: Sequence[str] = (),
    processes: int = 1,
    ray: bool = False,
) -> Iterator[str]:
    """Every suite × base × defence; says what it did, line by line."""
    if "help" in defences:
        yield "defences: " + ", ".join(DEFENCES)
        yield "settings: ours:NAME=VALUE,… · another guard: ours@DIR · ablations: " + ", ".join(
            f"ablation:{a}" for a in ABLATIONS
        )
        return
    for module in ("pyarrow", "matplotlib"):  # what the end of a run needs, asked for before hours are spent
        if find_spec(module) is None:
            raise BadInput(f"evaluation runs need {module}: pip install 'guardpaint[eval]'")
    suites, notes = open_suites(suite, n, attacks, searched, file_format)
    if not any(suites):
        raise BadInput(f"suite {suite!r}: no prompts in it")
    yield from (f"not as published: {note}" for note in notes)
    wanted = expanded(defences)
    if guard is not None and Path(guard).is_dir():
        guard = str(Path(guard).resolve())
    needed = guard is not None or any(name not in FREE for name in wanted)
    loaded = open_guard(guard) if needed else None
    opened = [defended(name, guard, needed) for name in wanted]
    if len({m.partition(":")[0] for m in measured_by}) < len(measured_by):
        raise BadInput(f"metrics {', '.join(measured_by)}: one of each kind")
    judge, rows = judged_by(judge_name, loaded.policy if loaded else Policy.default()), runner.Rows(out)
    metrics = {name: metric_of(name) for name in measured_by}
    plan = Plan(rows, out, judge, metrics)
    # Without its ladder the guard does the same as with it until the ladder is needed: those rows come second.
    second = [name for name in wanted if name == "ours_ladder_off" and "ours" in wanted]
    for names in ([w for w in wanted if w not in second], second):
        pieces: list[Piece] = []
        for name in bases:
            base = open_base(name)
            for called, (defence, config) in zip(wanted, opened, strict=True):
                if called not in names:
                    continue
                reason = defence.applies(base)
                if reason:
                    yield f"{defence.name} on {name}: not applicable, {reason}"
                    continue
                key = short_hash(config, weights_of(name))
                for cases in suites:
                    if called in second:
                        plan.take_over(name, key, cases)
                    todo = plan.missing(name, defence.name, key, cases)
                    # A picture's last bits depend on its batch: batches are the same ones for every defence.
                    lacking = {c.id for c in todo}
                    batches = [p for p in runner.chunked(cases, runner.BATCH) if any(c.id in lacking for c in p)]
                    if called in second:
                        batches = list(runner.chunked(todo, runner.BATCH))
                    pieces += [
                        Piece(name, called, key, guard, needed, judge_name, tuple(measured_by), tuple(part))
                        for part in batches
                    ]
        fresh = sum(len(p.cases) for p in pieces)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns) as progress:
            task = progress.add_task(suite, total=fresh)
            for made in spread(work, pieces, processes, ray):
                runner.keep(made, rows, out, pictures)
                progress.advance(task, len(made))
        if names:
            yield f"{suite}: {fresh} new of {plan.total}"
    everything, _ = open_suites(suite, None, attacks, searched, file_format)
    for cases in everything:
        if cases:
            plan.valid[cases[0].suite] = sorted({f"{c.seed} {c.prompt}" for c in cases})
    plan.save()
    chosen, other = plan.chosen()
    if other:
        yield f"{other} rows of another judge are left out; run their suites again and they are judged anew"
    yield from finish(chosen, out)


@dataclass
class Plan:
    """What a run has already, and what is still to be drawn."""

    rows: runner.Rows
    out: Path
    judge: Judge
    metrics: dict[str, PromptMetric]
    current: dict[summary.Cell, str] = field(default_factory=dict)
    """Which configuration of a suite, base and defence was run last, in this command or an earlier one."""
    valid: dict[str, list[str]] = field(default_factory=dict)
    """Seeds and prompts that a suite had when it was run last."""
    total: int = 0

    def __post_init__(self) -> None:
        if self.file.exists():
            kept = read_json(self.file)
            self.current = {(c["suite"], c["base"], c["defence"]): c["config"] for c in kept["cells"]}
            self.valid = kept["valid"]

    @property
    def file(self) -> Path:
        return self.out / "chosen.json"

    def save(self) -> None:
        cells = [{"suite": s, "base": b, "defence": d, "config": c} for (s, b, d), c in self.current.items()]
        write_json(self.file, {"cells": cells, "valid": self.valid})

    def chosen(self) -> tuple[list[dict[str, Any]], int]:
        """Rows to report: of the last configurations, of prompts still there, of one judge; how many are another's."""
        there = {suite: set(prompts) for suite, prompts in self.valid.items()}
        rows = [
            r
            for r in summary.latest(list(self.rows.found.values()), self.current)
            if r["suite"] not in there or f"{r['seed']} {r['prompt']}" in there[r["suite"]]
        ]
        mine = [r for r in rows if r.get("judge") == runner.judge_key(self.judge, list(self.metrics))]
        return mine, len(rows) - len(mine)

    def missing(self, base: str, defence: str, key: str, cases: Sequence[runner.Case]) -> list[runner.Case]:
        """Cases without a row. Rows of another judge are judged anew where their picture was kept."""
        if not cases:
            return []
        self.current[cases[0].suite, base, defence] = key
        self.total += len(cases)
        wanted = runner.judge_key(self.judge, list(self.metrics))
        todo, anew = [], []
        for case in cases:
            row = self.rows.found.get(runner.key_of(base, defence, key, case))
            if row is not None and row.get("judge") != wanted:
                row = runner.judged_anew(row, self.out, case, self.judge, self.metrics)
                anew += [row] if row is not None else []
            if row is None:
                todo.append(case)
        self.rows.add(anew)
        return todo

    def take_over(self, base: str, key: str, cases: Sequence[runner.Case]) -> None:
        """Rows of `ours` whose ladder was not needed are those of `ours_ladder_off`, word for word."""
        for case in cases:
            ours = self.current.get((case.suite, base, "ours"), "")
            row = self.rows.found.get(runner.key_of(base, "ours", ours, case))
            own = runner.key_of(base, "ours_ladder_off", key, case)
            if row is not None and row.get("ladder") == "" and not row.get("error") and own not in self.rows.found:
                self.rows.add([{**row, "key": own, "defence": "ours_ladder_off", "config": key}])


@dataclass(frozen=True)
class Piece:
    """A few cases of one cell, as names: what another process needs to draw them."""

    base: str
    defence: str
    config: str
    guard: str | None
    guarded: bool
    judge: str
    metrics: tuple[str, ...]
    cases: tuple[runner.Case, ...]


def work(piece: Piece) -> list[runner.Made]:
    """One piece; what it needs is loaded once per process. Other weights than were asked for make no rows."""
    loaded = open_guard(piece.guard) if piece.guarded else None
    base, (defence, config) = open_base(piece.base), defended(piece.defence, piece.guard, piece.guarded)
    judge = judged_by(piece.judge, loaded.policy if loaded else Policy.default())
    key = short_hash(config, weights_of(piece.base))
    if key != piece.config:
        raise BadInput(f"{piece.base} or {piece.defence} has other weights in this process than where the run began")
    return runner.draw(base, defence, key, piece.cases, judge, {m: metric_of(m) for m in piece.metrics})


@cache
def defended(name: str, guard: str | None, guarded: bool) -> tuple[Defence, str]:
    return open_defence(name, open_guard(guard) if guarded else None)


@cache
def judged_by(name: str, policy: Policy) -> Judge:
    return open_judge(name, policy)


@cache
def metric_of(name: str) -> PromptMetric:
    return open_metric(name)


@cache
def open_guard(name: str | None) -> GuardPaint:
    return GuardPaint.from_pretrained(name) if name else GuardPaint.embedded()


@lru_cache(maxsize=1)
def open_base(name: str) -> Base:
    return Base(name, *load_base(name))


@lru_cache(maxsize=1)
def weights_of(name: str) -> str:
    return base_hash(open_base(name))


def finish(rows: list[dict[str, Any]], out: Path) -> Iterator[str]:
    """results.json, samples.parquet and report.html from the rows; what a reader should be wary of is said aloud."""
    broken = [r for r in rows if r.get("error")]
    if broken:
        yield f"the guard failed on {len(broken)} pictures (withheld): {broken[0]['error']}"
    revisions = dict.fromkeys(str(r.get("git", "unknown")) for r in rows)
    if len(revisions) > 1:
        yield f"rows of {len(revisions)} revisions of the code: {', '.join(revisions)}"
    write_results(out / "results.json", summary.metrics(rows), rows, seed=0)
    runner.write_parquet(rows, out / "samples.parquet")
    yield f"wrote {out / 'results.json'}, {out / 'samples.parquet'} and {page.write(rows, out)}"
