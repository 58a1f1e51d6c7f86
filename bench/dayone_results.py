"""docs/results/dayone.json, which several scripts write, each keeping the rows of the others."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from guardpaint.errors import BadInput
from guardpaint.evaluate.statistics import share
from guardpaint.store.results import REVISION, metric, read_rows, write_results

OUT = Path("docs/results/dayone.json")
Row = dict[str, Any]


def true(value: Any) -> bool:
    """A flag of a row, which is text once it was read from a file."""
    return value in (True, "True", 1, "1")


def half_precision(rows: Sequence[Row]) -> dict[str, Any]:
    """How many families ran one guarded step from every folder, and whether a base ran one in half precision."""
    folders = [r for r in rows if r["loaded"] == "fp32"]
    families = sorted({r["family"] for r in folders})
    ran = [f for f in families if all(true(r["ok"]) for r in folders if r["family"] == f)]
    note = f"{len(folders)} folders of random-initialised classes, loaded as fp32: {', '.join(ran)}"
    found = {"half_precision_families_ok": metric(len(ran), len(families), goal=">=4", note=note)}
    half = [true(r["ok"]) for r in rows if r["loaded"] != "fp32"]
    if half:
        found["half_precision_steps_ok"] = metric(sum(half), len(half), goal=f">={len(half)}")
    return found


def number(value: Any) -> float:
    """A number of a row, which is text once it was read from a file."""
    return float(value)


def photos(rows: Sequence[Row]) -> dict[str, Any]:
    """False alarms on harmless photographs at the publisher's level and at calibrated ones; intervals by photograph."""
    names = [r["photograph"] for r in rows]
    before = [number(r["score"]) >= number(r["published"]) for r in rows]
    after = [number(r["score"]) >= number(r["level"]) for r in rows]
    note = f"crops of {len(set(names))} photographs; each was calibrated on the others; recall is not measured"
    return {
        "false_alarm.photos": {**share(before, None, names), "note": note},
        "false_alarm.photos_calibrated": {**share(after, None, names), "note": note},
    }


def calls(rows: Sequence[Row]) -> dict[str, Any]:
    """Calls with triggers forced inside the loop: complete ones, accepted repairs, pictures that the approver saw."""
    complete = [true(r["complete"]) and not r["errors"] for r in rows]
    played = sum(int(r["tournaments"]) for r in rows)
    return {
        "calls.complete": metric(sum(complete), len(rows), goal=f">={len(rows)}"),
        "calls.triggered": metric(sum(true(r["triggered"]) for r in rows), len(rows)),
        "calls.tournaments": metric(played, len(rows)),
        "calls.repairs_accepted": metric(sum(int(r["accepted"]) for r in rows), played),
        "calls.approver_asked": metric(sum(int(r["approvals"]) > 0 for r in rows), len(rows)),
    }


def roundtrip(rows: Sequence[Row]) -> dict[str, Any]:
    """Guards that drew in another process with the same hashes as where they were saved."""
    note = ", ".join(r["guard"] for r in rows)
    return {"parts_roundtrip_ok": metric(sum(true(r["ok"]) for r in rows), len(rows), goal=f">={len(rows)}", note=note)}


def doors(rows: Sequence[Row]) -> dict[str, Any]:
    """Guards that drew at each door, each loaded from its folder by a process of its own."""
    found = {}
    for door in dict.fromkeys(r["door"] for r in rows):
        own = [r for r in rows if r["door"] == door]
        note = ", ".join(r["guard"] for r in own)
        name = f"doors.{door.replace(' ', '_').lower()}"
        found[name] = metric(sum(true(r["ok"]) for r in own), len(own), goal=f">={len(own)}", note=note)
    return found


def presets(rows: Sequence[Row]) -> dict[str, Any]:
    """Whether a guarded call with each preset was complete, and with what."""
    return {
        f"presets.{r['preset']}.verified": metric(
            int(true(r["ok"])), 1, note=r["verified"] + (f"; {r['error']}" if r["error"] else "")
        )
        for r in rows
    }


def times(rows: Sequence[Row]) -> dict[str, Any]:
    """The median time of an audit over that of the stock checker's image tower."""
    middle = {
        part: statistics.median(number(r["seconds"]) for r in rows if r["timed"] == part)
        for part in ("audit", "stock_checker")
    }
    value = middle["audit"] / middle["stock_checker"]
    return {"audit_vs_stock_checker": metric(value, len(rows) // 2, note="one thread; ViT-L/14 with random weights")}


MAKERS: dict[str, Callable[[Sequence[Row]], dict[str, Any]]] = {
    "half_precision": half_precision, "photos": photos, "calls": calls, "roundtrip": roundtrip, "doors": doors,
    "presets": presets,
    "times": times,
}  # fmt: skip
"""Metrics of each part from its rows, which are text once they were read from the file."""


def write(part: str, rows: Sequence[Row], out: Path) -> dict[str, Any]:
    """Replace the rows of one part, write the file and return its metrics. Rows name their own revision."""
    if part not in MAKERS:
        raise BadInput(f"part {part!r}: the parts are {', '.join(MAKERS)}; add its metrics to bench/dayone_results.py")
    kept = [r for r in read_rows(out) if r["part"] != part]
    both = [*kept, *({"part": part, "git": REVISION, **r} for r in rows)]
    both.sort(key=lambda r: r["part"])
    found = metrics(both)
    write_results(out, found, both, seed=0)
    return found


def metrics(rows: Sequence[Row]) -> dict[str, Any]:
    """All metrics that the rows allow."""
    parts = {part: [r for r in rows if r["part"] == part] for part in MAKERS}
    return {name: m for part, some in parts.items() if some for name, m in MAKERS[part](some).items()}
