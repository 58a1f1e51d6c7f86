"""The tap: sees every denoiser call and every scheduler step of one request, and may change both.

Two reversible fittings on one pipeline object, none of them on a model:
`scheduler.step` is wrapped, and the denoiser attribute is replaced by a doorway that shares the module's
state and records what it is called with.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from guardpaint.draft.conditioning import DenoiserCall
from guardpaint.draft.family import Family


@runtime_checkable
class Listener(Protocol):
    """Who is told; `Request` is the one."""

    def before_call(self, call: DenoiserCall) -> DenoiserCall: ...

    def before_step(self, output: Tensor, timestep: Any, sample: Tensor) -> Tensor: ...

    def after_step(self, output: Tensor, timestep: Any, sample: Tensor, stepped: Tensor) -> Tensor: ...


def doorway(module: Any, listener: Listener) -> Any:
    """The module with its calls announced: same class, same state, nothing of the original changed."""
    cls = type(module)

    def announced(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = listener.before_call(DenoiserCall(module, args, kwargs))
        return module(*call.args, **call.kwargs)

    door: Any = object.__new__(type(cls.__name__, (cls,), {"__call__": announced}))
    object.__setattr__(door, "__dict__", vars(module))
    return door


@contextmanager
def tapped(pipe: Any, family: Family, listener: Listener) -> Iterator[None]:
    """Fit the tap to this pipeline object for the duration of one request."""
    scheduler = pipe.scheduler
    module = vars(pipe)[family.denoiser]
    original = scheduler.step

    @functools.wraps(original)
    def step(model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
        model_output = listener.before_step(model_output, timestep, sample)
        result = original(model_output, timestep, sample, *args, **kwargs)
        stepped = listener.after_step(model_output, timestep, sample, result[0])
        if stepped is result[0]:
            return result
        if isinstance(result, tuple):
            return (stepped, *result[1:])
        result["prev_sample"] = stepped
        return result

    scheduler.step = step
    vars(pipe)[family.denoiser] = doorway(module, listener)
    try:
        yield
    finally:
        del scheduler.step
        vars(pipe)[family.denoiser] = module
