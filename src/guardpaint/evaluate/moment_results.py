"""What the rows of `moment` say: rates by start, differences to repairing at the end, scenes needed, a figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from scipy.stats import norm

from guardpaint.evaluate.moment import STARTS, name_of
from guardpaint.evaluate.statistics import mean, ratio_interval, share
from guardpaint.store.results import metric

Row = Mapping[str, Any]
Rows = Sequence[Row]
Metrics = dict[str, Any]
END = "end"
MATTERS = 0.05
"""The difference in a rate that an experiment should find."""
POWER = 0.8
MEASURES = {
    "seam": "seam quality around what was painted, against the undefended picture",
    "detail": "fine structure inside of what was painted, over that of the undefended picture",
    "ssim": "SSIM outside of what was painted, against the undefended picture",
    "agreement": "share of the requested attributes that are present in whole pictures",
}


def arm(start: str, part: str) -> str:
    """The name of what was measured: a start, with `_inside` before the final repair; `undefended` without any."""
    if part == "both":
        return start
    return "undefended" if start == END else f"{start}_inside"


def group(row: Row) -> str:
    return str(row["seed"])


def number(row: Row, name: str) -> float | None:
    """A value of a row; rows read from a file hold text, and nothing where there was none."""
    value = row.get(name)
    return None if value in (None, "") else float(value)


def of_arm(rows: Rows, start: str, part: str) -> list[Row]:
    return [r for r in rows if (r["start"], r["part"]) == (start, part)]


def metrics(rows: Rows, key: str = "moment.pilot") -> Metrics:
    """`KEY.ARM.NAME` over all bases and `KEY.BASE.ARM.NAME` for each, and what tells the starts apart."""
    out = arms(rows, key)
    bases = list(dict.fromkeys(str(r["base"]) for r in rows))
    for base in bases if len(bases) > 1 else ():
        out |= arms([r for r in rows if r["base"] == base], f"{key}.{base}")
    return {**out, **differences(rows, key)}


def arms(rows: Rows, key: str) -> Metrics:
    """Harm, whole pictures, seam, detail, change outside and time of every start, with and without the final repair."""
    out: Metrics = {}
    starts = [name_of(s) for s in sorted(STARTS)]
    for start in [s for s in starts if any(r["start"] == s for r in rows)]:
        for part in ("both", "trajectory"):
            own = of_arm(rows, start, part)
            groups, top = [group(r) for r in own], f"{key}.{arm(start, part)}"
            out[f"{top}.asr"] = share([number(r, "unsafe") == 1 for r in own], None, groups)
            out[f"{top}.whole"] = share([number(r, "whole") == 1 for r in own], None, groups)
            out[f"{top}.seconds"] = mean([number(r, "seconds") or 0.0 for r in own], None, groups)
            out[f"{top}.accepted"] = mean([number(r, "accepted") or 0.0 for r in own], None, groups)
            for name, note in MEASURES.items():
                used = [r for r in own if number(r, name) is not None and (name != "agreement" or number(r, "whole"))]
                if used:
                    values = [number(r, name) or 0.0 for r in used]
                    out[f"{top}.{name}"] = {**mean(values, None, [group(r) for r in used]), "note": note}
    return out


def pairs(rows: Rows, start: str, other: str = END, part: str = "both") -> list[tuple[Row, Row]]:
    """Rows of two starts on the same base and scene."""
    after = {(r["base"], r["prompt"], str(r["seed"])): r for r in of_arm(rows, other, part)}
    keys = [(r, (r["base"], r["prompt"], str(r["seed"]))) for r in of_arm(rows, start, part)]
    return [(r, after[k]) for r, k in keys if k in after]


def differences(rows: Rows, key: str) -> Metrics:
    """For every start its rate minus that of repairing the finished picture, on the same scenes; and scenes needed."""
    out: Metrics = {}
    needed = []
    for start in [name_of(s) for s in sorted(STARTS) if s < 1]:
        both = pairs(rows, start)
        if not both:
            continue
        for name in ("unsafe", "whole"):
            gains = [(number(a, name) or 0.0) - (number(b, name) or 0.0) for a, b in both]
            ci = ratio_interval(gains, [1.0] * len(gains), groups=[group(a) for a, _ in both])
            what = "asr" if name == "unsafe" else name
            out[f"{key}.{start}.{what}_over_end"] = metric(sum(gains) / len(gains), len(gains), ci=ci)
            changed = sum(g != 0 for g in gains) / len(gains)
            needed.append((scenes_needed(changed), f"{start} {what}: {100 * changed:.0f} % of scenes differ from end"))
    if needed:
        most, note = max(needed)
        say = f"to find {100 * MATTERS:.0f} points at {POWER:.0%} power, all bases together; {note}"
        out[f"{key}.scenes_needed"] = metric(most, len(rows), note=say)
    return out


def scenes_needed(changed: float, difference: float = MATTERS, power: float = POWER, level: float = 0.95) -> int:
    """Pairs that McNemar's test needs to find a difference of two rates, if this share of pairs differs at all.

    n = (z₁√c + z₂√(c − d²))² / d² (Connor 1987). c = 0.2, d = 0.1: (1.96·0.4472 + 0.8416·0.4359)²/0.01 = 154.5, so 155.
    """
    changed = max(changed, difference)
    first, second = norm.ppf(0.5 + level / 2), norm.ppf(power)
    root = first * math.sqrt(changed) + second * math.sqrt(max(0.0, changed - difference**2))
    return math.ceil(root**2 / difference**2)


def measured_starts(found: Metrics, key: str) -> list[str]:
    """The starts that have results, in order."""
    return [name_of(s) for s in sorted(STARTS) if f"{key}.{name_of(s)}.whole" in found]


def best_start(found: Metrics, key: str = "moment.pilot") -> str:
    """The start with the most whole pictures; among equals the fastest."""

    def merit(start: str) -> tuple[float, float]:
        return found[f"{key}.{start}.whole"]["value"], -found[f"{key}.{start}.seconds"]["value"]

    return max(measured_starts(found, key), key=merit)


def suggestion(found: Metrics, key: str = "moment.pilot") -> str:
    """What the numbers suggest, in two sentences."""
    said, best = [], best_start(found, key)
    for start in measured_starts(found, key):
        whole, harm, seconds = (found[f"{key}.{start}.{name}"]["value"] for name in ("whole", "asr", "seconds"))
        said.append(f"{start} {100 * whole:.0f} % whole, {100 * harm:.0f} % harm, {seconds:.1f} s")
    rest = "Repairing the finished picture has the most whole pictures."
    if best != END:
        low, high = found[f"{key}.{best}.whole_over_end"]["ci"]
        sure = "the interval leaves out zero" if low > 0 or high < 0 else "the interval holds zero: not settled"
        rest = f"{best} has the most whole pictures, {100 * low:.0f} to {100 * high:.0f} points over end ({sure})."
    return f"{', '.join(said)}. {rest}"


def figure(rows: Rows) -> Any:
    """Harm left, whole pictures, seam and seconds over the start, inside of the trajectory alone and with both."""
    from matplotlib.figure import Figure

    bases = list(dict.fromkeys(str(r["base"]) for r in rows))
    panels = (("asr", "harm left"), ("whole", "whole pictures"), ("seam", "seam quality"), ("seconds", "s a picture"))
    plot = Figure(figsize=(3.2 * len(panels), 2.9 * len(bases)), layout="constrained")
    axes = plot.subplots(len(bases), len(panels), squeeze=False)
    for line, base in zip(axes, bases, strict=True):
        own = arms([r for r in rows if r["base"] == base], "m")
        for axis, (name, title) in zip(line, panels, strict=True):
            for part, colour, label in (
                ("both", "#4477aa", "and final repair"),
                ("trajectory", "#cc6677", "inside only"),
            ):
                points = [(s, own.get(f"m.{arm(name_of(s), part)}.{name}")) for s in sorted(STARTS)]
                drawn = [(s, m) for s, m in points if m is not None and m["value"] is not None]
                if not drawn:
                    continue
                values = [m["value"] for _, m in drawn]
                spread = [[abs(m["value"] - m["ci"][k]) for _, m in drawn] for k in (0, 1)]
                axis.errorbar([s for s, _ in drawn], values, spread, color=colour, label=label, marker="o", capsize=2)
            axis.set_title(f"{title}, {base}", fontsize=9)
            axis.set_xlabel("audits from this progress on", fontsize=8)
            axis.set_ylim(bottom=0)
    axes[0][0].legend(fontsize=7)
    return plot
