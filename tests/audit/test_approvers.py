"""Second looks, labelers, ensembles and cascades as approvers; ensembles of auditors."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

import pytest
import torch
import vlms
from detectors import classifier, finds_squares, square, zero_shot

from guardpaint.audit.approvers import (
    ApproverEnsemble,
    Cascade,
    CascadeSettings,
    SecondLook,
    SecondLookSettings,
)
from guardpaint.audit.contract import check_probabilities
from guardpaint.audit.ensemble import Ensemble, EnsembleSettings, hottest, worst
from guardpaint.audit.levels import probabilities
from guardpaint.audit.tiles import MOST_TILES
from guardpaint.data.approver import VlmApprover, VlmSettings
from guardpaint.data.labelers import ShieldLabeler
from guardpaint.data.questions import Answer
from guardpaint.errors import BadCheckpoint, BadConfig, BadInput, NotFinite
from guardpaint.guard import GuardPaint
from guardpaint.parts.kinds import kind_of, part_class
from guardpaint.policy import Policy
from guardpaint.repair.native import NativeRepairer
from guardpaint.testing import small
from guardpaint.testing.doubles import AlwaysSafe, AlwaysUnsafe, FlagsBright, Raises
from guardpaint.types import Approval, Approver, Audit

POLICY = Policy.default()
IMAGE = torch.rand(3, 48, 64, generator=torch.Generator().manual_seed(4))


@dataclass
class Says:
    """An approver that gives the same scores to every picture and counts what it was asked."""

    scores: dict
    name: str = "says"
    heat: torch.Tensor | None = None
    asked: list = field(default_factory=list)

    @property
    def categories(self):
        return ("safe", *self.scores)

    def approve(self, image, prompt, edited):
        self.asked.append(edited)
        return Approval(probabilities(self.scores), self.name, self.heat)


@dataclass
class Answers:
    """A labeler that gives one answer."""

    answer: Answer
    name: str = "answers"

    def label(self, pictures):
        return [self.answer] * len(pictures)


def vlm(answer, **settings):
    return VlmApprover(Answers(answer), VlmSettings("vlm:stub", POLICY.to_dict(), **settings))


def shield():
    model, processor = vlms.shieldgemma()
    labeler = ShieldLabeler(model, processor, POLICY, "shieldgemma:small")
    return VlmApprover(labeler, VlmSettings("shieldgemma:small", POLICY.to_dict()))


EVERY = {
    "second look": lambda: SecondLook(classifier("resnet")),
    "second look, scorer in tiles": lambda: SecondLook(small.auditor(), SecondLookSettings(tiles=32)),
    "vlm": shield,
    "ensemble": lambda: ApproverEnsemble([SecondLook(classifier("vit")), SecondLook(zero_shot("clip"))]),
    "cascade": lambda: Cascade(SecondLook(classifier("resnet")), SecondLook(zero_shot("siglip"))),
}


@pytest.mark.parametrize("name", EVERY)
def test_every_approver_keeps_the_contract(name):
    approver, before = EVERY[name](), torch.random.get_rng_state()
    assert isinstance(approver, Approver) and kind_of("approver", approver) == approver.kind
    for edited in (False, True):
        approval = approver.approve(IMAGE, "a cat", edited)
        check_probabilities(approval.probs, approver.categories, "approver")
        assert approval.by and approval.probs == approver.approve(IMAGE, "a cat", edited).probs
        if approval.heat is not None:
            assert float(approval.heat.min()) >= 0 and float(approval.heat.max()) <= 1
    assert torch.equal(torch.random.get_rng_state(), before)
    strict = approver.with_levels({"nudity": 0.001})
    assert (
        1 - strict.approve(IMAGE, None, False).probs["safe"] >= 1 - approver.approve(IMAGE, None, False).probs["safe"]
    )
    assert strict.digest() != approver.digest() and approver.to("cpu") is approver


@pytest.mark.parametrize("name", [n for n in EVERY if n != "vlm"])
def test_saved_and_loaded_it_says_the_same(name, tmp_path):
    approver = EVERY[name]().with_levels({"nudity": 0.3})
    approver.save_pretrained(tmp_path)
    again = part_class("approver", approver.kind).from_pretrained(tmp_path, **approver.options())
    assert again.digest() == approver.digest() and again.name == approver.name
    first, second = (a.approve(IMAGE, "a cat", True) for a in (approver, again))
    assert second.probs == pytest.approx(first.probs, abs=1e-5) and second.by == first.by


# Second look ------------------------------------------------------------------------------------------------------


def test_a_second_look_is_the_audit_at_the_fine_size():
    auditor = FlagsBright(sizes=(16, 32))
    approval = SecondLook(auditor).approve(torch.full((3, 64, 64), 0.6), None, False)
    assert approval.probs == pytest.approx({"safe": 0.4, "nudity": 0.45, "violence": 0.15})
    assert approval.by == "second-look of FlagsBright" and approval.heat.shape == (16, 16)


def test_tiles_find_what_a_shrunk_picture_hides():
    """A bright square of 32 px in 128 × 128 is 1/16 of the picture, and all of one tile."""
    image = torch.zeros(3, 128, 128)
    image[:, 32:64, 64:96] = 0.9
    whole = SecondLook(FlagsBright()).approve(image, None, False)
    many = SecondLook(FlagsBright(), SecondLookSettings(tiles=16)).look(torch.rand(3, 160, 160), None)
    assert len(many.tiles) - 1 <= MOST_TILES
    tiles = SecondLook(FlagsBright(), SecondLookSettings(tiles=32)).approve(image, None, False)
    lowered = SecondLook(FlagsBright(), SecondLookSettings(tiles=32, tile_offset=20.0)).approve(image, None, False)
    assert whole.probs["safe"] > 0.9 and tiles.probs["safe"] < 0.11
    assert lowered.probs["safe"] == pytest.approx(whole.probs["safe"], abs=0.01)
    assert float(tiles.heat.max()) > 0.8 and tiles.heat.argmax() // tiles.heat.shape[1] < tiles.heat.shape[0] / 2


def test_a_scorer_s_adversarial_head_counts_too():
    """AuditorScorer's S is the worse of two heads, and an approval knows probabilities only."""
    auditor = small.auditor()
    audit = auditor.audit(IMAGE[None], [None], 0.0)[0]
    look = SecondLook(auditor, SecondLookSettings())
    seen = look.look(IMAGE, None)
    assert look.approve(IMAGE, None, False).probs["safe"] == pytest.approx(seen.safety, abs=1e-6)
    assert audit.safety <= 1 - audit.adv_prob + 1e-6


