"""Few-step adapters: a random LoRA, merged into small pipelines and sampled as its publisher would."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from repairs import KNOBS, request

from guardpaint.errors import BadCheckpoint, BadConfig
from guardpaint.repair.folders import one_file, sampler
from guardpaint.repair.inpainter import Inpainter
from guardpaint.repair.options import Adapter
from guardpaint.repair.pipeline import PipelineRepairer
from guardpaint.store.folders import resolve
from guardpaint.testing import small_inpainters

SAMPLED_BY = {
    "sd": ("LCMScheduler", "TCDScheduler", "DDIMScheduler", "EulerDiscreteScheduler"),
    "sdxl-plain": ("LCMScheduler",),
    "sd3": ("FlowMatchEulerDiscreteScheduler",),
    "flux-fill": ("FlowMatchEulerDiscreteScheduler",),
}
CASES = [(kind, name) for kind, names in SAMPLED_BY.items() for name in names]
DEEP = replace(KNOBS, depth=10)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A pipeline and a LoRA for it, by kind."""
    root = tmp_path_factory.mktemp("adapters")

    def of(kind):
        if not (root / kind).exists():
            pipe = small_inpainters.inpainting(kind)
            pipe.save_pretrained(root / kind / "model")
            small_inpainters.random_lora(pipe, root / kind / "lora", "four-steps.safetensors")
        return root / kind / "model", root / kind / "lora"

    return of


def option(folder, scheduler):
    return {"path": str(folder), "scheduler": scheduler, "file": "four-steps.safetensors"}


@pytest.mark.parametrize(("kind", "scheduler"), CASES)
def test_a_pipeline_repairs_in_few_steps(saved, kind, scheduler):
    """Four steps unless told otherwise, one branch (guidance is off), weights changed, nothing drawn globally."""
    model, lora = saved(kind)
    plain = PipelineRepairer.from_pretrained(model, size=64, steps=4, guidance=1)
    fast = PipelineRepairer.from_pretrained(model, size=64, adapter=option(lora, scheduler))
    assert type(fast.scheduler).__name__ == scheduler
    rows = []
    denoiser = fast.pipe.components.get("unet") or fast.pipe.components["transformer"]
    denoiser.register_forward_hook(lambda m, args, out: rows.append(len(out[0])))
    state = torch.get_rng_state()
    painted = fast.candidates(request(DEEP))
    assert torch.equal(state, torch.get_rng_state()) and rows == [1] * 4
    assert torch.isfinite(painted).all() and torch.equal(painted, fast.candidates(request(DEEP)))
    assert float((painted - plain.candidates(request(DEEP))).abs().max()) > 0.01
    two = [DEEP, replace(DEEP, seed_offset=100)]
    alone = torch.cat([fast.candidates(request(k)) for k in two])
    torch.testing.assert_close(fast.candidates(request(*two)), alone, atol=1e-3, rtol=0)


@pytest.mark.parametrize("scheduler", ["LCMScheduler", "DDIMScheduler"])
def test_the_inpainter_repairs_in_few_steps(saved, scheduler):
    model, lora = saved("sd")
    fast = Inpainter.from_pretrained(model, adapter=option(lora, scheduler), steps=3)
    rows = []
    fast.pipe.unet.register_forward_hook(lambda m, args, out: rows.append(len(out[0])))
    painted = fast.candidates(request(DEEP))
    assert rows == [1] * 3 and torch.isfinite(painted).all()
    mixed = [replace(DEEP, depth=d, seed_offset=100 * d) for d in (1, 4, 9, 10)]
    together, alone = fast.candidates(request(*mixed)), torch.cat([fast.candidates(request(k)) for k in mixed])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=0)
    shown, begun = fast.preview(request(*mixed))
    rest = fast.candidates(replace(request(*mixed[2:]), begun=begun[2:]))
    torch.testing.assert_close(rest, together[2:], atol=1e-4, rtol=0)
    torch.testing.assert_close(shown[:2], together[:2], atol=1e-4, rtol=0)  # one step, so the preview is the repair


def test_lcm_adds_noise_of_its_own_after_a_step_and_ddim_none(saved):
    model, lora = saved("sd")
    lcm, ddim = (
        Inpainter.from_pretrained(model, adapter=option(lora, s), steps=2) for s in ("LCMScheduler", "DDIMScheduler")
    )
    assert float((lcm.candidates(request(DEEP)) - ddim.candidates(request(DEEP))).abs().max()) > 0.01
    one = replace(DEEP, depth=1)
    assert torch.equal(lcm.candidates(request(one)), ddim.candidates(request(one)))  # the last step adds none


