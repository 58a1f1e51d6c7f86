"""`guardpaint eval run`: open suites, bases and defences by name, draw what is missing, and write the run's files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from guardpaint.audit.part import Graded
from guardpaint.bases import BaseOptions
from guardpaint.data.judges import Judge, open_judge
from guardpaint.errors import BadInput
from guardpaint.evaluate import benign_files, by_category, page, prompt_suites, summary
from guardpaint.evaluate import run as runner
from guardpaint.evaluate.attacks.search import ATTACKS
from guardpaint.evaluate.defences.base import Defence
from guardpaint.evaluate.defences.opening import ABLATIONS, DEFENCES, expanded, needs_guard, open_defence, open_guard
from guardpaint.evaluate.defences.stock_checker import StockCheckerDefence
from guardpaint.evaluate.evaluated_base import BaseEntry, EvaluatedBase, open_base, read_entries
from guardpaint.evaluate.jury import Jury, not_independent
from guardpaint.evaluate.prompt_suites import PromptFiles
from guardpaint.evaluate.real_metrics import PromptMetric, open_metric
from guardpaint.evaluate.rows import EvaluationRow, RowStore, write_parquet
from guardpaint.policy import Policy
from guardpaint.store.checkpoint import read_json, short_hash, write_json
from guardpaint.store.jobs import spread
from guardpaint.store.progress import bar
from guardpaint.store.results import write_results
from guardpaint.testbed import FileTestbed, Testbed, installed, open_testbed

OWN_JUDGE = ("testbed", "oracle")
"""Names of the testbed's own judge, which judges that testbed's bases only; `oracle` is its name for paper dolls."""


@dataclass(frozen=True)
class RunOptions:
    """What `guardpaint eval run` is asked to do."""

    suite: str
    """benign, attacks, the name of one attack, or the path of a prompt file or of a folder of them."""
    bases: Sequence[str]
    """Names, or NAME=PATH."""
    defences: Sequence[str]
    out: Path
    guard: str | None = None
    """Guard of the guarded and post-hoc defences; None: the embedded one."""
    n: int | None = 200
    """Prompts of each suite; None: all of a prompt file or of an attack."""
    attacks: Path = Path("runs/attacks")
    searched: str | None = None
    """Base that the attack prompts were searched on; None: the testbed's first."""
    file_format: str | None = None
    pictures: int | None = None
    """Pictures kept per suite, base and defence; None: all."""
    judges: Sequence[str] = OWN_JUDGE[:1]
    """Judges by name; the majority of several decides."""
    metrics: Sequence[str] = ()
    processes: int = 1
    ray: bool = False
    testbed: str | None = None
    """Name or YAML file of the testbed; None: the installed one, opened only if something needs it."""
    opening: BaseOptions = field(default_factory=BaseOptions)
    """How each base is opened and called."""
    files: PromptFiles = field(default_factory=PromptFiles)
    """How prompt files become suites; `file_format` goes before the format in it."""
    calls: Sequence[str] = ()
    """Settings of single bases, as in flux:steps=28,guidance=3.5; they go before those in `opening`."""
    reader: Callable[[int | None, Policy], prompt_suites.Suites] | None = None
    """Reads the prompt files instead of `files`: at most so many prompts of each, under a policy."""
    batch: int | None = None
    """Prompts drawn at once, by every defence; None: chosen by the size of a base's pictures."""

    def read_files(self, n: int | None, policy: Policy) -> prompt_suites.Suites:
        """The suites of the prompt file or folder."""
        if self.reader is not None:
            return self.reader(n, policy)
        reading = self.files.reading
        if self.file_format is not None:
            reading = replace(reading, format=self.file_format)
        return prompt_suites.open_files(Path(self.suite), n, replace(self.files, reading=reading), policy)


