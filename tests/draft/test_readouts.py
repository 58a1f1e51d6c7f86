"""Early exits of tiny decoders: the least squares, the choice of an exit, and what the views are worth on photographs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from guardpaint.draft.codec import ViewDecoder, audit_size, resize
from guardpaint.draft.early_exit import EarlyExits, fitted, shipped
from guardpaint.draft.natural import natural_pictures
from guardpaint.draft.readouts import NormalEquations, Readouts, decoded, features, latents_of, stops
from guardpaint.errors import BadCheckpoint, BadConfig
from guardpaint.guard import GuardPaint
from guardpaint.store.checkpoint import canonical_fingerprint
from guardpaint.testing import small
from guardpaint.testing.photographs import HELD_OUT, fitting, photograph
from guardpaint.train.readouts import decibels

CPU = torch.device("cpu")
FLOORS = {512: (30.0, 25.0), 1024: (25.0, 25.0)}
"""Decibels of the view at 224 px and of the glance at 128 px, by shorter side. At 1024 both are made by the exit at a
quarter of the size."""


@pytest.fixture(scope="module")
def tiny():
    return small.tiny_decoder(4)


@pytest.fixture(scope="module")
def exits(tiny):
    own = EarlyExits(tiny)
    assert own.known is None and own.readouts.card["pictures"] == "synthetic"
    return own


def test_least_squares_by_hand():
    """Three pictures of one pixel: features 0, 1, 2 and targets 0, 0, 0.3.

    Means are 1 and 0.1, so the slope is (−1·−0.1 + 0 + 1·0.2) / (1 + 0 + 1) = 0.15 and the bias 0.1 − 0.15 = −0.05.
    The eight taps around the pixel see only padding, and the penalty leaves them at 0.
    """
    problem = NormalEquations(1)
    for x, y in ((0.0, 0.0), (1.0, 0.0), (2.0, 0.3)):
        problem.add(torch.full((1, 1, 1, 1), x), torch.full((1, 3, 1, 1), y))
    readout = problem.solve()
    assert problem.count == 3
    torch.testing.assert_close(readout.bias, torch.full((3,), -0.05), atol=1e-5, rtol=0)
    wanted = torch.zeros(3, 1, 3, 3)
    wanted[:, :, 1, 1] = 0.15
    torch.testing.assert_close(readout.weight, wanted, atol=1e-5, rtol=0)


def test_parts_add_up_to_one_least_squares_problem():
    """Rows in parts, two pictures: the same map as torch's own solver finds for all examples at once."""
    g = torch.Generator().manual_seed(0)
    values, wanted = torch.randn(2, 2, 37, 11, generator=g), torch.rand(2, 3, 37, 11, generator=g)
    problem = NormalEquations(2)
    for k in range(2):
        problem.add(values[k : k + 1], wanted[k : k + 1])
    columns = F.unfold(values.double(), 3, padding=1).transpose(1, 2).flatten(0, 1)
    columns = torch.cat([columns, torch.ones(len(columns), 1).double()], dim=1)
    direct = torch.linalg.lstsq(columns, wanted.double().flatten(2).transpose(1, 2).flatten(0, 1)).solution
    readout = problem.solve(ridge=1e-12)
    torch.testing.assert_close(readout.weight, direct[:-1].T.reshape(3, 2, 3, 3).float())
    torch.testing.assert_close(readout.bias, direct[-1].float())


@settings(max_examples=40, deadline=None)
@given(height=st.integers(4, 40), width=st.integers(4, 40), pixels=st.integers(8, 160))
def test_a_view_has_the_size_that_is_asked(tiny, exits, height, width, pixels):
    decoder = ViewDecoder(tiny, None, 4, CPU, exits=exits)
    with torch.no_grad():
        view = decoder.at(torch.zeros(1, 4, height, width), pixels)
    assert tuple(view.shape[-2:]) == audit_size(4 * height, 4 * width, pixels)
    assert float(view.min()) >= 0 and float(view.max()) <= 1


def test_the_size_chooses_the_exit(tiny, exits):
    """512: 224 px from the half, 128 px from the quarter, 384 px from the whole; 1024: 224 px from the quarter."""
    decoder = ViewDecoder(tiny, None, 4, CPU, exits=exits)
    cases = {(512, 224): "1/2", (512, 128): "1/4", (512, 257): "", (1024, 224): "1/4", (1024, 384): "1/2", (64, 64): ""}
    for (side, pixels), shrink in cases.items():
        assert decoder.path((side, side), pixels) == (f"exit {shrink}" if shrink else "tiny"), (side, pixels)
    assert decoder.path((512, 768), 256) == "exit 1/2" and decoder.path((512, 768), 257) == "tiny"
    assert ViewDecoder(None, None, 4, CPU).path((512, 512), 128) == "full"


def test_the_exit_runs_only_its_layers(tiny, exits):
    seen = []
    hooks = [layer.register_forward_hook(lambda *_, k=k: seen.append(k)) for k, layer in enumerate(tiny.decoder.layers)]
    with torch.no_grad():
        ViewDecoder(tiny, None, 4, CPU, exits=exits).at(torch.zeros(1, 4, 16, 16), 32)
    for hook in hooks:
        hook.remove()
    assert seen == list(range(stops(tiny)[2])) and len(seen) < len(tiny.decoder.layers)


def test_a_picture_no_larger_than_the_view_is_decoded_as_before(tiny, exits):
    z = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        view = ViewDecoder(tiny, None, 4, CPU, exits=exits).at(z, 160)
        assert torch.equal(view, resize(decoded(tiny, z), (160, 160)))


