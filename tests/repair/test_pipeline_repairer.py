"""PipelineRepairer on small random-initialised instances of the real inpainting classes, saved and loaded again."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from helpers import call
from repairs import KNOBS, request

from guardpaint.errors import BadCheckpoint, BadConfig, BadInput, UnsupportedPipeline
from guardpaint.guard import GuardPaint
from guardpaint.policy import Policy
from guardpaint.repair.inpainter import Inpainter
from guardpaint.repair.native import NativeRepairer
from guardpaint.repair.pipeline import PipelineRepairer
from guardpaint.testing import small, small_inpainters
from guardpaint.testing.doubles import AlwaysUnsafe, FlagsBright
from guardpaint.types import Repairer

BLOCK = replace(Policy.default(), last_resort=("block",))
MASKED = ("sd", "sdxl", "sd3-masked", "flux-fill")
"""Models that see the mask and the picture without what it covers as further input channels."""
KINDS = tuple(small_inpainters.INPAINTERS)
MIXED = tuple(replace(KNOBS, depth=d, seed_offset=o, jitter=0.2) for d, o in ((6, 0), (6, 100), (2, 200)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("hub")
    for kind in KINDS:
        small_inpainters.inpainting(kind).save_pretrained(root / kind)
    return root


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def repairer(folders, kind):
    return PipelineRepairer.from_pretrained(folders / kind, size=64)


def test_the_folder_opens_as_the_class_that_was_saved(repairer, kind):
    assert type(repairer.pipe) is type(small_inpainters.inpainting(kind))
    assert isinstance(repairer, Repairer)


def test_candidates_are_pictures_and_touch_no_global_randomness(repairer):
    torch.manual_seed(3)
    state = torch.get_rng_state()
    painted = repairer.candidates(request(*MIXED))
    assert torch.equal(state, torch.get_rng_state())
    assert painted.shape == (3, 3, 64, 64) and painted.dtype == torch.float32
    assert torch.isfinite(painted).all() and painted.min() >= 0 and painted.max() <= 1
    torch.manual_seed(4)
    assert torch.equal(painted, repairer.candidates(request(*MIXED)))


def test_a_candidate_is_the_same_in_a_batch_and_alone(repairer):
    together = repairer.candidates(request(*MIXED))
    one_by_one = repairer.candidates(request(*MIXED, batch=1))
    alone = torch.cat([repairer.candidates(request(k)) for k in MIXED])
    torch.testing.assert_close(together, alone, atol=1e-3, rtol=0)
    torch.testing.assert_close(together, one_by_one, atol=1e-3, rtol=0)


def change(repairer, **knobs):
    base = repairer.candidates(request(KNOBS))
    return float((repairer.candidates(request(replace(KNOBS, **knobs))) - base).abs().max())


def test_each_knob_changes_the_candidate(repairer, kind):
    """All but cfg do on every class; schnell has no guidance to change. Dilation and feather are in the masks."""
    assert change(repairer, depth=7) > 0.01
    assert change(repairer, seed_offset=100) > 0.01
    assert change(repairer, jitter=0.5) > 0.01
    assert (change(repairer, cfg=2.0) > 0.01) == (kind != "flux-schnell")
    wide = replace(request(KNOBS), masks=torch.ones(1, 64, 64))
    assert float((repairer.candidates(wide) - repairer.candidates(request(KNOBS))).abs().max()) > 0.01


def test_at_full_depth_a_model_with_mask_channels_does_not_see_the_harm(repairer, kind):
    """Depth 10 starts from pure noise. The others encode the picture with the harm in it and keep what is around it."""
    deep = request(replace(KNOBS, depth=10))
    other = replace(deep, view=torch.where(deep.masks[0] > 0, 1 - deep.view, deep.view))
    same = torch.equal(repairer.candidates(deep), repairer.candidates(other))
    assert same == (kind in MASKED)


def test_depth_is_the_number_of_denoiser_calls(repairer):
    """d of 10 tenths of the steps, at least one; the cfg knob of CFG models doubles rows, not calls."""
    calls = []
    denoiser = repairer.pipe.components.get("unet") or repairer.pipe.components["transformer"]
    hook = denoiser.register_forward_hook(lambda *_: calls.append(1))
    try:
        for depth, expected in ((1, 1), (5, 5), (10, 10)):
            calls.clear()
            repairer.candidates(request(replace(KNOBS, depth=depth)))
            assert len(calls) == expected
    finally:
        hook.remove()


def test_the_prompt_is_the_safe_one_unless_asked(repairer):
    repairers = [PipelineRepairer(repairer.pipe, size=64, steps=2, prompt=p) for p in ("safe", "user")]
    one, other = request(KNOBS), replace(request(KNOBS), prompt="a flag")
    safe, user = ([torch.equal(r.candidates(one), r.candidates(other))] for r in repairers)
    assert safe == [True] and user == [False]
    other = replace(request(KNOBS), safe_prompt="a flag")
    safe, user = ([torch.equal(r.candidates(one), r.candidates(other))] for r in repairers)
    assert safe == [False] and user == [True]


def test_what_to_avoid_is_the_negative_prompt_where_there_is_one(repairer, kind):
    other = replace(request(KNOBS), avoid="a storm")
    same = torch.equal(repairer.candidates(request(KNOBS)), repairer.candidates(other))
    assert same == kind.startswith("flux")


def test_pictures_are_repaired_at_the_models_own_size(repairer):
    """Whole units, the shorter side at the model's size, and never beyond its positions."""
    assert repairer.native_size(512, 512) == (64, 64)
    assert repairer.native_size(512, 768) == (64, 96)
    rows, columns = repairer.native_size(100, 2000)
    most = repairer.traits.most
    assert rows % repairer.traits.unit == columns % repairer.traits.unit == 0
    assert (rows, columns) == ((64, 1280) if most is None else (16, 256))
    assert repairer.candidates(request(KNOBS, size=96)).shape == (1, 3, 64, 64)