def open_suites(
    options: RunOptions, n: int | None, policy: Policy | None = None
) -> tuple[list[list[runner.Case]], list[str]]:
    """Cases of every suite that `options.suite` names, and notes on prompt files.

    n None means all cases, except that the benign suite is then empty: a testbed may have any number of those.
    """
    suite = options.suite
    if suite == "benign":
        return [runner.benign_suite(opened_testbed(options.testbed), n) if n else []], []
    if suite == "attacks" or suite in ATTACKS:
        names = list(ATTACKS) if suite == "attacks" else [suite]
        home = opened_testbed(options.testbed).bases()[0]
        base = options.searched or home
        suites = []
        for attack in names:  # a suite that was searched on another base than the first carries the base's name
            name = attack if base == home else f"{attack}@{base}"
            suites.append(runner.attack_suite(options.attacks / f"{attack}-{base}.jsonl", n, name))
        return suites, []
    if Path(suite).exists():
        found = options.read_files(n, policy or Policy.default())
        return found.cases, [*found.notes, *map(str, found.table)]
    raise BadInput(
        f"suite {suite!r}: write benign, attacks, {', '.join(ATTACKS)}, or the path of a prompt file or folder"
    )


def run(options: RunOptions) -> Iterator[str]:
    """Run every suite on every base with every defence; yields lines that say what was done."""
    if "help" in options.defences:
        yield "defences: " + ", ".join(DEFENCES)
        yield "settings: ours:NAME=VALUE,… · another guard: ours@DIR · ablations: " + ", ".join(
            f"ablation:{a}" for a in ABLATIONS
        )
        return
    for module in ("pyarrow", "matplotlib"):  # the end of a run needs them: fail before hours of work
        if find_spec(module) is None:
            raise BadInput(f"evaluation runs need {module}: pip install 'guardpaint[eval]'")
    wanted = expanded(options.defences)
    cast = Cast.of(options, wanted)
    cast.check_judges()
    policy = cast.policy()
    suites, notes = open_suites(options, options.n, policy)
    if not any(suites):
        raise BadInput(f"suite {options.suite!r} has no prompts; name another suite or testbed")
    yield from notes
    if len({m.partition(":")[0] for m in options.metrics}) < len(options.metrics):
        raise BadInput(f"metrics {', '.join(options.metrics)}: name at most one of each kind")
    if len(set(options.judges)) < len(options.judges):
        raise BadInput(f"judges {', '.join(options.judges)}: name each judge once")
    opened = {name: cast.defence(name) for name in wanted}
    rows = RowStore(options.out)
    jury = cast.judged_by()
    yield from not_independent(jury, cast.looks())
    plan = Plan(rows, options.out, jury, {name: metric_of(name) for name in options.metrics}, options.batch)
    # The guard without its ladder draws the same pictures until the ladder is needed: run it after `ours`, whose rows
    # it can take over.
    second = [name for name in wanted if name == "ours_ladder_off" and "ours" in wanted]
    for names in filter(None, ([w for w in wanted if w not in second], second)):
        pieces: list[Piece] = []
        for base in cast.bases:
            for name in names:
                reason = opened[name][0].applies(cast.base(base))
                if reason:
                    yield f"{opened[name][0].name} on {base}: not applicable, {reason}"
                    continue
                yield from plan.other_batch(cast.base(base))
                pieces += plan.pieces(cast, base, name, suites, after_ours=name in second)
        fresh = sum(len(p.cases) for p in pieces)
        with bar(options.suite, fresh) as advance:
            for drawings in spread(work, pieces, options.processes, options.ray):
                runner.keep(drawings, rows, options.out, options.pictures)
                advance(len(drawings))
        yield f"{options.suite}: {fresh} new of {plan.total}"
    everything, _ = open_suites(options, None, policy)
    for cases in everything:
        if cases:
            yield from plan.accept(cases)
    plan.save()
    if any(c.source for cases in everything for c in cases):
        prompt_suites.keep_table(options.out, options.read_files(None, policy).table)
    chosen, other = plan.chosen()
    if other:
        yield f"{other} rows of other judges are left out; run their suites again to have these judges look at them"
    yield from finish(chosen, options.out)


