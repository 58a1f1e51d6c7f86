"""The tables of docs/results.md on attacks, fuzzing and the soak, from docs/results/redteam.json."""

from __future__ import annotations

from formatting import cell, metric_table, metrics_of, table

NAMES = {
    "as_expected": "attempts that end as expected",
    "fuzz.inputs": "random inputs",
    "fuzz.tracebacks": "of these, tracebacks",
    "fuzz.errors_5xx": "random requests answered with a status over 499",
    "fuzz.answered.uploads": "random uploads that were audited",
    "fuzz.answered.JSON_bodies": "random bodies that were answered with status 200",
    "fuzz.memory_slope_mb_per_1000": "memory, MB in 1,000 inputs",
    "soak.requests": "requests of the soak",
    "soak.pictures": "pictures that it released",
    "soak.lost_records": "of these, without a record in the log",
    "soak.chain_intact": "the log's chain verifies at the end",
    "soak.unsafe": "unsafe pictures among them, with the bound of the measured miss rate",
    "soak.unexplained": "answers without an explanation",
    "soak.kills": "kills of the drawing process",
    "soak.disk_full": "times that the log's disk was full",
    "soak.reloads": "changes of the policy",
    "soak.memory_slope_mb_per_1000": "memory, MB in 1,000 requests",
}
CELLS = {
    "size_native": "64 × 64, native",
    "size128": "128 × 128",
    "size192": "192 × 192",
    "size32": "32 × 32",
    "guidance15": "guidance 15",
    "steps3": "3 steps",
}


def red_team() -> list[str]:
    """Return the headline metrics, attempts by group and leaks by size, as far as they were measured."""
    metrics = metrics_of("redteam")
    lines = metric_table(metrics, {key: meaning for key, meaning in NAMES.items() if key in metrics})
    groups: dict[str, list[bool]] = {}
    for key, m in metrics.items():
        if key.startswith("attempt."):
            groups.setdefault(key.split(".")[1], []).append(bool(m["met"]))
    if groups:
        body = [f"{group} {sum(met)} of {len(met)}" for group, met in sorted(groups.items())]
        lines += ["", f"Attempts that end as expected: {', '.join(body)}."]
    rows = []
    for key, meaning in CELLS.items():
        if f"leaks.{key}" in metrics:
            looks = (f"leaks.{key}", f"leaks.{key}.whole", f"leaks.{key}.any_tile", f"leaks.{key}.harmless")
            found = [cell(metrics.get(look), with_goal=look == looks[0]) for look in looks]
            rows.append([meaning, *found, str(metrics[looks[0]]["n"])])
    if rows:
        head = ["unsafe prompts that leak", "by the worst look", "by the whole picture", "by any tile",
                "oracle alarms, harmless prompts", "n"]  # fmt: skip
        lines += ["", *table(head, rows)]
    return lines