def test_fits_are_repeatable_and_leave_the_global_generator_alone(tiny, exits):
    state = torch.get_rng_state()
    again = fitted(tiny, natural_pictures(16, 256), "synthetic")
    assert torch.equal(torch.get_rng_state(), state)
    assert again.identity == exits.readouts.identity
    few = [torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(1))]
    assert fitted(tiny, few, "own").identity != again.identity


def test_fits_under_inference_mode_and_autocast_can_be_used_outside(tiny, exits):
    own = EarlyExits(tiny)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert own.readouts.identity == exits.readouts.identity
    assert not next(iter(own.readouts.maps.values())).weight.is_inference()


def test_synthetic_pictures_have_edges_and_flat_areas():
    picture = next(natural_pictures(1, 64))
    steps = picture.diff(dim=-1).abs()
    assert float(picture.min()) >= 0 and float(picture.max()) <= 1
    assert float(steps.median()) < 0.1 < float(steps.quantile(0.97))


def guard_with(tiny, readouts=None):
    return GuardPaint(small.auditor(), small.inpainter(), decoders={"sd": tiny}, readouts=readouts)


def test_a_guard_keeps_its_readouts(tmp_path, tiny, exits):
    guard = guard_with(tiny, {"sd": exits.readouts})
    assert guard.configured(candidates=2).exits is guard.exits
    guard.save_pretrained(tmp_path)
    again = GuardPaint.from_pretrained(tmp_path)
    assert again.exits["sd"].known is not None and again.exits["sd"].known.identity == exits.readouts.identity
    z = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        one, two = (ViewDecoder(g.decoders["sd"], None, 4, CPU, exits=g.exits["sd"]).at(z, 32) for g in (guard, again))
    assert torch.equal(one, two)
    other = fitted(tiny, [torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(1))], "own")
    other.save(tmp_path / "decoders" / "sd")
    with pytest.raises(BadCheckpoint, match="not those that guardpaint.json names"):
        GuardPaint.from_pretrained(tmp_path)
    other.save(tmp_path / "loose")
    (tmp_path / "loose" / "readouts.json").write_text('{"decoder": "x", "identity": "y"}')
    with pytest.raises(BadCheckpoint, match="not those that their card names"):
        Readouts.load(tmp_path / "loose")


def test_readouts_of_another_decoder_are_refused(exits):
    other = small.tiny_decoder(4)
    with torch.no_grad():
        next(other.decoder.parameters()).add_(1)
    with pytest.raises(BadConfig, match="fitted for another decoder"):
        guard_with(other, {"sd": exits.readouts})


def real(weights, name, dtype=torch.float32):
    from diffusers import AutoencoderTiny

    return AutoencoderTiny.from_pretrained(weights / name, torch_dtype=dtype).eval()


@pytest.mark.weights
@pytest.mark.parametrize("name", ["taesd", "taesdxl", "taesd3", "taef1"])
def test_published_decoders_are_recognised_in_every_precision(weights, name):
    prints = {
        canonical_fingerprint(real(weights, name, d).decoder) for d in (torch.float32, torch.bfloat16, torch.half)
    }
    assert len(prints) == 1
    found = shipped(prints.pop())
    assert found is not None and found.card["pictures"] == "photographs" and "astronaut" not in found.card["fitted_on"]
    tiny = real(weights, name, torch.bfloat16)
    with torch.no_grad():
        z = torch.zeros(1, tiny.config.latent_channels, 16, 16)
        assert ViewDecoder(tiny, None, 8, CPU).at(z, 64).dtype == torch.float32


@pytest.mark.weights
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "size",
    [(512, 512), (512, 768), *(pytest.param(s, marks=pytest.mark.slow) for s in ((1024, 1024), (1024, 1536)))],
    ids=lambda s: f"{s[0]}x{s[1]}",
)
@pytest.mark.parametrize("name", ["taesd", "taesdxl", "taesd3", "taef1"])
def test_views_of_held_out_photographs(weights, name, size):
    """Views by early exits against the shrunk whole decode, on photographs that the readouts were not fitted on."""
    tiny = real(weights, name)
    decoder = ViewDecoder(tiny, None, 8, CPU)
    names = list(HELD_OUT) if size[0] == 512 else ["astronaut"]
    values = {224: 0.0, 128: 0.0}
    with torch.no_grad():
        for photo in names:
            z = latents_of(tiny, fitting(photograph(photo), *size)[None])
            whole = decoder.full(z)
            for pixels in values:
                assert decoder.path(size, pixels).startswith("exit")
                wanted = resize(whole, audit_size(*size, pixels))
                values[pixels] += decibels(decoder.at(z, pixels), wanted) / len(names)
    view, glance = FLOORS[size[0]]
    assert values[224] >= view and values[128] >= glance, values


@pytest.mark.weights
def test_shrunken_latents_were_worse(weights):
    """What views were made of before: the picture of shrunken latents, more than 8 dB below the early exit's."""
    tiny = real(weights, "taesd")
    with torch.no_grad():
        z = latents_of(tiny, fitting(photograph("astronaut"), 512, 512)[None])
        whole = resize(decoded(tiny, z), (224, 224))
        old = decoded(tiny, F.interpolate(z, size=(28, 28), mode="area"))
        new = ViewDecoder(tiny, None, 8, CPU).at(z, 224)
    assert decibels(old, whole) + 8 < decibels(new, whole)


def test_features_are_bounded_like_the_decoders_input(tiny):
    """The decoder's own tanh comes first: huge latents give the features of saturated ones."""
    with torch.no_grad():
        one, two = (features(tiny, torch.full((1, 4, 8, 8), x), 2) for x in (1e3, 1e6))
    assert torch.equal(one, two)