@dataclass(frozen=True)
class Cast:
    """Names of the guard, judges, metrics and testbed of a run; every process loads the same ones, once each."""

    guard: str | None
    guarded: bool
    """Whether any defence needs a guard."""
    judges: tuple[str, ...]
    metrics: tuple[str, ...]
    testbed: str | None
    entries: tuple[BaseEntry, ...] = ()

    @classmethod
    def of(cls, options: RunOptions, defences: Sequence[str]) -> Cast:
        guard = options.guard
        if guard is not None and Path(guard).is_dir():
            guard = str(Path(guard).resolve())
        needed = guard is not None or any(map(needs_guard, defences))
        entries = tuple(read_entries(options.bases, options.opening, options.calls).values())
        return cls(guard, needed, tuple(options.judges), tuple(options.metrics), options.testbed, entries)

    def defence(self, name: str) -> tuple[Defence, str]:
        """A defence by name, and the hash of what it is made of."""
        return opened_defence(name, self)

    @property
    def bases(self) -> tuple[str, ...]:
        """Names of the bases."""
        return tuple(entry.name for entry in self.entries)

    def entry(self, name: str) -> BaseEntry:
        return next(entry for entry in self.entries if entry.name == name)

    @property
    def worldless(self) -> bool:
        """Whether no testbed is named and a base is none that a package brings: then no default testbed is used."""
        return self.testbed is None and any(entry.real for entry in self.entries)

    def base(self, name: str) -> EvaluatedBase:
        return opened_base(self.entry(name), self.testbed)

    def config(self, base: str, defence: str) -> str:
        """Hash of a defence's and a base's weights and settings."""
        opened, settings = self.defence(defence)
        parts = [settings, weights_of(self.entry(base), self.testbed)]
        if isinstance(opened, StockCheckerDefence) and (checker := opened.of(self.base(base))):
            parts.append(checker.digest())
        return short_hash(*parts)

    def policy(self) -> Policy:
        """The policy of the guard if a defence needs one, otherwise the default policy."""
        return open_guard(self.guard).policy if self.guarded else Policy.default()

    def judged_by(self) -> Jury:
        """The judges, under the policy of the run."""
        return Jury({name: opened_judge(name, self.policy(), self.testbed) for name in self.judges})

    def looks(self) -> dict[str, str]:
        """Digests of the guard's auditor and approver."""
        if not self.guarded:
            return {}
        guard = open_guard(self.guard)
        parts: dict[str, Any] = {"auditor": guard.parts.auditor, "approver": guard.parts.approver}
        return {role: part.digest() for role, part in parts.items() if issubclass(type(part), Graded)}

    def check_judges(self) -> None:
        """Raise BadInput if a testbed's own judge, which knows the pictures of its own bases only, is to judge others.

        The judge of a testbed from a file was named by whoever wrote the file, so it judges every base.
        """
        if not any(name in OWN_JUDGE for name in self.judges):
            return
        real = [entry for entry in self.entries if entry.real]
        if not real:
            return
        world = opened_testbed(self.testbed) if self.testbed or installed() else None
        foreign = [e for e in real if world is None or e.path not in world.bases()]
        if foreign and not isinstance(world, FileTestbed):
            own = "no testbed is installed"
            if world is not None:
                own = f"the judge of the testbed {world.name!r} only knows pictures of {', '.join(world.bases())}"
            raise BadInput(f"base {foreign[0].name}: {own}; name a judge with --judge, as in --judge vlm:MODEL")


@dataclass(frozen=True)
class Piece:
    """A batch of cases of one base and defence, by name, so that another process can draw them."""

    base: str
    defence: str
    config: str
    cast: Cast
    cases: tuple[runner.Case, ...]


