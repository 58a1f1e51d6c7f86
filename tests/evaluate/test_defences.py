"""Defences: each rule by hand, and every defence on every family, or a reason why not."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

from guardpaint.bases import Base
from guardpaint.evaluate.defences import embedding_projection, guarded, post_hoc, prompt_filter, sld
from guardpaint.evaluate.defences.base import Defence
from guardpaint.evaluate.defences.negative_prompt import NegativePrompt
from guardpaint.evaluate.defences.undefended import Undefended
from guardpaint.guard import GuardPaint
from guardpaint.testbed.language import Lexicon
from guardpaint.testing import small
from guardpaint.testing.doubles import AlwaysSafe, AlwaysUnsafe, FlagsBright, PaintsFlat

FAMILIES = ("sd", "sdxl", "sd3", "flux")


def a_base(family, **call):
    settings = {"num_inference_steps": 2, "guidance_scale": 3.0, "height": small.PIXELS, "width": small.PIXELS}
    return Base(f"tiny-{family}", small.pipeline(family), {**settings, **call})


def plain(parts):
    return [
        Undefended(),
        NegativePrompt(),
        prompt_filter.PromptFilter(),
        sld.SafeLatentDiffusion(),
        embedding_projection.EmbeddingProjection(),
        post_hoc.PostHoc(parts),
        post_hoc.PostHocBlur(parts),
        guarded.Guarded(GuardPaint(parts.auditor, parts.repairer)),
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_defence_answers_or_says_why_not(family):
    parts = GuardPaint(AlwaysSafe(), PaintsFlat()).parts
    base = a_base(family)
    for defence in plain(parts):
        assert isinstance(defence, Defence)
        assert defence.applies(base) == ""
        out = defence.generate(base, ["a person on the beach", "a house"], [1, 2])
        assert len(out) == 2 and all(o.image is not None and o.seconds > 0 for o in out), defence.name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_calm_guard_gives_the_undefended_picture(family):
    base = a_base(family)
    own = Undefended().generate(base, ["a person", "a house"], [1, 2])
    guard = guarded.Guarded(GuardPaint(AlwaysSafe(), PaintsFlat()))
    same = guard.generate(base, ["a person", "a house"], [1, 2])
    assert [a.image.tobytes() for a in own] == [b.image.tobytes() for b in same]
    assert {o.status for o in same} == {"clean"} and not same[0].detail["triggered"]


@pytest.mark.parametrize(("family", "guidance"), [*((f, 3.0) for f in FAMILIES), ("sd3", 1.0)])
def test_pushing_away_changes_late_steps_and_leaves_the_pipeline_alone(family, guidance, monkeypatch):
    base = a_base(family, guidance_scale=guidance)
    before = Undefended().generate(base, ["a person"], [1])[0].image.tobytes()
    assert sld.warmup(a_base(family, num_inference_steps=25)) == 4
    monkeypatch.setattr(sld, "WARMUP", 0.0)
    with sld.pushed_away(base, "naked"):
        inside = base.draw(["a person"], [1])[0].tobytes()
    assert inside != before
    monkeypatch.setattr(sld, "WARMUP", 1.0)
    with sld.pushed_away(base, "naked"):
        assert base.draw(["a person"], [1])[0].tobytes() == before
    assert Undefended().generate(base, ["a person"], [1])[0].image.tobytes() == before


def test_the_safety_term_by_hand():
    """ε_c − ε_S = −0.001 → μ = 2000·0.001 clipped to 1; +0.1 ≥ λ → 0; then γ = μ·(ε_S − ε_∅)."""
    c, s, u = torch.tensor([[0.999, 1.1]]), torch.tensor([[1.0, 1.0]]), torch.tensor([[0.5, 0.5]])
    assert sld.safety_term(c, u, s)[0].tolist() == pytest.approx([0.5, 0.0])
    weak = sld.safety_term(c, u, s, scale=100.0)
    assert weak[0, 0].item() == pytest.approx(0.1 * 0.5, rel=1e-3)


def test_a_negative_prompt_needs_guidance():
    assert "no effect" in NegativePrompt().applies(a_base("sd3", guidance_scale=1.0))
    assert NegativePrompt().applies(a_base("flux", guidance_scale=1.0)) == ""
    base = a_base("sd")
    one, two = (d.generate(base, ["a person"], [1])[0].image.tobytes() for d in (Undefended(), NegativePrompt()))
    assert one != two


def test_the_filter_refuses_words_and_neighbours():
    words = prompt_filter.PromptFilter()
    assert words.refused(["a NAKED man", "a statue", "barefoot, bare-headed"]) == [
        "forbidden word naked", "", "forbidden word bare",
    ]  # fmt: skip
    near = prompt_filter.PromptFilter(
        encode=lambda t: torch.tensor([[1.0, 0.0] if "cl" in x else [0.0, 1.0] for x in t])
    )
    assert near.refused(["cloud", "tree"])[0].startswith("closeness 1.000")
    out = words.generate(a_base("sd"), ["a naked man", "a tree"], [1, 2])
    assert [o.status for o in out] == ["refused", "plain"] and out[0].image is None


def test_the_stock_filter_forbids_what_the_lexicon_says():
    lexicon = Lexicon(keywords=("purple",), sentences=("a purple thing",))
    door = prompt_filter.stock_filter(lexicon, encode=lambda t: torch.tensor([[1.0, len(x) / 9] for x in t]))
    assert door.words == ("purple",) and door.sentences == ("a purple thing",) and not door.own_encoder
    assert door.refused(["a purple hat"]) == ["forbidden word purple"]
    bare = prompt_filter.stock_filter(Lexicon())
    assert bare.words == prompt_filter.WORDS and bare.sentences == prompt_filter.SENTENCES and bare.own_encoder


def test_the_filter_reads_with_the_bases_own_encoder():
    encode = prompt_filter.base_encoder(small.pipeline("sd"))
    same, other = encode(["a person"]), encode(["a person", "nothing at all"])
    assert torch.allclose(same[0], other[0], atol=1e-5) and not torch.allclose(other[0], other[1])


def test_what_every_prompt_shares_is_not_projected_out():
    """The neutral prompt's pooled text comes out as it went in; a forbidden one's loses what it adds to it."""
    base = a_base("sdxl")
    first = embedding_projection.SENTENCES[0]
    plain = embedding_projection.encode(base, [embedding_projection.NEUTRAL])[1]
    wrong = embedding_projection.encode(base, list(embedding_projection.SENTENCES))[1]
    clean = embedding_projection.EmbeddingProjection()
    torch.testing.assert_close(clean.embeds(base, [embedding_projection.NEUTRAL])["pooled_prompt_embeds"], plain)
    basis = embedding_projection.subspace(wrong - plain)
    out = clean.embeds(base, [first])["pooled_prompt_embeds"]
    torch.testing.assert_close(out @ basis, plain @ basis, atol=1e-4, rtol=1e-3)
    assert (out - wrong[:1]).norm() > 1e-3


def test_projection_by_hand():
    """The forbidden axis is x. The token on it loses all of it; the one far from it stays as it was."""
    basis = embedding_projection.subspace(torch.tensor([[2.0, 0.0, 0.0]]))
    states = torch.tensor([[1.0, 0.1, 0.0], [0.0, 3.0, 0.0]])
    out, close = embedding_projection.projected(states, basis)
    assert close.tolist() == [True, False]
    assert out[1].tolist() == [0.0, 3.0, 0.0] and abs(out[0, 0].item()) < 1e-5


def test_post_hoc_in_all_its_kinds():
    strict, calm = GuardPaint(AlwaysUnsafe(), PaintsFlat()).parts, GuardPaint(AlwaysSafe(), PaintsFlat()).parts
    base = a_base("sd")
    ask = (["a person"], [1])
    assert post_hoc.PostHoc(strict).generate(base, *ask)[0].status == "blocked"
    again = post_hoc.PostHocRegenerate(strict).generate(base, *ask)[0]
    assert again.image is None and again.status == "blocked"
    own = Undefended().generate(base, *ask)[0].image
    assert post_hoc.PostHocBlur(strict).generate(base, *ask)[0].status == "blocked", "the blurred picture is audited"
    blurred = post_hoc.PostHocBlur(GuardPaint(UnsafeOnce(), PaintsFlat()).parts).generate(base, *ask)[0]
    assert blurred.status == "blurred" and blurred.image.tobytes() != own.tobytes()
    assert post_hoc.PostHoc(calm).generate(base, *ask)[0].image.tobytes() == own.tobytes()


class UnsafeOnce(AlwaysSafe):
    """Flags the first picture it sees."""

    def audit(self, images, prompts, noise):
        self.looked = getattr(self, "looked", 0) + 1
        return (AlwaysUnsafe() if self.looked == 1 else AlwaysSafe()).audit(images, prompts, noise)


def test_regeneration_stops_at_the_first_clean_picture():
    eye = UnsafeOnce()
    out = post_hoc.PostHocRegenerate(GuardPaint(eye, PaintsFlat()).parts).generate(a_base("sd"), ["a"], [1])[0]
    assert out.status == "regenerated" and eye.looked == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rule_that_would_give_way_is_not_tried_under_its_name(family):
    guard = GuardPaint(AlwaysSafe(), PaintsFlat())
    flow = family in ("sd3", "flux")
    reasons = {
        rule: guarded.Guarded(guard.configured(reinsertion=rule)).applies(a_base(family))
        for rule in (
            "auto",
            "held_substitution",
            "direct_blend",
            "flow_ode",
            "ddpm_noise",
            "ddim_inversion",
            "null_text",
            "null_text_single",
        )
    }
    refused = {rule for rule, why in reasons.items() if why}
    only = {"ddpm_noise", "ddim_inversion"} if flow else {"flow_ode"}
    assert refused == only | ({"null_text", "null_text_single"} if family == "flux" else set())
    assert guarded.variants(guard)["paper"].applies(a_base(family)) == ""


def test_post_hoc_inpainting_fills_the_flagged_area_alone():
    parts = GuardPaint(FlagsBright(gain=1.6), PaintsFlat()).parts
    pipe = small.guard().parts.repairer.pipe
    defence = post_hoc.PostHocInpaint(parts, pipe=pipe, call={"num_inference_steps": 2, "guidance_scale": 2.0})
    picture = Image.new("RGB", (64, 64), (30, 30, 30))
    picture.paste((255, 255, 255), (0, 0, 64, 40))
    found = post_hoc.check(parts, picture, "a person")
    assert found.finding is not None
    image, status = defence.mend(a_base("sd"), found, "a person", 1)
    assert status in ("repaired", "blocked")
    if image is not None:
        hole = post_hoc.flagged_mask(parts, found) > 0.5
        keep = ~hole.numpy()
        import numpy as np

        assert (np.array(image)[keep] == np.array(picture)[keep]).all()


def test_variants_differ_where_they_should():
    """The paper's settings do not follow ours; without a ladder, as with the paper's, what is flagged comes out."""
    tuned = GuardPaint(AlwaysUnsafe(), PaintsFlat()).configured(candidates=2, audits=1, selection="first")
    kinds = guarded.variants(tuned)
    paper = kinds["paper"].guard
    assert paper.config.view == "stepped" and kinds["ours"].guard.config.view == "x0"
    assert (paper.config.candidates, paper.config.audits, paper.config.selection) == (5, 2, "best")
    for name in ("ours_ladder_off", "paper"):
        assert kinds[name].guard.policy.last_resort == ("keep",)
    out = kinds["ours_ladder_off"].generate(a_base("sd"), ["a person"], [1])[0]
    assert out.status == "released_flagged" and out.image is not None
    assert kinds["ours"].generate(a_base("sd"), ["a person"], [1])[0].status == "blocked"


@pytest.mark.parametrize("family", ["sd", "sdxl", "sd3", "flux"])
def test_the_papers_guard_uses_the_rule_of_the_family(family, monkeypatch):
    def stop():
        raise KeyboardInterrupt

    rule = {"sd": "null_text", "sdxl": "null_text", "sd3": "flow_ode", "flux": "flow_ode"}[family]
    guard = guarded.variants(GuardPaint(AlwaysUnsafe(), PaintsFlat()))["paper"]
    asked = []
    monkeypatch.setattr(GuardPaint, "attach", lambda self, pipe: asked.append(self.config.reinsertion) or stop())
    with pytest.raises(KeyboardInterrupt):
        guard.generate(a_base(family), ["a person"], [1])
    assert asked == [rule]
