"""The inpainter's losses, on numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from guardpaint.train import alignment_loss as L

SAFE, BAD = True, False


def bools(*values):
    return torch.tensor(values)


def test_clean_estimate_by_hand():
    """z = 2, ε = 1, ᾱ = 0.25: (2 − √0.75)/0.5 = 2.268."""
    one = torch.ones(1, 1, 1, 1)
    out = L.clean_estimate(2 * one, one, torch.tensor([0.25]))
    assert out.item() == pytest.approx((2 - math.sqrt(0.75)) / 0.5)


def test_sft_loss_by_hand():
    """Errors 4 and 1 with weights ½ and 1: (2 + 1)/2 = 1.5; the offset adds 0.05·2 = 0.1."""
    out = torch.tensor([2.0, 1.0]).view(2, 1, 1, 1)
    assert L.sft_loss(out, torch.zeros(2, 1, 1, 1), torch.tensor([0.5, 1.0])).item() == pytest.approx(1.5)
    moved = L.offset_noise(torch.zeros(1, 1, 2, 2), torch.full((1, 1, 1, 1), 2.0))
    assert moved.unique().tolist() == pytest.approx([0.1])


def test_masked_error_by_hand():
    """Two channels, two of four pixels masked, each off by 1: Σ 1.5·1·1 over 4 values / Σ m = 6/2 = 3; the rest is free."""
    mask = torch.tensor([[1.0, 1.0], [0.0, 0.0]]).view(1, 1, 2, 2)
    off = torch.ones(1, 2, 2, 2)
    off[:, :, 1] = 100.0
    assert L.masked_error(off, torch.zeros(1, 2, 2, 2), mask).item() == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("reading", "want"),
    # unsafe gains −0.2 and 0.1: mean −0.05, 1.5·|mean| = 0.075
    [("exploit_side", [0.5, -0.075, 0.1]), ("printed", [0.5, -0.2, 0.075])],
)
def test_both_readings_of_the_cap(reading, want):
    gain = torch.tensor([0.5, -0.2, 0.1])
    assert L.capped(gain, bools(SAFE, BAD, BAD), torch.tensor(-0.05), reading).tolist() == pytest.approx(want)


def test_the_cap_has_a_floor_and_no_gradient_of_its_own():
    """Mean gain 0: the cap is still 0.03. A capped sample has no gradient, and the mean passes none."""
    gain = torch.tensor([-0.1, 0.1], requires_grad=True)
    out = L.capped(gain, bools(BAD, BAD), gain.mean())
    assert out.tolist() == pytest.approx([-0.03, 0.1])
    out.sum().backward()
    assert gain.grad.tolist() == [0.0, 1.0]


def test_an_unknown_reading_is_named():
    with pytest.raises(ValueError, match="cap='x'"):
        L.capped(torch.tensor([0.1]), bools(BAD), torch.tensor(0.1), "x")
    with pytest.raises(ValueError, match="kto='x'"):
        L.kto_margin(torch.tensor([0.1]), torch.tensor(0.0), bools(BAD), "x")


def test_a_batch_of_safe_samples_alone_has_no_cap():
    gain = torch.tensor([-0.5, 0.1], requires_grad=True)
    means = L.batch_means(gain, gain, bools(SAFE, SAFE))
    assert means.unsafe.isnan() and means.safe.item() == pytest.approx(-0.2)
    out = L.capped(gain, bools(SAFE, SAFE), means.unsafe)
    out.sum().backward()
    assert out.tolist() == pytest.approx([-0.5, 0.1]) and gain.grad.tolist() == [1.0, 1.0]


GAINS = torch.tensor([0.2, -0.5, 0.0, 0.1, 0.4, -0.1, 0.2, 0.05])
KINDS = bools(SAFE, BAD, SAFE, BAD, SAFE, BAD, SAFE, BAD)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_one_batch_of_eight_has_the_cap_of_four_parts_of_two(parts):
    """Unsafe gains −0.5, 0.1, −0.1, 0.05: mean −0.1125, so the cap is 0.16875 and −0.5 becomes −0.16875.

    The means of the parts come from added sums and counts, as those of several processes do. Alone, the part with −0.5
    of four would have the cap 0.75 and leave the gain as it is.
    """
    chunks = list(zip(GAINS.chunk(parts), KINDS.chunk(parts), strict=True))
    seen = []
    for gain, desired in chunks:
        L.batch_means(gain, gain, desired, lambda sums: seen.append(sums) or sums)
    means = L.batch_means(GAINS[:2], GAINS[:2], KINDS[:2], lambda _: sum(seen))
    assert means.unsafe.item() == pytest.approx(-0.1125) and means.safe.item() == pytest.approx(0.2)
    assert means.identity.item() == pytest.approx(GAINS.mean().item())
    capped = torch.cat([L.capped(gain, desired, means.unsafe) for gain, desired in chunks])
    assert capped.tolist() == pytest.approx([0.2, -0.16875, 0.0, 0.1, 0.4, -0.1, 0.2, 0.05])
    alone = L.capped(*chunks[0], L.batch_means(GAINS[:2], GAINS[:2], KINDS[:2]).unsafe)
    assert parts < 4 or alone[1].item() == pytest.approx(-0.5)


def means_of(safe, unsafe=float("nan")):
    return L.BatchMeans(torch.tensor(safe), torch.tensor(unsafe), torch.tensor(0.0))


def test_the_bco_shift_by_hand():
    """Midpoint of 0.4 and −0.2 is 0.1: 0.999·0.01 + 0.001·0.1 = 0.01009; far values are clamped to ±0.03."""
    means = means_of(0.4, -0.2)
    assert L.bco_shift(torch.tensor(0.01), means).item() == pytest.approx(0.01009)
    assert L.bco_shift(torch.tensor(0.5), means).item() == pytest.approx(0.03)
    assert L.bco_shift(torch.tensor(-0.5), means).item() == pytest.approx(-0.03)
    assert L.bco_shift(torch.tensor(0.01), means_of(0.4)).item() == pytest.approx(0.01)


def test_the_kto_shift_by_hand():
    """Safe samples alone: 0.99·0.01 + 0.01·0.2 = 0.0119, clamped to [−0.02, 0.05]."""
    means = means_of(0.2, -9.0)
    assert L.kto_shift(torch.tensor(0.01), means).item() == pytest.approx(0.0119)
    assert L.kto_shift(torch.tensor(9.0), means).item() == pytest.approx(0.05)
    assert L.kto_shift(torch.tensor(-9.0), means).item() == pytest.approx(-0.02)


def test_bco_loss_by_hand():
    """g = 0.02 safe, −0.02 nude, δ = 0: margins 1 and 1; (1·ln(1+e⁻¹) + 5·ln(1+e⁻¹))/2 = 3·0.31326."""
    margin = L.bco_margin(torch.tensor([0.02, -0.02]), torch.tensor(0.0), bools(SAFE, BAD))
    assert margin.tolist() == pytest.approx([1.0, 1.0])
    weight = L.class_weight(torch.tensor([0, 1]), (1.0, 5.0, 12.0))
    assert L.bco_loss(margin, weight).item() == pytest.approx(3 * math.log(1 + math.exp(-1)), rel=1e-5)


def test_kto_improvement_on_safe_lowers_the_loss():
    """g = ℓ_θ − ℓ_ref = −1/7 on a safe sample, δ = 0: margin 1, loss 1 − σ(1)."""
    margin = L.kto_margin(torch.tensor([-1 / 7]), torch.tensor(0.0), bools(SAFE))
    assert L.kto_loss(margin, torch.ones(1)).item() == pytest.approx(1 - 1 / (1 + math.exp(-1)))
    worse = L.kto_margin(torch.tensor([1 / 7]), torch.tensor(0.0), bools(SAFE))
    assert L.kto_loss(worse, torch.ones(1)) > L.kto_loss(margin, torch.ones(1))


def test_kto_as_printed_by_hand():
    """g = ℓ_θ − ℓ_ref = ±1/7 and δ = 0, so h = σ(sgn·7·g): what the paper prints prefers drift on safe samples.

    Safe and worse than the reference: h = σ(1), loss 1·(1 − 0.7311) = 0.2689. Unsafe and worse: h = σ(−1), loss
    12·(1 − 0.2689) = 8.773. Mended, both change places.
    """
    gap, desired = torch.tensor([1 / 7, 1 / 7]), bools(SAFE, BAD)
    weight = L.class_weight(torch.tensor([0, 2]), (1.0, 5.0, 12.0))
    printed = L.kto_margin(gap, torch.tensor(0.0), desired, "printed")
    mended = L.kto_margin(gap, torch.tensor(0.0), desired, "mended")
    assert printed.tolist() == pytest.approx([1.0, -1.0]) and mended.tolist() == pytest.approx([-1.0, 1.0])
    assert L.kto_loss(printed, weight).item() == pytest.approx((0.2689414 + 12 * 0.7310586) / 2, rel=1e-5)
    assert L.kto_loss(mended, weight).item() == pytest.approx((0.7310586 + 12 * 0.2689414) / 2, rel=1e-5)


def test_the_printed_shift_moves_the_same_way():
    """δ = 0.02, g = 0.05, safe: printed 7·0.03 = 0.21, mended −0.21."""
    arguments = torch.tensor([0.05]), torch.tensor(0.02), bools(SAFE)
    assert L.kto_margin(*arguments, "printed").item() == pytest.approx(0.21)
    assert L.kto_margin(*arguments).item() == pytest.approx(-0.21)


def test_the_reconstruction_of_kto_as_printed():
    """Half the pixels masked, errors 2 and 0: 200·(4·½ + 0)/2 = 200, unsafe samples and all."""
    mask = torch.tensor([[1.0, 0.0]]).view(1, 1, 1, 2).repeat(2, 1, 1, 1)
    out = torch.zeros(2, 1, 1, 2)
    out[1] = 2.0
    assert L.printed_anchor_loss(out, torch.zeros(2, 1, 1, 2), mask).item() == pytest.approx(200.0)


@pytest.mark.parametrize("x", [-3.0, 0.0, 3.0])
def test_gradients_of_both_losses(x):
    """softplus(−x): −(1 − σ(x)); 1 − σ(x): −σ(x)(1 − σ(x)), which dies on both sides."""
    s = 1 / (1 + math.exp(-x))
    for loss, want in ((L.bco_loss, -(1 - s)), (L.kto_loss, -s * (1 - s))):
        margin = torch.tensor([x], requires_grad=True)
        loss(margin, torch.ones(1)).backward()
        assert margin.grad.item() == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("weights", [(1.0, 3.0), (1.0, 5.0, 12.0), (1.0, 5.0, 2.0, 12.0, 4.0)])
def test_every_category_has_its_own_weight(weights):
    assert L.class_weight(torch.arange(len(weights)), weights).tolist() == list(weights)


def test_identity_per_sample_and_of_the_batch():
    """Gaps 0.12 and 0: per sample 30·0.1²/2 = 0.15 (unsafe: 5·0.1²/2 = 0.025); of the mean (0.06 − 0.02)² = 0.0016."""
    gap = torch.tensor([0.12, 0.0])
    mean = gap.mean()
    assert L.identity_loss(gap, bools(SAFE, SAFE), mean).item() == pytest.approx(0.15)
    assert L.identity_loss(gap, bools(BAD, SAFE), mean).item() == pytest.approx(0.025)
    assert L.identity_loss(gap, bools(SAFE, SAFE), mean, "batch").item() == pytest.approx(0.0016)
    assert L.identity_loss(gap, bools(SAFE, BAD), mean, "linear").item() == pytest.approx(30 * 0.12 / 2)
    with pytest.raises(ValueError, match="identity='x'"):
        L.identity_loss(gap, bools(SAFE, SAFE), mean, "x")


def test_the_batch_hinge_of_parts_has_the_gradient_of_the_whole():
    """(0.06 − 0.02)², slope 2·0.04/2 = 0.04 for each of two gaps: also when each gap is a part of its own, at weight ½."""
    whole = torch.tensor([0.12, 0.0], requires_grad=True)
    L.identity_loss(whole, bools(SAFE, SAFE), whole.mean(), "batch").backward()
    parts = torch.tensor([0.12, 0.0], requires_grad=True)
    losses = [0.5 * L.identity_loss(parts[k : k + 1], bools(SAFE), torch.tensor(0.06), "batch") for k in range(2)]
    sum(losses).backward()
    assert sum(losses).item() == pytest.approx(0.0016)
    assert whole.grad.tolist() == pytest.approx([0.04, 0.04]) and parts.grad.tolist() == pytest.approx([0.04, 0.04])


def test_below_the_hinge_nothing_pulls():
    gap = torch.tensor([0.019], requires_grad=True)
    L.identity_loss(gap, bools(SAFE), gap.mean()).backward()
    assert gap.grad.item() == 0.0


def test_the_anchor_counts_safe_samples_outside_the_mask():
    """Half the pixels masked, error 2 everywhere: safe 4·½ = 2; the unsafe sample, however wrong, counts nothing."""
    mask = torch.tensor([[1.0, 0.0]]).view(1, 1, 1, 2).repeat(2, 1, 1, 1)
    out = torch.full((2, 1, 1, 2), 2.0)
    out[1] = 100.0
    assert L.anchor_loss(out, torch.zeros(2, 1, 1, 2), mask, bools(SAFE, BAD)).item() == pytest.approx(2.0)
    assert L.anchor_loss(out, torch.zeros(2, 1, 1, 2), mask, bools(BAD, BAD)).item() == 0.0


def test_saturation_by_hand():
    """σ(5) = 0.9933 and σ(−5) = 0.0067 are saturated, σ(1) is not."""
    assert L.saturation(torch.tensor([5.0, -5.0, 1.0, 0.0])).item() == 0.5


def test_a_ddim_step_by_hand():
    """z = 1, ε = 0, ᾱ 0.25 → 1: ẑ0 = 2, and at ᾱ = 1 that is where it lands."""
    one = torch.ones(1, 1, 1, 1)
    assert L.ddim(one, 0 * one, torch.tensor([0.25]), torch.tensor([1.0])).item() == pytest.approx(2.0)
