"""The tables of docs/results.md and docs/performance.md, from the files in docs/results."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks_page import benchmarks, recipe
from formatting import ROOT, cell, grid, metric_table, metrics_of, number, path_of, results_of, table
from redteam_page import red_team
from repairs_page import repairs

BASES = {name: name for name in ("mini-sd", "mini-sdxl", "mini-sd3", "mini-sd3-turbo", "mini-flux")}
SUITES = ("sneakyprompt", "mma", "pgj", "daca", "ring_a_bell")
KINDS = ("swimwear", "statue", "sport", "red_garment", "red_flowers", "sauce", "sword_on_wall", "crowd")
DEFENCES = (
    "undefended", "ours", "ours_ladder_off", "paper", "negative_prompt", "prompt_filter", "embedding_projection", "sld",
    "post_hoc_block", "post_hoc_blur", "post_hoc_inpaint", "post_hoc_regenerate",
)  # fmt: skip
COST = {
    "benign_audit_vs_step": "benign audit of one step (tiny decoder, 224 px), in base steps",
    "glance_vs_step": "a glance (128 px), in base steps",
    "whole_tiny_vs_step": "for comparison: one whole decode by the tiny decoder, in base steps",
    "benign_audit_fine_vs_step": "the same with the 384 px confirmation, in base steps",
    "full_vae_audit_vs_step": "for comparison: one full VAE decode, in base steps",
    "benign_overhead_fraction": "whole benign overhead, X = 2, 50 steps, as a share of the generation",
    "benign_overhead_vs_stock_checker": "whole benign overhead, in passes of the stock safety checker (ViT-L/14)",
    "sld_overhead_fraction": "for comparison: a third guidance branch in every step, as a share of the generation",
    "tournament_paper_vs_generation": "the paper's tournament (N = 5, depth 8, guided), in 50-step generations",
    "tournament_all_five_vs_generation": "five candidates of the four-step inpainter",
    "tournament_first_wave_vs_generation": "its first wave (one candidate)",
    "tournament_vs_generation": "its tournaments by the waves and depths that were seen",
    "tournament_flops_vs_generation.sd15": "the same by counted operations, against SD 1.5",
    "tournament_flops_vs_generation.sdxl": "against SDXL at 1024 px",
    "tournament_flops_vs_generation.flux": "against FLUX.1-dev at 1024 px, 28 steps",
    "tournament_parts_explain": "a tournament's measured parts, as a share of the measured whole",
    "tournament_peak_gib": "peak memory of five candidates above the loaded models, GiB",
    "cost_model_explained": "the terms of Cost_t, as a share of the measured extra time (embedded size)",
    "import_seconds_light": "`import guardpaint`, seconds",
}


def attacks() -> list[str]:
    metrics = metrics_of("evaluation")
    names = {
        "undefended": "undefended",
        "ours": "the guard",
        "ours_ladder_off": "the guard without the last-resort ladder",
        "paper": "the guard with the published settings",
    }
    columns = {
        "attacks.asr.*": "attack success",
        "attacks.asr.nudity.*": "nudity",
        "attacks.asr.violence.*": "violence",
        "attacks.asr.where_unsafe.*": "success where the base drew harm",
        "attacks.whole.*": "whole safe picture",
        "attacks.whole.where_unsafe.*": "whole where the base drew harm",
    }
    lines = grid(metrics, names, columns)
    counts = [metrics[f"attacks.{key}.ours"]["n"] for key in ("asr", "asr.nudity", "asr.violence", "asr.where_unsafe")]
    cells = {
        "fall": "attack success falls by nine tenths",
        "released": "nine tenths of prompts get a whole picture",
        "agreement": "agreement on harmless attributes is at least 0.8",
    }
    lines += ["", "n = {} (nudity {}, violence {}, where the base drew harm {}).".format(*counts), ""]
    goals = []
    for key, meaning in cells.items():
        found = [metrics[f"attacks.cells.{key}.{name}"] for name in ("ours", "ours_ladder_off")]
        goals.append([meaning, *(f"{m['value']} {m['note']}" for m in found)])
    return [*lines, *table(["goal reached in", "the guard", "without the ladder"], goals)]


def attack_cells() -> list[str]:
    metrics = metrics_of("evaluation")

    def shown(attack: str, base: str) -> str:
        before, after = (metrics.get(f"{attack}.{base}.asr.{d}") for d in ("undefended", "ours"))
        return f"{before['value']:.2f} → {after['value']:.2f}" if before and after else "–"

    rows = [[attack, *(shown(attack, base) for base in BASES), shown(f"{attack}@mini-flux", "mini-flux")]
            for attack in SUITES]  # fmt: skip
    count, searched = (metrics[key]["n"] for key in ("mma.mini-sd.asr.ours", "mma@mini-flux.mini-flux.asr.ours"))
    return [
        *table(["attack success, undefended → guarded", *BASES, "searched on mini-flux itself"], rows),
        "",
        f"{count} prompts per cell, {searched} in the last column.",
    ]


def benign() -> list[str]:
    metrics = metrics_of("evaluation")
    names = {"benign.false_trigger": "false triggers, ordinary prompts"}
    names |= {f"benign.false_trigger.{kind}": f"false triggers, {kind.replace('_', ' ')}" for kind in KINDS}
    effects = {
        "benign.identical": "pictures without a trigger that equal the base's own, bit for bit",
        "benign.changed": "pictures that the guard changed, of all benign prompts",
        "benign.blocked": "pictures that were withheld",
        "benign.agreement_delta": "change of agreement with the prompt",
        "benign.kid_delta": "change of KID to renders of the same scenes",
        "benign.time_ratio": "time, as a multiple of the base's own",
    }
    return [*metric_table(metrics, names), "", *metric_table(metrics, effects)]


def defences() -> list[str]:
    metrics = metrics_of("evaluation")
    metrics |= {f"time.{key}": m for key, m in metrics_of("defences").items()}
    columns = {
        "*.asr": "attack success",
        "*.whole": "whole safe picture",
        "*.agreement_all": "agreement, a withheld picture counts 0",
        "time.*.attack.ratio": "time on attacked prompts, × undefended",
        "time.*.benign.ratio": "on benign prompts",
    }
    n, times = metrics["ours.asr"]["n"], metrics["time.ours.attack.ratio"]["n"]
    note = f"n = {n} ({metrics['ours.asr']['note']}), times n = {times}."
    return [*grid(metrics, {name: name for name in DEFENCES}, columns), "", note]


def adaptive() -> list[str]:
    names = {
        f"adaptive.caught.{kind}.eps{size}": f"unsafe renders caught by the {kind} auditor, view changed by {size}/255"
        for size in (2, 4, 8)
        for kind in ("plain", "careful")
    }
    names["adaptive.asr.before"] = "targets for which a search with the auditor's scores gets an unsafe picture"
    names["adaptive.asr.after"] = "the same against the careful auditor"
    return metric_table(metrics_of("adaptive"), names)


def auditor() -> list[str]:
    metrics = metrics_of("auditor")
    worst = max(KINDS, key=lambda kind: float(metrics[f"false_trigger.{kind}"]["value"]))
    columns = {
        "unfinished.macro_f1.*": "macro F1, unfinished pictures",
        "drawn.macro_f1.*": "macro F1, pictures as the base draws them",
        "drawn.caught.*": "unsafe ones caught",
        "drawn.false_trigger.*": "false triggers",
    }
    names = {
        "clean.accuracy": "accuracy on clean renders",
        "clean.macro_f1": "macro F1 on clean renders",
        "localisation.coverage": "share of unsafe pixels covered by the mask",
        "localisation.iou": "intersection over union of the mask",
        "faithfulness.auc": "AUC of the faithfulness score",
        "strength.spearman": "rank correlation of 1 − B with the strength of the harm",
        "seam.spearman": "rank correlation of P with the quality of pictures with artefacts",
        "false_trigger.ordinary": "false triggers on ordinary renders",
        f"false_trigger.{worst}": f"false triggers on the worst kind of hard negatives ({worst.replace('_', ' ')})",
        "conformal.miss.nudity": "misses at the calibrated threshold, nudity",
        "conformal.miss.violence": "misses at the calibrated threshold, violence",
        "conformal.uncovered": "unsafe pixels outside of the calibrated mask",
    }
    return [*metric_table(metrics, names), "", *grid(metrics, BASES, columns)]


def scope() -> list[str]:
    metrics = metrics_of("scope")
    sizes = {name.split(".")[1]: f"{name.split('.')[1]} px" for name in metrics if "." in name}
    columns = {
        "missed_whole.*": "missed, whole picture only",
        "missed.*": "missed, with tiles",
        "false_alarms_whole.*": "false alarms, whole picture only",
        "false_alarms.*": "false alarms, with tiles",
    }
    offset = number(metrics["tile_offset"]["value"])
    return [*grid(metrics, sizes, columns), "", f"Tiles are lowered by {offset} logits."]


def inpainter() -> list[str]:
    metrics = metrics_of("inpainter")
    names = {
        "base": "mini-inpaint",
        "sft": "SFT",
        "bco": "SFT + BCO, ships",
        "kto": "SFT + KTO",
        "bco_without_sft": "BCO without SFT",
    }
    columns = {
        "*.safe_region": "region is safe",
        "*.safe_region.euphemism": "with a euphemism",
        "*.safe_region.empty_prompt": "with an empty prompt",
        "*.context_kept": "context kept",
        "*.seam_gap": "seam gap",
        "*.detail_ratio": "detail, as a share of real garments'",
        "*.benign_agreement_delta": "change of agreement on benign prompts",
    }
    counts = [metrics[f"bco.{k}"]["n"] for k in ("safe_region", "safe_region.empty_prompt", "benign_agreement")]
    note = "n = {} (euphemisms and empty prompts {}, benign prompts {}).".format(*counts)
    memory = {
        f"fullsize.peak_memory_gb.{k}": f"peak memory of one {k.upper()} step at SD 1.5 size, GB"
        for k in ("sft", "kto", "bco")
    }
    return [*grid(metrics, names, columns), "", note, "", *metric_table(metrics, memory)]


def proposers() -> list[str]:
    metrics = metrics_of("proposer")
    rows = []
    leads = {"utility": "utility", "oracle_safe": "safety for the oracle", "utility_per_step": "utility per step"}
    for name in ("learned", "uniform", "first", "fixed", "optimised"):
        utility, safe, steps = (
            sum(metrics[f"{base}.{name}.{key}"]["value"] for base in BASES) / len(BASES)
            for key in ("utility", "oracle_safe", "steps")
        )
        found = [cell(metrics.get(f"all.learned_over_{name}.{key}")) for key in leads]
        rows.append([name, f"{utility:.3f}", f"{safe:.3f}", f"{steps:.1f}", f"{utility / steps:.4f}", *found])
    head = ["", "utility", "safe for the oracle", "steps", "utility per step"]
    head += [f"lead of the learned one in {meaning} (goal > 0)" for meaning in leads.values()]
    ranker = {
        "ranker.regret.keep3": "utility lost when the ranker keeps three of five candidates",
        "ranker.saved.keep3": "repair steps saved by it",
    }
    count = metrics["all.learned_over_uniform.utility"]["n"]
    return [
        *table(head, rows),
        "",
        f"n = {count} states. Leads are paired, and their goal is judged by the whole interval.",
        "",
        *metric_table(metrics, ranker),
    ]


def world() -> list[str]:
    metrics = metrics_of("world")
    columns = {
        "*.agreement": "agreement",
        "*.unsafe_yield": "unsafe yield",
        "*.benign_unsafe": "benign drawn unsafe",
        "oracle.generated_agreement.*": "oracle agrees with the eye",
        "*.kid": "KID",
        "*.seconds_per_image": "seconds per picture",
    }
    names = {
        "vae4.vae_psnr": "PSNR of `vae4`, dB",
        "vae16.vae_psnr": "PSNR of `vae16`, dB",
        "oracle.accuracy": "oracle: accuracy on renders",
        "oracle.iou": "oracle: intersection over union of unsafe pixels",
        "oracle.attributes": "oracle: attributes found",
        "oracle.generated_agreement": "oracle: agreement with labels by eye, pictures of all bases",
        "oracle.generated_recall": "oracle: recall on those",
        "oracle.generated_false_alarm": "oracle: false alarms on those",
        "mini-inpaint.inpaint_agreement": "`mini-inpaint`: agreement with the prompt",
        "mini-inpaint.inpaint_outside_error": "`mini-inpaint`: error outside of the mask",
        "render_per_second": "scenes rendered per second",
        "assets_mb.world": "weights of the world's models, MB",
    }
    n, eye = metrics["mini-sd.agreement"]["n"], metrics["oracle.generated_agreement.mini-sd"]["n"]
    note = f"n = {n}, labels by eye {eye}, times {metrics['mini-sd.seconds_per_image']['n']}."
    return [*grid(metrics, BASES, columns), "", note, "", *metric_table(metrics, names)]


WAVES = {
    "limit": "S from which on a first candidate ends a tournament of `dolls-fast`",
    "ends_after_first": "tournaments that then end after it",
    "harm_added": "change of unsafe winners, on these tournaments",
    "unsafe_winners": "unsafe winners of whole tournaments, in views of unfinished pictures",
}
SERVICE = {
    "unsafe_released": "unsafe pictures released under load",
    "unsafe_released.off": "the same without the guard",
    "sidedoor_unsafe": "unsafe ones among blurred and partial pictures that an ordinary key can get",
    "unexplained_errors": "unexplained errors",
    "faults_as_expected": "injected faults that end as expected",
    "ray_kill_lost": "requests lost when a Ray replica is killed",
    "ray_kill_unsafe": "unsafe pictures released meanwhile",
    "p50_ratio": "median latency, as a multiple of the unguarded service",
    "p95_ratio": "95th percentile of latency, the same",
    "benign_p95_ratio": "the same for harmless requests alone, among attacked ones",
    "throughput_ratio": "throughput, as a share of the unguarded service",
}


def service() -> list[str]:
    metrics = metrics_of("serve")
    return metric_table(metrics, {key: meaning for key, meaning in SERVICE.items() if key in metrics})


def seam() -> list[str]:
    """Rank correlations with LPIPS-VGG, on composites of photographs and of dolls."""
    rows = {
        "lpips_alex": "LPIPS-Alex",
        "backbone": "features of the embedded auditor",
        "backbone_random": "features of a random-initialised auditor",
        "pixels": "plain colour distance",
    }
    columns = {"seam.rank_correlation.*": "photographs", "seam.rank_correlation.*.dolls": "paper dolls"}
    return grid(metrics_of("seam"), rows, columns)


def gtp() -> list[str]:
    """Where the paper's table of the tournament policy is, and what its bases say of the proposer at N = 5."""
    metrics = metrics_of("gtp")
    rows = {key.split(".")[0]: key.split(".")[0] for key in metrics}
    columns = {
        "*.gtp.c5.acceptance": "accepted, proposer",
        "*.no_gtp.c5.acceptance": "accepted, random knobs",
        "*.gain.c5.seconds_ratio": "time, as a multiple",
    }
    return grid(metrics, rows, columns)


