"""Tensors of the other device (`testing/other_device.py`): CPU tensors in a wrapper, and what they may meet."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, no_type_check  # a checker would look at every one of thousands of operations

import torch
from torch import Tensor, nn

OTHER = torch.device("cuda", 0)
"""What tensors of the other device report."""
PLACE = torch.device("lazy", 0)
"""Where torch's own code believes them to be: a device that every build of torch knows, that nobody uses, and whose
backward pass runs in the calling thread. A build without CUDA cannot differentiate tensors that it takes for CUDA's."""


class MixedDevices(RuntimeError):
    """An operation got tensors of both devices, as CUDA refuses it."""


@no_type_check
class OtherTensor(Tensor):
    """A tensor of the other device; `inner` is the CPU tensor that computes."""

    inner: Tensor  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor, requires_grad: bool = False) -> OtherTensor:
        made: OtherTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=PLACE,
            requires_grad=requires_grad,
        )
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return compute(func, args, kwargs or {})

    def _put(self, value: Tensor) -> None:
        """`tensor.data = value`, for the shape that torch knows and for the numbers."""
        if not isinstance(value, OtherTensor):
            raise NotImplementedError("other device: `.data` of its tensors takes tensors of the same device only")
        DATA.__set__(self, value)
        self.inner = value.inner

    device = property(lambda self: OTHER)
    is_cuda = property(lambda self: True)

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"can't convert {OTHER} device type tensor to numpy. Use Tensor.cpu() to copy it to the host")

    __array__ = numpy

    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(without_lists(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(without_lists(index), value)

    def tolist(self) -> Any:
        return self.inner.tolist()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """That of the inner tensor, so that shared memory is recognised."""
        return self.inner.untyped_storage()

    def new_tensor(self, data: Any, **options: Any) -> Tensor:  # type: ignore[override]
        made = torch.tensor(data, **{"dtype": self.dtype, **options, "device": "cpu"})
        return made.to(options.get("device", OTHER))

    data = property(lambda self: self.detach(), _put)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{self.inner!r} on {OTHER}"

    def __deepcopy__(self, memo: dict[int, Any]) -> OtherTensor:
        if id(self) not in memo:
            memo[id(self)] = same_role(OtherTensor(self.inner.clone(), self.requires_grad), self)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return restored, (self.inner, self.requires_grad, bool(getattr(self, "_is_param", False)))


DATA: Any = torch._C.TensorBase.data


def without_lists(index: Any) -> Any:
    """An index with tensors in place of lists, which torch would turn into tensors out of sight."""
    if isinstance(index, tuple):
        return tuple(without_lists(part) for part in index)
    return torch.tensor(unwrapped(index)) if isinstance(index, list) else index


def same_role(copy: OtherTensor, original: Tensor) -> OtherTensor:
    """The copy, marked as a parameter if the original is one."""
    if getattr(original, "_is_param", False):
        copy._is_param = True
    return copy


LOADING = threading.local()


def restored(inner: Tensor, requires_grad: bool, parameter: bool) -> Tensor:
    """What `torch.load` makes of a saved tensor of the other device."""
    if getattr(LOADING, "to_cpu", False):
        plain = inner.requires_grad_(requires_grad)
        return nn.Parameter(plain, requires_grad) if parameter else plain
    made = OtherTensor(inner, requires_grad)
    if parameter:
        made._is_param = True
    return made


# Random numbers ---------------------------------------------------------------------------------------------

GENERATOR = torch.Generator
SALT = 0x5EED


class OtherGenerator(torch.Generator):
    """A generator that belongs to the other device; as there, a seed gives other numbers than on the CPU."""

    alive: ClassVar[weakref.WeakSet[OtherGenerator]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.alive.add(self)
        self.manual_seed(0)

    def manual_seed(self, seed: int) -> OtherGenerator:
        super().manual_seed((seed ^ SALT << 16) % 2**63)
        return self

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return OTHER


def of_other(generator: torch.Generator) -> bool:
    """Whether it belongs to the other device. Torch hands an operation a new object for the same generator."""
    if isinstance(generator, OtherGenerator):
        return True
    state = generator.get_state()
    return any(torch.equal(g.get_state(), state) for g in OtherGenerator.alive)


@no_type_check
def check_generator(generator: torch.Generator | None) -> None:
    """Raise as CUDA does for a generator of the CPU."""
    if generator is not None and not of_other(generator):
        raise MixedDevices(f"Expected a '{OTHER.type}' device type for generator but found 'cpu'")


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
"""Operations with an argument that must be on the CPU, and a result that is, by their position."""
INDEXED = frozenset(("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"))
MESSAGE = "Expected all tensors to be on the same device, but found at least two devices, {} and cpu! (in {})"


@cache
def name_of(func: Any) -> str:
    return str(func._schema.name).rpartition("::")[2]


@no_type_check
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


@cache
def names_of(func: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in func._schema.arguments)


@no_type_check
def named(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name."""
    return {**dict(zip(names_of(func), args, strict=False)), **kwargs}


@no_type_check
def check(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise as CUDA does if the tensors may not meet in this operation, or the generator is of the wrong device."""
    name = name_of(func)
    if name in CROSSING:
        return
    values = named(func, args, kwargs)
    if name in ON_CPU:
        place = names_of(func)[ON_CPU[name]]
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


@no_type_check
def unwrapped(value: Any) -> Any:
    """The inner tensor of a tensor, also inside lists and dictionaries."""
    if isinstance(value, OtherTensor):
        return value.inner
    if isinstance(value, list | tuple):
        return type(value)([unwrapped(v) for v in value])
    return {k: unwrapped(v) for k, v in value.items()} if isinstance(value, dict) else value


@no_type_check
def wrapped(value: Any) -> Any:
    """A result of a computation as tensors of this device."""
    if isinstance(value, Tensor):
        return value if isinstance(value, OtherTensor) else OtherTensor(value)
    return type(value)([wrapped(v) for v in value]) if isinstance(value, list | tuple) else value


@no_type_check
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
        made = [placed(r, o, given, goal) for r, o in zip(result, owners, strict=True)]
        if name_of(func) in ON_CPU:
            made[1] = result[1]
        return tuple(made)
    return result


@no_type_check
def placed(result: Any, owner: str | None, given: Mapping[str, Any], goal: Any) -> Any:
    """A result where it belongs: the argument that it is, a tensor of the device asked for, or one of this device."""
    if owner is not None:
        return given[owner]
    return result if goal is not None and not is_other(goal) else wrapped(result)


@no_type_check
def is_other(device: Any) -> bool:
    return torch.device(device).type in (OTHER.type, PLACE.type)