def test_save_load_options_digest(folders, kind, tmp_path):
    first = PipelineRepairer.from_pretrained(folders / kind, size=64, crop=0.25, guidance=3, steps=4, prompt="user")
    options = json.loads(json.dumps(first.options()))
    first.save_pretrained(tmp_path / "saved")
    again = PipelineRepairer.from_pretrained(tmp_path / "saved", **options)
    assert again.options() == first.options() and again.digest() == first.digest()
    assert torch.equal(again.candidates(request(KNOBS)), first.candidates(request(KNOBS)))
    assert first.digest() != PipelineRepairer(first.pipe).digest()
    assert first.digest() != PipelineRepairer(small_inpainters.inpainting(kind, seed=1), **options).digest()


@pytest.mark.parametrize("kind", ["sd", "sdxl", "sd3", "flux-fill"])
def test_a_whole_guarded_call(folders, kind):
    """The guard repairs a small base with the pipeline; nothing fails, and the global RNG stays as it was."""
    repairer = PipelineRepairer.from_pretrained(folders / kind, size=64, steps=2, crop=0.5)
    guard = GuardPaint(FlagsBright(), repairer, policy=BLOCK).configured(candidates=2, regions=1)
    state = torch.get_rng_state()
    report = call(guard.attach(small.pipeline("sd"))).safety[0]
    assert torch.equal(state, torch.get_rng_state())
    tournaments = [t for s in report.steps for t in s.tournaments]
    assert not report.errors and tournaments
    assert all(t.repairer == "pipeline" and len(t.candidates) == 2 for t in tournaments)


def test_no_repair_of_a_picture_that_stays_unsafe_is_shown(folders):
    repairer = PipelineRepairer.from_pretrained(folders / "sd", steps=1)
    guard = GuardPaint(AlwaysUnsafe(), repairer, policy=BLOCK).configured(candidates=2, regions=1)
    out = call(guard.attach(small.pipeline("sd")))
    assert out.safety[0].status == "blocked" and not out.safety[0].errors and out.images.max() == 0


def test_a_base_may_repair_itself_through_its_inpainting_class():
    """AutoPipelineForInpainting.from_pipe shares the weights of the base that is being guarded."""
    from diffusers import AutoPipelineForInpainting

    base = small.pipeline("sd")
    repairer = PipelineRepairer(AutoPipelineForInpainting.from_pipe(base))
    guard = GuardPaint(FlagsBright(), repairer, policy=BLOCK).configured(candidates=2, regions=1)
    report = call(guard.attach(base)).safety[0]
    assert not report.errors and report.steps[0].tournaments


def test_a_text_to_image_folder_opens_as_its_inpainting_class(tmp_path):
    small.pipeline("sdxl").save_pretrained(tmp_path)
    repairer = PipelineRepairer.from_pretrained(tmp_path)
    assert type(repairer.pipe).__name__ == "StableDiffusionXLInpaintPipeline"
    assert torch.isfinite(repairer.candidates(request(KNOBS))).all()


def test_the_safety_checker_is_off_while_it_repairs(tmp_path):
    """The stock layout, checker and all: loaded without it; in a pipeline that has one it is left alone."""
    with small.seeded(0):
        pipe = small_inpainters.sd(checker=True)
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(tmp_path)
    assert {"safety_checker", "feature_extractor"} <= {p.name for p in tmp_path.iterdir()}
    blacked = pipe(
        "a dog",
        image=torch.rand(1, 3, 64, 64),
        mask_image=torch.ones(1, 1, 64, 64),
        num_inference_steps=1,
        output_type="pt",
    )
    assert blacked.nsfw_content_detected == [True]
    given, loaded = PipelineRepairer(pipe), PipelineRepairer.from_pretrained(tmp_path)
    painted = given.candidates(request(KNOBS))
    assert pipe.safety_checker is not None and loaded.pipe.safety_checker is None
    assert painted.max() > 0 and torch.equal(painted, loaded.candidates(request(KNOBS)))
    stock = Inpainter.from_pretrained(tmp_path, prompt="safe")
    assert stock.candidates(request(KNOBS)).isfinite().all()


