"""A second device without the hardware: tensors that say they are on `cuda:0`, compute on the CPU, and do not mix.

    with other_device():
        guard.to(OTHER).attach(pipe.to(OTHER))(prompt)     # raises where a CPU tensor meets one of the other device

The rules of mixing are CUDA's: CPU tensors of zero dimensions may join element-wise arithmetic, CPU indices may index,
`copy_` and `to` cross over, and everything else raises. Generators belong to a device, `numpy()` wants `cpu()` first,
and what `torch.save` wrote comes back where it was unless `map_location` says otherwise. Not modelled: what CUDA has
no kernel for, its memory, its speed, more than one device, and child processes, which are outside the context.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from guardpaint.errors import BadInput

OTHER = torch.device("cuda", 0)
"""What tensors of the other device report."""


class MixedDevices(RuntimeError):
    """An operation got tensors of both devices, as CUDA refuses it."""


class OtherTensor(Tensor):
    """A tensor of the other device; `inner` is the CPU tensor that computes."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, requires_grad: bool = False) -> OtherTensor:
        made: OtherTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=OTHER,
            requires_grad=requires_grad,
        )
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})

    def _put(self, value: Tensor) -> None:
        """`tensor.data = value`, for the shape that torch knows and for the numbers."""
        if not isinstance(value, OtherTensor):
            raise NotImplementedError("other device: `.data` of its tensors takes tensors of the same device only")
        DATA.__set__(self, value)
        self.inner = value.inner

    data = property(lambda self: self.detach(), _put)  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{self.inner!r} on {OTHER}"

    def __deepcopy__(self, memo: dict[int, Any]) -> OtherTensor:
        if id(self) not in memo:
            memo[id(self)] = same_role(OtherTensor(self.inner.clone(), self.requires_grad), self)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return restored, (self.inner, self.requires_grad, bool(getattr(self, "_is_param", False)))


DATA: Any = torch._C.TensorBase.data


def same_role(copy: OtherTensor, original: Tensor) -> OtherTensor:
    """The copy, marked as a parameter if the original is one."""
    if getattr(original, "_is_param", False):
        copy._is_param = True  # type: ignore[attr-defined]
    return copy


LOADING = threading.local()


def restored(inner: Tensor, requires_grad: bool, parameter: bool) -> Tensor:
    """What `torch.load` makes of a saved tensor of the other device."""
    if getattr(LOADING, "to_cpu", False):
        plain = inner.requires_grad_(requires_grad)
        return nn.Parameter(plain, requires_grad) if parameter else plain
    made = OtherTensor(inner, requires_grad)
    if parameter:
        made._is_param = True  # type: ignore[attr-defined]
    return made


# What an operation may mix ----------------------------------------------------------------------------------

ALIKE = frozenset((
    "stack", "cat", "mm", "bmm", "addmm", "addmv", "addbmm", "baddbmm", "mv", "dot", "vdot", "linear",
    "convolution", "convolution_backward", "embedding", "embedding_dense_backward", "gather", "scatter",
    "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_select", "index_add",
    "index_add_", "index_copy", "index_copy_", "masked_select", "masked_scatter", "masked_scatter_", "take",
    "searchsorted", "bucketize", "equal", "native_layer_norm", "native_group_norm", "native_batch_norm",
    "grid_sampler_2d", "linalg_solve_ex", "_scaled_dot_product_attention_math", "nll_loss_forward",
))  # fmt: skip
"""Operations in which even CPU tensors of zero dimensions raise."""
CROSSING = frozenset(("copy_", "_to_copy", "_copy_from", "_foreach_copy_", "is_same_size", "set_data"))
"""Operations between devices."""
ON_CPU = {"_pack_padded_sequence": 1, "_pad_packed_sequence": 1}
"""Operations with an argument that must be on the CPU, by its position."""
INDEXED = frozenset(("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"))
MESSAGE = "Expected all tensors to be on the same device, but found at least two devices, {} and cpu! (in {})"


def name_of(func: Any) -> str:
    return str(func._schema.name).rpartition("::")[2]


def tensors_of(values: Any) -> Iterator[Tensor]:
    """All tensors in the arguments of an operation."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_of(value)


@cache
def written(func: Any) -> frozenset[str]:
    """Names of the arguments that the operation writes to."""
    return frozenset(a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def named(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name."""
    return {**{a.name: v for a, v in zip(func._schema.arguments, args, strict=False)}, **kwargs}


