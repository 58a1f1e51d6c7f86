"""Knobs, proposers, inpainter and native repair."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import bright_guard, call

from guardpaint.config import GateSettings
from guardpaint.draft.denoiser import Denoiser
from guardpaint.draft.families import family_of
from guardpaint.errors import BadCheckpoint, BadConfig
from guardpaint.repair.denoise import denoise, in_batches
from guardpaint.repair.inpainter import Inpainter
from guardpaint.repair.knobs import FixedProposer, StrongProposer, UniformProposer, denormalise
from guardpaint.repair.ladder import DEPTHS, own_ladder
from guardpaint.repair.native import NativeRepairer
from guardpaint.repair.once import digest_of, in_pieces
from guardpaint.repair.proposer import ProposerConfig, StateEncoder, TournamentProposer, fold_channels
from guardpaint.testing import small
from guardpaint.types import Knobs, Level, Proposer, ProposerState, RepairRequest

STATE = ProposerState(torch.zeros(32), torch.zeros(4, 16, 16), torch.zeros(256), 0.2, 0.8)


def test_denormalise_by_hand():
    """0.5 of every range: CFG 8, dilation 0.5, feather 0.5, jitter 0.25, depth 5.5 → 6 (round half to even)."""
    k = denormalise(torch.full((5,), 0.5), 3)
    assert (k.cfg, k.dilation, k.feather, k.jitter, k.depth, k.seed_offset) == (8.0, 0.5, 0.5, 0.25, 6, 300)
    clipped = denormalise(torch.tensor([-1.0, 2.0, 0.0, 1.0, 5.0]), 9)
    assert (clipped.cfg, clipped.dilation, clipped.depth, clipped.seed_offset) == (1.0, 1.0, 10, 900)


@pytest.mark.parametrize("proposer", [UniformProposer(), FixedProposer(), StrongProposer(), small.proposer()])
def test_every_proposer_keeps_to_the_ranges_and_its_seed(proposer):
    assert isinstance(proposer, Proposer)
    knobs = proposer.propose(STATE, 20, seed=3)
    assert knobs == proposer.propose(STATE, 20, seed=3) and len(knobs) == 20
    for k in knobs:
        assert 1 <= k.cfg <= 15 and 0 <= k.dilation <= 1 and 0 <= k.feather <= 1 and 0 <= k.jitter <= 0.5
        assert 1 <= k.depth <= 10 and isinstance(k.depth, int) and k.seed_offset in range(0, 901, 100)
    if proposer.name in ("uniform", "learned"):
        assert knobs != proposer.propose(STATE, 20, seed=4)


def test_state_is_257_and_initialised_orthogonally():
    """gain 0.1 in the encoder: W Wᵀ = 0.01 I for wide weights; gain 0.01 in the policy."""
    encoder = StateEncoder(ProposerConfig())
    w = encoder.text.weight
    torch.testing.assert_close(w @ w.T, 0.01 * torch.eye(64), atol=1e-5, rtol=0)
    state = encoder(
        torch.zeros(2, 512), torch.zeros(2, 4, 9, 9), torch.zeros(2, 256), torch.zeros(2, 1), torch.ones(2, 1)
    )
    assert state.shape == (2, 257) and (state[:, -1] == 1).all()
    policy = TournamentProposer()
    m = policy.mean.weight
    torch.testing.assert_close(m @ m.T, 0.0001 * torch.eye(5), atol=1e-7, rtol=0)
    mean, log_std, logits = policy(torch.zeros(1, 257))
    torch.testing.assert_close(mean, torch.full((1, 5), 0.5))
    assert logits.shape == (1, 10) and log_std.min() >= -4 and log_std.max() <= 0.5


def test_log_prob_by_hand():
    """A fresh policy at a zero state: N(0.5, 1) on five knobs at their mean, uniform over ten seeds."""
    policy = TournamentProposer().eval()
    got = policy.log_prob(torch.zeros(1, 257), torch.full((1, 5), 0.5), torch.tensor([4]))
    expected = 5 * (-0.5 * torch.log(torch.tensor(2 * torch.pi))) - torch.log(torch.tensor(10.0))
    torch.testing.assert_close(got[0], expected, atol=1e-5, rtol=0)


def test_channels_fold():
    x = torch.arange(16.0).view(1, 16, 1, 1)
    assert fold_channels(x, 4).flatten().tolist() == [1.5, 5.5, 9.5, 13.5]
    assert fold_channels(x[:, :2], 4).flatten().tolist() == [0.0, 1.0, 0.0, 0.0]
    with pytest.raises(BadConfig, match="6 latent channels"):
        fold_channels(x[:, :6], 4)


def test_every_channel_of_a_wide_latent_counts():
    """A proposer made for 16 channels sees each of them; four-channel latents leave the others at zero."""
    proposer = TournamentProposer(ProposerConfig(text_dim=8, image_dim=8))
    blank = ProposerState(torch.zeros(8), torch.zeros(16, 8, 8), torch.zeros(8), 0.1, 0.8)
    for channel in (4, 14):
        latent = torch.zeros(16, 8, 8)
        latent[channel], latent[channel + 1] = 1.0, -1.0  # an average over a group of four channels is 0
        assert not torch.equal(proposer.encode(replace(blank, latent=latent)), proposer.encode(blank))
    narrow = torch.rand(4, 8, 8)
    padded = torch.cat([narrow, torch.zeros(12, 8, 8)])
    assert torch.equal(proposer.encode(replace(blank, latent=narrow)), proposer.encode(replace(blank, latent=padded)))


def test_the_gates_of_training_are_in_the_checkpoint(tmp_path):
    gate = GateSettings("relative", 0.1, "on")
    TournamentProposer(ProposerConfig(gate=gate)).save_pretrained(tmp_path)
    assert TournamentProposer.from_pretrained(tmp_path).config.gate == gate


def test_proposer_round_trip(tmp_path):
    p = small.proposer(2)
    p.save_pretrained(tmp_path)
    assert TournamentProposer.from_pretrained(tmp_path).propose(STATE, 3, 1) == p.propose(STATE, 3, 1)


def request(knobs: list[Knobs], size: int = 64, batch: int = 8) -> RepairRequest:
    mask = torch.zeros(size, size)
    mask[16:48, 16:48] = 1
    view = torch.rand(3, size, size, generator=torch.Generator().manual_seed(0))
    return RepairRequest(
        view, mask.bool(), mask.expand(len(knobs), -1, -1), tuple(knobs), "a cat", "a dog", "", 7,
        None, (16, 16), batch,
    )  # fmt: skip


MIXED = [Knobs(3.0 + i, 0.3, 0.5, 0.1 * i, d, 100 * i) for i, d in enumerate((10, 1, 4, 7))]


def test_a_batch_of_mixed_depths_equals_one_by_one():
    """Every candidate of a batch is the picture it would have been alone, whatever the batch size."""
    inpainter = small.inpainter()
    together = inpainter.candidates(request(MIXED))
    halves = inpainter.candidates(request(MIXED, batch=2))
    alone = torch.cat([inpainter.candidates(request([k])) for k in MIXED])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=0)
    torch.testing.assert_close(together, halves, atol=1e-4, rtol=0)


def test_depth_counts_denoiser_calls():
    """d of 10 → d steps; a candidate joins the shared ladder at its own rung."""
    seen = []

    def estimate(z, level, active):
        seen.append((round(level.noise, 1), active.tolist()))
        return z, z

    ladders = [own_ladder(d, DEPTHS, lambda noise: Level(1 - noise, noise, noise)) for d in (3, 1)]
    denoise(torch.zeros(2, 1, 2, 2), ladders, estimate)
    assert seen == [(0.3, [0]), (0.2, [0]), (0.1, [0, 1])]


def test_few_steps_of_two_depths_run_in_one_call_each_at_its_own_level():
    """Depth 10 in two steps is at 1.0 and 0.5, depth 6 at 0.6 and 0.3: one call has both."""
    seen = []

    def estimate(z, level, active):
        seen.append([round(a.noise, 2) for a in level])
        return z, torch.ones_like(z)

    ladders = [[Level(1 - n, n, n) for n in noises] for noises in ((1.0, 0.5, 0.0), (0.6, 0.3, 0.0))]
    z = torch.tensor([2.0, 4.0]).view(2, 1, 1, 1)
    clean, _ = denoise(z, ladders, estimate)
    assert seen == [[1.0, 0.6], [0.5, 0.3]]
    # x0 = z and ε = 1: 2 → 0.5·2 + 0.5 = 1.5 → 1.5; 4 → 0.7·4 + 0.3 = 3.1 → 3.1
    assert clean.flatten().tolist() == pytest.approx([1.5, 3.1])


def test_requests_for_other_pictures_and_words_share_a_pass():
    """Three requests with prompts, views and masks of their own give what each gives alone, in fewer calls."""
    inpainter = small.inpainter()
    calls: list[int] = []
    inpainter.pipe.unet.register_forward_hook(lambda *a: calls.append(len(a[1][0]) // 2))
    first, other, third = request(MIXED[:2]), request(MIXED[2:]), request(MIXED[:1])
    other = replace(other, view=other.view.flip(-1), prompt="a horse", seed=8)
    third = replace(third, masks=third.masks.flip(-1), prompt="a boat on a lake")
    alone = [inpainter.candidates(r) for r in (first, other, third)]
    calls.clear()
    together = inpainter.together([first, other, third])
    assert len(calls) == 10 and sum(calls) == sum(k.depth for k in (*MIXED, MIXED[0]))
    for one, same in zip(alone, together, strict=True):
        torch.testing.assert_close(one, same, atol=1e-4, rtol=0)
    assert not torch.allclose(together[0][0], together[2][0], atol=1e-2)


def test_what_was_encoded_once_is_encoded_no_more(monkeypatch):
    """Waves of one tournament share text, view and masked views; another view or mask is encoded anew."""
    inpainter = small.inpainter()
    encoded: list[int] = []
    original = inpainter.pipe.vae.encode
    monkeypatch.setattr(inpainter.pipe.vae, "encode", lambda x, **k: encoded.append(len(x)) or original(x, **k))
    texts: list[int] = []
    inpainter.pipe.text_encoder.register_forward_hook(lambda *a: texts.append(1))
    memo: dict = {}
    wave = replace(request(MIXED[:1]), memo=memo)
    once = inpainter.candidates(wave)
    assert sum(encoded) == 2 and texts
    encoded.clear(), texts.clear()
    again = inpainter.candidates(replace(wave, knobs=wave.knobs, seed=wave.seed))
    assert not encoded and not texts and torch.equal(once, again)
    inpainter.candidates(replace(wave, view=wave.view.flip(-1)))
    assert sum(encoded) == 2 and not texts


def test_large_pictures_are_encoded_one_at_a_time():
    seen = []
    out = in_pieces(lambda some: seen.append(len(some)) or some + 1, torch.zeros(3, 3, 512, 512))
    assert seen == [1, 1, 1] and out.shape[0] == 3 and bool((out == 1).all())
    seen.clear()
    in_pieces(lambda some: seen.append(len(some)) or some, torch.zeros(5, 3, 64, 64))
    assert seen == [5]


@pytest.mark.parametrize("batch", [8, 2])
def test_a_previewed_candidate_goes_on_from_its_preview(batch):
    """The first step is not taken twice, and the picture is the one that no preview would have changed."""
    inpainter = small.inpainter()
    calls: list[int] = []
    inpainter.pipe.unet.register_forward_hook(lambda *a: calls.append(len(a[1][0]) // 2))
    whole = inpainter.candidates(request(MIXED, batch=batch))
    assert sum(calls) == sum(k.depth for k in MIXED)
    calls.clear()
    shown, begun = inpainter.preview(request(MIXED, batch=batch))
    assert sum(calls) == len(MIXED) and shown.shape == whole.shape
    kept = [0, 2]
    calls.clear()
    rest = inpainter.candidates(replace(request([MIXED[i] for i in kept], batch=batch), begun=begun[kept]))
    assert sum(calls) == sum(MIXED[i].depth - 1 for i in kept)
    torch.testing.assert_close(rest, whole[kept], atol=1e-4, rtol=0)
    torch.testing.assert_close(shown[1], whole[1], atol=1e-4, rtol=0)  # depth 1: the preview is the repair


def test_other_shapes_go_through_the_native_size():
    inpainter = small.inpainter()
    assert inpainter.native_size(64, 64) == (64, 64)
    assert inpainter.native_size(512, 768) == (64, 96)
    out = inpainter.candidates(request(MIXED[:1], size=96))
    assert out.shape == (1, 3, 64, 64) and out.min() >= 0 and out.max() <= 1


def test_candidates_ignore_the_global_rng():
    inpainter = small.inpainter()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    a = inpainter.candidates(request(MIXED[:1]))
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    assert torch.equal(a, inpainter.candidates(request(MIXED[:1])))


def test_a_four_channel_unet_is_no_inpainter(tmp_path):
    with pytest.raises(BadCheckpoint, match="4 channels"):
        Inpainter(small.pipeline("sd"))
    with pytest.raises(BadCheckpoint, match="not a StableDiffusionInpaintPipeline"):
        Inpainter.from_pretrained(tmp_path)


def test_slices():
    assert in_batches(5, 2) == [slice(0, 2), slice(2, 4), slice(4, 5)]


def test_a_name_of_a_picture_has_its_shape():
    """Black crops of other shapes are other pictures, with latents of their own."""
    assert digest_of(torch.zeros(3, 64, 128)) != digest_of(torch.zeros(3, 128, 64))


def test_the_base_encodes_a_region_once_for_all_waves(pipe, monkeypatch):
    """Native repair: the second wave of a tournament encodes neither the words nor the view again."""
    family, encoded, views = type(family_of(pipe)), [], []
    words, encode = family.encode_prompt, Denoiser.encode
    monkeypatch.setattr(family, "encode_prompt", lambda *a, **k: encoded.append(len(waves)) or words(*a, **k))
    monkeypatch.setattr(Denoiser, "encode", lambda *a, **k: views.append(len(waves)) or encode(*a, **k))
    waves = []

    class Watched(NativeRepairer):
        def candidates(self, asked):
            waves.append(len(asked.knobs))
            return super().candidates(asked)

    config = {"waves": "1", "wave_safety": 1.0, "wave_margin": 1.0, "candidates": 2, "regions": 1}
    guard = bright_guard(1.6, Watched(), FixedProposer(), f_gate="off", p_gate="off", **config)
    call(guard.attach(pipe), steps=3)
    assert waves[:2] == [1, 1]
    assert 1 in encoded and 2 not in encoded and 1 in views and 2 not in views
