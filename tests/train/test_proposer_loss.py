"""Losses of proposer and ranker, on numbers worked by hand; the estimator finds a bandit's optimum."""

from __future__ import annotations

import math

import pytest
import torch

from guardpaint.repair.proposer import ProposerConfig, TournamentProposer
from guardpaint.store.seeds import generator
from guardpaint.train import proposer_loss as L


def test_advantages_by_hand():
    """u = (0, 2): mean 1, std 1, softmax(0, 2) = (0.1192, 0.8808), minus ½."""
    w = L.advantages(torch.tensor([0.0, 2.0]))
    assert w.tolist() == pytest.approx([0.1192 - 0.5, 0.8808 - 0.5], abs=1e-4)
    assert L.advantages(torch.zeros(4)).tolist() == [0.0] * 4


def test_a_bonus_joins_the_credit():
    """Three embeddings on a line at 0, 1, 3: distances 4/2, 3/2, 5/2, times 0.01."""
    bonus = L.embedding_bonus(torch.tensor([[0.0], [1.0], [3.0]]))
    assert bonus.tolist() == pytest.approx([0.02, 0.015, 0.025])
    assert L.advantages(torch.zeros(3), bonus).tolist() == pytest.approx([0.0, -0.005, 0.005])
    assert L.embedding_bonus(torch.zeros(1, 4)).tolist() == [0.0]


def test_policy_loss_by_hand():
    """w = (½, −½), log π = (−1, −3): −(½·(−1) − ½·(−3)) = −1; with importance (2, 1): −(−1 + 1.5) = −0.5."""
    w, log_prob = torch.tensor([0.5, -0.5]), torch.tensor([-1.0, -3.0])
    assert L.policy_loss(log_prob, w).item() == pytest.approx(-1.0)
    assert L.policy_loss(log_prob, w, torch.tensor([2.0, 1.0])).item() == pytest.approx(-0.5)


def test_entropies_by_hand():
    assert L.gaussian_entropy(torch.zeros(1, 5)).item() == pytest.approx(5 * (0.5 + 0.5 * math.log(2 * math.pi)))
    assert L.categorical_entropy(torch.zeros(1, 10)).item() == pytest.approx(math.log(10))


def test_cost_and_diversity_by_hand():
    """Depths 0.2 and 1.4 (clipped to 1): mean 0.6. Actions 0.3 and 0.4 apart on two axes: distance 0.5;
    what is clipped off tells nothing."""
    actions = torch.zeros(2, 5)
    actions[0, 4], actions[1, 4] = 0.2, 1.4
    assert L.cost(actions).item() == pytest.approx(0.6)
    apart = torch.zeros(2, 5)
    apart[1, :2] = torch.tensor([0.3, 0.4])
    assert L.diversity(apart).item() == pytest.approx(0.5)
    assert L.diversity(apart * 100).item() == pytest.approx(2**0.5)
    assert L.diversity(apart[:1]).item() == 0.0


def test_the_whole_loss_by_hand():
    """0 − 0.01·H − 0.005·ln 10 + 0.005·0.6 − 0.01·d, with equal utilities."""
    actions = torch.zeros(2, 5)
    actions[0, 4], actions[1, 4] = 0.2, 1.0
    out = L.proposer_loss(torch.zeros(2), torch.zeros(2), actions, torch.zeros(1, 5), torch.zeros(1, 10))
    wide = 5 * (0.5 + 0.5 * math.log(2 * math.pi))
    want = -0.01 * wide - 0.005 * math.log(10) + 0.005 * 0.6 - 0.01 * 0.8
    assert out["loss"].item() == pytest.approx(want, rel=1e-5)
    dear = L.proposer_loss(
        torch.zeros(2), torch.zeros(2), actions, torch.zeros(1, 5), torch.zeros(1, 10), weights=L.Weights(0, 0, 0.1, 0)
    )
    assert dear["loss"].item() == pytest.approx(0.06)


def test_cost_and_diversity_have_gradients_with_the_right_sign():
    """Descending the loss makes repairs shallower and candidates differ more."""
    torch.manual_seed(0)
    actions = (0.5 + 0.1 * torch.randn(4, 5)).requires_grad_()
    (g,) = torch.autograd.grad(L.Weights().cost * L.cost(actions), actions)
    assert (g[:, L.DEPTH] > 0).all() and (g[:, :4] == 0).all()
    (g,) = torch.autograd.grad(-L.DIVERSITY * L.diversity(actions), actions)
    assert L.diversity((actions - 0.1 * g).detach()) > L.diversity(actions).detach()


