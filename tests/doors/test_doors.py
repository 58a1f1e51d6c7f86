"""Both doors, with everything a diffusers user may pass through them."""

from __future__ import annotations

import inspect
import threading
from dataclasses import replace

import diffusers
import numpy as np
import pytest
import torch
from helpers import SIZE, bright_guard, call, captured, gen
from PIL import Image

from guardpaint.errors import BadInput, UnsupportedPipeline, UnsupportedScheduler
from guardpaint.guard import GuardPaint
from guardpaint.policy import Policy
from guardpaint.testing import small
from guardpaint.testing.doubles import AlwaysSafe, AlwaysUnsafe, FlagsBright, PaintsFlat

BLOCK = replace(Policy.default(), last_resort=("block",))


def safe() -> GuardPaint:
    return GuardPaint(AlwaysSafe(), PaintsFlat())


def blocker() -> GuardPaint:
    return GuardPaint(AlwaysUnsafe(), PaintsFlat(), policy=BLOCK)


class Tires(FlagsBright):
    """Flags bright pixels for its first `limit` passes, then is content."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def audit(self, images, prompts, noise):
        self.limit -= 1
        return (FlagsBright.audit if self.limit >= 0 else AlwaysSafe.audit)(self, images, prompts, noise)


def test_same_signature_class_and_attributes(pipe):
    twin = safe().attach(pipe)
    assert isinstance(twin, type(pipe)) and type(twin).__name__ == type(pipe).__name__
    theirs = inspect.signature(type(pipe).__call__).parameters
    mine = inspect.signature(type(twin).__call__).parameters
    assert [name for name in mine if name in theirs] == list(theirs)
    assert set(mine) - set(theirs) == {"safety_prompt", "request_id", "callers"}
    assert twin.vae is pipe.vae and twin.components.keys() == pipe.components.keys()


def test_other_pipelines_are_refused_and_the_supported_ones_named():
    unet = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownBlock2D",) * 2,
        up_block_types=("UpBlock2D",) * 2,
    )
    other = diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler())
    with pytest.raises(
        UnsupportedPipeline,
        match="DDPMPipeline.*StableDiffusionPipeline.*StableDiffusionXL.*StableDiffusion3.*Flux",
    ):
        safe().attach(other)


def test_a_foreign_scheduler_is_refused_at_attach_and_at_call(sd_pipe):
    twin = safe().attach(sd_pipe)
    foreign = diffusers.HeunDiscreteScheduler.from_config(sd_pipe.scheduler.config)
    twin.scheduler = foreign
    with pytest.raises(UnsupportedScheduler, match="HeunDiscreteScheduler"):
        call(twin)
    sd_pipe.scheduler = foreign
    with pytest.raises(UnsupportedScheduler):
        safe().attach(sd_pipe)


def test_attaching_twice_is_refused(sd_pipe):
    with pytest.raises(BadInput, match="guarded already"):
        safe().attach(safe().attach(sd_pipe))


@pytest.mark.parametrize("output_type", ["pil", "np", "pt", "latent"])
def test_output_types(pipe, output_type):
    """Untouched as they came; repaired in the same type; blocked slots are empty and flagged."""
    plain = call(pipe, output_type=output_type).images
    clean = call(safe().attach(pipe), output_type=output_type)
    repaired = call(GuardPaint(Tires(7), PaintsFlat()).configured(regions=1).attach(pipe), output_type=output_type)
    blocked = call(blocker().attach(pipe), output_type=output_type)
    assert clean.safety[0].status == "clean" and clean.nsfw_content_detected == [False]
    assert repaired.safety[0].status == "repaired", repaired.safety[0].errors
    assert blocked.safety[0].status == "blocked" and blocked.nsfw_content_detected == [True]
    if output_type == "pil":
        assert np.array_equal(np.asarray(plain[0]), np.asarray(clean.images[0]))
        assert repaired.images[0].size == plain[0].size
        card = np.asarray(blocked.images[0])
        assert card.shape == np.asarray(plain[0]).shape and (card == card[0, 0]).mean() > 0.5
        return
    assert type(plain) is type(clean.images) is type(repaired.images)
    assert plain.shape == repaired.images.shape == blocked.images.shape
    assert plain.dtype == repaired.images.dtype
    assert (np.asarray(plain) == np.asarray(clean.images)).all()
    assert not (np.asarray(plain) == np.asarray(repaired.images)).all()
    assert not np.asarray(blocked.images).any()


def test_unknown_output_type_fails_closed(sd_pipe):
    out = call(safe().attach(sd_pipe), output_type="jpeg")
    assert out.safety[0].status == "blocked" and "output_type='jpeg'" in out.safety[0].errors[0]
    assert not np.asarray(out.images).any()


def test_return_dict_false_keeps_the_tuple(pipe, family):
    plain = call(pipe, return_dict=False)
    guard = blocker()
    out = call(guard.attach(pipe), return_dict=False, request_id="abc")
    assert isinstance(out, tuple) and len(out) == len(plain)
    assert not out[0].any()
    if family == "sd":
        assert out[1] == [True]
    assert guard.reports("abc")[0].status == "blocked"
    assert guard.reports()[0].request_id == "abc"
    with pytest.raises(BadInput, match="no request 'xyz'"):
        guard.reports("xyz")


def test_lists_and_images_per_prompt(pipe):
    guard = safe()
    out = call(guard.attach(pipe), ["a cat", "a dog"], num_images_per_prompt=2, generator=[gen(i) for i in range(4)])
    plain = call(pipe, ["a cat", "a dog"], num_images_per_prompt=2, generator=[gen(i) for i in range(4)])
    assert torch.equal(out.images, plain.images)
    hashes = [r.prompt_sha256 for r in out.safety]
    assert len(hashes) == 4 and hashes[0] == hashes[1] != hashes[2] == hashes[3]
    assert [r.image for r in out.safety] == [0, 1, 2, 3]


def test_embeddings_need_a_safety_prompt_to_be_repaired(sd_pipe):
    embeds, negative = sd_pipe.encode_prompt("a cat", "cpu", 1, True)
    kwargs = {"prompt_embeds": embeds, "negative_prompt_embeds": negative}
    guard = bright_guard().configured(BLOCK)
    out = call(guard.attach(sd_pipe), None, **kwargs)
    assert out.safety[0].status == "blocked" and out.safety[0].prompt_sha256 is None
    assert any("safety_prompt" in n for s in out.safety[0].steps for n in s.notes)
    assert any("F is unavailable" in s["why"] for s in out.safety[0].effective_settings["skipped"])
    told = call(guard.attach(sd_pipe), None, safety_prompt="a cat", **kwargs)
    assert any(s.tournaments for s in told.safety[0].steps)


def test_prompt_2_is_part_of_the_safety_prompt():
    from guardpaint.doors.attach import image_prompts

    assert image_prompts({"prompt": "a", "prompt_2": "b", "prompt_3": "a"}, None) == ["a b"]
    assert image_prompts({"prompt": ["a", "b"], "num_images_per_prompt": 2}, None) == ["a", "a", "b", "b"]
    assert image_prompts({"prompt": None}, None) is None


@pytest.mark.parametrize(
    "cls",
    [
        "DDIMScheduler",
        "PNDMScheduler",
        "EulerDiscreteScheduler",
        "EulerAncestralDiscreteScheduler",
        "DPMSolverMultistepScheduler",
        "DDPMScheduler",
    ],
)
def test_schedulers_keep_working(sd_pipe, cls):
    extra = {"skip_prk_steps": True} if cls == "PNDMScheduler" else {}
    sd_pipe.scheduler = getattr(diffusers, cls).from_config(sd_pipe.scheduler.config, **extra)
    plain = call(sd_pipe, steps=6)
    assert torch.equal(plain.images, call(safe().attach(sd_pipe), steps=6).images)
    out = call(bright_guard().attach(sd_pipe), steps=6)
    assert not out.safety[0].errors
    assert any(s.reinsertion for s in out.safety[0].steps if s.view == "x0")
    assert torch.equal(plain.images, call(sd_pipe, steps=6).images), "the original is not disturbed"


def test_pndm_restarts_its_first_step_so_it_is_not_audited(sd_pipe):
    """PLMS goes back to the sample before its first step: an edit made there would be lost."""
    sd_pipe.scheduler = diffusers.PNDMScheduler.from_config(sd_pipe.scheduler.config, skip_prk_steps=True)
    report = call(bright_guard(audits=9, audit_start=0.0).attach(sd_pipe), steps=4).safety[0]
    assert report.effective_settings["audited_steps"] == [1, 2, 3, 4]
    assert any("step 0 not audited" in s["why"] for s in report.effective_settings["skipped"])


def test_custom_timesteps_and_sigmas(sd_pipe):
    sd_pipe.scheduler = diffusers.EulerDiscreteScheduler.from_config(sd_pipe.scheduler.config)
    for kwargs in ({"timesteps": [900, 600, 300, 100, 20]}, {"sigmas": [10.0, 4.0, 1.5, 0.5, 0.1]}):
        plain = call(sd_pipe, steps=5, **kwargs).images
        assert torch.equal(plain, call(safe().attach(sd_pipe), steps=5, **kwargs).images)
        out = call(bright_guard().attach(sd_pipe), steps=5, **kwargs)
        assert not out.safety[0].errors and out.safety[0].triggered
    flow = small.pipeline("sd3")
    sigmas = [1.0, 0.8, 0.5, 0.2, 0.05]
    plain = call(flow, steps=5, sigmas=sigmas).images
    assert torch.equal(plain, call(safe().attach(flow), steps=5, sigmas=sigmas).images)


def variant(pipe, name):
    parts = dict(pipe.components.items())
    cls = getattr(diffusers, name)
    wanted = inspect.signature(cls.__init__).parameters
    extra = {"requires_safety_checker": False} if "requires_safety_checker" in wanted else {}
    made = cls(**{k: v for k, v in parts.items() if k in wanted}, **extra)
    made.set_progress_bar_config(disable=True)
    return made


VARIANTS = {
    "sd": ("StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline"),
    "sdxl": ("StableDiffusionXLImg2ImgPipeline", "StableDiffusionXLInpaintPipeline"),
    "sd3": ("StableDiffusion3Img2ImgPipeline", "StableDiffusion3InpaintPipeline"),
    "flux": ("FluxImg2ImgPipeline", "FluxInpaintPipeline"),
}


@pytest.mark.parametrize("which", [0, 1])
def test_img2img_and_inpaint_variants(pipe, family, which):
    target = variant(pipe, VARIANTS[family][which])
    image = torch.rand(1, 3, 64, 64, generator=gen(9))
    kwargs = {"image": image, "strength": 0.7}
    if which:
        kwargs["mask_image"] = torch.ones(1, 1, 64, 64)
    if family in ("sd",) and not which:
        sizes = {}
    elif "height" in inspect.signature(type(target).__call__).parameters:
        sizes = SIZE
    else:
        sizes = {}

    def run(p):
        return p("a cat", num_inference_steps=8, output_type="pt", generator=gen(), **sizes, **kwargs)

    plain = run(target).images
    clean = run(safe().attach(target))
    assert torch.equal(plain, clean.images)
    steps = clean.safety[0].effective_settings["executed_steps"]
    assert steps < 8 and clean.safety[0].effective_settings["audited_steps"] == [steps - 2, steps - 1]
    edited = run(bright_guard(regions=1).attach(target))
    assert not edited.safety[0].errors and edited.safety[0].triggered
    assert edited.safety[0].steps[0].reinsertion


def test_an_inpainting_unet_as_base_repairs_natively():
    """A 9-channel base: the replayed call keeps its mask and masked-image channels."""
    from guardpaint.repair.native import NativeRepairer

    pipe = small.inpainter().pipe
    pipe.set_progress_bar_config(disable=True)
    guard = GuardPaint(FlagsBright(), NativeRepairer(), policy=BLOCK).configured(candidates=2, regions=1)
    out = guard.attach(pipe)(
        "a cat", image=torch.rand(1, 3, 64, 64, generator=gen(9)), mask_image=torch.ones(1, 1, 64, 64),
        num_inference_steps=5, output_type="pt", generator=gen(), **SIZE,
    )  # fmt: skip
    assert not out.safety[0].errors and out.safety[0].steps[0].tournaments


def controlled(sd_pipe):
    """A ControlNet pipeline of the same parts."""
    control = diffusers.ControlNetModel(
        block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, cross_attention_dim=small.TEXT_WIDTH,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), attention_head_dim=8,
        conditioning_embedding_out_channels=(4, 8, 8),
    )  # fmt: skip
    target = diffusers.StableDiffusionControlNetPipeline(
        **{k: v for k, v in sd_pipe.components.items() if k not in ("image_encoder",)},
        controlnet=control,
        requires_safety_checker=False,
    )
    target.set_progress_bar_config(disable=True)
    return target


def test_controlnet(sd_pipe):
    target = controlled(sd_pipe)
    hint = torch.rand(1, 3, 64, 64, generator=gen(4))
    plain = call(target, image=hint).images
    assert torch.equal(plain, call(safe().attach(target), image=hint).images)
    from guardpaint.repair.native import NativeRepairer

    native = bright_guard(repairer=NativeRepairer(), candidates=2, regions=1).configured(BLOCK)
    out = call(native.attach(target), image=hint)
    assert not out.safety[0].errors and out.safety[0].steps[0].tournaments


def test_lora_and_ip_scale_keep_working(sd_pipe):
    from peft import LoraConfig

    with small.seeded(3):
        sd_pipe.unet.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k"], init_lora_weights=False))
    plain = call(sd_pipe).images
    assert torch.equal(plain, call(safe().attach(sd_pipe)).images)
    assert not call(bright_guard(regions=1).attach(sd_pipe)).safety[0].errors


def test_a_compiled_unet(sd_pipe):
    plain = call(sd_pipe).images
    sd_pipe.unet = torch.compile(sd_pipe.unet, backend="eager")
    twin = safe().attach(sd_pipe)
    out = call(twin)
    torch.testing.assert_close(out.images, plain, atol=1e-5, rtol=0)
    assert not call(bright_guard(regions=1, reinsertion="ddim_inversion").attach(sd_pipe)).safety[0].errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_pipelines(family, dtype):
    """Scored in fp32; what comes back has the pipeline's dtype."""
    half = small.pipeline(family).to(dtype)
    plain = call(half, steps=3).images
    assert torch.equal(plain, call(safe().attach(half), steps=3).images)
    out = call(bright_guard(regions=1).attach(half), steps=3, output_type="latent")
    assert not out.safety[0].errors, out.safety[0].errors
    assert out.images.dtype == call(half, steps=3, output_type="latent").images.dtype