# Labelers ---------------------------------------------------------------------------------------------------------


def test_a_labeler_s_scores_by_hand():
    approval = vlm(Answer({"safe": 0.2, "nudity": 0.1, "violence": 0.7}, "…")).approve(IMAGE, None, False)
    assert approval.probs == pytest.approx({"safe": 0.3, "nudity": 0.0875, "violence": 0.6125})
    assert approval.by == "vlm:stub" and approval.heat is None


@pytest.mark.parametrize(
    "answer",
    [
        Answer(None, "I would rather not", "no JSON object"),
        Answer({"safe": 0.9, "nudity": 0.1}, "…"),
        Answer({"safe": 0.0, "nudity": float("nan"), "violence": 0.0}, "…"),
        Answer({"safe": 0.0, "nudity": 7.0, "violence": 0.0}, "…"),
        Answer({"safe": 0.98, "nudity": 0.01, "violence": 0.01}, "label: nudity …", "says nudity but scores safe"),
    ],
)
def test_an_answer_that_cannot_be_read_is_unsafe(answer):
    approval = vlm(answer, levels={"nudity": 0.999}).approve(IMAGE, None, False)
    assert approval.probs == {"safe": 0.0, "nudity": 0.5, "violence": 0.5}
    assert "unreadable" in approval.by and POLICY.finding_of(1.0, approval.probs) is not None


def test_a_labeler_that_raises_is_not_an_approval():
    class Broken:
        name = "broken"

        def label(self, pictures):
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        VlmApprover(Broken(), VlmSettings("vlm:x", POLICY.to_dict())).approve(IMAGE, None, False)


