"""Stand-ins for hub repositories: each opens by the very call that the product opens the published one with."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from helpers import bright_guard, call
from PIL import Image

from guardpaint.audit.checkpoints import open_model
from guardpaint.audit.classifier import ClassifierAuditor
from guardpaint.audit.zero_shot import ZeroShotAuditor
from guardpaint.bases import BaseOptions, load_base, load_inpainter
from guardpaint.data.labelers import Asking, open_labeler
from guardpaint.draft.loading import TINY_DECODERS, load_tiny
from guardpaint.draft.options import LoadOptions
from guardpaint.errors import BadInput
from guardpaint.evaluate import real_metrics
from guardpaint.policy import Policy
from guardpaint.repair.inpainter import Inpainter
from guardpaint.repair.pipeline import PipelineRepairer
from guardpaint.testing import corpora, hub_layouts, hub_models, small
from guardpaint.testing.hub_layouts import LAYOUTS, build

SD, INPAINTING = "stable-diffusion-v1-5/stable-diffusion-v1-5", "stable-diffusion-v1-5/stable-diffusion-inpainting"
SDXL_INPAINTING = "diffusers/stable-diffusion-xl-1.0-inpainting-0.1"
BASES = {
    SD: ("sd", "StableDiffusionPipeline"),
    "stabilityai/stable-diffusion-xl-base-0.9": ("sdxl", "StableDiffusionXLPipeline"),
    "stabilityai/stable-diffusion-xl-base-1.0": ("sdxl", "StableDiffusionXLPipeline"),
    "stabilityai/sdxl-turbo": ("sdxl", "StableDiffusionXLPipeline"),
    "stabilityai/stable-diffusion-3.5-medium": ("sd3", "StableDiffusion3Pipeline"),
    "stabilityai/stable-diffusion-3.5-large-turbo": ("sd3", "StableDiffusion3Pipeline"),
    "black-forest-labs/FLUX.1-dev": ("flux", "FluxPipeline"),
    "black-forest-labs/FLUX.1-schnell": ("flux", "FluxPipeline"),
}
CHATS = ("OpenGVLab/InternVL3_5-8B-HF", "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3-VL-8B-Instruct")
LABELERS = {
    **{name: f"vlm:{name}" for name in CHATS},
    "google/shieldgemma-2-4b-it": "shieldgemma:google/shieldgemma-2-4b-it",
    "IDEA-Research/grounding-dino-base": "detector:IDEA-Research/grounding-dino-base",
}
CLIP, BLIP, RESNET = "openai/clip-vit-large-patch14", "Salesforce/blip-itm-base-coco", "microsoft/resnet-101"
SIGLIP, CLIPSEG, NSFW = "google/siglip-base-patch16-384", "CIDAS/clipseg-rd64-refined", "Falconsai/nsfw_image_detection"
POLICY = Policy.default()
PICTURES = [Image.new("RGB", (96, 64), c) for c in ("red", "blue")]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """All repositories, built once."""
    place = tmp_path_factory.mktemp("hub")
    for name in LAYOUTS:
        assert build(name, place) == place / name
    return place


def files(folder):
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def test_every_repository_has_a_test_of_its_loader():
    tested = {*BASES, INPAINTING, SDXL_INPAINTING, *TINY_DECODERS.values(), *LABELERS, CLIP, BLIP, RESNET, SIGLIP}
    assert tested | {CLIPSEG, NSFW} == set(LAYOUTS)


def test_all_together_are_small(hub):
    assert sum(p.stat().st_size for p in hub.rglob("*") if p.is_file()) < 60e6


def test_an_unknown_repository_is_named(tmp_path):
    with pytest.raises(BadInput, match=r"'runwayml/sd'.*black-forest-labs/FLUX\.1-dev, .*microsoft/resnet-101"):
        build("runwayml/sd", tmp_path)


def test_seeds_decide_and_nothing_is_drawn_globally(tmp_path):
    def weights(place, seed):
        data = (build(RESNET, tmp_path / place, seed=seed) / "model.safetensors").read_bytes()
        return hashlib.sha256(data).hexdigest()

    before = torch.get_rng_state()
    assert weights("a", 0) == weights("b", 0) != weights("c", 1)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", BASES)
def test_bases_open_draw_and_are_guarded(hub, name):
    """As `--base FOLDER` opens them: two steps at their own size, audited, repaired and reinserted."""
    family, cls = BASES[name]
    base = load_base(str(hub / name), BaseOptions(steps=2, guidance=3.0, size=64))
    assert base.family == family and type(base.pipe).__name__ == cls
    assert all(
        c is not None for n, c in base.pipe.components.items() if n not in ("image_encoder", "feature_extractor")
    )
    image = call(base.pipe, steps=2).images
    assert image.shape == (1, 3, 64, 64) and torch.isfinite(image).all() and image.std() > 0
    report = call(bright_guard(3.0).attach(base.pipe), steps=2).safety[0]
    assert not report.errors and report.status not in ("unfinished", "clean")


@pytest.mark.parametrize("name", [n for n, layout in LAYOUTS.items() if layout.variant and n in BASES])
def test_half_precision_files_are_a_variant(hub, name):
    base = load_base(str(hub / name), BaseOptions(LoadOptions(variant="fp16")))
    plain = load_base(str(hub / name))
    weights, halves = plain.pipe.unet.state_dict(), base.pipe.unet.state_dict()
    key = "conv_in.weight"
    assert torch.equal(weights[key].half().float(), halves[key]) and not torch.equal(weights[key], halves[key])


@pytest.mark.parametrize(("name", "dtype"), [(n, lay.dtype) for n, lay in LAYOUTS.items() if n in BASES])
def test_files_have_the_published_precision(hub, name, dtype):
    from safetensors.torch import load_file

    kinds = set()
    for file in (hub / name).rglob("*.safetensors"):
        found = {str(t.dtype).removeprefix("torch.") for t in load_file(file).values()} - {"int64"}
        kinds |= found if ".fp16" not in file.name else set()
        assert ".fp16" not in file.name or found == {"float16"}
    assert kinds == {dtype}


def test_files_have_the_published_names(hub):
    sd, flux = files(hub / SD), files(hub / "black-forest-labs/FLUX.1-dev")
    assert {"model_index.json", "unet/diffusion_pytorch_model.safetensors", "tokenizer/vocab.json",
            "unet/diffusion_pytorch_model.fp16.safetensors", "text_encoder/model.fp16.safetensors",
            "safety_checker/model.safetensors", "tokenizer/merges.txt", "feature_extractor/preprocessor_config.json",
            } <= sd  # fmt: skip
    for part, stem in (("transformer", "diffusion_pytorch_model"), ("text_encoder_2", "model")):
        assert f"{part}/{stem}.safetensors.index.json" in flux and f"{part}/{stem}.safetensors" not in flux
        assert sum(f.startswith(f"{part}/{stem}-0000") for f in flux) >= 2
    for chat in CHATS:
        found = files(hub / chat)
        assert {"preprocessor_config.json", "model.safetensors.index.json", "chat_template.jinja"} <= found
    assert "Pil" not in "".join(p.read_text() for p in hub.rglob("*config.json"))


@pytest.mark.parametrize("name", [INPAINTING])
def test_the_inpainter_opens_for_training_and_for_repair(hub, name):
    pipe = load_inpainter(str(hub / name))
    assert pipe.unet.config.in_channels == 9 and type(pipe).__name__ == "StableDiffusionInpaintPipeline"
    repairer = Inpainter.from_pretrained(hub / name)
    assert repairer.native == 64
    out = call(bright_guard(3.0, repairer=repairer, candidates=2).attach(small.pipeline("sd")), steps=3)
    assert not out.safety[0].errors


def test_sdxl_inpainting_opens_as_a_repairer(hub):
    for variant in (None, "fp16"):
        assert (
            PipelineRepairer.from_pretrained(hub / SDXL_INPAINTING, variant=variant).pipe.unet.config.in_channels == 9
        )


@pytest.mark.parametrize("family", TINY_DECODERS)
def test_tiny_decoders_fit_their_bases(hub, family):
    tiny = load_tiny(hub / TINY_DECODERS[family])
    name = next(n for n, (f, _) in BASES.items() if f == family)
    pipe = load_base(str(hub / name)).pipe
    latent = torch.zeros(1, pipe.vae.config.latent_channels, 8, 8)
    assert tiny.decode(latent).sample.shape == pipe.vae.decode(latent).sample.shape == (1, 3, 64, 64)


@pytest.mark.parametrize("name", LABELERS)
def test_labelers_open_and_answer(hub, name):
    kind, _, where = LABELERS[name].partition(":")
    labeler = open_labeler(f"{kind}:{hub / where}", Asking(POLICY, longest=8))
    answers = labeler.label(PICTURES)
    assert len(answers) == 2
    if name in CHATS:
        assert all(a.scores is None for a in answers), "a random model must never be taken for a labeler"
        assert len(labeler.caption(PICTURES)) == 2
    else:
        assert all(set(a.scores) == set(POLICY.names) for a in answers)


@pytest.mark.parametrize("name", CHATS)
def test_captions_depend_on_the_picture(hub, name):
    """Equal captions would make all pictures without a prompt one group of near-duplicates."""
    draw = np.random.default_rng(0)
    pictures = [corpora.crop(kind, draw) for kind in corpora.PHOTOGRAPHS for _ in range(2)]
    captions = open_labeler(f"vlm:{hub / name}", Asking(POLICY, longest=40)).caption(pictures)
    assert captions.count(None) <= 2 and len(set(captions)) >= 10


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_model_is_saved_and_opened_again(hub, name, tmp_path):
    """As an approver's folder is: the processor keeps the name that its publisher gave it."""
    first = open_labeler(f"vlm:{hub / name}", Asking(POLICY, longest=4))
    first.model.save_pretrained(tmp_path)
    first.processor.save_pretrained(tmp_path)
    again = open_labeler(f"vlm:{tmp_path}", Asking(POLICY, longest=4))
    assert type(again.processor).__name__ == type(first.processor).__name__
    assert again.label(PICTURES) == first.label(PICTURES)


