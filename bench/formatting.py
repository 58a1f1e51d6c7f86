"""Format the metrics in docs/results/*.json as Markdown tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
Metric = dict[str, Any]


def path_of(component: str) -> Path:
    """Return the path of a component's results file, which may not have been measured yet."""
    return ROOT / f"docs/results/{component}.json"


def results_of(component: str) -> dict[str, Any]:
    """Return the results file of a component: command, revision, seed, metrics."""
    return dict(json.loads(path_of(component).read_text()))


def metrics_of(component: str) -> dict[str, Metric]:
    """Return the metrics of a component by name."""
    return dict(results_of(component)["metrics"])


def number(value: float | None) -> str:
    """Return three significant digits; rounding errors around 0 are 0."""
    if value is None:
        return "–"
    return "0" if abs(value) < 1e-9 else f"{value:.3g}"


def interval(m: Metric) -> str:
    return f"{number(m['ci'][0])} to {number(m['ci'][1])}" if "ci" in m else ""


def goal(m: Metric) -> str:
    """Return the goal and whether it is met, or nothing if the metric has no goal."""
    if "goal" not in m:
        return ""
    return f"{sign(m['goal'])}, {'met' if m['met'] else '**not met**'}"


def sign(text: str) -> str:
    """Return a goal such as '<=0.04' with a typographic sign: '≤ 0.04'."""
    for ascii_sign, shown in (("<=", "≤ "), (">=", "≥ "), ("<", "< "), (">", "> ")):
        if text.startswith(ascii_sign):
            return shown + text.removeprefix(ascii_sign)
    return text


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows)]


def metric_table(metrics: Mapping[str, Metric], names: Mapping[str, str]) -> list[str]:
    """Return a table with one row per metric; `names` maps its key to what it means."""
    rows = []
    for key, meaning in names.items():
        m = metrics[key]
        rows.append([meaning, number(m["value"]), interval(m), str(m["n"]), goal(m)])
    return table(["what", "value", "95 % interval", "n", "goal"], rows)


def cell(m: Metric | None, with_goal: bool = False) -> str:
    """Return value and interval as one cell; a missed goal is always marked, a met one only `with_goal`."""
    if m is None:
        return "–"
    ci = f" [{number(m['ci'][0])}, {number(m['ci'][1])}]" if "ci" in m else ""
    if with_goal and "goal" in m:
        return f"{number(m['value'])}{ci} ({goal(m)})"
    missed = ", **not met**" if m.get("met") is False else ""
    return f"{number(m['value'])}{ci}{missed}"


def grid(metrics: Mapping[str, Metric], rows: Mapping[str, str], columns: Mapping[str, str]) -> list[str]:
    """Return a table with a row per name and a column per key, in which * stands for the row's name.

    A goal that all rows share is put into the column's title, other goals into their cells.
    """
    titles, cells = [""], [[title] for title in rows.values()]
    for key, title in columns.items():
        found = [metrics.get(key.replace("*", name)) for name in rows]
        goals = {m.get("goal") for m in found if m}
        shared = goals.pop() if len(goals) == 1 else None
        titles.append(f"{title} (goal {sign(shared)})" if shared else title)
        for row, m in zip(cells, found, strict=True):
            row.append(cell(m, with_goal=shared is None))
    return table(titles, cells)