@pytest.mark.parametrize("cls", [PipelineRepairer, Inpainter])
def test_a_saved_repairer_has_the_adapter_merged_once(saved, cls, tmp_path):
    """Its folder loads with the same options, without the adapter's own folder, and gives the same repairer."""
    model, lora = saved("sd")
    local = tmp_path / "lora"
    local.mkdir()
    (local / "four-steps.safetensors").write_bytes((lora / "four-steps.safetensors").read_bytes())
    first = cls.from_pretrained(model, adapter=option(local, "LCMScheduler"), steps=2)
    first.save_pretrained(tmp_path / "saved")
    (local / "four-steps.safetensors").unlink()
    again = cls.from_pretrained(tmp_path / "saved", **json.loads(json.dumps(first.options())))
    assert again.digest() == first.digest() and again.options() == first.options()
    assert torch.equal(again.candidates(request(DEEP)), first.candidates(request(DEEP)))
    for other in ({}, {"adapter": option(local, "DDIMScheduler")}):
        with pytest.raises(BadConfig, match="LCMScheduler merged into its weights; pass adapter="):
            cls.from_pretrained(tmp_path / "saved", **other)


def test_a_number_turns_guidance_on_again(saved):
    model, lora = saved("sd")
    fast = PipelineRepairer.from_pretrained(model, adapter=option(lora, "DDIMScheduler"), guidance=5.0, steps=1)
    rows = []
    fast.pipe.unet.register_forward_hook(lambda m, args, out: rows.append(len(out[0])))
    a, b = (fast.candidates(request(replace(DEEP, cfg=c))) for c in (1.0, 15.0))
    assert rows == [2, 2] and torch.equal(a, b)


def test_schedulers_keep_the_noise_schedule_and_trail_where_published_so(saved):
    scheduler = small_inpainters.inpainting("sd").scheduler
    for name in ("DDIMScheduler", "EulerDiscreteScheduler", "TCDScheduler", "LCMScheduler"):
        made = sampler(scheduler, Adapter("x", name))
        assert made.config.beta_end == 0.012 and made.config.beta_schedule == "scaled_linear"
        if name in ("DDIMScheduler", "EulerDiscreteScheduler"):
            made.set_timesteps(4)
            assert made.timesteps.tolist() == [999, 749, 499, 249]
    assert sampler(scheduler, None) is scheduler


def test_what_cannot_be_merged_or_sampled_is_refused_when_it_is_loaded(saved, tmp_path):
    model, lora = saved("sd")
    other = saved("sdxl-plain")[1]
    with pytest.raises(BadCheckpoint, match="not a LoRA for StableDiffusionInpaintPipeline"):
        PipelineRepairer.from_pretrained(model, adapter=option(other, "LCMScheduler"))
    with pytest.raises(BadCheckpoint, match="holds nothing for"):
        PipelineRepairer.from_pretrained(model, adapter=option(saved("sd3")[1], "LCMScheduler"))
    with pytest.raises(BadCheckpoint, match=r"has no pytorch_lora_weights\.safetensors"):
        Inpainter.from_pretrained(model, adapter={"path": str(lora), "scheduler": "LCMScheduler"})
    with pytest.raises(BadCheckpoint, match="not a directory"):
        Inpainter.from_pretrained(model, adapter=option(tmp_path / "nowhere", "LCMScheduler"))
    with pytest.raises(BadConfig, match="which it cannot replace"):
        PipelineRepairer.from_pretrained(saved("sd3")[0], adapter=option(saved("sd3")[1], "LCMScheduler"))
    with pytest.raises(BadConfig, match="which it cannot replace"):
        PipelineRepairer.from_pretrained(model, adapter=option(lora, "FlowMatchEulerDiscreteScheduler"))
    with pytest.raises(BadConfig, match="Inpainter samples as LCMScheduler, DDIMScheduler"):
        Inpainter.from_pretrained(model, adapter=option(lora, "TCDScheduler"))


def test_of_a_repository_only_the_adapters_file_is_fetched(monkeypatch, tmp_path):
    """Hyper-SD's repository holds dozens of adapters."""
    fetched = []

    def download(repo, file, revision, token):
        assert token is None
        fetched.append((repo, file, revision))
        return tmp_path / file

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    folder = resolve("hub:owner/many@v1", lambda repo, revision: one_file("four.safetensors", repo, revision))
    assert folder == tmp_path and fetched == [("owner/many", "four.safetensors", "v1")]
