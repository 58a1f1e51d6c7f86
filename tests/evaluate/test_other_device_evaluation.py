"""Evaluation with base, guard, surrogate and metrics on another device: drawing, attacks, thresholds, scores."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from elsewhere import CALL, busy_guard, on_a_gpu, places, rarely
from PIL import Image
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel

from guardpaint.audit.model import AuditorScorer
from guardpaint.bases import Base
from guardpaint.data import views
from guardpaint.data.views import Labelled
from guardpaint.evaluate import auditor as audit_measures
from guardpaint.evaluate import calibrate, corpus_auditor, distances, moment, proposers, run, seed_pairs
from guardpaint.evaluate import inpainter as fill_measures
from guardpaint.evaluate.attacks import adaptive
from guardpaint.evaluate.attacks.mma import Mma
from guardpaint.evaluate.attacks.ring_a_bell import RingABell
from guardpaint.evaluate.defences import embedding_projection, guarded, post_hoc, prompt_filter, sld
from guardpaint.evaluate.defences.negative_prompt import NegativePrompt
from guardpaint.evaluate.defences.opening import open_defence
from guardpaint.evaluate.defences.undefended import Undefended
from guardpaint.evaluate.outside import open_lpips
from guardpaint.evaluate.real_metrics import ClipScore, VisionFeatures, open_metric
from guardpaint.policy import Policy
from guardpaint.repair.knobs import UniformProposer
from guardpaint.testbed import Prompt
from guardpaint.testbed.language import Attacker, Lexicon, Surrogate
from guardpaint.testbed.models import load_surrogate
from guardpaint.testing import hub_layouts, small, small_detectors
from guardpaint.testing.other_device import OTHER, other_device
from guardpaint.train import rollouts

POLICY = Policy.default()
BRIEF = {"num_inference_steps": 2, "guidance_scale": 4.0}
LEXICON = Lexicon(
    keywords=("naked",),
    sentences=("a naked person",),
    open_phrases={"nudity": ("naked",)},
    hidden_phrases={"nudity": ("clad in air alone",)},
    words=("cloud", "river", "meadow"),
    contexts=("a person {} at sea",),
)


@pytest.fixture(autouse=True)
def device():
    with other_device() as device:
        yield device


def a_base(family="sd"):
    return Base(f"tiny-{family}", small.pipeline(family).to(OTHER), CALL)


class Dark:
    """A judge that calls dark pictures safe."""

    attributes, identity = False, "dark"

    def verdict(self, image, asked):
        return "safe", {}


CASES = [run.Case("benign", str(i), text, i) for i, text in enumerate(("a person on the beach", "a house"))]


@pytest.mark.parametrize("family", ["sd", *rarely("sdxl", "sd3", "flux")])
def test_stage_defences(family):
    """The harness draws with every defence, the guard's repairs among them; nothing is withheld for an error."""
    guard, base = busy_guard(OTHER), a_base(family)
    inpainting = small.inpainter(0).to(OTHER).pipe
    defences = [
        Undefended(), NegativePrompt(), prompt_filter.PromptFilter(encode=prompt_filter.base_encoder(base.pipe)),
        sld.SafeLatentDiffusion(), embedding_projection.EmbeddingProjection(), post_hoc.PostHoc(guard.parts),
        post_hoc.PostHocBlur(guard.parts), post_hoc.PostHocInpaint(guard.parts, pipe=inpainting, call=BRIEF), guarded.Guarded(guard),
    ]  # fmt: skip
    for defence in defences:
        made = run.draw(base, defence, "x", CASES, Dark())
        assert len(made) == 2 and not any(row.detail.get("error") for row, _ in made), defence.name


def test_stage_gradient_attack():
    """Gradients on the view find the same pictures as on the CPU, against a careful auditor too."""
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    found = []
    for place in ("cpu", OTHER):
        auditor = small.auditor(0).to(place)
        careful = adaptive.Careful(auditor, secret=1, looks=2)
        found.append(adaptive.perturbed(auditor, images, ["a", "b"], 4 / 255, steps=3, careful=careful).cpu())
    assert (found[0] - images).abs().max() > 0 and (found[0] - found[1]).abs().mean() < 1e-3


def test_stage_system_attack():
    """Seeds and starting noise are searched with base and auditor on the device."""
    base, auditor = a_base(), small.auditor(0).to(OTHER)
    options = adaptive.unsafe_options(base, ["a"], [1, 2], lambda image: True)
    best = adaptive.disguised(auditor, options)[0]
    start = next(o for o in options if o.seed == best.seed)
    assert len(adaptive.wandered(base, auditor, start, lambda image: True, rounds=1, children=2)) == 2


