"""One labeller's work on the sample of a run: what the page shows, and what is said when all is labelled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from guardpaint.data.label_page import Session
from guardpaint.errors import BadInput
from guardpaint.evaluate import eye, summary
from guardpaint.evaluate.eye_sample import Sample, check_closed, close, items_of, labels_file, sample_of
from guardpaint.evaluate.gather import read_run
from guardpaint.evaluate.rows import EvaluationRow
from guardpaint.policy import Policy


@dataclass(frozen=True)
class RunLabels:
    """A run and the sample of it that people label."""

    run: Path
    rows: Sequence[EvaluationRow]
    sample: Sample
    policy: Policy

    def session(
        self, labeller: str, cases: Sequence[str] = (), several: bool = False, settling: bool = False
    ) -> Session:
        """The labeller's session. Raises BadInput for one who has seen the judge's answers."""
        if labeller in self.sample.closed and not settling:
            raise BadInput(
                f"{labeller} has seen the judge's answers, so these labels are closed; another person may label too"
            )
        items = items_of(self.sample, self.run, self.rows)
        return Session(items, self.policy, labeller, labels_file(self.run), cases, several, settling)

    def said(self, session: Session) -> Iterator[str]:
        """Lines for the end of a session. With nothing left, the labels are closed and the judge's errors shown."""
        left = session.left()
        yield f"{left} pictures left; {session.out}"
        if left or session.settling:
            if not session.settling:
                yield "the judge's answers are shown when all are labelled"
            return
        labels = session.labels()
        check_closed(self.run, self.sample, labels)
        close(self.run, self.sample, session.labeller, labels)
        truth = {
            key: {"label": x.label, "case": x.case or "other"}
            for key, x in session.own(labels).items()
            if x.label != "unsure"
        }
        found = eye.metrics(self.rows, summary.harmful(self.rows), self.sample.keys, truth)
        for name, m in found.items():
            if name in ("eye.judge.false_alarms", "eye.judge.missed"):
                yield f"{name}: {eye.shown(m)} of {m['n']}"
        yield f"your labels are closed; rates with them: guardpaint eval report {self.run}"


def open_run(run: Path, policy: Policy, n: int | None = None, seed: int = 0) -> RunLabels:
    """A finished run with its sample, which is drawn now if there is none that fits."""
    rows = summary.latest(read_run(run))
    return RunLabels(run, rows, sample_of(run, rows, n, seed), policy)
