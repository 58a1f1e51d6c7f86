"""Saving and loading components: config.json + model.safetensors, atomic and strict."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from guardpaint.errors import BadCheckpoint

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
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
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
    if values.pop("kind", None) != kind:
        raise BadCheckpoint(f"{directory / CONFIG}: not a {kind}")
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}


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
    except SafetensorError as error:
        raise BadCheckpoint(f"{path}: not a complete safetensors file ({error}); fetch it again") from error


def load_strict(module: nn.Module, state: dict[str, Tensor], path: Path) -> None:
    wanted = module.state_dict()
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
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise BadCheckpoint(f"{path}: {key} holds NaN or infinity")
    module.load_state_dict({k: v.to(wanted[k].dtype) for k, v in state.items()})


def resolve(path_or_repo: str | Path) -> Path:
    """A local directory, or a hub repository downloaded to the cache (only when the name is not a path)."""
    path = Path(path_or_repo)
    if path.is_dir():
        return path
    text = str(path_or_repo)
    if path.exists() or text.startswith((".", "/", "~")) or text.count("/") != 1:
        raise BadCheckpoint(f"{text}: not a directory, and not a hub id of the form owner/name")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(text))
    except Exception as error:
        raise BadCheckpoint(f"{text}: no such directory, and not to be had from the hub ({error})") from error


def fingerprint(module: nn.Module) -> str:
    """SHA-256 over names, shapes and bytes of a module's state: which weights ran."""
    digest = hashlib.sha256()
    for key, tensor in sorted(module.state_dict().items()):
        digest.update(f"{key}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def short_hash(*values: Any) -> str:
    """Twelve hex digits over any JSON-like values; others count by their text."""
    return sha256_hex(json.dumps(values, sort_keys=True, default=str))[:12]


def sha256_hex(value: str | bytes) -> str:
    """SHA-256 in hex, of bytes or of a text's UTF-8 (lone surrogates included)."""
    return hashlib.sha256(value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value).hexdigest()