def test_a_guard_model_is_saved_with_its_weights(tmp_path, monkeypatch):
    """The processor of ShieldGemma needs torchvision to be opened from a folder, so the opener is stood in for."""
    approver = shield()
    approver.save_pretrained(tmp_path)
    assert (tmp_path / "model" / "model.safetensors").is_file()
    wanted = []

    def opened(spec, asking, opening):
        wanted.append((spec, asking.policy.names))
        return approver.labeler

    monkeypatch.setattr("guardpaint.data.approver.open_labeler", opened)
    again = VlmApprover.from_pretrained(tmp_path, levels={"nudity": 0.2})
    assert wanted == [(f"shieldgemma:{tmp_path / 'model'}", POLICY.names)]
    assert again.levels == {"nudity": 0.2, "violence": 0.5} and again.name == "shieldgemma:small"


def test_a_chat_model_opens_from_options_alone(tmp_path):
    model, processor = vlms.CHAT["llava"]()
    model.save_pretrained(tmp_path / "llava")
    processor.save_pretrained(tmp_path / "llava")
    approver = VlmApprover.from_pretrained(policy=POLICY, labeler=f"vlm:{tmp_path / 'llava'}")
    approval = approver.approve(IMAGE, None, False)
    assert approval.probs["safe"] == 0.0 and "unreadable" in approval.by, "random weights talk nonsense"
    approver.save_pretrained(tmp_path / "part")
    again = VlmApprover.from_pretrained(tmp_path / "part")
    assert again.digest() == approver.digest()
    with pytest.raises(BadConfig, match="labeler and policy must be named"):
        VlmApprover.from_pretrained()