@dataclass
class Plan:
    """The rows that a run has already, and the cases that it still has to draw."""

    rows: RowStore
    out: Path
    jury: Jury
    metrics: dict[str, PromptMetric]
    batch: int | None = None
    current: dict[summary.Cell, str] = field(default_factory=dict)
    """The configuration of each suite, base and defence that was run last, by this command or an earlier one."""
    valid: dict[str, list[str]] = field(default_factory=dict)
    """Seeds and prompts that each suite had when it was run last."""
    batches: dict[str, int] = field(default_factory=dict)
    """How many prompts were last drawn at once, by base."""
    total: int = 0

    def __post_init__(self) -> None:
        if self.file.exists():
            stored = read_json(self.file)
            self.current = {(c["suite"], c["base"], c["defence"]): c["config"] for c in stored["cells"]}
            self.valid = stored["valid"]
            self.batches = stored.get("batches", {})  # runs of earlier versions keep none

    @property
    def file(self) -> Path:
        return self.out / "chosen.json"

    def save(self) -> None:
        cells = [{"suite": s, "base": b, "defence": d, "config": c} for (s, b, d), c in self.current.items()]
        write_json(self.file, {"cells": cells, "valid": self.valid, "batches": self.batches})

    def accept(self, cases: Sequence[runner.Case]) -> Iterator[str]:
        """Keep the prompts and seeds that a suite has; yields a line if an earlier run had others under its name.

        Rows of a prompt file that were drawn before take over what is now said of their prompts.
        """
        suite, now = cases[0].suite, {f"{c.seed} {c.prompt}" for c in cases}
        gone = set(self.valid.get(suite, ())) - now
        self.valid[suite] = sorted(now)
        said = {(c.seed, c.prompt): c for c in cases if c.source}
        own = [r for r in self.rows.found.values() if r.suite == suite and (r.seed, r.prompt) in said]
        labelled = [runner.labelled(r, said[r.seed, r.prompt]) for r in own]
        self.rows.add(new for new, old in zip(labelled, own, strict=True) if new != old)
        if gone:
            yield (
                f"{suite}: {len(gone)} prompts of an earlier run are no longer in it, so their rows are not reported; "
                "for another file use --name or --out"
            )

    def chosen(self) -> tuple[list[EvaluationRow], int]:
        """Rows to report, and the number of rows left out because another judge made their verdicts.

        Reported are rows of the last configurations, of prompts that their suite still has.
        """
        valid = {suite: set(prompts) for suite, prompts in self.valid.items()}
        rows = [
            r
            for r in summary.latest(list(self.rows.found.values()), self.current)
            if r.suite not in valid or f"{r.seed} {r.prompt}" in valid[r.suite]
        ]
        mine = [r for r in rows if r.verdict.judge == runner.judge_key(self.jury, list(self.metrics))]
        return mine, len(rows) - len(mine)

    def other_batch(self, base: EvaluatedBase) -> Iterator[str]:
        """Note how many prompts of a base are drawn at once; yields a line if the run has rows of other batches."""
        size, before = runner.batch_for(base, self.batch), self.batches.get(base.name)
        self.batches[base.name] = size
        if before not in (None, size):
            yield f"{base.name}: rows of batches of {before} stay; new ones are of {size}, which changes the last bits"

    def pieces(
        self, cast: Cast, base: str, name: str, suites: Sequence[Sequence[runner.Case]], after_ours: bool
    ) -> list[Piece]:
        """The batches that one defence still has to draw on one base; `after_ours` takes rows of `ours` over first."""
        config = cast.config(base, name)
        defence = cast.defence(name)[0].name
        pieces: list[Piece] = []
        for cases in suites:
            if after_ours:
                self.take_over(base, config, cases)
            todo = self.missing(base, defence, config, cases)
            # The last bits of a picture depend on its batch, so batches are the same for every defence.
            lacking, size = {c.id for c in todo}, runner.batch_for(cast.base(base), self.batch)
            batches = [part for part in runner.chunked(cases, size) if any(c.id in lacking for c in part)]
            if after_ours:
                batches = list(runner.chunked(todo, size))
            pieces += [Piece(base, name, config, cast, tuple(part)) for part in batches]
        return pieces

    def missing(self, base: str, defence: str, config: str, cases: Sequence[runner.Case]) -> list[runner.Case]:
        """Cases without a row. Rows of another judge get a new verdict if their picture was kept."""
        if not cases:
            return []
        self.current[cases[0].suite, base, defence] = config
        self.total += len(cases)
        wanted = runner.judge_key(self.jury, list(self.metrics))
        todo, anew = [], []
        for case in cases:
            row = self.rows.found.get(runner.key_of(base, defence, config, case))
            if row is not None and row.verdict.judge != wanted:
                row = runner.judged_anew(row, self.out, case, self.jury, self.metrics)
                anew += [row] if row is not None else []
            if row is None:
                todo.append(case)
        self.rows.add(anew)
        return todo

    def take_over(self, base: str, config: str, cases: Sequence[runner.Case]) -> None:
        """Copy the rows of `ours` that did not need the ladder to `ours_ladder_off`, which draws the same pictures."""
        for case in cases:
            ours = self.current.get((case.suite, base, "ours"), "")
            row = self.rows.found.get(runner.key_of(base, "ours", ours, case))
            own = runner.key_of(base, "ours_ladder_off", config, case)
            same = row is not None and row.detail.get("ladder") == "" and not row.detail.get("error")
            if row is not None and same and own not in self.rows.found:
                self.rows.add([replace(row, key=own, defence="ours_ladder_off", config=config)])


