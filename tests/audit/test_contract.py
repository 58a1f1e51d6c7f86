"""What every auditor that ships has in common."""

from __future__ import annotations

import json
import math

import pytest
import torch
from detectors import EVERY

from guardpaint.audit.contract import check_audit
from guardpaint.audit.model import AuditorScorer
from guardpaint.errors import BadConfig
from guardpaint.parts.kinds import kind_of, part_class
from guardpaint.types import SAFE, Auditor

PICTURES = torch.rand(3, 3, 40, 56, generator=torch.Generator().manual_seed(3))
PROMPTS = ["a cat", None, "a dog on a meadow"]


@pytest.fixture(params=EVERY, scope="module")
def auditor(request):
    return EVERY[request.param]()


@pytest.fixture(scope="module")
def audits(auditor):
    return auditor.audit(PICTURES, PROMPTS, 0.3)


def test_audits_are_complete(auditor, audits):
    assert isinstance(auditor, Auditor) and len(audits) == 3
    assert auditor.categories[0] == SAFE and auditor.sizes[0] <= auditor.sizes[1]
    for audit, prompt in zip(audits, PROMPTS, strict=True):
        check_audit(audit, auditor, prompt)
        assert set(audit.probs) == set(audit.class_maps) == set(auditor.categories)
        assert sum(audit.probs.values()) == pytest.approx(1, abs=1e-5) and audit.pixels == 40
        given = {name for name, value in audit.scores().items() if value is None}
        assert given == auditor.absent | ({"F"} if prompt is None else set())


def test_maps_are_probabilities_on_the_cpu(audits):
    for audit in audits:
        for heat in (audit.adv_map, *audit.class_maps.values()):
            assert heat.dtype == torch.float32 and heat.device.type == "cpu" and not heat.requires_grad
            assert float(heat.min()) >= 0 and float(heat.max()) <= 1


def test_a_batch_is_its_pictures(auditor, audits):
    for i, audit in enumerate(audits):
        alone = auditor.audit(PICTURES[i : i + 1], PROMPTS[i : i + 1], 0.3)[0]
        assert alone.probs == pytest.approx(audit.probs, abs=1e-4)
        assert alone.faithfulness == pytest.approx(audit.faithfulness, abs=1e-4)
        for name, heat in audit.class_maps.items():
            assert torch.allclose(alone.class_maps[name], heat, atol=1e-4)
        assert torch.allclose(alone.image_embed, audit.image_embed, atol=1e-4)


def test_random_numbers_and_pictures_are_left_alone(auditor):
    pictures, before = PICTURES.clone(), torch.random.get_rng_state()
    with torch.inference_mode():
        auditor.audit(pictures, PROMPTS, 0.0)
    assert torch.equal(torch.random.get_rng_state(), before) and torch.equal(pictures, PICTURES)


def test_pictures_of_other_sizes_are_welcome(auditor):
    for size in ((16, 64), (300, 200)):
        audit = auditor.audit(torch.rand(1, 3, *size, generator=torch.Generator()), [None], 0.0)[0]
        assert math.isfinite(audit.safety) and audit.pixels == min(size)


def test_saved_and_loaded_it_says_the_same(auditor, audits, tmp_path):
    auditor.save_pretrained(tmp_path)
    again = part_class("auditor", auditor.kind).from_pretrained(tmp_path)
    assert again.options() == auditor.options() == json.loads(json.dumps(auditor.options()))
    assert again.digest() == auditor.digest() and again.sizes == auditor.sizes and again.absent == auditor.absent
    repeated = again.audit(PICTURES, PROMPTS, 0.3)
    for old, new in zip(audits, repeated, strict=True):
        assert new.probs == pytest.approx(old.probs, abs=1e-5)
        assert torch.allclose(new.adv_map, old.adv_map, atol=2e-3)
    with_options = part_class("auditor", auditor.kind).from_pretrained(tmp_path, **auditor.options())
    assert with_options.digest() == auditor.digest()


def test_it_is_of_a_registered_kind(auditor):
    assert kind_of("auditor", auditor) == auditor.kind


def test_levels_make_a_twin(auditor):
    if isinstance(auditor, AuditorScorer):
        assert auditor.with_levels({}) is auditor
        with pytest.raises(BadConfig, match="Ensemble"):
            auditor.with_levels({"nudity": 0.1})
        return
    strict = auditor.with_levels({"nudity": 0.01})
    assert strict.digest() != auditor.digest() and strict.options()["levels"]["nudity"] == 0.01
    for old, new in zip(auditor.audit(PICTURES, PROMPTS, 0.0), strict.audit(PICTURES, PROMPTS, 0.0), strict=True):
        assert new.adv_prob >= old.adv_prob
        assert float(new.class_maps["nudity"].max()) >= float(old.class_maps["nudity"].max())
    assert auditor.with_levels({"nudity": 0.5}).audit(PICTURES, PROMPTS, 0.0)[0].probs == pytest.approx(
        auditor.audit(PICTURES, PROMPTS, 0.0)[0].probs
    )
    with pytest.raises(BadConfig, match="covers"):
        auditor.with_levels({"unheard-of": 0.5})


def test_it_moves(auditor):
    assert auditor.to("cpu") is auditor
    assert auditor.audit(PICTURES[:1], [None], 0.0)[0].pixels == 40
