"""The Auditor-Scorer: shapes, isolation of the faithfulness head, save/load, Grad-CAM."""

from __future__ import annotations

import json
import math

import pytest
import torch

from guardpaint.audit.gradcam import grad_cam, overlay
from guardpaint.audit.model import AuditorConfig, AuditorScorer
from guardpaint.audit.text import byte_tokenizer, token_batch
from guardpaint.errors import BadCheckpoint, BadConfig, BadInput
from guardpaint.store.images import to_pil
from guardpaint.testing import small
from guardpaint.types import Auditor


@pytest.fixture(scope="module")
def auditor():
    return small.auditor()


def test_full_size_has_the_papers_dimensions():
    """ResNet-101, 2048×7×7 at 224, FiLM 512→4096 and 512→1024, d = 512, 256-d embeddings."""
    with torch.device("meta"):
        model = AuditorScorer(AuditorConfig())
    assert sum(p.numel() for p in model.backbone.parameters()) == 42_500_160
    assert model.strength_film.project.weight.shape == (4096, 512)
    assert model.seam_film.project.weight.shape == (1024, 512)
    assert model.adv_head.weight.shape == (1, 2048, 1, 1)
    assert model.attention.num_heads == 8 and model.attention.embed_dim == 512
    visual = model.features(torch.zeros(1, 3, 224, 224, device="meta"))
    assert visual.shape == (1, 2048, 7, 7)


def test_scores_are_in_range_and_finite(auditor):
    g = torch.Generator().manual_seed(0)
    audits = auditor.audit(torch.rand(3, 3, 64, 96, generator=g), ["a", "", None], 0.3)
    assert isinstance(auditor, Auditor)
    for a in audits:
        assert sum(a.probs.values()) == pytest.approx(1.0, abs=1e-5)
        assert a.safety == pytest.approx(min(1 - a.adv_prob, a.probs["safe"]))
        assert all(0 <= v <= 1 for v in a.scores().values() if v is not None)
        assert a.adv_map.shape == (8, 12) and a.adv_map.min() >= 0 and a.adv_map.max() <= 1
        assert a.image_embed.shape == (256,)
    assert audits[2].faithfulness is None and audits[0].faithfulness is not None


def test_maps_are_at_least_sixteen_at_the_fine_size(auditor):
    a = auditor.audit(torch.rand(1, 3, 128, 128), ["a"], 0.0)[0]
    assert min(a.adv_map.shape) >= 16


def test_a_batch_scores_like_single_images(auditor):
    """Padding of shorter prompts must not change their scores."""
    g = torch.Generator().manual_seed(1)
    images = torch.rand(2, 3, 64, 64, generator=g)
    prompts = ["a cat", "a much longer description of a quiet street at night"]
    together = auditor.audit(images, prompts, 0.2)
    auditor.train(False)
    for i in range(2):
        alone = auditor.audit(images[i : i + 1], prompts[i : i + 1], 0.2)[0]
        assert alone.faithfulness == pytest.approx(together[i].faithfulness, abs=1e-5)
        assert alone.adv_prob == pytest.approx(together[i].adv_prob, abs=1e-5)


def test_time_reaches_strength_and_quality_only(auditor):
    image = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(2))
    early, late = auditor.audit(image, ["a"], 0.9)[0], auditor.audit(image, ["a"], 0.0)[0]
    assert early.adv_prob == late.adv_prob and early.faithfulness == late.faithfulness
    assert early.suppression != late.suppression and early.quality != late.quality