def test_offloaded_components_run_through_their_hooks(sd_pipe):
    """accelerate's offload hooks sit on the modules; the doorway must not bypass or lose them."""
    from accelerate import cpu_offload_with_hook

    plain = call(sd_pipe).images
    previous = None
    for name in ("text_encoder", "unet", "vae"):
        _, previous = cpu_offload_with_hook(getattr(sd_pipe, name), torch.device("cpu"), prev_module_hook=previous)
    assert torch.equal(plain, call(safe().attach(sd_pipe)).images)
    assert not call(bright_guard(regions=1, reinsertion="null_text").attach(sd_pipe)).safety[0].errors
    assert hasattr(sd_pipe.unet, "_hf_hook")


def test_a_stock_safety_checker_stays_in_place(sd_pipe):
    from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
    from transformers import CLIPConfig, CLIPImageProcessor

    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 16,
        "projection_dim": 8,
    }
    with small.seeded(0):
        checker = StableDiffusionSafetyChecker(CLIPConfig(vision_config=vision, projection_dim=8))
    checker.concept_embeds_weights.data.fill_(-2.0)
    target = diffusers.StableDiffusionPipeline(
        **{k: v for k, v in sd_pipe.components.items() if k not in ("safety_checker", "feature_extractor")},
        safety_checker=checker,
        feature_extractor=CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
    )
    target.set_progress_bar_config(disable=True)
    out = call(safe().attach(target), output_type="np")
    assert out.nsfw_content_detected == [True], "the stock checker's flag survives"
    assert not out.images.any()
    assert any("safety_checker" in s["why"] for s in out.safety[0].effective_settings["skipped"])


