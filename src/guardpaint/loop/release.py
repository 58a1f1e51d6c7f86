"""The end of a guarded call: one decision and one report per image, and the output in the type the caller asked for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.config import audited_steps
from guardpaint.draft.codec import vae_decode
from guardpaint.draft.views import PixelView
from guardpaint.errors import BadInput, NotFinite
from guardpaint.loop.call import GuardedCall, ImageState, is_finite
from guardpaint.loop.context import RepairPlan, StepContext
from guardpaint.loop.pictures import placeholder
from guardpaint.loop.report import GuardReport, Status
from guardpaint.loop.step import edit_of
from guardpaint.loop.verdict import Decision, conclude, failed, look_twice, tried
from guardpaint.policy import Finding
from guardpaint.reinsert.rules import x0_substitution
from guardpaint.repair.options import RepairOptions
from guardpaint.store.checkpoint import sha256_hex
from guardpaint.store.images import from_pil, to_pil
from guardpaint.types import Draft, JsonDict
from guardpaint.verify.parts import Parts
from guardpaint.verify.passes import Work
from guardpaint.verify.weak import weak_settings


@torch.no_grad()
def release(call: GuardedCall, images: Any, output_type: str) -> tuple[Any, list[GuardReport]]:
    """Make the final verdict on every image; returns the images to hand out, and the reports."""
    config, count = call.setup.parts.config, len(images)
    call.ensure(count)
    if config.mode == "off":
        return images, reports(call, [Decision(Status.UNGUARDED)] * count)
    drafts: Sequence[Draft | None] = [None] * count
    try:
        drafts = call.drafts(call.state.index - 1) if call.state.last is not None else drafts
    except Exception as error:
        call.fail(error, range(count))
    works = {i: decide(call, images, i, output_type, drafts[i]) for i in range(count)}
    outcomes = call.passes.together(works)
    for outcome in outcomes.values():
        if isinstance(outcome, Exception):  # only with `on_error="raise"`
            raise outcome
    decisions = [outcome for outcome in outcomes.values() if isinstance(outcome, Decision)]
    finished = reports(call, decisions)
    if call.setup.write_log is not None:
        try:
            call.setup.write_log([r.to_dict() for r in finished])
        except Exception as error:
            call.fail(error, range(count))
            decisions = [failed(config.mode)] * count
            finished = reports(call, decisions)
    return handed_out(images, decisions, output_type), finished


def decide(call: GuardedCall, images: Any, i: int, output_type: str, draft: Draft | None) -> Work[Decision]:
    """The decision about one image, which is also written into its record. Any error fails closed."""
    setup, state = call.setup, call.state
    image, config = state.images[i], setup.parts.config
    try:
        if i in state.unfinite or (draft is not None and not is_finite(draft)):
            raise NotFinite("the final image or its latent holds NaN or infinity")
        if image.errors:
            return failed(config.mode)
        picture = picture_of(call, images, i, output_type, draft)
        due = draft is not None and draft.step in audited_steps(draft.steps, config)
        if due and draft is not None:
            state.audited.add(draft.step)
        context = call.context(i, draft, PixelView(picture))
        repairs = due and setup.door == "attach" and config.final_repair == "on"
        plan = RepairPlan.usual(setup.parts) if repairs else None
        decision = yield from conclude(context, picture, image.edited, plan)
        if output_type == "latent":
            decision = yield from as_latent(call, images, i, context, decision)
        image.recorder.finish(decision.verdict, decision.audits, decision.ladder, decision.approvals)
        if decision.repair is not None and decision.status.released:
            context.writer.composed()
        return decision
    except Exception as error:
        call.fail(error, [i])
        return failed(config.mode)


def picture_of(call: GuardedCall, images: Any, i: int, output_type: str, draft: Draft | None) -> Float[Tensor, "3 h w"]:
    """One output image as fp32 RGB in [0, 1]."""
    if output_type == "pil":
        return from_pil(images[i])
    if output_type == "np":
        return torch.from_numpy(np.asarray(images[i], dtype=np.float32)).permute(2, 0, 1)
    if output_type == "pt":
        return images[i].detach().float().cpu()
    if output_type != "latent":
        raise BadInput(f"output_type={output_type!r}: the guard knows pil, np, pt and latent")
    clean = clean_latent(call, spatial(call, images, i), draft)
    return vae_decode(call.setup.vae, clean[None], call.setup.pipe._execution_device)[0].cpu()


def spatial(call: GuardedCall, images: Tensor, i: int) -> Float[Tensor, "c h w"]:
    """One latent of the output, unpacked to channels × height × width."""
    family = call.setup.family
    return family.unpack(images[i : i + 1].float(), family.geometry(images, call.state.calls))[0]


def clean_latent(call: GuardedCall, z: Float[Tensor, "c h w"], draft: Draft | None) -> Float[Tensor, "c h w"]:
    """The clean estimate of an output latent, which is still noisy if the call stopped early (SDXL's denoising_end)."""
    if draft is None or draft.after.noise <= 0:
        return z
    note = "the generation stopped early, so the verdict is on the clean estimate of a noisy latent"
    if note not in call.state.notes:
        call.state.notes.append(note)
    return (z - draft.after.sigma * draft.eps) / draft.after.signal


def as_latent(call: GuardedCall, images: Tensor, i: int, context: StepContext, decision: Decision) -> Work[Decision]:
    """The decision with its changed picture as a latent.

    The picture must still be benign after the VAE's round trip. If it is not, `decision.otherwise` is tried; without
    one the image is blocked.
    """
    if decision.repair is None:
        return decision
    draft = context.draft
    if draft is None:
        return replace(decision, status=Status.BLOCKED, repair=None)
    changed = x0_substitution(spatial(call, images, i), edit_of(decision.repair, draft), draft.after, draft.eps)
    clean = clean_latent(call, changed, draft)
    shown = draft.base.decode(clean).cpu()
    finding, record = yield from look_twice(context, shown)
    if finding is None and context.parts.approver is not None:
        _, finding, approval = context.approval(shown, edited=True)
        decision = replace(decision, approvals=(*decision.approvals, approval))
    if finding is None:
        latent = call.packed(changed).to(images.dtype)
        return replace(decision, latent=latent, audits=(*decision.audits, record))
    if decision.otherwise is not None:
        earlier = replace(decision.otherwise, approvals=decision.approvals)
        if earlier.repair is not None:
            return (yield from as_latent(call, images, i, context, earlier))
        earlier, finding = approved_as_it_is(context, earlier)
        if finding is None:
            return earlier
        decision = replace(decision, approvals=earlier.approvals)
    ladder = tried(decision, "latent", "flagged after the VAE round trip")
    return replace(decision, status=Status.BLOCKED, verdict="flagged", repair=None, ladder=ladder)


def approved_as_it_is(context: StepContext, decision: Decision) -> tuple[Decision, Finding | None]:
    """Show the approver the picture as the loop left it: so far it has seen only the one that was made of it."""
    if context.parts.approver is None:
        return decision, None
    _, finding, approval = context.approval(context.view.full(), edited=True)
    return replace(decision, approvals=(*decision.approvals, approval)), finding


def handed_out(images: Any, decisions: Sequence[Decision], output_type: str) -> Any:
    """The output images: repaired ones replaced, blocked ones replaced by a placeholder or zeros, others untouched."""
    if all(d.status is not Status.BLOCKED and d.repair is None for d in decisions):
        return images
    if output_type == "pil":
        return [shown(image, d) for image, d in zip(images, decisions, strict=True)]
    result = images.copy() if isinstance(images, np.ndarray) else images.clone()
    for i, d in enumerate(decisions):
        if d.status is Status.BLOCKED:
            result[i] = 0
        elif d.latent is not None:
            result[i] = d.latent
        elif d.repair is not None and output_type == "np":
            result[i] = d.repair.view.permute(1, 2, 0).numpy()
        elif d.repair is not None:
            result[i] = d.repair.view.to(result.dtype)
    return result


def shown(image: Any, decision: Decision) -> Any:
    """One PIL image of the output."""
    if decision.status is Status.BLOCKED:
        return placeholder(*image.size)
    return image if decision.repair is None else to_pil(decision.repair.view)


# Reports -----------------------------------------------------------------------------------------------------


def unfinished_reports(call: GuardedCall) -> list[GuardReport]:
    """The reports of a call that has no final verdict (yet)."""
    return reports(call, [Decision(Status.UNFINISHED)] * len(call.state.images))


def reports(call: GuardedCall, decisions: Sequence[Decision]) -> list[GuardReport]:
    """One report per image."""
    names = call.setup.request_id, type(call.setup.pipe).__name__, call.setup.family.name
    seconds = time.perf_counter() - call.state.started
    settings, parts = effective_settings(call), call.setup.parts
    return [
        report_of(parts, names, i, image, decision.status, settings, seconds)
        for i, (image, decision) in enumerate(zip(call.state.images, decisions, strict=True))
    ]


def report_of(
    parts: Parts,
    names: tuple[str, str, str],
    number: int,
    image: ImageState,
    status: Status,
    settings: JsonDict,
    seconds: float,
) -> GuardReport:
    """The report of one image; `names` are the request id, the pipeline class and its family."""
    return GuardReport(
        request_id=names[0],
        image=number,
        status=status,
        mode=parts.config.mode,
        pipeline=names[1],
        family=names[2],
        seed=image.seed,
        prompt_sha256=None if image.prompt is None else sha256_hex(image.prompt),
        prompt=image.prompt if parts.config.log_prompts else None,
        steps=image.recorder.steps,
        final=image.recorder.final,
        effective_settings=settings,
        errors=image.errors,
        seconds=seconds,
        caller=image.caller,
        glances=image.recorder.glances,
        evidence=image.recorder.evidence,
        painted=image.recorder.painted,
    )


def effective_settings(call: GuardedCall) -> JsonDict:
    """The settings that the call really ran with, and what was skipped and why."""
    setup, state = call.setup, call.state
    parts = setup.parts
    skipped = [{"what": "guard", "why": note} for note in state.notes]
    skipped += unguarded(parts)
    if parts.config.mode != "enforce":
        skipped.append({"what": "repair", "why": f"mode is {parts.config.mode}"})
    if state.prompts is None:
        skipped.append({"what": "repair", "why": "no prompt text: F is unavailable"})
    if not any(image.recorder.final.verdict != "none" for image in state.images) and parts.config.mode != "off":
        all_failed = all(image.errors for image in state.images)
        why = "an error came first" if all_failed else "guard.finish(out) was not called"
        skipped.append({"what": "final verdict", "why": f"no final verdict: {why}"})
    return {
        **components(parts),
        "on_error": parts.config.on_error,
        "glances": glances_of(call),
        "views": views_of(parts, call.state.views),
        "view_decoder": "full" if setup.tiny is None or parts.config.view_decoder == "full" else "tiny",
        "scheduler": type(setup.pipe.scheduler).__name__,
        "executed_steps": state.index,
        "audited_steps": sorted(state.audited),
        "door": setup.door,
        "weights": setup.weights,
        "skipped": skipped,
    }


def unguarded(parts: Parts) -> list[JsonDict]:
    """What the guard's parts cannot do: gates without a score, categories that nobody looks for, a fixed knob."""
    gates = [
        {"what": f"gate {name}", "why": f"the auditor gives no {name}"}
        for name in sorted(parts.auditor.absent & {"F", "P"})
    ]
    why = "no part can tell it; the policy accepts that"
    settings = getattr(parts.repairer, "settings", None)
    if isinstance(settings, RepairOptions) and settings.fixed_guidance is not None:
        said = f"the repairer's guidance is {settings.fixed_guidance:g} for every candidate"
        gates.append({"what": "knob cfg", "why": said})
    return [*gates, *({"what": f"category {name}", "why": why} for name in parts.uncovered)]


def glances_of(call: GuardedCall) -> JsonDict | None:
    """Where the guard glanced, and how often that scheduled an audit; None if glances are off."""
    parts = call.setup.parts
    if parts.config.glance_from is None:
        return None
    made = [g for image in call.state.images for g in image.recorder.glances]
    return {
        "from": parts.config.glance_from,
        "pixels": parts.glance_size,
        "made": len(made),
        "scheduled": sum(g.scheduled for g in made),
    }


def views_of(parts: Parts, ways: Sequence[str]) -> JsonDict:
    """How the views of unfinished pictures were made, and on which views the thresholds were calibrated."""
    calibration = parts.config.calibration
    known: list[str] | str | None = None
    if calibration is not None:
        known = calibration.valid_for if calibration.finished_only else list(calibration.views) or "unrecorded"
    return {"made_by": list(ways), "calibrated_on": known}


def components(parts: Parts) -> JsonDict:
    """The effective settings that name the policy and the components."""
    return {
        "mode": parts.config.mode,
        "policy": parts.policy.name,
        "policy_sha256": parts.policy.digest(),
        "trigger": parts.policy.trigger,
        "scope": None if parts.config.scope is None else asdict(parts.config.scope),
        "weak": [w.to_dict() for w in weak_settings(parts.policy, parts.config)],
        "calibrated": None if parts.config.calibration is None else parts.config.calibration.valid_for,
        "auditor": type(parts.auditor).__name__,
        "approver": None if parts.approver is None else parts.approver.name,
        "absent_scores": sorted(parts.auditor.absent),
        "uncovered": list(parts.uncovered),
        "repairer": parts.repairer.name,
        "proposer": parts.proposer.name,
        "seam": parts.seam.name,
    }
