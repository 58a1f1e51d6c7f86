"""Choose and run a reinsertion rule; say what was done and why it was not what was asked."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from guardpaint.draft.family import Family
from guardpaint.reinsert import rules
from guardpaint.store.seeds import generator
from guardpaint.types import Draft, Edit

UNET_ONLY = ("ddim_inversion", "ddpm_noise")
FLOW_ONLY = ("flow_ode",)
NULL_TEXT = ("null_text", "null_text_single")
"""With an embedding for every remaining step, and with one for all of them."""


@dataclass(frozen=True)
class Reinserted:
    """The new latent, and what the remaining steps must do."""

    latent: Float[Tensor, "c h w"]
    rule: str
    note: str = ""
    hold: float = 0.0
    embedding: Float[Tensor, "1 l d"] | None = None
    """The unconditional embedding of the next step."""
    every_step: bool = False
    """Whether each later step optimises an embedding of its own; else all use this one."""
    edits_history: bool = False


def fitting(rule: str, flow: bool, has_cfg: bool) -> tuple[str, str]:
    """The rule that runs on such a model and, if it is not the one asked for, why."""
    if rule in FLOW_ONLY and not flow:
        return "x0_substitution", f"{rule} is for flow models"
    if rule in UNET_ONLY and flow:
        return "flow_ode", f"{rule} is for UNet models"
    if rule in NULL_TEXT and not has_cfg:
        return "direct_blend", f"{rule} needs a classifier-free branch"
    return rule, ""


def choose(rule: str, draft: Draft, family: Family) -> tuple[str, str]:
    """The rule to run and, if it is not the one asked for, why."""
    if rule == "auto":
        rule = family.default_reinsertion
    called = bool(draft.base.calls)
    other, why = fitting(rule, draft.base.prediction == "flow", not called or draft.base.has_cfg)
    if why:
        return other, why
    if rule in ("ddim_inversion", *NULL_TEXT) and not called:
        return "direct_blend", f"{rule} needs the base's denoiser, and no call of it was recorded"
    if rule in NULL_TEXT and draft.step + 1 >= draft.steps:
        return "direct_blend", f"{rule} needs at least one step left"
    if rule == "ddim_inversion" and draft.after.noise <= 0:
        return "direct_blend", "nothing to invert to at noise 0"
    return rule, ""


def reinsert(
    asked: str, draft: Draft, edit: Edit, family: Family, *, hold: float, alpha: float, seed: int
) -> Reinserted:
    """Apply one rule to the control latent."""
    rule, note = choose(asked, draft, family)
    z, level = draft.latent, draft.after
    if rule == "ddpm_noise":
        return Reinserted(rules.ddpm_noise(z, edit, level, generator(seed, "reinsert")), rule, note)
    if rule == "flow_ode":
        return Reinserted(rules.flow_ode(z, edit, level, generator(seed, "reinsert")), rule, note)
    if rule == "direct_blend":
        return Reinserted(rules.direct_blend(z, edit, level, alpha), rule, note)
    if rule == "ddim_inversion":
        return Reinserted(rules.ddim_inversion(z, edit, level, alpha, draft.base), rule, note)
    if rule in NULL_TEXT:
        blended = rules.direct_blend(z, edit, level, alpha)
        embedding = rules.null_text(blended, edit, level, draft.base)
        return Reinserted(blended, rule, note, embedding=embedding, every_step=rule == "null_text")
    latent = rules.x0_substitution(z, edit, level, draft.eps)
    held = hold if rule == "held_substitution" else 0.0
    return Reinserted(latent, rule, note, hold=held, edits_history=True)