def test_safety_losses_never_reach_the_faithfulness_head():
    """∂(adv + class + strength + quality) is zero on text encoder and faithfulness head; cosine reaches both
    and the backbone."""
    model = small.auditor(3)
    ids = model.token_ids(["a cat", "a dog"])
    out = model(torch.rand(2, 3, 64, 64), ids, torch.tensor([0.1, 0.5]))
    faith = [
        *model.text.parameters(), *model.query.parameters(), *model.attention.parameters(),
        *model.image_proj.parameters(), *model.text_proj.parameters(), *model.query_norm.parameters(),
        *model.key_norm.parameters(), model.log_temperature,
    ]  # fmt: skip
    safety = out.adv_logit.sum() + out.class_logits[:, 1].sum() + out.strength.sum() + out.quality.sum()
    grads = torch.autograd.grad(safety, faith, retain_graph=True, allow_unused=True)
    assert all(g is None or not g.any() for g in grads)
    backbone = list(model.backbone.parameters())
    for target, params in ((out.cosine.sum(), backbone), (safety, backbone)):
        reached = torch.autograd.grad(target, params, retain_graph=True, allow_unused=True)
        assert any(g is not None and g.abs().sum() > 0 for g in reached)
    text = torch.autograd.grad(out.cosine.sum(), list(model.text.parameters()), allow_unused=True)
    assert any(g is not None and g.abs().sum() > 0 for g in text)


def test_round_trip(tmp_path, auditor):
    auditor.save_pretrained(tmp_path)
    again = AuditorScorer.from_pretrained(tmp_path)
    image = torch.rand(1, 3, 64, 64)
    a, b = auditor.audit(image, ["x"], 0.1)[0], again.audit(image, ["x"], 0.1)[0]
    assert a.scores() == b.scores() and torch.equal(a.adv_map, b.adv_map)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_fp16_storage_loads_as_fp32(tmp_path, auditor):
    auditor.save_pretrained(tmp_path, torch.float16)
    again = AuditorScorer.from_pretrained(tmp_path)
    assert again.adv_head.weight.dtype == torch.float32
    image = torch.rand(1, 3, 64, 64)
    assert again.audit(image, ["x"], 0.1)[0].adv_prob == pytest.approx(
        auditor.audit(image, ["x"], 0.1)[0].adv_prob, abs=1e-2
    )


