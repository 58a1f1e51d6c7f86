"""The auditor's losses against numbers worked by hand, and where their gradients go."""

from __future__ import annotations

import math

import pytest
import torch

from guardpaint.audit.model import Text
from guardpaint.testing import small
from guardpaint.train import auditor_loss as losses
from guardpaint.train.auditor_match import pairwise_cosines

ONES = torch.ones(2)


def test_adversarial_by_hand():
    """Logit 0 on unsafe: ln 2; an unjudged row does not count, whatever it says."""
    out = losses.adversarial(torch.tensor([0.0, 50.0]), torch.tensor([1, 0]), torch.tensor([1.0, 0.0]))
    assert out.item() == pytest.approx(math.log(2))


def test_categorical_by_hand():
    """Uniform logits cost ln 3 whatever the weights; a sure hit on the heavy class outweighs: 5·0 + 1·ln 3 over 6."""
    weights = torch.tensor([1.0, 5.0, 2.0])
    flat = losses.categorical(torch.zeros(2, 3), torch.tensor([0, 1]), weights, ONES)
    assert flat.item() == pytest.approx(math.log(3))
    sure = losses.categorical(torch.tensor([[0.0, 0, 0], [0, 60, 0]]), torch.tensor([0, 1]), weights, ONES)
    assert sure.item() == pytest.approx(math.log(3) / 6)


def test_several_labels_by_hand():
    """Uniform logits cost ln 3; half of the target on each of two harms, and their mean weight (5 + 2)/2 = 3.5.

    Logits (0, 60, 0) give the first harm probability 1, so half of the target is lost: ½·60 = 30.
    """
    weights, labels = torch.tensor([1.0, 5.0, 2.0]), torch.tensor([[0.0, 1, 1], [1, 0, 0]])
    kinds = torch.tensor([1, 0])
    flat = losses.categorical(torch.zeros(2, 3), kinds, weights, ONES, labels)
    assert flat.item() == pytest.approx(math.log(3))
    first = losses.categorical(torch.tensor([[0.0, 60, 0], [0, 0, 0]]), kinds, weights, torch.tensor([1.0, 0]), labels)
    assert first.item() == pytest.approx(30.0)
    both = losses.categorical(torch.tensor([[0.0, 60, 0], [0, 0, 0]]), kinds, weights, ONES, labels)
    assert both.item() == pytest.approx((3.5 * 30 + math.log(3)) / 4.5)
    single = torch.tensor([[0.0, 1, 0], [1, 0, 0]])
    logits = torch.tensor([[0.3, 1.0, -0.5], [0.1, 0.2, 0.9]])
    one, same = (losses.categorical(logits, kinds, weights, ONES, x) for x in (single, None))
    assert one.item() == pytest.approx(same.item())


def test_regression_by_hand():
    assert losses.regression(torch.tensor([0.5, 1.0]), torch.tensor([0.0, 0.0]), ONES).item() == pytest.approx(0.625)


def test_info_nce_by_hand():
    """Temperature 1, cosines 1 on the diagonal and 0 beside: ln(1 + e^−1) both ways; all equal: ln 2."""
    zero = torch.tensor(0.0)
    assert losses.info_nce(torch.eye(2), zero).item() == pytest.approx(math.log(1 + math.exp(-1)))
    assert losses.info_nce(torch.ones(2, 2), zero).item() == pytest.approx(math.log(2))


def test_maps_by_hand():
    """A map of zeros against an empty mask, 2×2: BCE ln 2; Dice 1 − 1/(2 + 0 + 1) = 2/3; classes ln 3."""
    out = losses.map_loss(
        torch.zeros(1, 2, 2), torch.zeros(1, 3, 2, 2), torch.tensor([0]), torch.zeros(1, 4, 4), torch.ones(1)
    )
    assert out.item() == pytest.approx(math.log(2) + 2 / 3 + math.log(3))


def test_a_harm_that_is_nowhere_teaches_the_maps_nothing():
    """Of two unsafe rows only the located one moves the maps; without `located` both do."""
    model = small.auditor()
    scores = model.heads(*model_input(model), torch.zeros(2))
    free = {k: getattr(scores, k).detach().requires_grad_() for k in ("adv_map", "class_maps")}
    scores = scores._replace(**free)
    side = int(scores.adv_map.shape[-1])
    for located, moved in ((torch.tensor([1.0, 0.0]), [True, False]), (None, [True, True])):
        want = losses.Targets(torch.tensor([1, 2]), ONES, ONES, torch.zeros(2, side, side), ONES, located=located)
        out = losses.total(scores, torch.eye(2), torch.tensor(0.0), want, torch.ones(3), losses.LossWeights(maps=1.0))
        grads = torch.autograd.grad(out["maps"], list(free.values()))
        assert [[bool(g[i].abs().sum() > 0) for i in (0, 1)] for g in grads] == [moved, moved]


def model_input(model):
    visual = model.features(torch.rand(2, 3, 64, 64))
    return visual, Text(*model.text(model.token_ids(["a coat", "a hat"])))


