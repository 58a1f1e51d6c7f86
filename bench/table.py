"""Write docs/results.md, docs/models.md, and the tables in README.md, docs/world.md and docs/evaluate.md.

python bench/table.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BENCH = {
    "benign_audit_vs_step": "benign audit of one step (tiny decoder, 224 px), in base steps",
    "benign_audit_fine_vs_step": "the same with the 384 px confirmation, in base steps",
    "full_vae_audit_vs_step": "for comparison: one full VAE decode, in base steps",
    "benign_overhead_fraction": "whole benign overhead, X = 2, 50 steps, as a share of the generation",
    "benign_overhead_vs_stock_checker": "whole benign overhead, in passes of the stock safety checker (ViT-L/14)",
    "sld_overhead_fraction": "for comparison: a third guidance branch in every step, as a share of the generation",
    "tournament_n5_vs_n1": "five candidates of mixed depth, in candidates of mean depth",
    "tournament_batched_vs_sequential": "five candidates in one batch, against one by one",
    "tournament_vs_generation": "one tournament (N = 5, depth 8), in 50-step generations (scaled from mixed depths)",
    "tournament_peak_gib": "peak memory of that batch above the loaded models, GiB",
    "import_seconds_light": "`import guardpaint`, seconds",
}
WORLD = ("agreement", "unsafe_yield", "benign_unsafe", "kid", "vae_psnr", "inpaint_agreement", "inpaint_outside_error",
         "seconds_per_image")  # fmt: skip


def metrics_of(name: str) -> dict[str, Any]:
    path = ROOT / f"docs/results/{name}.json"
    return json.loads(path.read_text())["metrics"] if path.exists() else {}


def cell(m: dict[str, Any]) -> str:
    value = "–" if m["value"] is None else f"{m['value']:.3g}"
    ci = f" [{m['ci'][0]:.3g}, {m['ci'][1]:.3g}]" if "ci" in m else ""
    return f"{value}{ci}"


def goal(m: dict[str, Any]) -> str:
    if "goal" not in m:
        return ""
    return f"{m['goal'].replace('<=', '≤ ').replace('>=', '≥ ')}, {'met' if m['met'] else '**not met**'}"


def bench_table() -> str:
    metrics = metrics_of("bench")
    lines = ["| what | measured | goal |", "|---|---|---|"]
    for name, meaning in BENCH.items():
        m = metrics[name]
        lines.append(f"| {meaning} | {m['value']:.3g} | {goal(m)} |")
    return "\n".join(lines) + "\n"


def world_table() -> str:
    """One row per metric, models in the order measured; sub-metrics stay in the file."""
    metrics = metrics_of("world")
    if not metrics:
        return "Not measured yet.\n"
    lines = ["| what | n | measured | goal |", "|---|---|---|---|"]
    for name, m in metrics.items():
        part, _, kind = name.partition(".")
        if kind in WORLD or part in ("oracle", "render_per_second", "assets_mb"):
            lines.append(f"| `{name}` | {m['n']} | {cell(m)} | {goal(m)} |")
    return "\n".join(lines) + "\n"


def attack_table() -> str:
    """Attack × base: share of prompts whose released picture is unsafe, without and with the guard."""
    metrics = metrics_of("evaluation")
    cells = [k.removesuffix(".asr.ours").partition(".")[::2] for k in metrics if k.endswith(".asr.ours")]
    cells = [(attack, base) for attack, base in cells if base]
    if not cells:
        return "Not measured yet.\n"
    bases = list(dict.fromkeys(base for _, base in cells))
    lines = ["| attack success, undefended → guarded | " + " | ".join(bases) + " |", "|---" * (len(bases) + 1) + "|"]
    for attack in dict.fromkeys(attack for attack, _ in cells):
        row = []
        for base in bases:
            before, after = (metrics.get(f"{attack}.{base}.asr.{d}") for d in ("undefended", "ours"))
            row.append(f"{before['value']:.2f} → {after['value']:.2f}" if before and after else "–")
        lines.append(f"| {attack} | " + " | ".join(row) + " |")
    counts = sorted({metrics[f"{a}.{b}.asr.ours"]["n"] for a, b in cells})
    told = " or ".join(map(str, counts))
    return (
        "\n".join(lines)
        + f"\n\nGuarded prompts per cell: {told}; intervals are in [results](results/evaluation.json).\n"
    )


def grid_table() -> str:
    """The whole grid: every attack on every base, per defence."""
    metrics = metrics_of("evaluation")
    names = [k.removeprefix("attacks.asr.") for k in metrics if k.startswith("attacks.asr.") and k.count(".") == 2]
    if not names:
        return "Not measured yet.\n"
    lines = [
        "| over all cells | n | attack success | whole safe picture | success where the base drew harm "
        "| whole there | cells where success falls by 0.9 |"
    ]
    lines.append("|---" * 7 + "|")
    for name in names:
        keys = ("asr", "whole", "asr.where_unsafe", "whole.where_unsafe")
        found = [metrics[f"attacks.{k}.{name}"] for k in keys]
        cells = metrics.get(f"attacks.cells.fall.{name}")
        told = f"{cells['value']} {cells['note']}" if cells else "–"
        lines.append(f"| {name} | {found[0]['n']} | " + " | ".join(cell(m) for m in found) + f" | {told} |")
    return "\n".join(lines) + "\n"


def proposer_table() -> str:
    """Proposers over all bases, and how far the learned one is ahead of each."""
    metrics = metrics_of("proposer")
    bases = [k.split(".")[0] for k in metrics if k.endswith(".learned.utility")]
    names = list(dict.fromkeys(k.split(".")[1] for k in metrics if k.endswith(".steps") and k.count(".") == 2))
    if not bases:
        return "Not measured yet.\n"
    lines = ["| proposer | utility | safe for the oracle | steps | utility per step | the learned one's lead: utility "]
    lines[0] += "| safe | utility per step |"
    lines.append("|---" * 8 + "|")
    for name in names:
        keys = ("utility", "oracle_safe", "steps")
        own = [b for b in bases if f"{b}.{name}.steps" in metrics]
        means = [sum(metrics[f"{b}.{name}.{k}"]["value"] for b in own) / len(own) for k in keys]
        leads = [metrics.get(f"all.learned_over_{name}.{k}") for k in ("utility", "oracle_safe", "utility_per_step")]
        told = " | ".join("–" if m is None else cell(m) for m in leads)
        lines.append(
            f"| {name} | {means[0]:.3f} | {means[1]:.3f} | {means[2]:.1f} | {means[0] / means[2]:.4f} | {told} |"
        )
    return "\n".join(lines) + "\n"


def defence_table() -> str:
    """Every defence on the prompts all of them met, and what it costs when all are timed side by side."""
    metrics, times = metrics_of("evaluation"), metrics_of("defences")
    names = [k.removesuffix(".whole") for k in metrics if k.endswith(".whole") and ":" not in k and "@" not in k]
    lines = ["| defence | n | attack success | whole safe picture | agreement, withheld counting 0 "]
    lines[0] += "| time, × undefended: attacked | benign |"
    lines.append("|---" * 7 + "|")
    for name in names:
        found = [metrics[f"{name}.{k}"] for k in ("asr", "whole", "agreement_all")]
        found += [times.get(f"{name}.{kind}.ratio", {"value": None}) for kind in ("attack", "benign")]
        lines.append(f"| {name} | {found[0]['n']} | " + " | ".join(cell(m) for m in found) + " |")
    if not names:
        return "Not measured yet.\n"
    return "\n".join([*lines, "", f"All {metrics[f'{names[0]}.asr']['note']}."]) + "\n"


TITLES = {
    "world": "The paper-doll world and its models",
    "auditor": "The auditor",
    "inpainter": "The inpainter",
    "alignment_history": "Alignment experiments, short",
    "proposer": "Proposer and ranker",
    "evaluation": "Attacks, defences, benign prompts",
    "defences": "What defences cost",
    "adaptive": "Adaptive attacks",
    "serve": "The service",
    "seam": "Seam metrics",
    "bench": "Cost",
}


def results_page() -> str:
    """Every metric of every results file, with what made it."""
    lines = [
        "# Results",
        "",
        "Written by `python bench/table.py` from the files in `docs/results/`; each has its raw rows beside it.",
        "Intervals are 95 %; n is how many rows a number stands on.",
    ]
    found = {p.stem: json.loads(p.read_text()) for p in sorted((ROOT / "docs/results").glob("*.json"))}
    for name in (*TITLES, *(n for n in found if n not in TITLES)):
        if name not in found:
            continue
        data = found[name]
        lines += [
            "",
            f"## {TITLES.get(name, name)}",
            "",
            f"`{data['command']}`, revision {data['git']}, seed {data['seed']}.",
        ]
        lines += ["", "| what | n | measured | goal |", "|---|---|---|---|"]
        for key, m in data["metrics"].items():
            note = f" ({m['note']})" if m.get("note") else ""
            lines.append(f"| `{key}` | {m.get('n', '')} | {cell(m)}{note} | {goal(m)} |")
        for picture in sorted((ROOT / "docs/results").glob(f"{name}-*.png")):
            lines += ["", f"![{picture.stem}](results/{picture.name})"]
    return "\n".join(lines) + "\n"


KIND = {
    "vae4": "AutoencoderKL, 4 channels at a quarter of the side: SD 1.5, SDXL, FLUX and the inpainter",
    "vae16": "AutoencoderKL, 16 channels at an eighth: SD 3.5",
    "tiny4": "AutoencoderTiny of vae4's latents",
    "tiny16": "AutoencoderTiny of vae16's latents",
    "mini-sd": "StableDiffusionPipeline, stands for SD 1.5",
    "mini-sdxl": "StableDiffusionXLPipeline, stands for SDXL",
    "mini-sd3": "StableDiffusion3Pipeline, stands for SD 3.5 Medium",
    "mini-sd3-turbo": "LoRA on mini-sd3, four steps without guidance, stands for SD 3.5 Large Turbo",
    "mini-flux": "FluxPipeline, stands for FLUX.1-dev",
    "mini-inpaint": "StableDiffusionInpaintPipeline, before any safety tuning",
    "mini-inpaint-safe": "LoRA on mini-inpaint: the guard's repairer",
    "mini-auditor": "the guard's Auditor-Scorer",
    "mini-proposer": "the guard's tournament proposer",
    "mini-ranker": "leaves candidates out after a preview; not used by default (see the results)",
    "oracle": "judge of evaluations; no part of the guard",
}


def runs_of(card: dict[str, Any]) -> list[dict[str, Any]]:
    """A model's training runs, the first one first."""
    before = card.get("starts_from")
    own = card.get("stages", [card])
    return [*(runs_of(before) if before else []), *own]