@pytest.mark.parametrize("damage", ["truncated", "missing", "shape", "extra", "nan", "config", "kind", "tokenizer"])
def test_damaged_checkpoints_are_refused_with_a_reason(tmp_path, auditor, damage):
    from safetensors.torch import load_file, save_file

    auditor.save_pretrained(tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    state = load_file(weights)
    match damage:
        case "truncated":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "missing":
            weights.unlink()
        case "shape":
            state["adv_head.weight"] = torch.zeros(1, 5, 1, 1)
            save_file(state, weights)
        case "extra":
            save_file({**state, "more": torch.zeros(1)}, weights)
        case "nan":
            state["adv_head.bias"] = torch.tensor([float("nan")])
            save_file(state, weights)
        case "config":
            config.write_text('{"kind": "Auditor')
        case "kind":
            config.write_text(json.dumps({"kind": "Other"}))
        case "tokenizer":
            (tmp_path / "tokenizer.json").write_text("{}")
    words = {
        "truncated": "not a complete",
        "missing": "no such",
        "shape": r"\(1, 5, 1, 1\)",
        "extra": "unexpected",
        "nan": "NaN",
        "config": "not valid JSON",
        "kind": "not the configuration of kind AuditorScorer",
        "tokenizer": "tokenizer",
    }
    with pytest.raises(BadCheckpoint, match=words[damage]):
        AuditorScorer.from_pretrained(tmp_path)


def test_bad_configs_name_the_value():
    for change, word in (
        ({"categories": ("nudity", "safe")}, "first must be"),
        ({"text_dim": 30}, "text_dim=30"),
        ({"sizes": (8, 16)}, "sizes"),
        ({"stage_depths": (1,)}, "stage_channels"),
    ):
        with pytest.raises(BadConfig, match=word):
            AuditorConfig.tiny(**change)
    with pytest.raises(BadConfig, match="unexpected"):
        AuditorConfig.from_dict({"nonsense": 1})


def test_grad_cam_is_a_heat_map_and_leaves_no_gradients(auditor):
    image = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        cam = grad_cam(auditor, image, "nudity", "a cat")
    assert cam.shape == (64, 64) and cam.min() >= 0 and cam.max() <= 1
    assert all(p.grad is None for p in auditor.parameters())
    assert overlay(to_pil(image), cam).size == (64, 64)
    with pytest.raises(BadInput, match="'gore'.*nudity"):
        grad_cam(auditor, image, "gore")


def test_grad_cam_by_hand():
    """Linear class head: α_k = w_k / (h·w), so the map is ReLU(Σ w_k F_k) up to scale."""
    model = small.auditor(5)
    image = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        visual = model.features(image[None])
    expected = torch.relu((model.class_head.weight[1].view(1, -1, 1, 1) * visual).sum(1, keepdim=True))
    expected = torch.nn.functional.interpolate(expected, size=(64, 64), mode="bilinear")[0, 0].detach()
    cam = grad_cam(model, image, "nudity")
    torch.testing.assert_close(cam, expected / expected.max().clamp_min(1e-12), atol=1e-4, rtol=1e-3)


def test_tokenizer_spells_every_script():
    tokenizer = byte_tokenizer()
    for text in ("кот", "שלום", "🐈‍⬛", "日本", "plain"):
        ids = tokenizer.encode(text).ids
        assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text
    batch = token_batch(tokenizer, ["", "abc"], 128)
    assert batch.shape == (2, 4) and batch[0].tolist()[1:] == [0, 0, 0]
    assert token_batch(tokenizer, ["x" * 1000], 16).shape == (1, 16)


def test_prompt_cache_is_dropped_with_the_weights():
    model = small.auditor(6)
    image = torch.rand(1, 3, 64, 64)
    before = model.audit(image, ["a"], 0.0)[0].faithfulness
    with torch.no_grad():
        model.text.embed.weight.mul_(-3)
    model.eval()
    assert model.audit(image, ["a"], 0.0)[0].faithfulness != before


def test_pooling_by_hand():
    """Cells (0, 0, 0, ln 5): mean ln 5 / 4; smooth maximum ln((3 + 5)/4) = ln 2."""
    from guardpaint.audit.model import pooled

    cells = torch.tensor([[[0.0, 0.0], [0.0, math.log(5.0)]]])
    torch.testing.assert_close(pooled(cells, "mean"), torch.tensor([math.log(5.0) / 4]))
    torch.testing.assert_close(pooled(cells, "peak"), torch.tensor([math.log(2.0)]))


def test_quality_may_follow_the_worst_place():
    """With one bad cell, P by its worst place is below P by the mean; an old checkpoint keeps the mean."""
    from dataclasses import replace

    model = small.auditor(0)
    assert model.config.quality_pool == "mean"
    images, ids, noise = torch.rand(2, 3, 64, 64), model.token_ids(["a", "b"]), torch.zeros(2)
    with torch.no_grad():
        by_mean = model(images, ids, noise).quality
        model.config = replace(model.config, quality_pool="peak")
        assert (model(images, ids, noise).quality <= by_mean + 1e-6).all()
        model.config = replace(model.config, quality_pool="high")
        assert (model(images, ids, noise).quality <= by_mean + 1e-6).all()
    with pytest.raises(BadConfig, match="quality_pool='min'"):
        replace(model.config, quality_pool="min")


def test_high_pooling_does_not_ask_how_large_a_place_is():
    """Two maps with one and with sixteen cells of 9 among zeros: nearly 9 both, where a smooth maximum tells them apart."""
    from guardpaint.audit.model import pooled

    few, many = torch.zeros(16, 16), torch.zeros(16, 16)
    few[0, 0] = 9.0
    many[:4, :4] = 9.0
    by_hand = 9 * math.exp(9) / (math.exp(9) + 255)
    assert pooled(few, "high").item() == pytest.approx(by_hand, rel=1e-5) and by_hand > 8.7
    assert pooled(many, "high").item() == pytest.approx(9.0, abs=0.05)
    assert pooled(many, "peak") - pooled(few, "peak") > 2.5
