"""Attacks with full knowledge: gradients lower worry within their bound; the careful auditor never worries less."""

from __future__ import annotations

import pytest
import torch

from guardpaint.bases import Base
from guardpaint.errors import BadInput
from guardpaint.evaluate import adaptive
from guardpaint.evaluate.attacks import adaptive as attacks
from guardpaint.evaluate.defences.guarded import Guarded
from guardpaint.guard import GuardPaint
from guardpaint.testbed import open_testbed
from guardpaint.testing import small
from guardpaint.testing.doubles import AlwaysSafe, AlwaysUnsafe, FlagsBright, PaintsFlat
from paperdolls.oracle import Oracle, OracleConfig, OracleNet


@pytest.fixture(scope="module")
def base():
    call = {"num_inference_steps": 2, "guidance_scale": 3.0, "height": small.PIXELS, "width": small.PIXELS}
    return Base("tiny-sd", small.pipeline("sd"), call)


def test_gradients_lower_worry_within_their_bound():
    auditor = small.auditor(0)
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    ids = auditor.token_ids(["a", "b"])
    moved = attacks.perturbed(auditor, images, ["a", "b"], 4 / 255, steps=6)
    assert (moved - images).abs().max() <= 4 / 255 + 1e-6 and moved.min() >= 0 and moved.max() <= 1
    with torch.no_grad():
        assert (attacks.worry(auditor, moved, ids) < attacks.worry(auditor, images, ids)).all()


def test_the_careful_auditor_believes_the_most_worried_look():
    class Moody(AlwaysSafe):
        calls = 0

        def audit(self, images, prompts, noise):
            Moody.calls += 1
            return (AlwaysUnsafe() if Moody.calls == 3 else AlwaysSafe()).audit(images, prompts, noise)

    found = attacks.Careful(Moody(), secret=1, looks=3).audit(torch.rand(1, 3, 64, 64), ["a"], 0.0)[0]
    assert found.adv_prob > 0.9 and found.harm != "safe" and found.safety < 0.1
    assert found.quality == AlwaysSafe().audit(torch.rand(1, 3, 64, 64), ["a"], 0.0)[0].quality


def test_copies_depend_on_the_secret():
    image = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    a, b = (attacks.Careful(AlwaysSafe(), secret=s).copies(image, 0) for s in (1, 2))
    assert a.shape == image.shape and not torch.equal(a, b)
    assert torch.equal(a, attacks.Careful(AlwaysSafe(), secret=1).copies(image, 0))


def test_a_copy_is_the_same_alone_and_in_a_batch():
    images = torch.rand(3, 3, 64, 64)
    careful = attacks.Careful(AlwaysSafe(), secret=1)
    for k in (0, 1):
        together = careful.copies(images, k)
        assert all(torch.equal(together[i : i + 1], careful.copies(images[i : i + 1], k)) for i in range(3))


def test_a_careful_guard_runs_the_loop(base):
    out = Guarded(GuardPaint(attacks.Careful(AlwaysUnsafe(), 1), PaintsFlat())).generate(base, ["a"], [1])
    assert out[0].status in ("blocked", "blurred", "repaired")


def test_a_disguise_is_the_least_worrying_unsafe_picture(base):
    seen = []

    def eyes(image):
        seen.append(image)
        return len(seen) % 2 == 0

    options = attacks.unsafe_options(base, ["a", "b"], [1, 2], eyes)
    assert [(o.prompt, o.seed) for o in options] == [("a", 2), ("b", 2)]
    found = attacks.disguised(FlagsBright(), options)
    pictures = base.draw(["a", "a", "b", "b"], [1, 2, 1, 2])
    views = [torch.nn.functional.interpolate(attacks.from_pil(p)[None], size=(64, 64)) for p in pictures]
    levels = [FlagsBright().audit(v, ["a"], 0.0)[0].adv_prob for v in views]
    assert [f.adv_prob for f in found] == pytest.approx(sorted([levels[1], levels[3]]), abs=1e-4)
    assert attacks.disguised(FlagsBright(), attacks.unsafe_options(base, ["a"], [1], lambda i: False)) == []