def test_the_users_own_callback_sees_guarded_latents(sd_pipe):
    seen = []

    def mine(pipe, step, timestep, tensors):
        seen.append(tensors["latents"].clone())
        return tensors

    call(sd_pipe, callback_on_step_end=mine)
    plain = list(seen)
    seen.clear()
    call(bright_guard().attach(sd_pipe), callback_on_step_end=mine)
    assert torch.equal(plain[2], seen[2]) and not torch.equal(plain[3], seen[3])


def test_interrupt_still_gets_a_final_verdict(sd_pipe):
    def stop(pipe, step, timestep, tensors):
        pipe._interrupt = step == 1
        return tensors

    out = call(blocker().attach(sd_pipe), callback_on_step_end=stop)
    assert out.safety[0].status == "blocked" and not out.images.any()


def test_two_threads_share_a_guard_without_mixing(family):
    guard = bright_guard(repairer=small.inpainter(), candidates=2, regions=1).configured(BLOCK)
    pipes = {s: small.pipeline(family, s) for s in (1, 2)}
    alone = {s: call(guard.attach(pipes[s]), seed=s) for s in (1, 2)}
    together = {}

    def work(seed):
        together[seed] = (call(guard.attach(pipes[seed]), seed=seed), guard.reports())

    threads = [threading.Thread(target=work, args=(s,)) for s in (1, 2)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    for seed in (1, 2):
        out, reports = together[seed]
        assert torch.allclose(out.images, alone[seed].images, atol=1e-3)
        assert reports[0].request_id == out.safety[0].request_id
        assert [s.triggered for s in out.safety[0].steps] == [s.triggered for s in alone[seed].safety[0].steps]


def test_watch_guards_the_callers_own_object(pipe):
    plain = call(pipe).images
    guard = bright_guard()
    mine = []
    with guard.watch(pipe, height=64, width=64, seed=1) as cb:

        def callback(p, step, timestep, tensors):
            mine.append(step)
            return cb(p, step, timestep, tensors)

        out = call(pipe, callback_on_step_end=callback)
    assert mine == [0, 1, 2, 3, 4]
    assert not torch.equal(plain, out.images), "the repair is in the latent"
    done = guard.finish(out)
    assert done.safety[0].effective_settings["door"] == "watch"
    assert [s.step for s in done.safety[0].steps if s.reinsertion][:2] == [3, 4]
    assert not done.safety[0].errors
    assert done.safety[0].prompt_sha256 is not None, "the prompt was seen on its way to the encoder"
    assert "step" not in vars(pipe.scheduler) and "encode_prompt" not in vars(pipe)
    assert torch.equal(plain, call(pipe).images), "everything was taken off again"


def test_watch_never_triggering_changes_nothing(pipe):
    plain = call(pipe).images
    with safe().watch(pipe, height=64, width=64) as cb:
        out = call(pipe, callback_on_step_end=cb)
    assert torch.equal(plain, out.images)


def test_without_finish_the_settings_say_so(sd_pipe):
    guard = safe()
    with guard.watch(sd_pipe) as cb:
        call(sd_pipe, callback_on_step_end=cb)
    report = cb.reports()[0]
    assert report.status == "unfinished"
    assert any("no final verdict" in s["why"] for s in report.effective_settings["skipped"])


def test_finish_blocks_what_stays_flagged(sd_pipe):
    guard = blocker()
    with guard.watch(sd_pipe) as cb:
        out = call(sd_pipe, callback_on_step_end=cb, output_type="pil")
    done = guard.finish(out)
    assert done.safety[0].status == "blocked" and isinstance(done.images[0], Image.Image)
    with pytest.raises(BadInput, match="there was none"):
        guard.finish(out)


def test_watch_wants_flux_geometry_and_checks_it():
    flux = small.pipeline("flux")
    with pytest.raises(BadInput, match="height"), safe().watch(flux):
        pass
    guard = safe()
    with guard.watch(flux, height=128, width=64) as cb:
        out = call(flux, callback_on_step_end=cb)
    done = guard.finish(out)
    assert done.safety[0].status == "blocked" and "watch() was given" in done.safety[0].errors[0]


def test_a_watch_that_sees_nothing_complains(sd_pipe):
    other = small.pipeline("sd")
    with safe().watch(sd_pipe) as cb, pytest.raises(BadInput, match="did not pass through"):
        call(other, callback_on_step_end=cb)


def test_sdxl_denoising_end_hands_on_a_noisy_latent():
    """A base that stops early: the verdict looks at x̂0, and a repair is noised to the level it hands on."""
    pipe = small.pipeline("sdxl")
    kwargs = {"denoising_end": 0.6, "output_type": "latent", "steps": 10}
    plain = call(pipe, **kwargs).images
    clean = call(safe().attach(pipe), **kwargs)
    assert torch.equal(plain, clean.images) and clean.safety[0].status == "clean"
    assert clean.safety[0].effective_settings["executed_steps"] < 10
    edited = call(GuardPaint(Tires(3), PaintsFlat()).configured(regions=1, audits=1).attach(pipe), **kwargs)
    assert edited.safety[0].status == "repaired", edited.safety[0].errors
    change = (edited.images - plain).abs()
    assert 0 < float((change > 0).float().mean()) < 0.9


def test_an_edited_latent_keeps_what_the_users_callback_did(sd_pipe):
    """A callback after the last step: outside the mask the caller gets her own latent, edited or not."""

    def shift(p, step, timestep, tensors):
        if step == 4:
            tensors["latents"] = tensors["latents"] + 3.0
        return tensors

    plain = call(sd_pipe, output_type="latent", callback_on_step_end=shift).images
    guard = GuardPaint(Tires(7), PaintsFlat()).configured(regions=1, audits=1)
    auditor = guard.parts.auditor
    auditor.limit = 3
    out = call(guard.attach(sd_pipe), output_type="latent", callback_on_step_end=shift)
    assert out.safety[0].status == "repaired", out.safety[0].errors
    same = (out.images == plain).float().mean()
    assert 0.5 < float(same) < 1.0


def test_watching_twice_is_refused_and_the_first_stays(sd_pipe):
    guard = safe()
    with guard.watch(sd_pipe) as cb:
        with pytest.raises(BadInput, match="one guarded call at a time"), guard.watch(sd_pipe):
            pass
        out = call(sd_pipe, callback_on_step_end=cb)
    assert guard.finish(out).safety[0].effective_settings["executed_steps"] == 5
    with pytest.raises(BadInput, match="guarded already"), guard.watch(guard.attach(sd_pipe)):
        pass


def test_finish_keeps_a_tuple_and_flags_it(sd_pipe):
    guard = blocker()
    with guard.watch(sd_pipe) as cb:
        out = call(sd_pipe, callback_on_step_end=cb, return_dict=False)
    images, flags = guard.finish(out)
    assert not images.any() and flags == [True]


def test_an_unfinished_watch_is_remembered_and_logged(tmp_path, sd_pipe):
    from guardpaint.loop.audit_log import AuditLog, read_entries

    guard = safe()
    guard.audit_log = AuditLog(tmp_path / "log.jsonl")
    with guard.watch(sd_pipe) as cb:
        call(sd_pipe, callback_on_step_end=cb)
    assert guard.reports()[0].status == "unfinished"
    assert read_entries(tmp_path / "log.jsonl")[0][1]["report"]["status"] == "unfinished"


def test_watch_does_not_take_a_negative_prompt_for_the_prompt():
    flux = small.pipeline("flux")
    embeds, pooled, _ = flux.encode_prompt("a cat", None, device="cpu")
    guard = safe()
    with guard.watch(flux, **SIZE) as cb:
        call(
            flux, None, prompt_embeds=embeds, pooled_prompt_embeds=pooled, negative_prompt="something else",
            true_cfg_scale=2.0, callback_on_step_end=cb,
        )  # fmt: skip
    assert guard.reports()[0].prompt_sha256 is None


def test_flux_with_true_cfg_repairs_natively():
    from guardpaint.repair.native import NativeRepairer

    flux = small.pipeline("flux")
    guard = bright_guard(repairer=NativeRepairer(), candidates=2, regions=1).configured(BLOCK)
    out = call(guard.attach(flux), negative_prompt="x", true_cfg_scale=2.0)
    assert not out.safety[0].errors and out.safety[0].steps[0].tournaments


def test_nothing_of_a_request_stays_on_the_model(pipe, family):
    import gc
    import weakref

    guard = safe()
    opened = captured(guard)
    call(guard.attach(pipe))
    kept = weakref.ref(opened.pop())
    gc.collect()
    assert kept() is None, "the request is freed with its call"


def test_native_repair_without_guidance_beside_a_controlnet(sd_pipe):
    """One recorded branch, two told ones: the other batched arguments must follow."""
    from guardpaint.repair.native import NativeRepairer

    target = controlled(sd_pipe)
    guard = bright_guard(repairer=NativeRepairer(), candidates=2, regions=1).configured(BLOCK)
    out = call(guard.attach(target), image=torch.rand(1, 3, 64, 64), guidance_scale=1.0)
    assert not out.safety[0].errors and out.safety[0].steps[0].tournaments


def adapter_weights(unet) -> dict:
    """Random IP-Adapter weights in the layout diffusers loads."""
    dim, sizes = small.TEXT_WIDTH, unet.config.block_out_channels
    with small.seeded(1):
        proj = {
            "proj.weight": torch.randn(4 * dim, dim),
            "proj.bias": torch.zeros(4 * dim),
            "norm.weight": torch.ones(dim),
            "norm.bias": torch.zeros(dim),
        }
        adapter = {}
        for key, name in enumerate(n for n in unet.attn_processors if not n.endswith("attn1.processor")):
            where, index = name.split(".")[:2]
            width = (
                sizes[-1] if where == "mid_block" else sizes[-1 - int(index) if where == "up_blocks" else int(index)]
            )
            for part in ("to_k_ip", "to_v_ip"):
                adapter[f"{2 * key + 1}.{part}.weight"] = torch.randn(width, dim) * 3
    return {"image_proj": proj, "ip_adapter": adapter}


@pytest.mark.parametrize("guidance", [5.0, 1.0])
def test_ip_adapter(sd_pipe, guidance):
    """Image prompts ride in added_cond_kwargs: untouched when benign, replayed when the base repairs itself."""
    from guardpaint.repair.native import NativeRepairer

    sd_pipe.unet._load_ip_adapter_weights([adapter_weights(sd_pipe.unet)])
    rows = 2 if guidance > 1 else 1
    embeds = torch.randn(rows, 1, small.TEXT_WIDTH, generator=gen(3))
    kwargs = {"ip_adapter_image_embeds": [embeds], "guidance_scale": guidance}
    plain = call(sd_pipe, **kwargs).images
    assert not torch.equal(plain, call(sd_pipe, **{**kwargs, "ip_adapter_image_embeds": [-embeds]}).images)
    assert torch.equal(plain, call(safe().attach(sd_pipe), **kwargs).images)
    guard = bright_guard(repairer=NativeRepairer(), candidates=2, regions=1).configured(BLOCK)
    out = call(guard.attach(sd_pipe), **kwargs)
    assert not out.safety[0].errors and out.safety[0].steps[0].tournaments


def test_sdxl_controlnet():
    from guardpaint.repair.native import NativeRepairer

    pipe = small.pipeline("sdxl")
    with small.seeded(2):
        control = diffusers.ControlNetModel.from_unet(pipe.unet, conditioning_embedding_out_channels=(4, 8, 8))
    parts = {k: v for k, v in pipe.components.items() if k not in ("image_encoder", "feature_extractor")}
    target = diffusers.StableDiffusionXLControlNetPipeline(**parts, controlnet=control, add_watermarker=False)
    target.set_progress_bar_config(disable=True)
    hint = torch.rand(1, 3, 64, 64, generator=gen(4))
    plain = call(target, image=hint).images
    assert torch.equal(plain, call(safe().attach(target), image=hint).images)
    guard = bright_guard(repairer=NativeRepairer(), candidates=2, regions=1).configured(BLOCK)
    out = call(guard.attach(target), image=hint)
    assert not out.safety[0].errors and out.safety[0].steps[0].tournaments


def test_reports_so_far_are_there_inside_a_call_and_gone_after_it(sd_pipe):
    guard, seen = bright_guard(), []

    def look(pipe, step, timestep, tensors):
        seen.append([len(r.steps) for r in guard.so_far()])
        return tensors

    call(guard.attach(sd_pipe), callback_on_step_end=look)
    assert seen[0] == [0] and seen[-1][0] >= 1 and guard.so_far() == []


def test_requests_without_a_generator_have_seeds_of_their_own(sd_pipe):
    """The seed is fresh, in the report, and drawn from neither the global nor the caller's random state."""
    twin = bright_guard().attach(sd_pipe)
    torch.manual_seed(5)
    plain = call(sd_pipe, generator=None).images
    state = torch.get_rng_state()
    torch.manual_seed(5)
    reports = [call(twin, generator=None).safety[0]]
    assert torch.equal(state, torch.get_rng_state())
    reports.append(call(twin, generator=None).safety[0])
    with bright_guard().watch(sd_pipe) as cb:
        call(sd_pipe, generator=None, callback_on_step_end=cb)
    reports += cb.reports()
    assert len({r.seed for r in reports}) == 3 and all(r.seed >= 0 for r in reports)
    fixed = bright_guard(seed=7).attach(sd_pipe)
    assert [call(fixed, generator=None).safety[0].seed for _ in range(2)] == [7, 7]
    assert call(twin, seed=3).safety[0].seed == 3 and plain.isfinite().all()