def test_the_pipeline_that_was_passed_stays_as_it_is(folders):
    pipe = small_inpainters.inpainting("sd")
    pipe.set_progress_bar_config(disable=False)
    scheduler, before = pipe.scheduler, dict(pipe.scheduler.__dict__)
    PipelineRepairer(pipe, steps=2).candidates(request(KNOBS))
    assert pipe.scheduler is scheduler and dict(scheduler.__dict__) == before
    assert pipe._progress_bar_config == {"disable": False}


def test_a_sampler_that_draws_in_every_step_uses_the_candidates_generators(folders):
    """SD 3's pipeline passes its scheduler no generator; a stochastic one would draw from the global RNG."""
    repairer = PipelineRepairer.from_pretrained(folders / "sd3")
    repairer.scheduler.register_to_config(stochastic_sampling=True)
    state = torch.get_rng_state()
    together = repairer.candidates(request(*MIXED))
    assert torch.equal(state, torch.get_rng_state())
    alone = torch.cat([repairer.candidates(request(k)) for k in MIXED])
    torch.testing.assert_close(together, alone, atol=1e-3, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(folders, dtype):
    """SDXL's VAE is cast to fp32 and back where it overflows."""
    repairer = PipelineRepairer.from_pretrained(folders / "sdxl", dtype=dtype, steps=1)
    repairer.pipe.vae.register_to_config(force_upcast=True)
    painted = repairer.candidates(request(KNOBS))
    assert repairer.pipe.unet.dtype == repairer.pipe.vae.dtype == dtype
    assert painted.dtype == torch.float32 and torch.isfinite(painted).all()
    assert repairer.to("cpu") is repairer and repairer.device == torch.device("cpu")


@pytest.mark.parametrize("kind", ["sd", "sd3", "flux-fill"])
def test_classes_that_take_no_lists_paint_one_candidate_at_a_time(folders, kind):
    repairer = PipelineRepairer.from_pretrained(folders / kind, size=64, steps=2)
    together = repairer.candidates(request(*MIXED))
    repairer.traits = replace(repairer.traits, batched=False)
    torch.testing.assert_close(repairer.candidates(request(*MIXED)), together, atol=1e-3, rtol=0)


@pytest.mark.parametrize("cls", [PipelineRepairer, Inpainter])
def test_parts_of_a_guarded_pipeline_are_refused(cls):
    pipe = small_inpainters.inpainting("sd")
    guarded = GuardPaint(FlagsBright(), NativeRepairer(), policy=BLOCK).attach(pipe)
    for wrong in (guarded, type(pipe)(**guarded.components, requires_safety_checker=False)):
        with pytest.raises(BadInput, match="parts of a guarded pipeline"):
            cls(wrong)


@pytest.mark.parametrize("family", small.BASES)
def test_a_text_to_image_pipeline_is_refused(family):
    with pytest.raises(UnsupportedPipeline, match=r"no image, mask_image.*AutoPipelineForInpainting\.from_pipe"):
        PipelineRepairer(small.pipeline(family))


def test_a_pipeline_that_needs_a_control_image_is_refused():
    from diffusers import ControlNetModel, StableDiffusionControlNetInpaintPipeline

    parts = small_inpainters.inpainting("sd-plain").components
    control = ControlNetModel.from_unet(parts["unet"], conditioning_embedding_out_channels=(4, 8, 8))
    pipe = StableDiffusionControlNetInpaintPipeline(**parts, controlnet=control, requires_safety_checker=False)
    with pytest.raises(UnsupportedPipeline, match="needs control_image"):
        PipelineRepairer(pipe)


@pytest.mark.parametrize(
    ("kind", "part", "wrong", "message"),
    [
        ("sd", "unet", lambda: small.unet(in_channels=8), "takes 8 channels.*repairs with 4 or 9"),
        ("sdxl", "unet", lambda: small.unet(in_channels=5), "takes 5 channels.*repairs with 4 or 9"),
        ("sd", "vae", lambda: small.vae(16), "takes 9 channels; with a VAE of 16.*repairs with none"),
        ("sd3", "vae", lambda: small.vae(4), "takes 16 channels; with a VAE of 4.*repairs with none"),
        ("flux", "transformer", lambda: small_inpainters.flux(fill=True).transformer, "takes 192 .*repairs with 64"),
        ("flux-fill", "transformer", lambda: small_inpainters.flux(fill=False).transformer, "takes 64 .*with 192"),
    ],
)
def test_a_model_for_other_channels_or_another_latent_size_is_refused(kind, part, wrong, message, tmp_path):
    pipe = small_inpainters.inpainting(kind)
    setattr(pipe, part, wrong())
    with pytest.raises(BadCheckpoint, match=message):
        PipelineRepairer(pipe)
    pipe.save_pretrained(tmp_path)
    with pytest.raises(BadCheckpoint, match=message):
        PipelineRepairer.from_pretrained(tmp_path)


def test_a_folder_that_is_no_pipeline_is_refused(tmp_path):
    with pytest.raises(BadCheckpoint, match=r"model_index\.json: missing"):
        PipelineRepairer.from_pretrained(tmp_path)
    (tmp_path / "model_index.json").write_text('{"_class_name": "os.system"}')
    with pytest.raises(BadCheckpoint, match=r"os\.system does not open as an inpainting pipeline"):
        PipelineRepairer.from_pretrained(tmp_path)


def test_a_pipeline_that_does_not_say_its_size_is_asked_for_it():
    pipe = small_inpainters.inpainting("sd")
    pipe.unet.register_to_config(sample_size=None)
    with pytest.raises(BadCheckpoint, match="pass size="):
        PipelineRepairer(pipe)
    assert PipelineRepairer(pipe, size=64).native_size(64, 64) == (64, 64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": "evil"}, "prompt='evil': choose among safe, user"),
        ({"crop": -1}, r"crop=-1: must be in \[0, 8\]"),
        ({"crop": float("nan")}, "crop=nan: must be a number"),
        ({"crop": True}, "crop=True"),
        ({"steps": 0}, r"steps=0: must be a whole number in \[1, 100\]"),
        ({"steps": 2.5}, r"steps=2\.5"),
        ({"guidance": "off"}, "guidance='off'"),
        ({"size": 0}, "size=0"),
        ({"strength": 1}, "option 'strength': choose among prompt, crop"),
        ({"adapter": "lcm"}, "adapter='lcm': must be a mapping with path, scheduler"),
        ({"adapter": {"path": "x", "scheduler": "Magic"}}, "scheduler='Magic': choose among LCMScheduler"),
        ({"adapter": {"path": "x", "scheduler": "LCMScheduler", "file": "a.bin"}}, r"must be the name of a \.safetens"),
        ({"adapter": {"path": "x", "scheduler": "LCMScheduler"}, "steps": 9}, r"steps=9: .* \[1, 8\]"),
    ],
)
@pytest.mark.parametrize("cls", [PipelineRepairer, Inpainter])
def test_bad_options_are_refused_when_the_repairer_is_made(cls, options, message):
    with pytest.raises(BadConfig, match=message):
        cls(small_inpainters.inpainting("sd"), **options)