def day_one() -> list[str]:
    metrics = metrics_of("dayone")
    names = {
        "false_alarm.photos": "open_nsfw: false alarms on photographs and their crops",
        "false_alarm.photos_calibrated": "the same with levels calibrated on the other photographs",
        "audit_vs_stock_checker": "one audit by open_nsfw, in passes of the stock safety checker",
        "calls.complete": "guarded calls with forced triggers whose report is complete",
        "calls.repairs_accepted": "repairs accepted in them, of all tournaments",
        "calls.approver_asked": "pictures that the approver saw; the others stayed flagged",
        "parts_roundtrip_ok": "kinds of guard that draw the same after saving and loading elsewhere",
        "doors.command_line": "of these, drawing by `guardpaint generate`",
        "doors.openai_client": "of these, served and asked by openai's client",
        "doors.ray": "on Ray",
        "half_precision_families_ok": "families opened from fp32, fp16 and bf16 folders",
        "half_precision_steps_ok": "families with a guarded step in bf16",
    }
    lines = metric_table(metrics, {key: meaning for key, meaning in names.items() if key in metrics})
    rows = [
        [key.split(".")[1], "yes" if m["value"] else "no", m["note"]]
        for key, m in metrics.items()
        if key.startswith("presets.")
    ]
    return [*lines, "", *table(["preset", "a guarded call ran here", "with"], rows)]


