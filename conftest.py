"""Shapes in signatures are checked here, and only here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

os.environ["OMP_NUM_THREADS"] = "1"  # a process started by a test adds up sums in the same order as this one
install_import_hook(["guardpaint", "paperdolls"], "typecheck.checked")

import torch  # noqa: E402

from guardpaint.testing import small  # noqa: E402

torch.set_num_threads(1)
FAMILIES = tuple(small.BASES)
_PIPES: dict[str, object] = {}


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def pipe(family):
    """One small random pipeline per family, made once; tests attach to it and must leave it alone."""
    if family not in _PIPES:
        _PIPES[family] = small.pipeline(family)
    return _PIPES[family]


@pytest.fixture
def sd_pipe():
    """A fresh SD pipeline a test may change."""
    return small.pipeline("sd")


@pytest.fixture
def weights() -> Path:
    """The real TAESD and LPIPS weights, where they are."""
    root = Path(os.environ.get("GUARDPAINT_WEIGHTS", Path(__file__).parents[1] / "shared" / "weights"))
    if not (root / "taesd" / "config.json").exists():
        pytest.skip(f"no real weights at {root}; set GUARDPAINT_WEIGHTS to run this test")
    return root