def test_the_inpainter_refuses_other_families_and_takes_the_safe_prompt():
    with pytest.raises(UnsupportedPipeline, match="use PipelineRepairer"):
        Inpainter(small_inpainters.inpainting("sdxl"))
    with pytest.raises(BadCheckpoint, match="takes 0 channels"):
        Inpainter(small_inpainters.inpainting("flux"))
    pipe = small_inpainters.inpainting("sd")
    aligned, stock = Inpainter(pipe), Inpainter(pipe, prompt="safe")
    as_user = replace(request(KNOBS), prompt="a dog")
    assert not torch.equal(aligned.candidates(request(KNOBS)), stock.candidates(request(KNOBS)))
    plain = replace(request(KNOBS), avoid="")
    torch.testing.assert_close(aligned.candidates(as_user), stock.candidates(plain), atol=0, rtol=0)


def test_inpainter_and_native_keep_the_saving_contract(tmp_path):
    first = Inpainter(small_inpainters.inpainting("sd"), prompt="safe", crop=0.5)
    first.save_pretrained(tmp_path)
    again = Inpainter.from_pretrained(tmp_path, **json.loads(json.dumps(first.options())))
    assert again.options() == first.options() and again.digest() == first.digest()
    assert first.digest() != Inpainter(first.pipe).digest()
    native = NativeRepairer()
    native.save_pretrained(tmp_path / "native")
    assert not (tmp_path / "native").exists()
    assert (
        native.options() == {}
        and NativeRepairer.from_pretrained(tmp_path, **native.options()).digest() == native.digest()
    )
    assert [r.kind for r in (first, native)] == ["inpainter", "native"] and PipelineRepairer.kind == "pipeline"
    with pytest.raises(BadConfig, match="native repair has none"):
        NativeRepairer.from_pretrained(tmp_path, crop=0.5)
