"""The tap: sees every denoiser call and every scheduler step of one request, and may change both.

Reversible fittings on one pipeline object, none of them on a model: `scheduler.step` is wrapped, and the denoiser
and VAE attributes are replaced by doorways that share the module's state and announce what passes through.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from guardpaint.draft.codec import Casts, casts
from guardpaint.draft.conditioning import DenoiserCall
from guardpaint.draft.family import Family
from guardpaint.errors import BadInput


@runtime_checkable
class Listener(Protocol):
    """Receives the events of the tap. A subclass defines only the methods whose events it uses or changes."""

    def before_call(self, call: DenoiserCall) -> DenoiserCall:
        """A denoiser call is about to be made; returns the call to make."""
        return call

    def before_step(self, output: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        """A scheduler step is about to be taken; returns the model output to take it with."""
        return output

    def after_step(self, output: Tensor, timestep: Any, sample: Tensor, stepped: Tensor) -> Tensor:
        """A scheduler step was taken; returns the latents to go on from."""
        return stepped

    def decoded(self, images: Tensor) -> None:
        """The pipeline's VAE has decoded these images."""
        return None


def doorway(module: Any, methods: dict[str, Any]) -> Any:
    """The module seen through other methods: same class, same state, nothing of the original changed."""
    cls = type(module)
    door: Any = object.__new__(type(cls.__name__, (cls,), methods))
    object.__setattr__(door, "__dict__", vars(module))
    return door


@contextmanager
def tapped(pipe: Any, family: Family, listener: Listener) -> Iterator[None]:
    """Fit the tap to this pipeline object for the duration of one request."""
    scheduler, parts = pipe.scheduler, vars(pipe)
    if "step" in vars(scheduler):
        raise BadInput(f"{type(scheduler).__name__}.step is wrapped already: one guarded call at a time per object")
    module, vae, original = parts[family.denoiser], parts["vae"], scheduler.step
    ears: list[Listener] = [listener]
    own_cache_hooks(module)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        outgoing = DenoiserCall(module, args, kwargs)
        outgoing = ears[0].before_call(outgoing) if ears else outgoing
        return module(*outgoing.args, **outgoing.kwargs)

    def decode(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = vae.decode(*args, **kwargs)
        if ears:
            ears[0].decoded(result[0])
        return result

    casting = Casts(vae) if casts(vae) else None

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert casting is not None
        casting.to(*args, **kwargs)
        return self

    methods: dict[str, Any] = {"decode": decode}
    if casting is not None:
        methods |= {"to": to, "dtype": property(lambda self: casting.dtype())}

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

    try:
        parts[family.denoiser] = doorway(module, {"__call__": call})
        parts["vae"] = doorway(vae, methods)
        scheduler.step = step
        yield
    finally:
        ears.clear()
        if casting is not None:
            casting.close()
        vars(scheduler).pop("step", None)
        parts[family.denoiser], parts["vae"] = module, vae


def own_cache_hooks(module: Any) -> None:
    """diffusers makes a transformer's hook registry at its first call; it must not belong to a doorway."""
    from diffusers.hooks import HookRegistry
    from diffusers.models.cache_utils import CacheMixin

    if isinstance(module, CacheMixin):
        HookRegistry.check_if_exists_or_initialize(module)