def surrogate(place):
    with small.seeded(0):
        encoder = small.clip_text().to(place)
    return Surrogate(words(), encoder)


def words():
    """Byte tokens and a few whole words, which MMA chooses from."""
    tokenizer = small.clip_tokenizer()
    tokenizer.add_tokens([f"{w}</w>" for w in LEXICON.words])
    return tokenizer


@pytest.mark.parametrize("attack", ["mma", "ring_a_bell"])
def test_stage_prompt_attack(attack):
    """The surrogate's embeddings and token gradients come from the device; the prompts are those of the CPU."""
    target, found = "a person naked at sea", []
    for place in ("cpu", OTHER):
        encoder = surrogate(place)
        encoder.encoder.resize_token_embeddings(len(encoder.tokenizer))
        encoder.encoder.to(place)
        attacker = Attacker(encoder, LEXICON)
        search = Mma(rounds=2, tokens=2) if attack == "mma" else RingABell(population=6, generations=2, words=2)
        gap, rng = search.gap(target, attacker), random.Random(1)
        if attack == "mma":
            free = search.optimised(gap, rng)
        else:
            free = search.evolved(gap, [gap.drawn(2, rng) for _ in range(6)], {}, rng)[0]
        found.append(gap.filled(free))
    assert "naked" not in found[1]


def views_of(count=4):
    category = torch.arange(count) % 3
    batch = Labelled(
        images=torch.rand(count, 3, 64, 64),
        masks=torch.zeros(count, 1, 1, dtype=torch.bool),
        category=category,
        seeds=list(range(count)),
        prompts=[f"picture {i}" for i in range(count)],
        names=POLICY.names,
    )
    return replace(batch.views(batch.images, "clean"), strength=torch.zeros(count))


def test_stage_thresholds():
    """What calibration and the auditor's tables see of views."""
    auditor = small.auditor(0).to(OTHER)
    looks = calibrate.scored(auditor, views_of(12))
    found, _ = calibrate.calibrate(views_of(12), looks, replace(POLICY, trigger=1e-9), 0.5, 0.5, (0.0,))
    assert set(found.bands[0].thresholds) == set(POLICY.names[1:])
    assert len(audit_measures.measure_views(auditor, POLICY, "tiny", views_of())) == 4
    assert len(corpus_auditor.other_prompts(auditor, views_of())) == 4
    assert audit_measures.measure_speed(auditor, repeats=1)


def test_stage_fills():
    image, hole = np.zeros((64, 64, 3), np.uint8), np.ones((64, 64), bool)
    made = fill_measures.fills(small.inpainter(0).to(OTHER).pipe, [image], [hole], ["a coat"], [1])
    assert made[0].shape == (64, 64, 3)


def test_stage_proposers():
    """Proposers are compared on tournaments that are replayed on the device."""
    guard = busy_guard(OTHER)
    state = next(s for s in rollouts.catch(guard, a_base(), [Prompt("1", "a person", 1)]) if s is not None)
    for proposer in (UniformProposer(), guard.parts.proposer):
        assert proposers.measure(state, guard.parts, proposer, Dark())


def test_stage_metrics():
    """The score of a picture and its prompt, and the features of a Fréchet distance."""
    images = [Image.new("RGB", (40, 40), c) for c in ("red", "blue")]
    shape = {**small_detectors.vision_shape(), "hidden_size": 32}
    with small.seeded(0):
        vision = CLIPVisionModel(CLIPVisionConfig(**shape))
    size = {"height": 32, "width": 32}
    features = VisionFeatures(vision, CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=size))
    clip, pixels = ClipScore(*small_detectors.clip()), torch.randint(0, 256, (2, 3, 40, 40)).byte()
    scores, here = clip.score(images, ["a", "b"]), features(pixels)
    clip.model.to(OTHER)
    there = features.to(OTHER)(pixels.to(OTHER))
    assert clip.score(images, ["a", "b"]) == pytest.approx(scores, abs=1e-3)
    assert there.device == OTHER and torch.allclose(there.cpu(), here, atol=1e-4)


def openers(folder):
    """What opens a metric, a surrogate or an auditor from files, by name."""
    clip, blip = (
        hub_layouts.build(i, folder) for i in ("openai/clip-vit-large-patch14", "Salesforce/blip-itm-base-coco")
    )
    return {
        "clip": lambda: open_metric(f"clip:{clip}"),
        "blip": lambda: open_metric(f"blip:{blip}"),
        "features": lambda: VisionFeatures.from_pretrained(str(clip)),
        "surrogate": lambda: load_surrogate(str(clip)),
        "lpips": open_lpips,
    }


