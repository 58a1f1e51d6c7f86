"""The two ways in: `attach` gives a guarded twin of a pipeline, `watch` guards one call of your own object."""

from __future__ import annotations

import copy
import functools
import inspect
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from guardpaint.draft.families import family_of
from guardpaint.draft.schedule import prediction_type
from guardpaint.draft.tap import tapped
from guardpaint.errors import BadInput
from guardpaint.loop.report import GuardReport
from guardpaint.loop.call import Request

if TYPE_CHECKING:
    from guardpaint.guard import GuardPaint


class Guarded:
    """Marks a guarded twin."""

    _guardpaint: GuardPaint


def attach(guard: GuardPaint, pipe: Any) -> Any:
    """A twin of the pipeline with the same class, signature and weights, whose calls are guarded."""
    if isinstance(pipe, Guarded):
        raise BadInput("this pipeline is guarded already; attach to the original instead")
    family = family_of(pipe)
    prediction_type(pipe.scheduler)
    guard.tiny_decoder(pipe, family)
    twin = copy.copy(pipe)
    twin.__class__ = guarded_class(type(pipe))
    vars(twin)["_guardpaint"] = guard
    return twin


_CLASSES: dict[type, type] = {}


def guarded_class(cls: type) -> type:
    """A subclass of the pipeline's class whose __call__ runs under guard; made once per class."""
    if cls in _CLASSES:
        return _CLASSES[cls]
    original = cls.__call__
    signature = inspect.signature(original)
    extra = [
        inspect.Parameter("safety_prompt", inspect.Parameter.KEYWORD_ONLY, default=None),
        inspect.Parameter("request_id", inspect.Parameter.KEYWORD_ONLY, default=None),
    ]

    @functools.wraps(original)
    def call(self: Any, *args: Any, safety_prompt: Any = None, request_id: str | None = None, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        arguments.update(arguments.pop("kwargs", {}))
        return guarded_call(self._guardpaint, self, original, args, kwargs, arguments, safety_prompt, request_id)

    parameters = list(signature.parameters.values())
    tail = [p for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD]
    call.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*(p for p in parameters if p not in tail), *extra, *tail]
    )
    body = {"__call__": call, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return _CLASSES.setdefault(cls, type(cls.__name__, (cls, Guarded), body))


def guarded_call(
    guard: GuardPaint,
    twin: Any,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    arguments: dict[str, Any],
    safety_prompt: Any,
    request_id: str | None,
) -> Any:
    """Run the pipeline's own __call__ on a private copy with a private scheduler, then release its images."""
    run = copy.copy(twin)
    vars(run)["scheduler"] = copy.deepcopy(twin.scheduler)
    request = guard.open(
        run,
        request_id=request_id,
        door="attach",
        prompts=image_prompts(arguments, safety_prompt),
        seeds=seed_rule(arguments.get("generator"), guard.config.seed),
        true_cfg=float(arguments.get("true_cfg_scale") or 1.0),
    )
    if vars(run).get("safety_checker") is not None:
        request.posture_notes.append("the pipeline's own safety_checker runs before the final verdict")
    guard.running(request)
    try:
        with tapped(run, request.family, request):
            out = original(run, *args, **kwargs)
    finally:
        guard.running(None)
    return guard.release(request, out, str(arguments.get("output_type", "pil")))


def finished_output(out: Any, images: Any, reports: list[GuardReport]) -> Any:
    """The pipeline's output, object or tuple, with guarded images and flags (and, in the object, the reports)."""
    if isinstance(out, tuple):
        return (images, nsfw_flags(reports, out[1]), *out[2:]) if len(out) > 1 else (images,)
    previous = out.get("nsfw_content_detected")
    out.images = images
    out.nsfw_content_detected = nsfw_flags(reports, previous)
    out.safety = reports
    return out


def nsfw_flags(reports: Sequence[GuardReport], previous: Sequence[bool] | None) -> list[bool]:
    """diffusers' flag: this slot was withheld, or released although flagged."""
    mine = [r.status in ("blocked", "released_flagged") for r in reports]
    return mine if previous is None else [a or bool(b) for a, b in zip(mine, previous, strict=True)]


def image_prompts(arguments: dict[str, Any], safety_prompt: Any) -> list[str] | None:
    """The text of each image, from the call's prompts (all encoders') or safety_prompt; None if unknown."""
    per_prompt = int(arguments.get("num_images_per_prompt") or 1)
    if safety_prompt is not None:
        texts = [safety_prompt] if isinstance(safety_prompt, str) else list(safety_prompt)
        embeds = arguments.get("prompt_embeds")
        if len(texts) == 1 and embeds is not None:
            texts = texts * len(embeds)
    else:
        columns = []
        for name in ("prompt", "prompt_2", "prompt_3"):
            value = arguments.get(name)
            if value is not None:
                columns.append([value] if isinstance(value, str) else list(value))
        if not columns:
            return None
        rows = max(map(len, columns))
        texts = [" ".join(dict.fromkeys(c[i % len(c)] for c in columns)) for i in range(rows)]
    return [t for t in texts for _ in range(per_prompt)]


def seed_rule(generator: Any, fallback: int) -> Callable[[int, int], tuple[int, int]]:
    """Request seed per image from the caller's generators, read without drawing from them."""
    if isinstance(generator, Sequence) and len(generator) > 1:
        seeds = [g.initial_seed() for g in generator]
        return lambda image, batch: (seeds[image % len(seeds)], image // len(seeds))
    if isinstance(generator, Sequence) and generator:
        generator = generator[0]
    seed = generator.initial_seed() if isinstance(generator, torch.Generator) else fallback
    return lambda image, batch: (seed, image)


class Watch:
    """The callback of the second door. Put it into callback_on_step_end, alone or inside your own callback."""

    def __init__(self, request: Request) -> None:
        self.request = request

    def __call__(self, pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if self.request.index != step + 1:
            raise BadInput(
                f"step {step} did not pass through the watched scheduler (it saw {self.request.index} steps); "
                "run the pipeline that was given to guard.watch, and do not replace its scheduler meanwhile"
            )
        return tensors


@contextmanager
def watch(
    guard: GuardPaint,
    pipe: Any,
    *,
    height: int | None,
    width: int | None,
    safety_prompt: Any,
    seed: int | None,
    request_id: str | None,
) -> Iterator[Watch]:
    """Fit the tap to the caller's own object, for one call; taken off again on leaving."""
    if isinstance(pipe, Guarded):
        raise BadInput("this pipeline is guarded already; watch the original instead")
    family = family_of(pipe)
    prediction_type(pipe.scheduler)
    if family.name == "flux" and (height is None or width is None):
        raise BadInput("FLUX latents are packed: give watch(pipe, height=…, width=…), the size you generate")
    request = guard.open(
        pipe,
        request_id=request_id,
        door="watch",
        prompts=None,
        seeds=seed_rule(None, guard.config.seed if seed is None else seed),
    )
    if "encode_prompt" in vars(pipe):
        raise BadInput("this pipeline is being watched already: one guarded call at a time per object")
    encode = pipe.encode_prompt
    heard: list[bool] = []
    signature = inspect.signature(encode)

    @functools.wraps(encode)
    def encode_prompt(*args: Any, **kwargs: Any) -> Any:
        if not heard:
            heard.append(True)
            request.prompts = image_prompts(dict(signature.bind(*args, **kwargs).arguments), safety_prompt)
        return encode(*args, **kwargs)

    if height is not None and width is not None:
        request.expected_size = (height, width)
    vars(pipe)["encode_prompt"] = encode_prompt
    try:
        with tapped(pipe, family, request):
            yield Watch(request)
    finally:
        del vars(pipe)["encode_prompt"]


def new_request_id() -> str:
    return uuid.uuid4().hex


class ThreadReports(threading.local):
    """The reports of the latest request of each thread."""

    latest: list[GuardReport] | None = None
    watched: Request | None = None
    running: Request | None = None