def check(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise as CUDA does if the tensors may not meet in this operation, or the generator is of the wrong device."""
    name = name_of(func)
    if name in CROSSING:
        return
    values = named(func, args, kwargs)
    if name in ON_CPU:
        place = func._schema.arguments[ON_CPU[name]].name
        lengths = values.pop(place)
        if isinstance(lengths, OtherTensor):
            raise MixedDevices(f"'{place}' argument should be a 1D CPU int64 tensor, but got a {OTHER} tensor")
    if name in INDEXED:
        indices = list(tensors_of([values.pop("indices")]))
        own = values.get("self", args[0])
        if not isinstance(own, OtherTensor) and any(isinstance(i, OtherTensor) for i in indices):
            raise MixedDevices(
                "indices should be either on cpu or on the same device as the indexed tensor (cpu), "
                f"but found {OTHER} (in {name})"
            )
    tensors = list(tensors_of(values.values()))
    others = sum(isinstance(t, OtherTensor) for t in tensors)
    if others:
        check_generator(values.get("generator"))
    if others in (0, len(tensors)):
        return
    targets = {id(t) for t in tensors_of([values[n] for n in written(func) if n in values])}
    for tensor in tensors:
        scalar = tensor.dim() == 0 and name not in ALIKE and id(tensor) not in targets
        if not isinstance(tensor, OtherTensor) and not scalar:
            raise MixedDevices(MESSAGE.format(OTHER, name))


def check_generator(generator: Any) -> None:
    if generator is not None and not of_other(generator):
        raise MixedDevices(f"Expected a '{OTHER.type}' device type for generator but found 'cpu'")


# Computing --------------------------------------------------------------------------------------------------


@cache
def composite(func: Any) -> bool:
    """Whether the operation is made of others, which are checked one by one."""
    return bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
        and not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CPU")
    )


@cache
def returned(func: Any) -> tuple[str | None, ...]:
    """For every result, the name of the argument that it is; None for a new tensor or a view."""
    owners = {}
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            for label in argument.alias_info.before_set:
                owners[label] = argument.name
    found: list[str | None] = []
    for result in func._schema.returns:
        labels = result.alias_info.before_set if result.alias_info is not None and result.alias_info.is_write else ()
        found.append(next((owners[label] for label in labels if label in owners), None))
    return tuple(found)


def unwrapped(value: Any) -> Any:
    return tree_map_only(OtherTensor, lambda t: t.inner, value)


def wrapped(value: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t if isinstance(t, OtherTensor) else OtherTensor(t), value)


def compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One operation with tensors of the other device, or one that makes such tensors."""
    if composite(func):
        return func.decompose(*args, **kwargs)
    check(func, args, kwargs)
    if name_of(func) == "_fused_sdp_choice":
        return 0  # plain arithmetic: which fused kernels there are depends on the device
    given, options = named(func, args, kwargs), dict(kwargs)
    goal = options.get("device")
    if goal is not None:
        options["device"] = torch.device("cpu") if is_other(goal) else goal
    if options.get("pin_memory"):
        options["pin_memory"] = False
    result = func(*unwrapped(args), **unwrapped(options))
    for tensor in tensors_of([given[name] for name in written(func) if name in given]):
        if isinstance(tensor, OtherTensor) and tensor.inner.shape != tensor.shape:
            raise NotImplementedError(f"other device: {func} changes the shape of an argument in place")
    owners = returned(func)
    if len(owners) == 1:
        return placed(result, owners[0], given, goal)
    if isinstance(result, tuple | list) and len(owners) == len(result):
        return tuple(placed(r, o, given, goal) for r, o in zip(result, owners, strict=True))
    return result


def placed(result: Any, owner: str | None, given: Mapping[str, Any], goal: Any) -> Any:
    """A result where it belongs: the argument that it is, a tensor of the device asked for, or one of this device."""
    if owner is not None:
        return given[owner]
    return result if goal is not None and not is_other(goal) else wrapped(result)


def is_other(device: Any) -> bool:
    return torch.device(device).type == OTHER.type


# Random numbers ---------------------------------------------------------------------------------------------


class OtherGenerator(torch.Generator):
    """A generator that belongs to the other device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return OTHER


def of_other(generator: Any) -> bool:
    return isinstance(generator, OtherGenerator)


class Generators(type):
    """Makes `torch.Generator(device)` inside the context, and knows all generators as its instances."""

    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        return OtherGenerator() if is_other(device) else GENERATOR(device)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, GENERATOR)


GENERATOR = torch.Generator


class AnyGenerator(metaclass=Generators):
    """Stands for `torch.Generator` inside the context."""


# The context ------------------------------------------------------------------------------------------------

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
        everything.fallback(anything, "CUDA")
        for name in FACTORIES:
            some.impl(name, factory(name), "CUDA")
        yield
    finally:
        some._destroy()
        everything._destroy()


def made(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A new tensor of the other device."""
    check_generator(kwargs.get("generator"))
    return OtherTensor(func(*args, **{**kwargs, "device": torch.device("cpu"), "pin_memory": False}))


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
    torch._C._ensureCUDADeviceGuardSet()
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.cuda, "_lazy_init", lambda: None))
        stack.enter_context(kernels())
        stack.enter_context(patch.object(nn.Module, "_apply", moving(nn.Module._apply)))
        stack.enter_context(patch.object(torch, "load", loading(torch.load)))
        stack.enter_context(patch.object(torch, "Generator", AnyGenerator))
        stack.enter_context(torch.serialization.safe_globals([restored]))
        stack.enter_context(accelerated())
        yield OTHER