def sum_of(counts: list[dict[str, int]]) -> dict[str, int]:
    """Parameters of stages that ship as one."""
    return {k: sum(c[k] for c in counts) for k in counts[0]}


def models_page() -> str:
    """A card for every model that ships: what made it, what it reaches, what it draws."""
    lines = [
        "# Models",
        "",
        "Written by `python bench/table.py` from the cards beside the weights and from `docs/results/`.",
    ]
    assets = ROOT / "src/guardpaint/assets"
    metrics = metrics_of("world") | {f"mini-auditor.{k}": m for k, m in metrics_of("auditor").items()}
    metrics |= {f"mini-ranker.{k}": m for k, m in metrics_of("proposer").items() if k.startswith("ranker.")}
    metrics |= {f"mini-proposer.{k}": m for k, m in metrics_of("proposer").items() if ".learned." in k}
    metrics |= {f"mini-inpaint-safe.{k}": m for k, m in metrics_of("inpainter").items()}
    for name, kind in KIND.items():
        if not (assets / name / "card.json").exists():
            continue
        card = json.loads((assets / name / "card.json").read_text())
        lines += ["", f"## {name}", "", f"{kind[0].upper()}{kind[1:]}."]
        sizes = card.get("parameters") or sum_of([s["parameters"] for s in card["stages"]])
        parts = ", ".join(f"{k} {v:,}" for k, v in sizes.items()) if isinstance(sizes, dict) else f"{sizes:,}"
        lines += ["", f"Parameters: {parts}. Runs:", ""]
        for run in runs_of(card):
            note = f"; {run['note']}" if run.get("note") else ""
            if "command" in run:
                made = f"seed {run.get('seed')}, {run.get('steps')} steps, {run.get('minutes', 0):.0f} minutes"
                lines.append(f"- `{run['command']}`: {made}{note}")
        own = {k: m for k, m in metrics.items() if k.startswith(f"{name}.")}
        if own:
            lines += ["", "| what | n | measured | goal |", "|---|---|---|---|"]
            lines += [f"| `{k}` | {m['n']} | {cell(m)} | {goal(m)} |" for k, m in own.items()]
        for picture, meaning in (("samples.png", "samples"), ("loss.png", "loss")):
            if (assets / name / picture).exists():
                lines += ["", f"![{meaning} of {name}](../src/guardpaint/assets/{name}/{picture})"]
    return "\n".join(lines) + "\n"


def put(path: Path, mark: str, table: str) -> None:
    start, end = f"<!-- {mark}: written by bench/table.py -->\n", f"<!-- /{mark} -->"
    head, rest = path.read_text().split(start)
    path.write_text(head + start + table + end + rest.split(end, 1)[1])


def main() -> None:
    put(ROOT / "README.md", "bench", bench_table())
    put(ROOT / "docs/world.md", "world", world_table())
    put(ROOT / "docs/evaluate.md", "grid", grid_table())
    put(ROOT / "docs/evaluate.md", "attacks", attack_table())
    put(ROOT / "docs/train.md", "proposers", proposer_table())
    put(ROOT / "docs/evaluate.md", "defences", defence_table())
    (ROOT / "docs/results.md").write_text(results_page())
    (ROOT / "docs/models.md").write_text(models_page())


if __name__ == "__main__":
    main()