def work(piece: Piece) -> list[runner.Made]:
    """Draw and judge one piece; raises if this process has other weights than the one that planned the run."""
    cast = piece.cast
    config = cast.config(piece.base, piece.defence)
    if config != piece.config:
        raise BadInput(
            f"{piece.base} or {piece.defence} has other weights in this process than where the run began; "
            "use the same files in every process"
        )
    metrics = {name: metric_of(name) for name in cast.metrics}
    defence, base = cast.defence(piece.defence)[0], cast.base(piece.base)
    if cast.guarded:
        open_guard(cast.guard).to(base.pipe._execution_device)
    return runner.draw(base, defence, config, piece.cases, cast.judged_by(), metrics)


@cache
def opened_testbed(name: str | None) -> Testbed:
    return open_testbed(name)


@cache
def opened_defence(name: str, cast: Cast) -> tuple[Defence, str]:
    guard = open_guard(cast.guard) if cast.guarded else None
    return open_defence(name, guard, None if cast.worldless else lambda: opened_testbed(cast.testbed))


@cache
def opened_judge(name: str, policy: Policy, testbed: str | None) -> Judge:
    return opened_testbed(testbed).judge(policy) if name in OWN_JUDGE else open_judge(name, policy)


@cache
def metric_of(name: str) -> PromptMetric:
    return open_metric(name)


@lru_cache(maxsize=1)
def opened_base(entry: BaseEntry, testbed: str | None) -> EvaluatedBase:
    return open_base(entry, None if testbed is None else opened_testbed(testbed))


@lru_cache(maxsize=1)
def weights_of(entry: BaseEntry, testbed: str | None) -> str:
    return opened_base(entry, testbed).digest()


def finish(rows: Sequence[EvaluationRow], out: Path) -> Iterator[str]:
    """Write results.json, samples.parquet and report.html from the rows; yields lines with warnings and file names."""
    broken = [r for r in rows if r.detail.get("error")]
    if broken:
        yield f"the guard failed on {len(broken)} pictures (withheld): {broken[0].detail['error']}"
    revisions = dict.fromkeys(r.git for r in rows)
    if len(revisions) > 1:
        yield f"the rows come from {len(revisions)} revisions of the code: {', '.join(revisions)}"
    found = {**summary.metrics(rows), **by_category.metrics(rows), **benign_files.metrics(rows)}
    write_results(out / "results.json", found, [r.to_dict() for r in rows], seed=0)
    write_parquet(rows, out / "samples.parquet")
    yield f"wrote {out / 'results.json'}, {out / 'samples.parquet'} and {page.write(rows, out)}"
