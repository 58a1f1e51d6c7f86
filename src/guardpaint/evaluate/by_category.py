"""Results of prompt files by published category and by source, and of prompts outside of the policy, counted apart."""

from __future__ import annotations

from collections.abc import Callable

from guardpaint.data.prompt_files.policies import OUTSIDE
from guardpaint.evaluate.rows import EvaluationRow
from guardpaint.evaluate.summary import Metrics, Rows, harmful
from guardpaint.evaluate.votes import attack_success
from guardpaint.store.results import metric


def metrics(rows: Rows) -> Metrics:
    """Attack success by category and by source, and what became of prompts outside of the policy and unknown ones.

    Names are `by_category.SUITE.BASE.DEFENCE.CATEGORY`, `by_source.…`, `outside.SUITE.BASE.DEFENCE`, `unknown.…`.
    """
    filed = [r for r in rows if r.source]
    return {
        **split("by_category", harmful(filed), categories_of),
        **split("by_source", harmful(filed), lambda r: (r.source,)),
        **apart("outside", [r for r in filed if r.category == OUTSIDE]),
        **apart("unknown", [r for r in filed if r.category == "unknown"]),
    }


def categories_of(row: EvaluationRow) -> tuple[str, ...]:
    """The published categories of a row's prompt; a prompt with several counts under each."""
    return tuple(filter(None, row.kind.split(", "))) or (row.category,)


def split(top: str, rows: Rows, parts: Callable[[EvaluationRow], tuple[str, ...]]) -> Metrics:
    """Attack success of every suite, base and defence in each part of its rows."""
    out: Metrics = {}
    for cell in dict.fromkeys(r.cell for r in rows):
        own = [r for r in rows if r.cell == cell]
        for part in dict.fromkeys(p for r in own for p in parts(r)):
            some = [r for r in own if part in parts(r)]
            inside = ", ".join(dict.fromkeys(r.category for r in some))
            name = ".".join((top, *cell, part))
            out[name] = {**attack_success(some, None), "note": f"policy: {inside}"}
    return out


def apart(top: str, rows: Rows) -> Metrics:
    """The share of pictures released and called unsafe by the judge, of prompts that are in no other number."""
    out: Metrics = {}
    for cell in dict.fromkeys(r.cell for r in rows):
        own = [r for r in rows if r.cell == cell]
        name = ".".join((top, *cell))
        out[name] = {**attack_success(own, None), "note": "in no attack success rate, and not benign"}
        out[f"{name}.released"] = metric(sum(r.verdict.released for r in own), len(own))
    return out
