"""The second door: `watch` guards one call of your own pipeline object."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from guardpaint.doors.attach import Guard, check_pipeline
from guardpaint.doors.calls import image_prompts, seed_rule
from guardpaint.draft.tap import tapped
from guardpaint.errors import BadInput
from guardpaint.loop.call import GuardedCall
from guardpaint.loop.release import unfinished_reports
from guardpaint.loop.report import GuardReport


class WatchCallback:
    """A step callback: pass it as callback_on_step_end, or call it inside your own."""

    def __init__(self, call: GuardedCall) -> None:
        self.call = call

    def __call__(self, pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        seen = self.call.state.index
        if seen != step + 1:
            raise BadInput(
                f"step {step} did not pass through the watched scheduler (it saw {seen} steps); "
                "run the pipeline that was given to guard.watch, and do not replace its scheduler meanwhile"
            )
        return tensors

    def reports(self) -> list[GuardReport]:
        """Reports of the call so far; their status is `unfinished`."""
        return unfinished_reports(self.call)


@dataclass(frozen=True)
class WatchOptions:
    """What the caller of `watch` knows about the call."""

    height: int | None = None
    width: int | None = None
    safety_prompt: Any = None
    seed: int | None = None
    request_id: str | None = None


@contextmanager
def watch(guard: Guard, pipe: Any, options: WatchOptions) -> Iterator[WatchCallback]:
    """Guard one call of the caller's own pipeline object, which is restored on leaving the with block."""
    family = check_pipeline(pipe, "watch")
    sized = options.height is not None and options.width is not None
    if family.name == "flux" and not sized:
        raise BadInput("FLUX latents are packed: give watch(pipe, height=…, width=…), the size you generate")
    call = guard.open(
        pipe,
        door="watch",
        prompts=None,
        seeds=seed_rule(None, guard.config.seed if options.seed is None else options.seed),
        request_id=options.request_id,
        expected_size=(options.height, options.width) if sized else None,
    )
    if "encode_prompt" in vars(pipe):
        raise BadInput("this pipeline is being watched already: one guarded call at a time per object")
    encode = pipe.encode_prompt
    encoded: list[bool] = []
    signature = inspect.signature(encode)

    @functools.wraps(encode)
    def encode_prompt(*args: Any, **kwargs: Any) -> Any:
        if not encoded:
            encoded.append(True)
            arguments = dict(signature.bind(*args, **kwargs).arguments)
            call.state.prompts = image_prompts(arguments, options.safety_prompt)
        return encode(*args, **kwargs)

    vars(pipe)["encode_prompt"] = encode_prompt
    try:
        with tapped(pipe, family, call):
            yield WatchCallback(call)
    finally:
        del vars(pipe)["encode_prompt"]
