"""A second device without the hardware: tensors that say they are on `cuda:0`, compute on the CPU, and do not mix.

    with other_device():
        guard.to(OTHER).attach(pipe.to(OTHER))(prompt)     # raises where a CPU tensor meets one of the other device

The rules of mixing are CUDA's: CPU tensors of zero dimensions may join element-wise arithmetic, CPU indices may index,
`copy_` and `to` cross over, and everything else raises. Generators belong to a device, `numpy()` wants `cpu()` first,
and what `torch.save` wrote comes back where it was unless `map_location` says otherwise.

Not modelled: what CUDA has no kernel for, autocast, memory and speed, more than one device, child processes, and a
generator of the device that is given to the CPU. Moves name the index: `to("cuda:0")`, not `to("cuda")`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._device import _device_constructors

from guardpaint.errors import BadInput
from guardpaint.testing.other_tensor import (
    GENERATOR,
    LOADING,
    OTHER,
    MixedDevices,
    OtherGenerator,
    OtherTensor,
    check_generator,
    compute,
    is_other,
    restored,
    unwrapped,
)

__all__ = ["OTHER", "MixedDevices", "OtherTensor", "other_device"]

FACTORIES = (
    "arange", "arange.start", "arange.start_step", "linspace", "logspace", "range", "range.step", "eye", "eye.m",
    "randperm", "randperm.generator", "tril_indices", "triu_indices",
)  # fmt: skip
"""Operations that torch would write into an empty tensor and resize it, which a wrapper cannot do."""


@contextmanager
def kernels() -> Iterator[None]:
    """Operations that make tensors of the other device, and those that torch calls below `__torch_dispatch__`."""

    def anything(func: Any, *args: Any, **kwargs: Any) -> Any:
        return compute(func, args, kwargs)

    def factory(name: str) -> Callable[..., Any]:
        packet, _, overload = name.partition(".")
        func = getattr(getattr(torch.ops.aten, packet), overload or "default")
        return lambda *args, **kwargs: made(func, args, kwargs)

    everything, some = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    try:
        for key in ("CUDA", "Lazy"):
            everything.fallback(anything, key)
            for name in FACTORIES:
                some.impl(name, factory(name), key)
        yield
    finally:
        some._destroy()
        everything._destroy()


def made(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A new tensor of the other device."""
    check_generator(kwargs.get("generator"))
    return OtherTensor(func(*args, **{**kwargs, "device": torch.device("cpu"), "pin_memory": False}))


class Generators(type):
    """Makes `torch.Generator(device)` inside the context, and knows all generators as its instances."""

    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        return OtherGenerator() if is_other(device) else GENERATOR(device)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, GENERATOR)


class AnyGenerator(metaclass=Generators):
    """Stands for `torch.Generator` inside the context."""


def converting(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.tensor` and `torch.as_tensor`, which build on the CPU and move where `__torch_dispatch__` cannot see."""

    def convert(data: Any, *args: Any, device: Any = None, **options: Any) -> Any:
        data = unwrapped(data) if isinstance(data, list | tuple) else data
        if device is None or not is_other(device):
            return original(data, *args, device=device, **options)
        if isinstance(data, OtherTensor):
            return original(data, *args, **options)
        wanted = options.pop("requires_grad", False)
        moved = original(data, *args, device="cpu", **options).to(OTHER)
        return moved.requires_grad_() if wanted else moved

    return convert


@contextmanager
def accelerated() -> Iterator[None]:
    """Accelerate puts models and batches on the other device."""
    from accelerate.state import AcceleratorState

    with patch.dict(os.environ, ACCELERATE_TORCH_DEVICE=str(OTHER)):
        AcceleratorState._reset_state(True)
        try:
            yield
        finally:
            AcceleratorState._reset_state(True)


def moving(original: Callable[..., Any]) -> Callable[..., Any]:
    """`nn.Module._apply` that keeps parameters the objects that they are, as it does between real devices."""

    def apply(self: nn.Module, fn: Any, recurse: bool = True) -> Any:
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return original(self, fn, recurse)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    return apply


def loading(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.load` that puts tensors where they were, or where `map_location` says."""

    def load(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        LOADING.to_cpu = map_location is not None and not is_other(map_location)
        try:
            return original(file, "cpu", *args, **kwargs)
        finally:
            LOADING.to_cpu = False

    return load


@contextmanager
def other_device() -> Iterator[torch.device]:
    """Tensors and modules can be moved to `OTHER` inside, in all threads of this process."""
    if torch.cuda.is_available():
        raise BadInput("the other device is a stand-in for CUDA, which this machine has; use that")
    _device_constructors()  # remembered by torch at the first call: these should be its own
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.cuda, "_lazy_init", lambda: None))
        stack.enter_context(kernels())
        stack.enter_context(patch.object(nn.Module, "_apply", moving(nn.Module._apply)))
        stack.enter_context(patch.object(torch, "load", loading(torch.load)))
        stack.enter_context(patch.object(torch, "Generator", AnyGenerator))
        stack.enter_context(patch.object(torch, "tensor", converting(torch.tensor)))
        stack.enter_context(patch.object(torch, "as_tensor", converting(torch.as_tensor)))
        stack.enter_context(torch.serialization.safe_globals([restored]))
        stack.enter_context(accelerated())
        yield OTHER