def cost() -> list[str]:
    metrics = metrics_of("bench")
    return metric_table(metrics, {key: meaning for key, meaning in COST.items() if key in metrics})


def views() -> list[str]:
    """Quality of views by real tiny decoders on photographs; nothing before it was measured."""
    if not (ROOT / "docs/results/views.json").exists():
        return []
    metrics = metrics_of("views")
    rows = {
        f"{family}.{side}": f"{family}, {side} px" for family in ("sd", "sdxl", "sd3", "flux") for side in (512, 1024)
    }
    columns = {
        "*.view_db": "view, 224 px",
        "*.glance_db": "glance, 128 px",
        "*.synthetic_db": "view, fitted without photographs",
        "*.synthetic_glance_db": "glance, fitted without photographs",
        "*.shrunken_db": "shrunken latents",
        "*.full_db": "whole decode against the photograph",
    }
    times = {
        "view_vs_step": "a view of a 512 px picture and its audit, in base steps",
        "glance_vs_step": "a glance, in base steps",
        "whole_tiny_vs_step": "for comparison: one whole decode by the tiny decoder, in base steps",
    }
    return ["", *grid(metrics, rows, columns), "", *metric_table(metrics, times), "", f"- {source('views')}"]


SECTIONS: list[tuple[str, tuple[str, ...], Callable[[], list[str]], str]] = [
    ("Attacks", ("evaluation",), attacks, "Five attacks on five bases, explained in [evaluate.md](evaluate.md)."),
    ("Attacks by base", ("evaluation",), attack_cells, ""),
    ("Benign prompts", ("evaluation",), benign, "Half ordinary prompts, half hard negatives of eight kinds."),
    ("Defences", ("evaluation", "defences"), defences, "On the prompts that every defence met."),
    ("Adaptive attacks", ("adaptive",), adaptive, ""),
    ("Auditor", ("auditor",), auditor, ""),
    ("Large pictures", ("scope",), scope, "Known pictures enlarged, and single ones in mosaics of harmless ones."),
    ("Inpainter", ("inpainter",), inpainter, "Unsafe scenes repaired under the unsafe prompt."),
    ("Proposer and ranker", ("proposer",), proposers, "What the proposers are is in [train.md](train.md#proposers)."),
    ("World", ("world",), world, "What the columns mean is in [world.md](world.md#measured)."),
    ("Service", ("serve",), service, "Mixed requests under load; see [serve.md](serve.md)."),
    ("Under attack", ("redteam",), red_team, "Attempts, fuzzing and a soak; see [serve.md](serve.md#under-attack)."),
    ("Guards without training", ("dayone",), day_one, "Public parts on harmless pictures; see [parts.md](parts.md)."),
    ("Benchmarks", ("benchmarks",), benchmarks, "Published prompt sets; see [evaluate.md](evaluate.md#prompt-files)."),
    ("Seam metrics", ("seam",), seam, "Rank correlation with LPIPS-VGG over composites; see [method.md](method.md)."),
    ("Tournament policy", ("gtp",), gtp, "Five candidates; the paper's whole table is in [gtp.md](results/gtp.md)."),
    ("The paper's parts", ("recipe",), recipe, ""),
]  # fmt: skip
"""Title, results files, table, a line of introduction."""


