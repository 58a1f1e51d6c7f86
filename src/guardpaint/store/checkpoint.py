"""Saving and loading components: config.json + model.safetensors, atomic and strict."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from guardpaint.errors import BadCheckpoint, GuardPaintError

M = TypeVar("M", bound=nn.Module)
WEIGHTS = "model.safetensors"
CONFIG = "config.json"


def write_atomic(path: Path, data: bytes) -> None:
    """Write to a sibling file, sync, rename: a reader sees the old file or the new one, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def write_tensors(path: Path, value: Any) -> None:
    """torch.save, whole or not at all."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    write_atomic(path, buffer.getvalue())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadCheckpoint(f"{path}: missing; is {path.parent} a GuardPaint checkpoint?") from error
    except OSError as error:
        raise BadCheckpoint(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{path}: not valid JSON ({error}); the file may be half-written") from error


def save_module(module: nn.Module, config: dict[str, Any], directory: Path, dtype: torch.dtype | None) -> None:
    """Config and weights of one component; floats in `dtype` when given (assets ship as fp16)."""
    from safetensors.torch import save

    state = {
        k: (v.to(dtype) if dtype is not None and v.is_floating_point() else v).contiguous()
        for k, v in module.state_dict().items()
    }
    write_atomic(directory / WEIGHTS, save(state))
    write_json(directory / CONFIG, config)


def read_shape(directory: Path, kind: str) -> dict[str, Any]:
    """The configuration a module of this kind was saved with."""
    values = read_json(directory / CONFIG)
    if not isinstance(values, dict) or values.pop("kind", None) != kind:
        raise BadCheckpoint(f"{directory / CONFIG}: not the configuration of kind {kind}")
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}


def loaded(make: Callable[[], M], directory: Path) -> M:
    """The module that `make` builds from a saved configuration, with its weights.

    The sizes that the configuration names are compared with those of the weights before any memory is taken for them.
    """
    path = directory / WEIGHTS
    state = read_tensors(path)
    try:
        with torch.device("meta"):
            plan = make().state_dict()
    except GuardPaintError:
        raise
    except Exception as error:  # whatever a constructor makes of strange numbers
        raise BadCheckpoint(f"{directory / CONFIG}: describes no model ({type(error).__name__}: {error})") from error
    check_fit(plan, state, path)
    module = make()
    load_strict(module, state, path)
    return module


def load_state(module: nn.Module, directory: Path) -> None:
    """Load weights strictly: every key, every shape, every number finite."""
    path = directory / WEIGHTS
    load_strict(module, read_tensors(path), path)


def read_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise BadCheckpoint(f"{path}: no such weights file")
    try:
        return load_file(path)
    except (SafetensorError, ValueError, OSError) as error:
        raise BadCheckpoint(f"{path}: not a complete safetensors file ({error}); fetch it again") from error


def load_strict(module: nn.Module, state: dict[str, Tensor], path: Path) -> None:
    wanted = module.state_dict()
    check_fit(wanted, state, path)
    for key, tensor in state.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise BadCheckpoint(f"{path}: {key} holds NaN or infinity")
    module.load_state_dict({k: v.to(wanted[k].dtype) for k, v in state.items()})


def check_fit(wanted: Mapping[str, Tensor], state: Mapping[str, Tensor], path: Path) -> None:
    """Raise BadCheckpoint unless both have the same tensors by name and shape."""
    missing, extra = sorted(set(wanted) - set(state)), sorted(set(state) - set(wanted))
    if missing or extra:
        raise BadCheckpoint(
            f"{path}: does not fit this config ({len(missing)} tensors missing {missing[:3]}, "
            f"{len(extra)} unexpected {extra[:3]})"
        )
    for key, tensor in state.items():
        if tensor.shape != wanted[key].shape:
            raise BadCheckpoint(
                f"{path}: {key} has shape {tuple(tensor.shape)}, the config needs {tuple(wanted[key].shape)}"
            )


def fingerprint(module: nn.Module) -> str:
    """SHA-256 over names, shapes and bytes of a module's state: which weights ran."""
    digest = hashlib.sha256()
    for key, tensor in sorted(module.state_dict().items()):
        digest.update(f"{key}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def canonical_fingerprint(module: nn.Module) -> str:
    """SHA-256 over names, shapes and values of a module's state, the same whether it was loaded in fp32, bf16 or fp16.

    Values count as bf16 has them, and those too small for fp16's full precision as 0.
    """
    digest = hashlib.sha256()
    for key, tensor in sorted(module.state_dict().items()):
        value = tensor.detach().cpu()
        if value.is_floating_point():
            value = value.to(torch.bfloat16)
            value = torch.where(value.abs() < 2**-14, torch.zeros_like(value), value)
        digest.update(f"{key}{tuple(value.shape)}".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def short_hash(*values: Any) -> str:
    """Twelve hex digits over any JSON-like values; others count by their text."""
    return sha256_hex(json.dumps(values, sort_keys=True, default=str))[:12]


def sha256_hex(value: str | bytes) -> str:
    """SHA-256 in hex, of bytes or of a text's UTF-8 (lone surrogates included)."""
    return hashlib.sha256(value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value).hexdigest()
