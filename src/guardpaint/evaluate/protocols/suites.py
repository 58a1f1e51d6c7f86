"""The prompt files of a protocol: which attack each one belongs to, and what is missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path

from guardpaint.data.prompt_files import load_all
from guardpaint.errors import BadInput
from guardpaint.evaluate.prompt_suites import UNKNOWN, PromptFiles, Suites, open_files, suite_names
from guardpaint.evaluate.protocols.spec import Protocol
from guardpaint.evaluate.run import Case
from guardpaint.policy import Policy
from guardpaint.types import SAFE


@dataclass
class ProtocolFiles:
    """The prompt files below a folder, as suites of a protocol."""

    protocol: Protocol
    data: Path
    files: PromptFiles = field(default_factory=PromptFiles)
    assigned: Sequence[str] = ()
    """ATTACK=PATTERN: files that belong to an attack though their name does not say so."""
    attack_of: dict[str, str] = field(default_factory=dict)
    """The attack of every suite that belongs to one; known once `read` was called."""

    def __post_init__(self) -> None:
        for text in self.assigned:
            attack, mark, pattern = text.partition("=")
            if not mark or not pattern or attack not in self.protocol.attacks:
                raise BadInput(f"file {text!r}: write ATTACK=PATTERN; attacks are {', '.join(self.protocol.attacks)}")
        if not self.data.is_dir():
            raise BadInput(f"{self.data}: not a folder; name the one that holds the published prompt files")

    def read(self, count: int | None, policy: Policy) -> Suites:
        """All suites with notes: at most `count` prompts of each file, under a policy."""
        found, notes = load_all(self.data, self.files.reading)
        suites = suite_names(list(found), self.data, self.files.name)
        out = Suites([], notes, [], {})
        known: dict[str, str] = {}
        self.attack_of.clear()
        for path, benchmark in found.items():
            suite = suites[path]
            attack = self.attack(path, benchmark.name)
            own = replace(self.files, name=suite)
            if attack and all(p.harmful is None for p in benchmark.prompts):
                own = replace(own, reading=replace(self.files.reading, harmful=True))
                out.notes.append(f"{suite}: taken as prompts of {self.protocol.attacks[attack].title}, so as harmful")
            one = open_files(path, count, own, policy)
            out.cases.extend(one.cases)
            out.notes.extend(one.notes)
            out.table.extend(one.table)
            known |= one.known
            if attack and any(c.category not in (SAFE, UNKNOWN) for cases in one.cases for c in cases):
                self.attack_of[suite] = attack
        if not self.attack_of:
            listed = ", ".join(suites[p] for p in found)
            raise BadInput(
                f"{self.data}: no file belongs to {', '.join(self.protocol.attacks)}; there are {listed}; say which "
                "belongs to what with --file ATTACK=PATTERN"
            )
        return replace(out, known=known)

    def attack(self, path: Path, known: str) -> str:
        """The attack that a file belongs to, or an empty text."""
        inside = path.relative_to(self.data)
        for text in self.assigned:
            attack, _, pattern = text.partition("=")
            if fnmatch(str(inside), pattern) or fnmatch(inside.name, pattern):
                return attack
        names = (*(part.partition(".")[0] for part in reversed(inside.parts)), known)
        return next((key for key, attack in self.protocol.attacks.items() if attack.fits(names)), "")


def described(files: ProtocolFiles, cases: Sequence[Sequence[Case]]) -> Iterator[str]:
    """Lines that say which suites every attack has, and which have none."""
    counts = {some[0].suite: kinds(some) for some in cases if some}
    for key, attack in files.protocol.attacks.items():
        own = [f"{suite} ({counts[suite]})" for suite, of in files.attack_of.items() if of == key and suite in counts]
        yield f"{attack.title}: {', '.join(own) or 'NO FILE; its row will be empty'}"
    if others := [f"{suite} ({n})" for suite, n in counts.items() if suite not in files.attack_of]:
        yield f"beside the attacks: {', '.join(others)}"


def kinds(cases: Sequence[Case]) -> str:
    """Counts of harmful, harmless and other prompts, as text."""
    safe, unknown = (sum(c.category == kind for c in cases) for kind in (SAFE, UNKNOWN))
    parts: Mapping[str, int] = {"harmful": len(cases) - safe - unknown, "benign": safe, "unknown": unknown}
    return ", ".join(f"{n} {kind}" for kind, n in parts.items() if n)