def source(component: str) -> str:
    """A line that says where the numbers of a section come from."""
    data = results_of(component)
    pictures = sorted((ROOT / "docs/results").glob(f"{component}-*.png"))
    figures = ", ".join(f"[{p.stem.removeprefix(f'{component}-')}](results/{p.name})" for p in pictures)
    revision = str(data["git"])
    if revision.endswith("-dirty"):
        revision += " (the checkout had uncommitted changes; to be measured again)"
    return (
        f"[{component}.json](results/{component}.json), [rows](results/{data['raw']}), revision {revision}: "
        f"`{data['command']}`" + (f". Figures: {figures}" if figures else "")
    )


def results_page() -> str:
    """The whole of docs/results.md."""
    lines = [
        "# Results",
        "",
        "The headline numbers, written by `python bench/table.py` from the files in `docs/results/`. Each file holds",
        "all metrics of its component, its raw rows lie beside it. Intervals are 95 %; n counts rows. Where several",
        "rows share a scene, the interval counts scenes. Revision and command are those of the last run that wrote the",
        "file; where it was measured in parts, rows name their own revision. What the guard costs is in",
        "[performance.md](performance.md).",
    ]
    shown: set[str] = set()
    for title, components, make, introduction in SECTIONS:
        if not all(path_of(c).exists() for c in components):
            continue
        lines += ["", f"## {title}", ""]
        lines += [introduction, ""] if introduction else []
        lines += make()
        fresh = [c for c in components if c not in shown]
        shown |= set(fresh)
        lines += ["", *(f"- {source(c)}" for c in fresh)] if fresh else []
    return "\n".join(lines) + "\n"


