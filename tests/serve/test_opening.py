"""How a service opens its base: with the options of the command line, in every process that draws."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from guardpaint.bases import BaseOptions
from guardpaint.draft.options import LoadOptions, Lora
from guardpaint.serve.engine import Engine
from guardpaint.serve.jobs import Ask
from guardpaint.serve.settings import Settings
from guardpaint.serve.start import Options, absolute, load_worker, recipe
from guardpaint.testing import small

OPENING = BaseOptions(LoadOptions(dtype="bf16"), steps=3, guidance=2.0, size=32)


def options(base="tiny-sd", **more):
    return Options(
        base, "tiny", None, "127.0.0.1", 0, None, 8, 1, False, None, None, None, None, weak=("calibration", "scope"), **more
    )  # fmt: skip


def test_every_process_loads_with_the_same_options():
    """The recipe is what the child process and the replicas of a cluster are sent."""
    guard, pipe, call = pickle.loads(pickle.dumps(recipe(options(opening=OPENING))))()
    assert pipe.unet.dtype == pipe.text_encoder.dtype == torch.bfloat16
    assert Engine(pipe, call).ask == Ask(3, 2.0, (32, 32))
    assert next(guard.parts.auditor.parameters()).dtype == torch.float32, "scoring stays in fp32"


def test_the_guard_of_a_worker_is_where_its_pipeline_runs(monkeypatch):
    moved = []
    guard = type(small.guard())
    monkeypatch.setattr(guard, "to", lambda self, device: moved.append(str(device)) or self)
    worker = load_worker(options(), Settings())
    worker.close()
    assert moved == ["cpu"] and worker.facts.ask == Ask(50, 7.5, (64, 64))


@pytest.mark.parametrize(("family", "ask"), [("sd3", Ask(28, 7.0, (64, 64))), ("flux", Ask(28, 3.5, (512, 512)))])
def test_a_base_without_call_arguments_is_served_as_its_pipeline_draws(family, ask):
    assert Engine(small.pipeline(family), {}).ask == ask


def test_replicas_find_loras_by_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("style").mkdir()
    given = BaseOptions(LoadOptions(loras=(Lora("style", 0.5), Lora("hub:o/style"))))
    load = absolute(options(opening=given)).opening.load
    assert load.loras == (Lora(str(tmp_path / "style"), 0.5), Lora("hub:o/style"))


def test_a_service_takes_a_seam_metric_by_name(tmp_path, monkeypatch):
    """The processes that draw are sent it, and the file of its weights by an absolute path."""
    guard, *_ = pickle.loads(pickle.dumps(recipe(options(seam="pixels"))))()
    assert guard.parts.seam.name == "pixels"
    monkeypatch.chdir(tmp_path)
    Path("vgg.safetensors").touch()
    assert absolute(options(seam="lpips_vgg:vgg.safetensors")).seam == f"lpips_vgg:{tmp_path / 'vgg.safetensors'}"
    assert absolute(options(seam="pixels")).seam == "pixels" and absolute(options()).seam is None
