"""CLIP and SigLIP as auditors of any policy."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from detectors import PLACES, place, square, zero_shot

from guardpaint.audit.contrast import Contrast, contrasts, plain, texts
from guardpaint.audit.dual_encoder import DualEncoder
from guardpaint.audit.inputs import prepared
from guardpaint.audit.segmenter import Segmenter
from guardpaint.audit.zero_shot import ZeroShotAuditor, ZeroShotSettings, log_mean_exp, prompts_of
from guardpaint.errors import BadCheckpoint, BadConfig
from guardpaint.policy import Category, Policy
from guardpaint.testing import small_detectors

POLICY = Policy.default()
PICTURES = torch.rand(2, 3, 40, 40, generator=torch.Generator().manual_seed(2))
FAMILIES = sorted(small_detectors.ENCODERS)


def test_prompts_come_from_the_policy():
    found = contrasts(POLICY)
    assert set(found) == {"nudity", "violence"}
    assert found["nudity"].harm[0] == "a person shown without clothing"
    assert "a photo of swimwear and sportswear" in found["nudity"].neutral
    assert "a peaceful scene with nobody hurt" in found["violence"].neutral
    assert len(texts(found)) == len(set(texts(found)))


def test_any_policy_will_do():
    policy = Policy("office", (Category("safe"), Category("logos", "The logo of a company.", ("road signs",))))
    model, processor = small_detectors.clip()
    auditor = ZeroShotAuditor(model, processor, ZeroShotSettings(prompts_of(policy)))
    assert auditor.categories == ("safe", "logos")
    assert set(auditor.audit(PICTURES, [None, None], 0.0)[0].probs) == {"safe", "logos"}
    with pytest.raises(BadConfig, match="'logos' has no definition"):
        contrasts(Policy("empty", (Category("safe"), Category("logos"))))


def test_a_definition_inside_a_caption():
    assert plain("Injury, or a weapon\n  being used.") == "injury, or a weapon being used"


def test_the_score_by_hand():
    """s = 2, cosines 0.5 and 0.1 for, 0.2 against: σ(log((e¹ + e⁰·²)/2) − 0.4)."""
    wanted = 1 / (1 + math.exp(-(math.log((math.e + math.exp(0.2)) / 2) - 0.4)))
    similar = 2 * torch.tensor([0.5, 0.1, 0.2])
    contrast = log_mean_exp(similar[:2]) - log_mean_exp(similar[2:])
    assert float(contrast.sigmoid()) == pytest.approx(wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_score_is_the_formula_on_the_model_s_own_embeddings(family):
    auditor = zero_shot(family, f_slope=3.0, f_offset=0.5)
    model, processor = auditor.encoder.model, auditor.encoder.processor

    def embedded(lines):
        tokens = processor(text=lines, padding="max_length", max_length=32, truncation=True, return_tensors="pt")
        return F.normalize(model.get_text_features(**tokens).pooler_output, dim=-1)

    pixels = prepared(PICTURES, processor.image_processor)
    images = F.normalize(model.get_image_features(pixel_values=pixels).pooler_output, dim=-1)
    contrast = contrasts(POLICY)["violence"]
    scale = model.logit_scale.exp()
    raw = (
        log_mean_exp(scale * images @ embedded(list(contrast.harm)).T)
        - log_mean_exp(scale * images @ embedded(list(contrast.neutral)).T)
    ).sigmoid()
    assert torch.allclose(auditor.raw(images)[:, 1], raw, atol=1e-5)
    cosine = float(images[0] @ embedded(["a cat"])[0])
    audit = auditor.audit(PICTURES, ["a cat", None], 0.0)
    assert audit[0].faithfulness == pytest.approx(1 / (1 + math.exp(-(3 * cosine + 0.5))), abs=1e-5)
    assert audit[1].faithfulness is None
    assert torch.allclose(audit[0].image_embed, images[0], atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_map_points_to_the_evidence(family, monkeypatch):
    """The texts are given the embeddings of a bright and of a dark picture; the map finds the bright square."""
    model, processor = small_detectors.ENCODERS[family]()
    auditor = ZeroShotAuditor(model, processor, ZeroShotSettings({"nudity": {"harm": ["bright"], "neutral": ["dark"]}}))
    encoder = auditor.encoder
    both = encoder.images(encoder.pixels(torch.stack([torch.full((3, 32, 32), 0.95), square()])))
    known = {"bright": both[0], "dark": both[1]}
    monkeypatch.setattr(encoder, "texts", lambda lines: torch.stack([known[t] for t in lines]))
    for where in PLACES:
        audit = auditor.audit(square(*where)[None], [None], 0.0)[0]
        assert place(audit.adv_map) == where
        assert float(audit.adv_map.max()) == pytest.approx(audit.adv_prob, abs=1e-5) and float(audit.adv_map.min()) == 0


def test_a_segmenter_s_map_is_its_own_answer_for_the_definition():
    auditor = zero_shot("clip", segmenter=True)
    model, processor = auditor.segmenter.model, auditor.segmenter.processor
    assert auditor.maps == "segmenter"
    line = contrasts(POLICY)["nudity"].harm[0]
    tokens = processor(text=[line, line], padding="max_length", max_length=32, truncation=True, return_tensors="pt")
    logits = model(pixel_values=prepared(PICTURES, processor.image_processor), **tokens).logits
    own = auditor.segmenter.maps(PICTURES, [line])
    assert own.shape == (2, 1, 32, 32) and torch.allclose(own[:, 0], logits.sigmoid(), atol=1e-5)
    heat = auditor.audit(PICTURES, [None, None], 0.0)[0].class_maps["nudity"]
    stretched = own[0, 0] - own[0, 0].min()
    assert torch.allclose(heat / heat.max(), stretched / stretched.max(), atol=1e-3)


def test_large_maps_of_a_segmenter_are_pooled(monkeypatch):
    monkeypatch.setattr("guardpaint.audit.segmenter.MOST_CELLS", 8)
    assert Segmenter(*small_detectors.clipseg()).maps(PICTURES, ["a", "b"]).shape == (2, 2, 8, 8)


def test_every_text_is_encoded_once():
    model, processor = small_detectors.clip()
    encoder = DualEncoder(model, processor)
    calls = []
    hook = model.text_model.register_forward_hook(lambda *args: calls.append(1))
    first = encoder.texts(["a", "b", "a"])
    assert torch.equal(encoder.texts(["b", "a"]), first[[1, 0]]) and len(calls) == 2
    assert torch.equal(first[0], first[2])
    hook.remove()


def test_a_long_prompt_is_cut():
    audits = zero_shot("clip").audit(PICTURES, ["cat " * 500, "cat " * 600], 0.0)
    assert all(0 < a.faithfulness < 1 for a in audits)


def test_it_opens_a_hub_folder_with_a_policy(tmp_path):
    folder = small_detectors.saved(small_detectors.clip(), tmp_path / "clip")
    segmenter = small_detectors.saved(small_detectors.clipseg(), tmp_path / "clipseg")
    before = torch.random.get_rng_state()
    auditor = ZeroShotAuditor.from_pretrained(folder, POLICY.to_dict(), segmenter, levels={"violence": 0.7})
    assert torch.equal(torch.random.get_rng_state(), before), "loading drew random numbers"
    assert auditor.maps == "segmenter" and auditor.levels == {"nudity": 0.5, "violence": 0.7}
    auditor.save_pretrained(tmp_path / "saved")
    again = ZeroShotAuditor.from_pretrained(tmp_path / "saved")
    assert again.maps == "segmenter" and again.digest() == auditor.digest()
    assert ZeroShotAuditor.from_pretrained(folder, POLICY).digest() != auditor.digest()
    with pytest.raises(BadConfig, match="name the policy"):
        ZeroShotAuditor.from_pretrained(folder)


def test_a_checkpoint_that_is_no_image_text_encoder(tmp_path):
    folder = small_detectors.saved(small_detectors.classifier("vit"), tmp_path)
    with pytest.raises(BadCheckpoint):
        ZeroShotAuditor.from_pretrained(folder, POLICY)
    with pytest.raises(BadCheckpoint, match="'vit' checkpoint"):
        DualEncoder(*small_detectors.classifier("vit"))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"prompts": {}}, "one or more harms"),
        ({"prompts": {"safe": {"harm": ["a"], "neutral": ["b"]}}}, "without 'safe'"),
        ({"prompts": {"nudity": ["a"]}}, "write"),
        ({"prompts": {"nudity": {"harm": [], "neutral": ["b"]}}}, "texts for and against"),
        ({"maps": "segmenter"}, "name a CLIPSeg checkpoint"),
        ({"maps": "cam"}, "choose auto"),
        ({"f_slope": 0.0}, "above 0"),
        ({"sizes": (4, 8)}, "at least 8"),
    ],
)
def test_settings_that_do_not_fit_are_named(changes, word):
    model, processor = small_detectors.clip()
    with pytest.raises(BadConfig, match=word):
        ZeroShotAuditor(model, processor, ZeroShotSettings(**{"prompts": prompts_of(POLICY), **changes}))


def test_a_contrast_survives_json():
    value = prompts_of(POLICY)["violence"]
    assert Contrast.from_json(value) == contrasts(POLICY)["violence"]


def test_moving_it_where_it_is_forgets_no_text():
    """An evaluation moves its guard before every batch."""
    auditor = zero_shot("clip")
    auditor.audit(PICTURES, [None, None], 0.0)
    before = dict(auditor.encoder._texts)
    auditor.to("cpu")
    assert before and all(auditor.encoder._texts[line] is vector for line, vector in before.items())