@pytest.mark.parametrize(
    ("family", "sized"), [("sd", True), ("sdxl", True), ("sd3", True), ("flux", True), ("sd", False), ("sd3", False)]
)
def test_starting_noise_is_the_seeds_own(family, sized):
    call = {"num_inference_steps": 2, "guidance_scale": 3.0}
    call |= {"height": small.PIXELS, "width": small.PIXELS} if sized else {}
    base = Base(family, small.pipeline(family), call)
    again = attacks.starting_at(base, attacks.starting_noise(base, 5)).draw(["a"], [6])[0]
    assert again.tobytes() == base.draw(["a"], [5])[0].tobytes() != base.draw(["a"], [6])[0].tobytes()


def test_a_search_through_noise_finds_unsafe_pictures_that_worry_less(base):
    start = attacks.unsafe_options(base, ["a"], [1], lambda i: True)[0]
    found = attacks.wandered(base, FlagsBright(), start, lambda i: True, rounds=3, children=4, turn=1.0)
    levels = [f.adv_prob for f in attacks.disguised(FlagsBright(), [start, *found])]
    assert len(found) == 12 and levels[0] < attacks.disguised(FlagsBright(), [start])[0].adv_prob
    best = attacks.disguised(FlagsBright(), found)[0]
    norms = [float(f.noise.square().mean()) for f in found]
    assert min(norms) > 0.7 and max(norms) < 1.3
    shown = []
    attacks.breaks(base, Guarded(GuardPaint(AlwaysSafe(), PaintsFlat())), best, lambda i: bool(shown.append(i)) or True)
    again = attacks.starting_at(base, best.noise).draw(["a"], [1])[0]
    assert shown[0].tobytes() == again.tobytes()
    assert attacks.wandered(base, FlagsBright(), start, lambda i: False, rounds=1) == []


def test_a_blocking_guard_does_not_break(base):
    found = attacks.Found("a", 1, 0.1, 4)
    strict = Guarded(GuardPaint(AlwaysUnsafe(), PaintsFlat()))
    assert attacks.breaks(base, Guarded(GuardPaint(AlwaysSafe(), PaintsFlat())), found, lambda i: True)
    assert not attacks.breaks(base, strict, found, lambda i: True)


def test_rows_and_numbers(base, tmp_path, monkeypatch):
    torch.manual_seed(0)
    oracle = Oracle(OracleNet(OracleConfig(channels=(8, 8, 8, 8))).eval())
    monkeypatch.setattr(Oracle, "load", classmethod(lambda cls, *_: oracle))
    world = open_testbed("paperdolls")
    budget = adaptive.Budget(2, 1, wordings=2, seeds=1)
    found = adaptive.run(small.guard(), base, world, tmp_path / "a.json", budget)
    assert {"adaptive.caught.plain.eps0", "adaptive.caught.careful.eps8", "adaptive.asr.before"} <= set(found)
    assert (tmp_path / "a.rows.csv.gz").exists()
    with pytest.raises(BadInput, match="need an AuditorScorer"):
        adaptive.run(GuardPaint(AlwaysSafe(), PaintsFlat()), base, world, tmp_path / "b.json")


def test_numbers_by_hand():
    rows = [
        {"part": "detector", "auditor": "plain", "eps": 4, "caught": 1},
        {"part": "detector", "auditor": "plain", "eps": 4, "caught": 0},
        {"part": "system", "guard": "before", "broken": 1, "adv": 0.1},
        {"part": "system", "guard": "before", "broken": 0, "adv": None},
        {"part": "system", "guard": "after", "broken": 0, "adv": 0.2},
    ]
    out = adaptive.metrics(rows)
    assert out["adaptive.caught.plain.eps4"]["value"] == 0.5
    assert out["adaptive.asr.before"]["value"] == 0.5 and out["adaptive.asr.after"]["value"] == 0.0
    assert out["adaptive.asr_of_drawn.before"]["value"] == 1.0
