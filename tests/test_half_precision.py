"""Folders in half precision, as most of the hub's are: every family loads in one precision and draws under guard."""

from __future__ import annotations

import importlib
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

from guardpaint.errors import BadInput
from guardpaint.testing import small

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture(scope="module")
def bench():
    """Modules of the folder `bench` by name, imported as its scripts import them."""
    sys.path.insert(0, str(BENCH))
    yield importlib.import_module
    sys.path.remove(str(BENCH))


@pytest.fixture(scope="module")
def guard(bench):
    return bench("half_precision").short_guard()


@pytest.mark.parametrize(("family", "dtype"), product(small.BASES, ("fp32", "fp16", "bf16")))
def test_a_folder_of_any_precision_draws_a_guarded_step_in_fp32(bench, guard, family, dtype, tmp_path):
    script = bench("half_precision")
    row = script.step(script.stored(family, dtype, tmp_path / "base"), guard)
    assert row["ok"] and row["error"] == "" and row["status"] == "blocked", row


def test_one_guarded_step_in_bf16(bench, guard, tmp_path):
    script = bench("half_precision")
    row = script.step(script.stored("sd", "bf16", tmp_path / "base"), guard, "bf16")
    assert row["ok"] and row["precisions"] == "torch.bfloat16", row


def test_the_libraries_alone_mix_precisions(bench, tmp_path):
    """What the loader is for; once this fails, they have mended it."""
    from diffusers import DiffusionPipeline

    folder = bench("half_precision").stored("sd", "fp16", tmp_path)
    pipe = DiffusionPipeline.from_pretrained(folder, use_safetensors=True, local_files_only=True)
    modules = [m for m in pipe.components.values() if isinstance(m, nn.Module)]
    assert {m.dtype for m in modules} == {torch.float16, torch.float32}


def test_the_parts_of_a_results_file_keep_each_other(bench, tmp_path, monkeypatch):
    results = bench("dayone_results")
    other = {"other": lambda rows: {"other.rows": {"value": len(rows), "n": len(rows)}}}
    monkeypatch.setattr(results, "MAKERS", results.MAKERS | other)
    out = tmp_path / "dayone.json"
    row = {"family": "sd", "stored": "fp16", "loaded": "fp32", "ok": True}
    results.write("half_precision", [row, {**row, "family": "flux", "ok": False}], out)
    results.write("other", [{"colour": "red"}], out)
    found = results.write("other", [{"colour": "blue"}, {"colour": "grey"}], out)
    assert found["half_precision_families_ok"]["value"] == 1 and not found["half_precision_families_ok"]["met"]
    assert found["other.rows"]["value"] == 2 and "half_precision_steps_ok" not in found
    half = results.write("half_precision", [row, {**row, "loaded": "bf16"}], out)
    assert half["half_precision_steps_ok"]["met"] and half["other.rows"]["value"] == 2
    with pytest.raises(BadInput, match="part 'heat': the parts are half_precision, .*other"):
        results.write("heat", [], out)
