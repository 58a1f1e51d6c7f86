"""The first door: `attach` gives a guarded twin of a pipeline."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from guardpaint.config import GuardConfig
from guardpaint.doors.calls import image_prompts, seed_rule
from guardpaint.draft import schedule
from guardpaint.draft.families import FAMILIES, family_of
from guardpaint.draft.family import Family
from guardpaint.draft.tap import tapped
from guardpaint.errors import BadInput
from guardpaint.loop.call import GuardedCall
from guardpaint.types import JsonDict


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
    callers: Sequence[JsonDict] | None


def check_pipeline(pipe: Any, verb: str) -> Family:
    """The pipeline's family, if it can be guarded and is not guarded already."""
    if isinstance(pipe, GuardedTwin):
        raise BadInput(f"this {type(pipe).__name__} is guarded already; {verb} the original pipeline instead")
    family = family_of(pipe)
    schedule.check(pipe.scheduler)
    return family


def attach(guard: Guard, pipe: Any) -> Any:
    """A twin of the pipeline with the same class, signature and weights, whose calls are guarded."""
    guard.tiny_decoder(pipe, check_pipeline(pipe, "attach to"))
    twin = copy.copy(pipe)
    twin.__class__ = twin_class(type(pipe))
    vars(twin)["_guardpaint"] = guard
    for name in ("scheduler", *DENOISERS & vars(pipe).keys()):
        vars(twin)[name] = reserved(name, vars(pipe)[name])
    return twin


class Reserved:
    """Marks scheduler and denoiser of a twin. A pipeline made of a twin's parts has them too, and cannot draw."""

    _guardpaint_original: type


DENOISERS = frozenset(f.denoiser for f in FAMILIES)


def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise BadInput(
        f"this {type(self).__name__} belongs to a guarded pipeline, but the pipeline that uses it is not guarded. Make "
        "it from the original pipeline, then guard it with guard.attach(pipe)"
    )


_RESERVED: dict[type, type] = {}


def reserved_class(cls: type, *methods: str) -> type:
    """A subclass of the same name whose `methods` refuse; made once per class.

    It counts as equal to the original class: diffusers' `from_pipe` compares classes, and without this it would leave
    the part out and complain of something else.
    """
    if cls not in _RESERVED:

        class Equal(type(cls)):  # type: ignore[misc]
            def __eq__(self, other: object) -> bool:
                return self is other or other is cls

            def __hash__(self) -> int:
                return hash(cls)

        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_guardpaint_original": cls}
        _RESERVED[cls] = Equal(cls.__name__, (cls, Reserved), {**names, **dict.fromkeys(methods, refuse)})
    return _RESERVED[cls]


def reserved(name: str, part: Any) -> Any:
    """A pipeline's part as its twin holds it: scheduler and denoiser refuse to work, other parts stay as they are."""
    if part is None or isinstance(part, Reserved):
        return part
    if name == "scheduler":
        twin = copy.copy(part)
        twin.__class__ = reserved_class(type(part), "set_timesteps", "step")
        return twin
    if name in DENOISERS:
        if isinstance(vars(part).get("_modules", {}).get("_orig_mod"), Reserved):
            raise BadInput(
                f"{name}: compiled from the part of a guarded pipeline. Call twin.{name}.compile(), or compile the "
                "original pipeline's part"
            )
        return with_state_of(part, reserved_class(type(part), "__call__"))
    return part


def freed(part: Any) -> Any:
    """A twin's scheduler or denoiser as one guarded call uses it; the scheduler is a private copy."""
    if not isinstance(part, Reserved):
        return part
    if "__call__" in vars(type(part)):
        return with_state_of(part, part._guardpaint_original)
    run = copy.deepcopy(part)
    run.__class__ = part._guardpaint_original
    return run


def with_state_of(module: Any, cls: type) -> Any:
    """An object of this class that shares the module's whole state, also what is set on either of them later."""
    twin: Any = object.__new__(cls)
    object.__setattr__(twin, "__dict__", vars(module))
    return twin


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
        inspect.Parameter("callers", inspect.Parameter.KEYWORD_ONLY, default=None),
    ]

    @functools.wraps(original)
    def call(
        self: Any,
        *args: Any,
        safety_prompt: Any = None,
        request_id: str | None = None,
        callers: Sequence[JsonDict] | None = None,
        **kwargs: Any,
    ) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        arguments.update(arguments.pop("kwargs", {}))
        return guarded_call(self, original, TwinCall(args, kwargs, arguments, safety_prompt, request_id, callers))

    def set_attribute(self: Any, name: str, value: Any) -> None:
        cls.__setattr__(self, name, reserved(name, value))

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
    for name in ("scheduler", *DENOISERS & vars(run).keys()):
        vars(run)[name] = freed(vars(run)[name])
    arguments = request.arguments
    call = guard.open(
        run,
        door="attach",
        prompts=image_prompts(arguments, request.safety_prompt),
        seeds=seed_rule(arguments.get("generator"), guard.config.seed),
        request_id=request.request_id,
        true_cfg=float(arguments.get("true_cfg_scale") or 1.0),
        callers=request.callers,
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