def test_samples_are_reparameterised_but_log_prob_sees_them_detached():
    model = TournamentProposer(ProposerConfig(text_dim=8, image_dim=8))
    state = torch.randn(1, 257)
    drawn = model.sample(state, 32, generator(1, "x"))
    assert drawn.unclipped.requires_grad
    log_prob = model.log_prob(state, drawn.unclipped.detach(), drawn.buckets)
    (g,) = torch.autograd.grad(L.cost(drawn.unclipped), model.mean.bias, retain_graph=True)
    assert g.abs().sum() > 0
    (g,) = torch.autograd.grad(log_prob.sum(), model.log_std.bias)
    assert torch.isfinite(g).all()


def test_importance_and_effective_samples_by_hand():
    """π/μ = e^0, e^1, and e^9 clipped to 5. ESS of (1, 1, 2): 16/6; of equal weights: their number."""
    rho = L.importance(torch.tensor([0.0, 1.0, 9.0]), torch.zeros(3))
    assert rho.tolist() == pytest.approx([1.0, math.e, 5.0])
    assert L.effective_samples(torch.tensor([1.0, 1.0, 2.0])) == pytest.approx(16 / 6)
    assert L.effective_samples(torch.ones(7)) == pytest.approx(7)
    assert L.effective_samples(torch.zeros(3)) == 0.0


def test_delta_is_recalibrated_once_there_are_fifty():
    assert L.recalibrated(0.05, [0.02] * 49) == 0.05
    assert L.recalibrated(0.05, [-0.02] * 50) == pytest.approx(0.02)
    assert L.recalibrated(0.05, [0.001] * 50) == 0.01
    values = [i / 100 for i in range(101)]
    assert L.recalibrated(0.05, values) == pytest.approx(0.95)


def test_listnet_by_hand():
    """Utilities (0, 2): targets (0.1192, 0.8808); even scores: ln 2; scores like the target's logits: its entropy."""
    u = torch.tensor([[0.0, 2.0]])
    assert L.listnet(torch.zeros(1, 2), u).item() == pytest.approx(math.log(2))
    entropy = -(0.1192 * math.log(0.1192) + 0.8808 * math.log(0.8808))
    assert L.listnet(torch.tensor([[0.0, 2.0]]), u).item() == pytest.approx(entropy, abs=1e-3)


def test_plackett_luce_by_hand():
    """Order (b, a): P = σ(s_b − s_a)·1; scores a = 0, b = 1: (ln(1 + e⁻¹) + 0)/2."""
    out = L.plackett_luce(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.2, 0.9]]))
    assert out.item() == pytest.approx(math.log(1 + math.exp(-1)) / 2, rel=1e-5)


def test_a_tie_teaches_the_ranker_nothing():
    scores = torch.randn(2, 3, requires_grad=True)
    L.ranker_loss(scores, torch.tensor([[0.0, 0.0, 0.0], [0.1, 0.1, 0.1]]))["loss"].backward()
    assert scores.grad.abs().sum() == 0


def test_the_estimator_finds_a_bandits_optimum():
    """Utility peaks at cfg 0.8, dilation 0.2, feather 0.7, jitter 0.3, shallow depth, and seed bucket 3."""
    torch.manual_seed(0)
    model = TournamentProposer(ProposerConfig(text_dim=4, image_dim=4))
    state, peak = torch.randn(1, 257), torch.tensor([0.8, 0.2, 0.7, 0.3, 0.1])
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(700):
        drawn = model.sample(state, 16, generator(step, "bandit"))
        actions = drawn.unclipped.detach()
        u = torch.exp(-4 * ((actions.clamp(0, 1) - peak) ** 2).sum(1)) * torch.where(drawn.buckets == 3, 1.0, 0.5)
        mean, log_std, logits = model(state)
        log_prob = model.log_prob(state, actions, drawn.buckets)
        out = L.proposer_loss(log_prob, L.advantages(u), drawn.unclipped, log_std, logits)
        optimiser.zero_grad()
        out["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    mean, _, logits = model(state)
    assert (mean[0] - peak).abs().max() < 0.15
    assert logits.argmax().item() == 3
