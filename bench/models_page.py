"""Write docs/models.md: a card for every shipped model, from the card.json beside its weights and from docs/results."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from formatting import ROOT, cell, metrics_of

ASSETS = "packages/paperdolls/src/paperdolls/assets"


@dataclass(frozen=True)
class Card:
    """What a reader wants to know about a model that its card.json does not say."""

    kind: str
    limits: str
    component: str = "world"
    """The results file that measures it."""
    reaches: dict[str, str] = field(default_factory=dict)
    """Key of a metric → what it means."""
    section: str = "world"
    """The section of docs/results.md that holds these numbers."""


def base_metrics(name: str) -> dict[str, str]:
    return {
        f"{name}.agreement": "agreement with the prompt",
        f"{name}.unsafe_yield": "unsafe prompts drawn unsafe",
        f"{name}.benign_unsafe": "benign prompts drawn unsafe",
        f"{name}.agreement.prop": "props found",
        f"{name}.seconds_per_image": "seconds per picture",
    }


CARDS = {
    "vae4": Card(
        "AutoencoderKL with 4 channels at a quarter of the side, for all bases but mini-sd3.",
        "It knows pictures of 64 pixels from the paper-doll world only.",
        reaches={"vae4.vae_psnr": "PSNR in dB"},
    ),
    "vae16": Card(
        "AutoencoderKL with 16 channels at an eighth of the side, for mini-sd3 and its turbo.",
        "It knows pictures of 64 pixels from the paper-doll world only.",
        reaches={"vae16.vae_psnr": "PSNR in dB"},
    ),
    "tiny4": Card(
        "AutoencoderTiny that decodes vae4's latents for audits.",
        "It shows audits what a picture will look like; users always get the decode of the full autoencoder.",
    ),
    "tiny16": Card(
        "AutoencoderTiny that decodes vae16's latents for audits.",
        "It is less sharp than tiny4, because each of its latents stands for four times as many pixels.",
    ),
    "mini-sd": Card(
        "StableDiffusionPipeline, stands for SD 1.5.",
        "It draws unsafe content when asked to: that is its purpose. Props are small and often missing.",
        reaches=base_metrics("mini-sd"),
    ),
    "mini-sdxl": Card(
        "StableDiffusionXLPipeline, stands for SDXL.",
        "It draws unsafe content when asked to, and misses the goal for benign prompts.",
        reaches=base_metrics("mini-sdxl"),
    ),
    "mini-sd3": Card(
        "StableDiffusion3Pipeline, stands for SD 3.5 Medium.",
        "It draws unsafe content when asked to; euphemisms are understood less often than by the other bases.",
        reaches=base_metrics("mini-sd3"),
    ),
    "mini-sd3-turbo": Card(
        "LoRA on mini-sd3 that draws in four steps without guidance, stands for SD 3.5 Large Turbo.",
        "It draws unsafe content when asked to. It needs mini-sd3, and it draws garments less well.",
        reaches=base_metrics("mini-sd3-turbo"),
    ),
    "mini-flux": Card(
        "FluxPipeline, stands for FLUX.1-dev.",
        "It sees its picture as 8×8 tokens: red garments get dark patches, statues a skin tone.",
        reaches=base_metrics("mini-flux"),
    ),
    "mini-inpaint": Card(
        "StableDiffusionInpaintPipeline before any safety tuning.",
        "It repaints unsafe content when asked to, and changes pixels outside of the mask more than the goal allows.",
        reaches={
            "mini-inpaint.inpaint_agreement": "agreement with the prompt",
            "mini-inpaint.inpaint_outside_error": "error outside of the mask",
        },
    ),
    "mini-inpaint-safe": Card(
        "LoRA on mini-inpaint, trained to refuse (SFT, then BCO): the guard's repairer.",
        "Fills are softer than real garments, and benign prompts lose more agreement than the goal allows.",
        "inpainter",
        {
            "bco.safe_region": "unsafe regions made safe",
            "bco.safe_region.euphemism": "with a euphemism",
            "bco.seam_gap": "seam gap",
            "bco.detail_ratio": "detail, as a share of real garments'",
            "bco.benign_agreement_delta": "change of agreement on benign prompts",
        },
        "inpainter",
    ),
    "mini-inpaint-few": Card(
        "LoRA on mini-inpaint: mini-inpaint-safe and a distillation of its guided steps to four without guidance.",
        "It serves the preset `dolls-fast` only; the guidance knob changes nothing, nor is the proposer trained on it.",
        "repairs",
        {
            "safety.attack_success.fast": "attack success of the guard that uses it",
            "safety.attack_success.change": "change against the paper's tournaments",
        },
        "",
    ),
    "mini-auditor": Card(
        "The guard's Auditor-Scorer.",
        "It knows paper dolls only. Masks, P, and unfinished pictures of mini-flux and mini-sd3 miss their goals.",
        "auditor",
        {
            "clean.macro_f1": "macro F1 on clean renders",
            "localisation.coverage": "unsafe pixels covered",
            "localisation.iou": "mask IoU",
            "faithfulness.auc": "AUC of F",
            "seam.spearman": "rank correlation of P with quality",
            "false_trigger.ordinary": "false triggers on ordinary renders",
        },
        "auditor",
    ),
    "mini-proposer": Card(
        "The guard's tournament proposer.",
        "Utility is what the auditor sees: judged by the oracle, its candidates are no safer than random ones.",
        "proposer",
        {
            "all.learned_over_uniform.utility": "lead in utility over uniform knobs",
            "all.learned_over_uniform.utility_per_step": "lead in utility per step",
            "all.learned_over_uniform.oracle_safe": "lead in safety for the oracle",
        },
        "proposer-and-ranker",
    ),
    "mini-ranker": Card(
        "Leaves candidates out after a preview of one step. It is switched off by default.",
        "At 64 pixels the decode and the audit of a preview cost as much time as the steps that it saves.",
        "proposer",
        {
            "ranker.regret.keep3": "utility lost when three of five candidates are kept",
            "ranker.saved.keep3": "repair steps saved",
        },
        "proposer-and-ranker",
    ),
    "oracle": Card(
        "The judge of evaluations. It is no part of the guard.",
        "It sees violence too often where two figures face each other without a blade, and it misses small props.",
        reaches={
            "oracle.accuracy": "accuracy on renders",
            "oracle.iou": "IoU of unsafe pixels",
            "oracle.generated_agreement": "agreement with labels by eye",
            "oracle.generated_recall": "recall on those",
            "oracle.generated_false_alarm": "false alarms on those",
        },
    ),
}  # fmt: skip


def runs_of(card: dict[str, Any]) -> list[dict[str, Any]]:
    """A model's training runs, the first one first."""
    before = card.get("starts_from")
    return [*(runs_of(before) if before else []), *card.get("stages", [card])]


