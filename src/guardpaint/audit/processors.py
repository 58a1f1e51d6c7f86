"""Processors of chat models: where torchvision is not installed, they open without the part that reads videos."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

VIDEO = "video_processor"


def chat_processor(folder: Path) -> Any:
    """The processor that lies beside a chat model's weights.

    transformers refuses to open one that also takes videos where torchvision is not installed, although pictures do
    not need it.
    """
    from transformers import PROCESSOR_MAPPING, AutoConfig, AutoProcessor

    if find_spec("torchvision") is None:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        known = PROCESSOR_MAPPING.get(type(config), None)
        if known is not None and VIDEO in known.get_attributes():
            return pictures_only(known).from_pretrained(folder, local_files_only=True)
    return AutoProcessor.from_pretrained(folder, local_files_only=True)


def pictures_only(processor: Any) -> Any:
    """A processor class without its video part. It keeps its name, which is written into saved folders."""

    class Pictures(processor):
        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in super().get_attributes() if name != VIDEO]

    Pictures.__name__ = processor.__name__
    return Pictures
