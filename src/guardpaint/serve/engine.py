"""Draws batches with one pipeline, under the guard that is passed with each of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from PIL import Image

from guardpaint.draft.call_settings import call_settings
from guardpaint.draft.codec import vae_decode
from guardpaint.draft.families import family_of
from guardpaint.errors import BadConfig
from guardpaint.guard import GuardPaint
from guardpaint.loop.pictures import blurred_thumbnail
from guardpaint.loop.release import components
from guardpaint.loop.report import GuardReport
from guardpaint.serve.jobs import Ask, Cancelled, Facts, Job, send_audits
from guardpaint.store.images import from_pil, to_pil

log = logging.getLogger("guardpaint.serve")


class NoPrompts(logging.Filter):
    """Keeps prompts out of the log: diffusers writes what a text encoder cuts off into a warning."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "truncated" not in str(record.msg)


def keep_prompts_out() -> None:
    """Filter what the pipelines' libraries write, whichever pipeline it is: the base or one that repairs."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.get_logger("diffusers"), transformers_logging.get_logger("transformers")  # they make handlers
    for name in ("diffusers", "transformers", None):
        for handler in logging.getLogger(name).handlers:
            if not any(isinstance(f, NoPrompts) for f in handler.filters):
                handler.addFilter(NoPrompts())


class Engine:
    """One pipeline and its call arguments."""

    def __init__(self, pipe: Any, call: Mapping[str, Any]) -> None:
        self.pipe, self.call = pipe, dict(call)
        own = call_settings(pipe, call)
        self.ask = Ask(own.steps, own.guidance, (own.height, own.width))
        keep_prompts_out()

    def facts(self, guard: GuardPaint) -> Facts:
        """What a service needs to know about this pipeline and a guard that can be served."""
        if guard.config.mode != "enforce":
            raise BadConfig(f"the guard's mode is {guard.config.mode}; a service needs mode=enforce")
        return Facts(
            self.ask,
            int(self.pipe.vae_scale_factor),
            guard.config.retain_evidence,
            guard.policy,
            guard.policy.last_resort[-1] == "keep",
            (type(self.pipe).__name__, family_of(self.pipe).name),
            components(guard.parts),
            guard.config.timeout_s,
            guard.config.log_prompts,
            guard.config.scope,
        )

    def draw(
        self, guard: GuardPaint, batch: list[Job], request_id: str | None = None
    ) -> tuple[list[Image.Image], list[GuardReport]]:
        """The pictures and reports of a batch."""
        ask = batch[0].ask
        twin = guard.attach(self.pipe)
        call = {**self.call, "num_inference_steps": ask.steps, "guidance_scale": ask.guidance}
        call |= {"height": ask.size[0], "width": ask.size[1]}
        out = twin(
            [j.prompt for j in batch],
            generator=[torch.Generator().manual_seed(j.seed) for j in batch],
            callback_on_step_end=self.watch(guard, batch, ask),
            callback_on_step_end_tensor_inputs=["latents"],
            request_id=request_id,
            callers=[{"key": j.owner, "request": j.request} for j in batch],
            **call,
        )
        return list(out.images), list(out.safety)

    def watch(self, guard: GuardPaint, batch: list[Job], ask: Ask) -> Callable[..., dict[str, Any]]:
        """A step callback that sends audits and previews, and stops the batch when nobody waits for it."""
        family = family_of(self.pipe)
        factor = self.pipe.vae_scale_factor
        shape = (ask.size[0] // factor, ask.size[1] // factor)

        def step(pipe: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
            if all(job.gone.is_set() for job in batch):
                raise Cancelled
            if any(job.on_audit is not None for job in batch):
                for job, report in zip(batch, guard.so_far(), strict=False):
                    send_audits(job, report)
            wanted = [i for i, job in enumerate(batch) if job.on_step is not None and not job.gone.is_set()]
            if wanted:
                z = family.unpack(kwargs["latents"].detach(), shape)[wanted].float()
                views = vae_decode(self.pipe.vae, z, z.device).cpu()
                for i, view in zip(wanted, views, strict=True):
                    job = batch[i]
                    picture = to_pil(view) if job.clear else blurred_thumbnail(view)
                    assert job.on_step is not None
                    job.on_step(index, ask.steps, picture, not job.clear)
            return {}

        return step


def catches(guard: GuardPaint, bad: Image.Image) -> bool:
    """Whether the guard flags a picture that is known to be unsafe; an error counts as no."""
    try:
        picture = from_pil(bad)
        found = guard.finding(picture, guard.audit_image(picture, None))
    except Exception:
        log.exception("the self-test failed")
        return False
    return found is not None