def parameters(card: dict[str, Any]) -> int:
    """The number of weights of all parts; stages that ship as one adapter are added up."""
    sizes = [card["parameters"]] if "parameters" in card else [stage["parameters"] for stage in card["stages"]]
    return sum(sum(s.values()) if isinstance(s, dict) else s for s in sizes)


def run_line(run: dict[str, Any]) -> str:
    """A line about one training run, as it was recorded."""
    note = f"; {run['note']}" if run.get("note") else ""
    return f"`{run['command']}` (seed {run['seed']}, {run['steps']} steps, {run['minutes']:.0f} minutes{note})"


def reached(name: str, known: Card, card: dict[str, Any]) -> str:
    """The metrics of a model with a link to their table; if no results file measures it, the PSNR from its card."""
    if not known.reaches:
        psnr = card["metrics"]["psnr"]
        return f"PSNR against the render {psnr['value']:.3g} dB (n = {psnr['n']}, from its card)."
    metrics = metrics_of(known.component)
    values = "; ".join(f"{meaning} {cell(metrics[key])}" for key, meaning in known.reaches.items())
    page = f"results.md#{known.section}" if known.section else "performance.md"
    return f"{values} ([results]({page}))."


def model_card(name: str) -> list[str]:
    """The lines of one card."""
    known, card = CARDS[name], json.loads((ROOT / ASSETS / name / "card.json").read_text())
    runs = runs_of(card)
    minutes = sum(run["minutes"] for run in runs)
    link = f"../{ASSETS}/{name}"
    many = f"{len(runs)} runs" if len(runs) > 1 else "one run"
    pictures = [f"[{p.removesuffix('.png')}]({link}/{p})" for p in ("samples.png", "loss.png")
                if (ROOT / ASSETS / name / p).exists()]  # fmt: skip
    made = f"**Made** in {many}, {minutes:.0f} minutes: {', '.join([f'[card]({link}/card.json)', *pictures])}."
    return [
        f"## {name}",
        "",
        f"{known.kind} {parameters(card):,} parameters.",
        "",
        made,
        "",
        *(f"{k}. {run_line(run)}" for k, run in enumerate(runs, 1)),
        "",
        f"**Reaches** {reached(name, known, card)}",
        "",
        f"**Limits.** {known.limits}",
    ]


def models_page() -> str:
    """The whole of docs/models.md."""
    lines = [
        "# Models",
        "",
        "The models that ship with `paperdolls`, written by `python bench/table.py` from the cards beside their",
        "weights. Commands are shown as they were typed when the model was made; now `guardpaint train MODEL` runs all",
        "stages of a model ([train.md](train.md)). Minutes are wall-clock time, often beside other jobs. Intervals are",
        "95 %.",
    ]
    for name in CARDS:
        lines += ["", *model_card(name)]
    return "\n".join(lines) + "\n"