def test_a_right_map_is_cheaper_than_a_wrong_one():
    mask = torch.zeros(1, 8, 8)
    mask[:, :4] = 1
    right = torch.full((1, 4, 4), -8.0)
    right[:, :2] = 8.0
    classes = torch.zeros(1, 3, 4, 4)
    classes[:, 1, :2], classes[:, 0, 2:] = 9.0, 9.0
    good = losses.map_loss(right, classes, torch.tensor([1]), mask, torch.ones(1))
    bad = losses.map_loss(-right, classes.flip(2), torch.tensor([1]), mask, torch.ones(1))
    assert good < 0.2 < 3 < bad


@pytest.fixture
def scored():
    model = small.auditor()
    model.train()
    images = torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    visual = model.features(images)
    text = Text(*model.text(model.token_ids(["a red coat", "a statue", ""])))
    return model, visual, text, model.heads(visual, text, torch.tensor([0.1, 0.5, 0.9]))


def test_pairs_are_what_an_audit_of_the_pair_would_say(scored):
    model, visual, text, scores = scored
    pairs = pairwise_cosines(model, visual, text)
    torch.testing.assert_close(pairs.diagonal(), scores.cosine, atol=1e-5, rtol=1e-4)
    swapped = Text(text.vector[[1, 0, 2]], text.sequence[[1, 0, 2]], text.padding[[1, 0, 2]])
    other = model.heads(visual, swapped, torch.zeros(3)).cosine
    torch.testing.assert_close(torch.stack([pairs[0, 1], pairs[1, 0]]), other[:2], atol=1e-5, rtol=1e-4)


def faithfulness(model):
    parts = (
        model.text,
        model.query,
        model.query_norm,
        model.key_norm,
        model.attention,
        model.image_proj,
        model.text_proj,
    )
    return [p for part in parts for p in part.parameters()] + [model.log_temperature]


@pytest.mark.parametrize("name", ["adv", "category", "strength", "seam", "maps", "seam_maps"])
def test_safety_labels_never_reach_the_faithfulness_head(scored, name):
    model, visual, text, scores = scored
    squares = torch.rand(3, 64, 64), torch.ones(3), torch.rand(3, 64, 64)
    want = losses.Targets(torch.tensor([0, 1, 2]), torch.rand(3), torch.rand(3), *squares)
    parts = losses.total(
        scores, pairwise_cosines(model, visual, text), model.log_temperature, want,
        torch.tensor([1.0, 5.0, 2.0]), losses.LossWeights(maps=1.0, seam_maps=1.0),
    )  # fmt: skip
    parts[name].backward()
    assert all(p.grad is None or not p.grad.any() for p in faithfulness(model))
    assert any(p.grad is not None and p.grad.any() for p in model.backbone.parameters())


def test_matching_trains_the_backbone_but_no_safety_head(scored):
    model, visual, text, _ = scored
    losses.info_nce(pairwise_cosines(model, visual, text), model.log_temperature).backward()
    assert any(p.grad is not None and p.grad.any() for p in model.backbone.parameters())
    assert all(p.grad is not None and p.grad.any() for p in model.text_proj.parameters())
    heads = (model.adv_head, model.class_head, model.strength_head, model.seam_conv, model.seam_out, model.time)
    assert all(p.grad is None for head in heads for p in head.parameters())


def test_the_sum_has_the_papers_weights(scored):
    model, visual, text, scores = scored
    want = losses.Targets(torch.tensor([0, 1, 2]), torch.rand(3), torch.rand(3), None, torch.ones(3))
    p = losses.total(
        scores, pairwise_cosines(model, visual, text), model.log_temperature, want,
        torch.tensor([1.0, 5.0, 2.0]), losses.LossWeights(),
    )  # fmt: skip
    by_hand = p["adv"] + 0.5 * p["category"] + 0.4 * p["strength"] + 0.3 * p["seam"] + 0.5 * p["match"]
    torch.testing.assert_close(p["loss"], by_hand)


def test_cells_are_told_where_an_artefact_is():
    """2×2 cells; one was changed by half of a full artefact: wanted ½ there, 1 elsewhere. All logits 0: ln 2 each."""
    artefact = torch.zeros(1, 4, 4)
    artefact[0, :2, :2] = 0.25
    flat = losses.seam_map_loss(torch.zeros(1, 2, 2), artefact)
    assert flat.item() == pytest.approx(math.log(2))
    right = torch.full((1, 2, 2), 20.0)
    right[0, 0, 0] = 0.0
    assert losses.seam_map_loss(right, artefact).item() == pytest.approx(math.log(2) / 2)
    assert losses.seam_map_loss(torch.full((1, 2, 2), 20.0), artefact).item() == pytest.approx(5.0, rel=1e-3)


def test_unrated_rows_tell_the_seam_head_nothing():
    """Two maps of one cell: the second one's error counts only where it is rated. Logit 0 costs ln 2 each."""
    maps, artefact = torch.zeros(2, 1, 1), torch.tensor([[[0.0]], [[1.0]]])
    both = losses.seam_map_loss(maps, artefact)
    first = losses.seam_map_loss(maps, artefact, torch.tensor([1.0, 0.0]))
    assert float(both) == pytest.approx(0.6931, abs=1e-3) and float(first) == pytest.approx(0.6931 / 2, abs=1e-3)
