"""The first door: `attach` gives a guarded twin of a pipeline."""

from __future__ import annotations

import copy
import functools
import inspect
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from guardpaint.config import GuardConfig
from guardpaint.doors.calls import image_prompts, seed_rule
from guardpaint.draft.families import family_of
from guardpaint.draft.family import Family
from guardpaint.draft.schedule import prediction_type
from guardpaint.draft.tap import tapped
from guardpaint.errors import BadInput
from guardpaint.loop.call import GuardedCall


@runtime_checkable
class Guard(Protocol):
    """What the doors need of a guard; `GuardPaint` implements it."""

    @property
    def config(self) -> GuardConfig: ...

    def tiny_decoder(self, pipe: Any, family: Family) -> Any | None: ...

    def open(self, pipe: Any, *, door: str, prompts: list[str] | None, seeds: Any, **more: Any) -> GuardedCall: ...

    def running(self, call: GuardedCall | None) -> None: ...

    def release(self, call: GuardedCall, out: Any, output_type: str) -> Any: ...


class GuardedTwin:
    """Base class of all guarded twins, by which they are recognised."""

    _guardpaint: Guard


@dataclass(frozen=True)
class TwinCall:
    """One call of a twin: its arguments as they were passed, and all arguments by name, defaults included."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    arguments: dict[str, Any]
    safety_prompt: Any
    request_id: str | None


def check_pipeline(pipe: Any, verb: str) -> Family:
    """The pipeline's family, if it can be guarded and is not guarded already."""
    if isinstance(pipe, GuardedTwin):
        raise BadInput(f"this {type(pipe).__name__} is guarded already; {verb} the original pipeline instead")
    family = family_of(pipe)
    prediction_type(pipe.scheduler)
    return family


def attach(guard: Guard, pipe: Any) -> Any:
    """A twin of the pipeline with the same class, signature and weights, whose calls are guarded."""
    guard.tiny_decoder(pipe, check_pipeline(pipe, "attach to"))
    twin = copy.copy(pipe)
    twin.__class__ = twin_class(type(pipe))
    vars(twin)["_guardpaint"] = guard
    vars(twin)["scheduler"] = reserved(pipe.scheduler)
    return twin


class ReservedScheduler:
    """Marks the scheduler of a twin. A pipeline that was made of a twin's parts has it too, and cannot draw with it."""

    _guardpaint_original: type


def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise BadInput(
        "this scheduler belongs to a guarded pipeline, but the pipeline that uses it is not guarded. Make it from the "
        "original pipeline, then guard it with guard.attach(pipe)"
    )


_RESERVED: dict[type, type] = {}


def reserved(scheduler: Any) -> Any:
    """A copy of a scheduler with the same class name and configuration that refuses to step."""
    cls = type(scheduler)
    if issubclass(cls, ReservedScheduler):
        return scheduler
    if cls not in _RESERVED:
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_guardpaint_original": cls}
        doors = dict.fromkeys(("set_timesteps", "step"), refuse)
        _RESERVED[cls] = type(cls.__name__, (cls, ReservedScheduler), {**names, **doors})
    twin = copy.copy(scheduler)
    twin.__class__ = _RESERVED[cls]
    return twin


def freed(scheduler: Any) -> Any:
    """A private copy of a twin's scheduler that steps, for one guarded call."""
    run = copy.deepcopy(scheduler)
    if isinstance(run, ReservedScheduler):
        run.__class__ = run._guardpaint_original
    return run


_CLASSES: dict[type, type] = {}


def twin_class(cls: Any) -> type:
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
        return guarded_call(self, original, TwinCall(args, kwargs, arguments, safety_prompt, request_id))

    def set_attribute(self: Any, name: str, value: Any) -> None:
        cls.__setattr__(self, name, reserved(value) if name == "scheduler" and value is not None else value)

    parameters = list(signature.parameters.values())
    tail = [p for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD]
    call.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*(p for p in parameters if p not in tail), *extra, *tail]
    )
    body = {
        "__call__": call,
        "__setattr__": set_attribute,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
    }
    return _CLASSES.setdefault(cls, type(cls.__name__, (cls, GuardedTwin), body))


def guarded_call(twin: Any, original: Any, request: TwinCall) -> Any:
    """Run the pipeline's own __call__ on a private copy with a private scheduler, then release its images."""
    guard: Guard = twin._guardpaint
    run = copy.copy(twin)
    vars(run)["scheduler"] = freed(twin.scheduler)
    arguments = request.arguments
    call = guard.open(
        run,
        door="attach",
        prompts=image_prompts(arguments, request.safety_prompt),
        seeds=seed_rule(arguments.get("generator"), guard.config.seed),
        request_id=request.request_id,
        true_cfg=float(arguments.get("true_cfg_scale") or 1.0),
    )
    if vars(run).get("safety_checker") is not None:
        call.state.notes.append("the pipeline's own safety_checker runs before the final verdict")
    guard.running(call)
    try:
        with tapped(run, call.setup.family, call):
            out = original(run, *request.args, **request.kwargs)
    finally:
        guard.running(None)
    return guard.release(call, out, str(arguments.get("output_type", "pil")))