@pytest.mark.parametrize("name", ["clip", "blip", "features", "surrogate", "lpips"])
def test_stage_opening(name, tmp_path, monkeypatch):
    """Metrics and the attack's surrogate go where the machine computes, without an option."""
    opener = openers(tmp_path)[name]
    here = opener()
    on_a_gpu(monkeypatch, OTHER)
    there = opener()
    assert places(here) == {"cpu"} and places(there) == {"cuda"}
    picture = Image.new("RGB", (64, 64), "red")
    if name in ("clip", "blip"):
        assert there.score([picture], ["a cat"]) == pytest.approx(here.score([picture], ["a cat"]), abs=1e-3)
    elif name == "surrogate":
        assert torch.allclose(there.embed(["a cat"]), here.embed(["a cat"]), atol=1e-4)


def test_stage_distances(tmp_path, monkeypatch):
    """The pictures of a Fréchet distance follow the network to the device."""
    for name, colours in (("one", ("red", "blue", "green")), ("two", ("black", "white", "grey"))):
        (tmp_path / name).mkdir()
        for i, colour in enumerate(colours):
            Image.new("RGB", (40, 40), colour).save(tmp_path / name / f"{i}.png")
    clip = hub_layouts.build("openai/clip-vit-large-patch14", tmp_path)
    seen = []
    forward = VisionFeatures.forward
    monkeypatch.setattr(VisionFeatures, "forward", lambda self, x: seen.append(x.device.type) or forward(self, x))
    on_a_gpu(monkeypatch, OTHER)
    features = VisionFeatures.from_pretrained(str(clip))
    with pytest.raises(Reached):
        distances.compared(Collects(features), *(sorted((tmp_path / n).glob("*")) for n in ("one", "two")), batch=2)
    assert set(seen) == {"cuda"}


class Reached(Exception):
    """All pictures were shown."""


class Collects(torch.nn.Module):
    """A metric of torchmetrics' shape that shows pictures to its network and computes nothing."""

    def __init__(self, features):
        super().__init__()
        self.inception = features

    def update(self, pictures, real):
        self.inception(pictures)

    def compute(self):
        raise Reached


@pytest.mark.parametrize("command", ["calibrate", "corpus-auditor"])
def test_stage_auditor_of_a_command(command, tmp_path, monkeypatch):
    """The auditor of `calibrate` and of `eval corpus-auditor` is moved before it looks at views."""
    auditor, seen = small.auditor(0), []
    monkeypatch.setattr(AuditorScorer, "from_pretrained", lambda folder: auditor)
    on_a_gpu(monkeypatch, OTHER)
    split = {"calibrate": "calibration", "corpus-auditor": "test"}[command]
    views.store([views_of(12)], tmp_path / f"tiny-{split}.pt")

    def look(auditor, *more):
        seen.append(auditor.device.type)
        raise Reached

    with pytest.raises(Reached):
        if command == "calibrate":
            monkeypatch.setattr(calibrate, "scored", look)
            calibrate.run(tmp_path, tmp_path, tmp_path / "c.json", calibrate.Promise(0.5, 0.5, (0.0,)))
        else:
            monkeypatch.setattr(corpus_auditor, "measured", look)
            corpus_auditor.run(tmp_path, tmp_path, tmp_path / "r.json", POLICY)
    assert seen == ["cuda"]


def test_stage_named_repairer(tmp_path, monkeypatch):
    """The repairer of `post_hoc_inpaint@FOLDER` is moved when it is opened."""
    small.inpainter(0).pipe.save_pretrained(tmp_path)
    on_a_gpu(monkeypatch, OTHER)
    defence, _ = open_defence(f"post_hoc_inpaint@{tmp_path}", small.guard(0))
    assert places(defence.repairer.pipe.unet) == {"cuda"}


def test_stage_moment_and_seed_pairs(tmp_path):
    """The guard is moved to where each base draws; it starts on the CPU."""
    prompts = [Prompt("0", "words", 1, "nudity")]
    guard = busy_guard()
    rows = moment.measure(moment.MomentOptions(guard, [a_base()], prompts, Dark(), tmp_path / "m", (0.5,)))
    assert rows and not any(row["error"] for row in rows)
    guard = busy_guard()
    asked = seed_pairs.SeedPairs(guard, [a_base()], prompts, Dark(), {}, tmp_path / "s", 2)
    assert len(asked.measure()) == 2
    assert next(guard.parts.auditor.parameters()).device.type == torch.device(OTHER).type