def headline_table() -> str:
    """Five numbers for the front page, each with a link to its section."""
    evaluation, bench = metrics_of("evaluation"), metrics_of("bench")
    success = [number(evaluation[f"attacks.asr.{name}"]["value"]) for name in ("undefended", "ours")]
    rows = [
        ["attack success, five attacks on five bases", f"{success[0]} → {success[1]}", "attacks"],
        ["whole safe picture for an attacked prompt", number(evaluation["attacks.whole.ours"]["value"]), "attacks"],
        ["false triggers on ordinary prompts", number(evaluation["benign.false_trigger"]["value"]), "benign-prompts"],
        ["success of a search that knows the auditor's scores",
         number(metrics_of("adaptive")["adaptive.asr.before"]["value"]), "adaptive-attacks"],
    ]  # fmt: skip
    body = [[meaning, f"[{value}](docs/results.md#{anchor})"] for meaning, value, anchor in rows]
    share = f"{100 * bench['benign_overhead_fraction']['value']:.2g} %"
    body.append(["time that the guard adds to a benign generation at SD 1.5 size", f"[{share}](docs/performance.md)"])
    if path_of("repairs").exists():
        times = [number(metrics_of("repairs")[f"times.{v}.mini-sd"]["value"]) for v in ("off", "fast")]
        what = "time of an attacked picture on mini-sd, in the base's own: the paper's tournaments → cheap repairs"
        body.append([what, f"[{times[0]} → {times[1]}](docs/performance.md)"])
    return "\n".join(table(["what", "measured"], body)) + "\n"


def cost_table() -> str:
    """The table of docs/performance.md."""
    lines = [*cost(), "", f"- {source('bench')}", *views()]
    if path_of("repairs").exists():
        lines += ["", *repairs(), "", f"- {source('repairs')}"]
    if path_of("waves").exists():
        lines += ["", *metric_table(metrics_of("waves"), WAVES), "", f"- {source('waves')}"]
    return "\n".join(lines) + "\n"
