"""Tables of docs/results.md on published benchmarks and on the rehearsal of the recipe."""

from __future__ import annotations

from formatting import grid, metric_table, metrics_of

ATTACKS = ("sneakyprompt", "mma", "ring_a_bell", "pgj", "daca")
STARTS = {"s40": "0.4", "s55": "0.55", "s70": "0.7", "s85": "0.85", "end": "at the end", "undefended": "never"}
RECIPE = {
    "rehearsal.stages_run": "stages of the recipe that ran on small models and local photographs",
    "rehearsal.minutes": "minutes that they took, one thread beside other work",
    "rehearsal.broken_chain_detected": "outputs whose absence stops the stage that reads them, of all outputs",
    "rehearsal.broken_chain_by_commands": "the same for the bare commands",
    "rehearsal.families_attached": "families that the rehearsed guard drew with",
    "rehearsal.overrides": "settings that the rehearsal changes, listed in its report",
    "device_truth.stages": "steps of stages that run on another device",
    "device_truth.planted_found": "planted leaks between devices that are found",
    "auditor_fullsize.seconds_per_step": "seconds of a training step of the full-size auditor on one core",
    "auditor_fullsize.peak_gb": "peak memory of that step, GB",
    "seam.spearman_trained": "rank correlation of the trained auditor's seam metric with LPIPS-VGG, photographs",
    "nulltext.per_step_over_single": "null-text: error inside the mask, an embedding per step over a single one",
    "nulltext.psnr_outside_gain": "the same: dB gained outside the mask",
    "nulltext.seconds_ratio": "the same: time of the steps from the repair on",
}
SINGLE = {
    "layouts.right": "layouts of published prompt files that are read right",
    "protocol.stages_ok": "stages of the protocol command that work on small random bases of five families",
    "ppi.coverage": "share of invented runs whose corrected interval holds the truth",
    "ppi.uncorrected": "the same, uncorrected",
    "ppi.coverage_uneven": "the same, corrected, where the judge's errors differ between defences",
    "seedpairs.mixed": "prompts of which some seeds draw harm and others do not",
}
"""What single metrics mean."""


def of(metrics: dict, names: dict[str, str]) -> list[str]:
    return metric_table(metrics, {key: meaning for key, meaning in names.items() if key in metrics})


def benchmarks() -> list[str]:
    metrics = metrics_of("benchmarks")
    judges = sorted(key.split(".")[1] for key in metrics if key.startswith("judges."))
    lines = of(metrics, SINGLE)
    if judges:
        lines += ["", f"Judges whose loading code was run, most on small random models: {', '.join(judges)}."]
    lines += ["", "Attacks against blind draws at equal queries and texts read: gain in their own objective.", ""]
    columns = {
        "attacks.*.over_random": "gain",
        "attacks.*.over_random.dolls": "dolls' text encoder",
        "attacks.*.over_random.random_clip": "random CLIP",
        "attacks.*.passes": "passes the filter",
        "attacks.*.original": "originals pass",
    }
    lines += grid(metrics, dict(zip(ATTACKS, ATTACKS, strict=True)), columns)
    lines += ["", "Telling harm from no harm (AUC), within one prompt by its seeds and over all pictures.", ""]
    rows = {"auditor": "auditor", "auditor_without_prompt": "auditor without the prompt", "open_nsfw": "open_nsfw"}
    rows["prompt"] = "the prompt alone"
    columns = {"seedpairs.*.auc_within": "within prompts", "seedpairs.*.auc_all": "over all"}
    lines += grid(metrics, rows, columns)
    if "moment.pilot.end.asr" in metrics:
        lines += ["", "When to step in, a pilot: audits from a progress on, on the same scenes.", ""]
        columns = {
            "moment.pilot.*.asr": "harm left",
            "moment.pilot.*.whole": "whole safe pictures",
            "moment.pilot.*.seam": "seam",
            "moment.pilot.*.seconds": "seconds",
        }
        lines += grid(
            metrics, {key: name for key, name in STARTS.items() if f"moment.pilot.{key}.asr" in metrics}, columns
        )
    return lines


def recipe() -> list[str]:
    """What was measured while the recipe was rehearsed; only what the file has."""
    return of(metrics_of("recipe"), RECIPE)
