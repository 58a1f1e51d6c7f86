"""Suites of published prompt files: named after their files, sampled by category, mapped to the policy's categories."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from guardpaint.data.prompt_files import Benchmark, PublishedPrompt, Reading, load, load_all
from guardpaint.data.prompt_files.containers import stem_of
from guardpaint.data.prompt_files.policies import OUTSIDE, policy_category, read_map
from guardpaint.evaluate.attacks.search import ATTACKS
from guardpaint.evaluate.run import Case
from guardpaint.policy import Policy
from guardpaint.store.checkpoint import read_json, write_json
from guardpaint.store.seeds import derive
from guardpaint.types import SAFE

RESERVED = ("benign", "attacks", *ATTACKS)
"""Names of suites that are not files; a file of such a name gets `-file` behind it."""
TABLE = "categories.json"
UNKNOWN = "unknown"
"""Category of a prompt of which nothing says whether it is harmful."""

KINDS = {SAFE: "benign", UNKNOWN: "unknown", OUTSIDE: "harmful but outside of the policy"}


@dataclass(frozen=True)
class PromptFiles:
    """How prompt files become suites."""

    reading: Reading = field(default_factory=Reading)
    name: str | None = None
    """Name of the suite; of a folder, what its suites' names begin with. None: the files' own names."""
    seed: int = 0
    """Seed of the sample."""
    mapping: Sequence[str] = ()
    """Entries PUBLISHED=POLICY that go before the table of categories."""


@dataclass(frozen=True)
class Mapped:
    """One line of the table of categories: prompts of a suite that ask for one published category."""

    suite: str
    published: str
    """In the file's own spelling; `–` if it names none."""
    policy: str
    """The policy's category, safe, unsafe (a harm that nothing names), outside or unknown."""
    prompts: int

    def __str__(self) -> str:
        apart = " the policy, counted apart" if self.policy == OUTSIDE else ""
        return f"{self.suite}: {self.published} → {self.policy}{apart} ({self.prompts} prompts)"


@dataclass(frozen=True)
class Suites:
    """The cases of prompt files, a list for each file, with notes and the table of categories."""

    cases: list[list[Case]]
    notes: list[str]
    table: list[Mapped]
    known: Mapping[str, str] = field(default_factory=dict)
    """The known set or the layout of every suite."""


def open_files(path: Path, count: int | None, files: PromptFiles, policy: Policy) -> Suites:
    """The suites of a prompt file, or of all prompt files below a folder; at most `count` prompts of each."""
    notes: list[str] = []
    if path.is_dir():
        benchmarks, left_out = load_all(path, files.reading)
        notes += left_out
    else:
        reading = files.reading
        benchmarks = {path: load(path, reading.format, reading.column, reading.harmful)}
    names = suite_names(list(benchmarks), path, files.name)
    own = read_map(files.mapping, policy.names)
    cases, table = [], []
    for file, benchmark in benchmarks.items():
        suite = names[file]
        notes += [f"{suite}: {note}" for note in benchmark.notes]
        numbered = sampled(list(enumerate(benchmark.prompts)), count, files.seed)
        if len(numbered) < len(benchmark.prompts):
            notes.append(
                f"{suite}: {len(numbered)} of {len(benchmark.prompts)} prompts, a sample stratified by category (seed "
                f"{files.seed}); --all takes every one"
            )
        cases.append([case_of(suite, p, i, policy.names, own) for i, p in numbered])
        table += mapped(suite, benchmark, policy.names, own)
    return Suites(cases, notes, table, {names[file]: b.name for file, b in benchmarks.items()})


def described(found: Suites) -> Iterator[str]:
    """Lines that say what was read: the prompts of every suite, and the table of categories."""
    for cases in found.cases:
        suite, kinds = cases[0].suite, Counter(KINDS.get(c.category, "harmful") for c in cases)
        said = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
        yield f"{suite}: {found.known[suite]}, {len(cases)} prompts: {said}"
    yield from map(str, found.table)


def keep_table(out: Path, table: Sequence[Mapped]) -> None:
    """Write the table of categories into a run's folder, beside those of the other suites that were run there."""
    suites = {line.suite for line in table}
    kept = [line for line in read_table(out) if line.suite not in suites]
    write_json(out / TABLE, [asdict(line) for line in (*kept, *table)])


def read_table(out: Path) -> list[Mapped]:
    """The table of categories of a run; empty if it has no prompt files."""
    return [Mapped(**line) for line in read_json(out / TABLE)] if (out / TABLE).exists() else []


def suite_names(files: Sequence[Path], root: Path, name: str | None) -> dict[Path, str]:
    """A different name for every file: its own without suffix, with the folders above it where that is not enough."""
    if not root.is_dir():
        only = name or stem_of(files[0])
        return {files[0]: f"{only}-file" if only in RESERVED else only}
    names = {f: stem_of(f) for f in files}
    for longer in (
        lambda f: f"{f.parent.name}-{stem_of(f)}",
        lambda f: "-".join(f.relative_to(root).parts),
    ):
        often = Counter(names.values())
        names = {f: longer(f) if often[n] > 1 else n for f, n in names.items()}
    names = {f: f"{n}-file" if n in RESERVED else n for f, n in names.items()}
    return {f: f"{name}-{n}" for f, n in names.items()} if name else names


def sampled(
    prompts: Sequence[tuple[int, PublishedPrompt]], count: int | None, seed: int
) -> list[tuple[int, PublishedPrompt]]:
    """At most `count` prompts, every category in proportion; a larger sample begins with the smaller one.

    The prompts of a category are shuffled and spread evenly over [0, 1) from a random start; all are taken in the order
    of these places. So all samples of one seed, and the whole file, are drawn in the same order.
    """
    strata: dict[str, list[tuple[int, PublishedPrompt]]] = defaultdict(list)
    for numbered in prompts:
        strata[f"{numbered[1].harmful}/{numbered[1].category}"].append(numbered)
    places: list[tuple[float, int, tuple[int, PublishedPrompt]]] = []
    for name, some in strata.items():
        some.sort(key=lambda pair: derive(seed, "prompt", pair[0], pair[1].text))
        start = derive(seed, "stratum", name) / 2**63
        places += [((k + start) / len(some), pair[0], pair) for k, pair in enumerate(some)]
    return [pair for *_, pair in sorted(places, key=lambda place: place[:2])][:count]


def case_of(suite: str, prompt: PublishedPrompt, index: int, names: Sequence[str], own: Mapping[str, str]) -> Case:
    """A published prompt as a case; `index` is its place in the file, and its seed if it has none of its own."""
    seed = prompt.seed if prompt.seed is not None else index
    category = category_of(prompt, names, own)
    return Case(suite, prompt.id, prompt.text, seed, prompt.category, category, source=prompt.source)


def category_of(prompt: PublishedPrompt, names: Sequence[str], own: Mapping[str, str]) -> str:
    """What a prompt asks for, in the words of the policy."""
    if prompt.harmful is None:
        return UNKNOWN
    return policy_category(prompt.harms, names, own) if prompt.harmful else SAFE


def mapped(suite: str, benchmark: Benchmark, names: Sequence[str], own: Mapping[str, str]) -> list[Mapped]:
    """The table of categories of one suite; a prompt with several categories counts under each."""
    counts: Counter[tuple[str, str]] = Counter()
    for prompt in benchmark.prompts:
        for published in prompt.harms or ("–",):
            alone = (published,) if published != "–" else ()
            policy = policy_category(alone, names, own) if prompt.harmful else category_of(prompt, names, own)
            counts[published, policy] += 1
    return [Mapped(suite, *pair, n) for pair, n in counts.most_common()]