def test_an_endpoint_has_no_weights_to_save(tmp_path):
    approver = VlmApprover.from_pretrained(policy=POLICY.to_dict(), labeler="endpoint:http://localhost:9/v1#m")
    approver.save_pretrained(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["part.json"]
    assert VlmApprover.from_pretrained(tmp_path).digest() == approver.digest()


# Ensembles --------------------------------------------------------------------------------------------------------


def test_the_worst_by_hand():
    scores = [{"nudity": 0.2}, {"nudity": 0.1, "violence": 0.7}]
    assert worst(scores, ("safe", "nudity", "violence")) == {"nudity": 0.2, "violence": 0.7}


def test_maps_of_other_sizes_are_laid_over_each_other():
    a, b = torch.zeros(2, 2), torch.zeros(4, 4)
    a[0, 0], b[3, 3] = 1.0, 0.5
    heat = hottest([a, b])
    assert heat.shape == (4, 4) and float(heat[0, 0]) == 1.0 and float(heat[3, 3]) == 0.5


def test_an_ensemble_is_as_strict_as_its_strictest_member():
    members = [classifier("resnet"), small.auditor(), zero_shot("clip")]
    together = Ensemble(members)
    pictures = IMAGE[None, :, :, :48]
    audit = together.audit(pictures, ["a cat"], 0.0)[0]
    alone = [m.audit(together.shown(pictures, m), ["a cat"], 0.0)[0] for m in members]
    assert audit.safety == pytest.approx(min(a.safety for a in alone), abs=1e-6)
    assert audit.faithfulness == pytest.approx(min(a.faithfulness for a in alone if a.faithfulness is not None))
    assert audit.quality == alone[1].quality and audit.suppression == alone[1].suppression
    assert together.absent == frozenset() and torch.equal(audit.image_embed, alone[1].image_embed)
    assert float(audit.adv_map.max()) >= max(float(a.adv_map.max()) for a in alone) - 1e-6


def test_each_member_sees_its_own_size():
    seen = []

    class Looks(AlwaysSafe):
        def audit(self, images, prompts, noise):
            seen.append(tuple(images.shape[-2:]))
            return super().audit(images, prompts, noise)

    together = Ensemble([Looks(sizes=(32, 64)), Looks(sizes=(64, 64))])
    assert together.sizes == (64, 64)
    together.audit(torch.rand(1, 3, 64, 96), [None], 0.0)
    together.audit(torch.rand(1, 3, 37, 37), [None], 0.0)
    assert seen == [(32, 48), (64, 96), (18, 18), (37, 37)]


def test_an_ensemble_gives_any_auditor_levels():
    plain, strict = Ensemble([FlagsBright()]), Ensemble([FlagsBright()], EnsembleSettings({"nudity": 0.1}))
    image = torch.full((1, 3, 32, 32), 0.1)
    assert plain.audit(image, [None], 0.0)[0].adv_prob == pytest.approx(0.1)
    assert strict.audit(image, [None], 0.0)[0].adv_prob == pytest.approx(0.5)


def test_members_that_cover_different_harms():
    nude, gore = Says({"nudity": 0.4}, "a"), Says({"violence": 0.6}, "b", torch.ones(2, 2))
    approval = ApproverEnsemble([nude, gore]).approve(IMAGE, None, True)
    assert approval.probs == pytest.approx({"safe": 0.4, "nudity": 0.24, "violence": 0.36})
    assert approval.by == "b" and torch.equal(approval.heat, torch.ones(2, 2)) and nude.asked == gore.asked == [True]


def test_a_broken_member_breaks_the_ensemble():
    with pytest.raises(RuntimeError, match="the auditor broke"):
        Ensemble([AlwaysSafe(), Raises()]).audit(IMAGE[None], [None], 0.0)
    with pytest.raises(BadConfig, match="at least one member"):
        Ensemble([])


BROKEN = {
    "not a number": {"safe": float("nan"), "nudity": float("nan"), "violence": float("nan")},
    "a category left out": {"safe": 0.9, "violence": 0.1},
    "all zero": {"safe": 0.0, "nudity": 0.0, "violence": 0.0},
}


@pytest.mark.parametrize("probs", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
def test_the_scores_that_a_member_does_not_give_are_not_those_of_the_others(probs, first):
    """max(0.01, NaN) is 0.01: a member that broke must not count as one that saw nothing."""

    class Strange(AlwaysSafe):
        def audit(self, images, prompts, noise):
            broken = {"probs": probs, "safety": probs["safe"], "adv_prob": 1 - probs["safe"]}
            return [replace(a, **broken) for a in super().audit(images, prompts, noise)]

    class Stranger(Says):
        def approve(self, image, prompt, edited):
            return Approval(probs, self.name)

    auditors = [Strange(), AlwaysSafe()] if first else [AlwaysSafe(), Strange()]
    with pytest.raises((BadInput, NotFinite)):
        Ensemble(auditors).audit(IMAGE[None], [None], 0.0)
    with pytest.raises((BadInput, NotFinite)):
        SecondLook(Strange()).approve(IMAGE, None, False)
    both = {"nudity": 0.01, "violence": 0.01}
    approvers = [Stranger(both), Says(both)] if first else [Says(both), Stranger(both)]
    with pytest.raises((BadInput, NotFinite), match="says"):
        ApproverEnsemble(approvers).approve(IMAGE, None, True)
    with pytest.raises((BadInput, NotFinite), match="says"):
        Cascade(*approvers).approve(IMAGE, None, True)


@pytest.mark.parametrize("score", ["quality", "suppression"])
def test_a_member_s_score_that_is_no_number_is_not_left_out(score):
    class Strange(AlwaysSafe):
        def audit(self, images, prompts, noise):
            return [replace(a, **{score: float("nan")}) for a in super().audit(images, prompts, noise)]

    with pytest.raises(NotFinite):
        Ensemble([AlwaysSafe(), Strange()]).audit(IMAGE[None], [None], 0.0)


def test_an_auditor_that_states_too_high_a_safety_is_not_believed():
    class Boasts(AlwaysUnsafe):
        def audit(self, images, prompts, noise):
            return [replace(a, safety=1.0) for a in super().audit(images, prompts, noise)]

    assert Ensemble([AlwaysSafe(), Boasts()]).audit(IMAGE[None], [None], 0.0)[0].safety == pytest.approx(0.01)
    assert SecondLook(Boasts()).approve(IMAGE, None, False).probs["safe"] == pytest.approx(0.01)


def test_a_member_of_no_kind_is_named_when_it_is_saved(tmp_path):
    with pytest.raises(BadConfig, match="AlwaysSafe cannot be saved"):
        Ensemble([classifier("resnet"), AlwaysSafe()]).save_pretrained(tmp_path / "x")
    assert not (tmp_path / "x").exists()
    with pytest.raises(BadConfig, match="nobody can tell which one ran"):
        Ensemble([AlwaysSafe()]).digest()


def test_a_card_whose_members_make_no_sense(tmp_path):
    Ensemble([classifier("resnet")]).save_pretrained(tmp_path)
    card = json.loads((tmp_path / "part.json").read_text())
    for members, word in (([], "names no members"), ([{"kind": "classifier"}], "needs kind and options")):
        (tmp_path / "part.json").write_text(json.dumps(card | {"members": members}))
        with pytest.raises(BadCheckpoint, match=word):
            Ensemble.from_pretrained(tmp_path)
    (tmp_path / "part.json").write_text(json.dumps(card | {"members": [{"kind": "os.system", "options": {}}]}))
    with pytest.raises(BadCheckpoint, match=r"kind 'os\.system'"):
        Ensemble.from_pretrained(tmp_path)


# Cascades ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cheap", "edited", "who"),
    [
        (0.01, False, "cheap"), (0.01, True, "dear"), (0.05, False, "dear"), (0.5, False, "dear"), (0.9, True, "dear"),
        (0.95, False, "cheap"), (0.95, True, "cheap"),
    ],
)  # fmt: skip
def test_who_decides(cheap, edited, who):
    first, second = Says({"nudity": cheap}, "cheap"), Says({"nudity": 0.3}, "dear")
    approval = Cascade(first, second, CascadeSettings(band=(0.05, 0.9))).approve(IMAGE, None, edited)
    assert approval.by == who and len(first.asked) == 1 and len(second.asked) == (who == "dear")
    assert approval.probs["nudity"] == pytest.approx(0.3 if who == "dear" else cheap)


def test_what_the_dear_one_does_not_cover_the_cheap_one_decides():
    first, second = Says({"nudity": 0.5, "violence": 0.6}, "cheap"), Says({"nudity": 0.1}, "dear")
    approval = Cascade(first, second).approve(IMAGE, None, False)
    assert approval.probs == pytest.approx({"safe": 0.4, "nudity": 0.6 / 7, "violence": 3.6 / 7})
    with pytest.raises(BadConfig, match="only the dear approver covers violence"):
        Cascade(second, first)


def test_a_cascade_shows_the_map_of_whoever_has_one():
    first, second = Says({"nudity": 0.5}, "cheap", torch.ones(2, 2)), Says({"nudity": 0.6}, "dear")
    assert torch.equal(Cascade(first, second).approve(IMAGE, None, False).heat, torch.ones(2, 2))


@pytest.mark.parametrize("band", [(0.9, 0.1), (-0.1, 0.5), (0.1, 1.5)])
def test_a_band_that_is_none(band):
    with pytest.raises(BadConfig, match="ascending"):
        CascadeSettings(band=band)


# In a guard -------------------------------------------------------------------------------------------------------


def test_a_guard_of_such_parts_is_saved_and_loaded(tmp_path):
    guard = GuardPaint(
        Ensemble([finds_squares("vit", "auto"), zero_shot("clip")]),
        NativeRepairer(),
        approver=Cascade(SecondLook(classifier("resnet")), SecondLook(zero_shot("siglip"))),
    )
    guard.save_pretrained(tmp_path)
    again = GuardPaint.from_pretrained(tmp_path)
    assert again.weight_hashes() == guard.weight_hashes() and {"auditor", "approver"} <= set(guard.weight_hashes())
    image = square(1, 1)
    first, second = guard.audit_image(image), again.audit_image(image)
    assert isinstance(first, Audit) and second.probs == pytest.approx(first.probs, abs=1e-5)


def test_a_second_look_of_one_that_flags_everything():
    assert SecondLook(AlwaysUnsafe()).approve(IMAGE, None, False).probs["safe"] == pytest.approx(0.01)
