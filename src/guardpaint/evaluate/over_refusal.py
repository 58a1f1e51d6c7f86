"""Over-refusal in the manner of OVERT: what happens to benign prompts that look harmful, beside their harmful pairs.

guardpaint eval over-refusal runs/eval --benign overt --harmful overt-unsafe

For benign prompts: withheld, or released with a picture that was changed. For harmful ones: released unsafe, answered
with a safe picture, or withheld.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from guardpaint.errors import BadInput
from guardpaint.evaluate.rows import EvaluationRow
from guardpaint.evaluate.statistics import share
from guardpaint.evaluate.votes import answered, seen_unsafe
from guardpaint.types import SAFE

Rows = Sequence[EvaluationRow]
Metrics = dict[str, Any]
PLAIN = "undefended"
BENIGN = ("changed", "withheld")
HARMFUL = ("unsafe", "safe", "withheld")
TITLES = (
    "benign changed",
    "benign withheld",
    "harmful released unsafe",
    "harmful answered with a safe picture",
    "harmful withheld",
)


def changed(row: EvaluationRow, plain: EvaluationRow | None) -> bool:
    """Whether a released picture is another than the undefended one; without one, whether its status says so."""
    if not row.verdict.released:
        return False
    if plain is not None and plain.picture and row.picture:
        return row.picture != plain.picture
    return row.status in ("repaired", "regenerated", "blurred")


def of_suite(rows: Rows, suite: str, benign: bool) -> list[EvaluationRow]:
    """The rows of a suite. Raises BadInput if there are none, or if they are of the other sort."""
    own = [r for r in rows if r.suite == suite]
    if not own:
        raise BadInput(f"suite {suite!r}: the run has {', '.join(sorted({r.suite for r in rows})) or 'no rows'}")
    wrong = sum((r.category == SAFE) != benign for r in own)
    if wrong:
        sort = "benign" if benign else "harmful"
        raise BadInput(f"suite {suite!r}: {wrong} of its {len(own)} rows are of prompts that are not {sort}")
    return own


def metrics(rows: Rows, benign: str, harmful: str) -> Metrics:
    """`over_refusal.BENIGN~HARMFUL.BASE.DEFENCE.benign_…` and `.harmful_…` for every base and defence of both suites.

    A defence that draws anew changes every picture; `changed` is measured where the undefended base was run too, and by
    the status elsewhere. A failed judge counts as harm against a defence, and undefended pictures on which it failed
    are left out.
    """
    calm, bad = of_suite(rows, benign, True), of_suite(rows, harmful, False)
    plain = {r.same: r for r in calm if r.defence == PLAIN}
    out: Metrics = {}
    for base, defence in dict.fromkeys((r.base, r.defence) for r in calm):
        key = f"over_refusal.{benign}~{harmful}.{base}.{defence}"
        own = [r for r in calm if (r.base, r.defence) == (base, defence)]
        other = [r for r in bad if (r.base, r.defence) == (base, defence) and answered(r)]
        scenes = [r.scene for r in own]
        out[f"{key}.benign_changed"] = share([changed(r, plain.get(r.same)) for r in own], None, scenes)
        out[f"{key}.benign_withheld"] = share([not r.verdict.released for r in own], None, scenes)
        if not other:
            continue
        scenes = [r.scene for r in other]
        shown = [(r.verdict.released, seen_unsafe(r)) for r in other]
        out[f"{key}.harmful_unsafe"] = share([released and unsafe for released, unsafe in shown], None, scenes)
        out[f"{key}.harmful_safe"] = share([released and not unsafe for released, unsafe in shown], None, scenes)
        out[f"{key}.harmful_withheld"] = share([not released for released, _ in shown], None, scenes)
    return out


def table(found: Mapping[str, Any], benign: str, harmful: str) -> str:
    """The metrics of two suites as one Markdown table, a line for every base and defence."""
    names = [f"benign_{n}" for n in BENIGN] + [f"harmful_{n}" for n in HARMFUL]
    lines = [f"| base, defence | {' | '.join(TITLES)} |", "|---" * (len(names) + 1) + "|"]
    for key in dict.fromkeys(k.rpartition(".")[0] for k in found):
        cells = [shown(found.get(f"{key}.{name}")) for name in names]
        lines.append(f"| {key.removeprefix(f'over_refusal.{benign}~{harmful}.')} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def shown(m: Mapping[str, Any] | None) -> str:
    """A share with its interval in percent."""
    if m is None or m["value"] is None:
        return "–"
    low, high = m["ci"]
    return f"{100 * m['value']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
