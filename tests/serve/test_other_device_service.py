"""A guard on another device: attached to every family, with every repairer and rule, and behind the service."""

from __future__ import annotations

import pytest
import torch
from elsewhere import CALL, STRICT, busy_guard, rarely
from services import BAD

from guardpaint.guard import GuardPaint
from guardpaint.repair.native import NativeRepairer
from guardpaint.repair.pipeline import PipelineRepairer
from guardpaint.serve.jobs import Job
from guardpaint.serve.settings import Settings
from guardpaint.serve.worker import Worker
from guardpaint.testing import small, small_inpainters
from guardpaint.testing.doubles import FlagsBright, PaintsFlat
from guardpaint.testing.other_device import OTHER, other_device


@pytest.fixture(autouse=True)
def device():
    with other_device() as device:
        yield device


def drawn(guard, family):
    pipe = small.pipeline(family).to(OTHER)
    return guard.attach(pipe)("a person", generator=torch.Generator().manual_seed(1), output_type="pt", **CALL)


@pytest.mark.parametrize("family", ["sd", "flux", *rarely("sdxl", "sd3")])
def test_stage_generation(family):
    """Views, audits, tournaments, reinsertion and the final verdict run with base and guard on the device."""
    out = drawn(busy_guard(OTHER), family)
    report = out.safety[0]
    assert any(step.tournaments for step in report.steps) and not report.errors
    assert not report.to_html().startswith("error")


@pytest.mark.parametrize("family", ["sd", *rarely("sd3")])
def test_stage_generation_with_native_repair(family):
    assert not drawn(busy_guard(OTHER, NativeRepairer()), family).safety[0].errors


@pytest.mark.slow
def test_stage_generation_with_a_pipeline_that_repairs():
    repairer = PipelineRepairer(small_inpainters.inpainting("sdxl"), steps=2)
    assert not drawn(busy_guard(OTHER, repairer), "sdxl").safety[0].errors


RULES = ("direct_blend", "ddpm_noise", "ddim_inversion", "x0_substitution", "flow_ode")


@pytest.mark.parametrize("rule", ["held_substitution", "null_text", *rarely(*RULES)])
def test_stage_reinsertion(rule):
    """Repairs are accepted, and each rule puts them back on the device."""
    own = GuardPaint(FlagsBright(3.0), PaintsFlat(0.1)).config
    config = own.with_(reinsertion=rule, on_error="raise", audits=2, audit_start=0.3, f_gate="off", p_gate="off")
    guard = GuardPaint(FlagsBright(3.0), PaintsFlat(0.1), policy=STRICT, config=config).to(OTHER)
    report = drawn(guard, "flux" if rule == "flow_ode" else "sd").safety[0]
    accepted = [t for step in report.steps for t in step.tournaments if t.winner is not None]
    assert accepted and not report.errors


def test_stage_service():
    """A worker draws in its own thread, sends previews, and audits an upload."""
    guard = busy_guard(OTHER)
    worker = Worker(guard, small.pipeline("sd").to(OTHER), CALL, Settings(keys={}))
    try:
        seen = []
        job = Job("a person", 1, worker.ask, "ann", on_step=lambda *step: seen.append(step))
        worker.submit([job])
        done = job.future.result(120)
        assert done.report.steps and len(seen) == CALL["num_inference_steps"]
        assert isinstance(worker.guard, GuardPaint) and worker.guard.audit_image(torch.rand(3, 64, 64), "a") is not None
    finally:
        worker.close()


def test_stage_saved_guard(tmp_path):
    """A guard on the device writes the folder that it would write from the CPU."""
    busy_guard(OTHER).save_pretrained(tmp_path / "there")
    busy_guard("cpu").save_pretrained(tmp_path / "here")
    for file in sorted((tmp_path / "here").rglob("*.safetensors")):
        assert file.read_bytes() == (tmp_path / "there" / file.relative_to(tmp_path / "here")).read_bytes(), file.name
    assert BAD.size == (64, 64)
    assert GuardPaint.from_pretrained(tmp_path / "there").weight_hashes() == busy_guard(OTHER).weight_hashes()