def test_the_backbone_of_the_auditor_opens(hub):
    from transformers import AutoModelForImageClassification, ResNetModel

    model = open_model(AutoModelForImageClassification, hub / RESNET, "ResNet")
    backbone = ResNetModel.from_pretrained(hub / RESNET, local_files_only=True)
    assert model.config.num_labels == 1000 and model.config.layer_type == "bottleneck"
    assert tuple(backbone.config.hidden_sizes) == hub_models.RESNET_STAGES
    assert backbone(torch.zeros(1, 3, 64, 64)).last_hidden_state.shape == (1, hub_models.RESNET_STAGES[-1], 2, 2)


def test_metrics_open(hub):
    prompts = ["a cat, " * 40, "ü"]
    for spec in (f"clip:{hub / CLIP}", f"blip:{hub / BLIP}"):
        scores = real_metrics.open_metric(spec).score(PICTURES, prompts)
        assert len(scores) == 2 and all(s == s for s in scores)
    features = real_metrics.VisionFeatures.from_pretrained(str(hub / CLIP))
    assert features(torch.zeros(1, 3, 64, 64, dtype=torch.uint8)).shape == (1, 32)


def test_parts_of_presets_open(hub):
    auditor = ZeroShotAuditor.from_pretrained(hub / SIGLIP, POLICY, segmenter=hub / CLIPSEG)
    second = ClassifierAuditor.from_pretrained(hub / NSFW, labels={"normal": "safe", "nsfw": "nudity"})
    for part in (auditor, second):
        assert part.audit(torch.zeros(1, 3, 64, 64), ["a cat"], 0.0)[0].probs.keys() >= {"safe", "nudity"}


def test_gated_repositories_are_marked():
    assert {n for n, layout in LAYOUTS.items() if layout.gated} == {
        "stabilityai/stable-diffusion-xl-base-0.9", "stabilityai/stable-diffusion-3.5-medium",
        "stabilityai/stable-diffusion-3.5-large-turbo", "black-forest-labs/FLUX.1-dev",
        "black-forest-labs/FLUX.1-schnell", "google/shieldgemma-2-4b-it",
    }  # fmt: skip
    assert hub_layouts.LAYOUTS[CLIP].gated is False
