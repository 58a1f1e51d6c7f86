"""Aligning an inpainter: LoRA where it belongs, frozen references, two passes, alarms, runs from pairs to pipelines."""

from __future__ import annotations

import copy
import gc
import json
import math
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import small_inpainter
from pictures import small_pairs

from guardpaint.data.pairs import PairStore
from guardpaint.draft.loading import load_pipeline
from guardpaint.errors import BadConfig, BadInput
from guardpaint.policy import Category, Policy
from guardpaint.testing import small
from guardpaint.train import align, alignment_config, alignment_watch, dynamics, memory, noise_seeds
from guardpaint.train import alignment_loss as L
from guardpaint.train.alignment_config import shares
from guardpaint.train.engine import Run, TrainConfig
from guardpaint.train.latents import tokenise
from guardpaint.train.pair_latents import encode_pairs, leaked, load_pairs

POLICY = Policy.default()
TRAIN = TrainConfig(steps=2, batch_size=8, learning_rate=0.001, seed=1, warmup=1, validate_every=1)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A small random inpainting pipeline and a few encoded pairs."""
    root = tmp_path_factory.mktemp("align")
    small_inpainter(root / "inpainter")
    pipe = load_pipeline(root / "inpainter")
    for split, count in (("train", 4), ("validation", 2)):
        small_pairs(root / "pairs", split, {"safe": 4, "nudity": count, "violence": count})
    for split in ("train", "validation"):
        encode_pairs(PairStore(root / "pairs"), split, pipe, POLICY)
    return root


@pytest.fixture
def data(home):
    pipe = load_pipeline(home / "inpainter")
    return pipe, load_pairs(home / "pairs", "train", pipe.vae), tokenise(pipe.tokenizer, [""])[0]


def aligner(data, **options):
    parts, policy = options.pop("parts", 1), options.pop("policy", POLICY)
    config = align.AlignConfig(rank=4, **options).under(policy)
    pipe = data[0]
    return align.Aligner(pipe.unet, pipe.text_encoder, pipe.scheduler.alphas_cumprod, config, 1, parts)


def a_batch(data, model, step=0):
    return align.batch_of(data[1], step, model.config, TRAIN, data[2])


@pytest.mark.parametrize("freeze", ["none", "conv_in", "convs"])
def test_exactly_the_listed_modules_get_a_lora(data, freeze):
    names = {n for n, _ in data[0].unet.named_modules()}
    model = aligner(data, freeze=freeze)
    touched = {
        n.removeprefix("base_model.model.") for n, m in model.unet.named_modules() if hasattr(m, "lora_A") and m.lora_A
    }
    ends = {
        "none": (*alignment_config.ATTENTION, "conv1", "conv2", "conv_in"),
        "conv_in": (*alignment_config.ATTENTION, "conv1", "conv2"),
        "convs": alignment_config.ATTENTION,
    }[freeze]
    assert touched == {n for n in names if any(n == e or n.endswith("." + e) for e in ends)}
    assert ("conv_in" in touched) == (freeze == "none")
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in n for n in trained)


def test_a_batch_has_its_mixture(data):
    """Of 8: 4 safe (2 safe versions of unsafe scenes, 2 ordinary), 2 nude, 2 violent; unsafe ones keep their own z0."""
    batch = a_batch(data, aligner(data))
    assert batch.category.tolist() == [0, 0, 0, 0, 1, 1, 2, 2]
    pairs = data[1]
    for i in range(8):
        pool = pairs.target if i < 4 else pairs.source
        assert any(torch.equal(batch.z0[i], z) for z in pool)
    again = a_batch(data, aligner(data))
    assert torch.equal(batch.z0, again.z0) and torch.equal(batch.eps, again.eps)


def test_sft_trains_on_safe_targets_under_the_unsafe_prompt(data):
    model = aligner(data, method="sft", dropout=0.0)
    batch, pairs = a_batch(data, model), data[1]
    for i in range(8):
        row = next(k for k in range(len(pairs)) if torch.equal(batch.z0[i], pairs.target[k]))
        assert pairs.category[row] > 0 and torch.equal(batch.ids[i], pairs.ids[row])


def test_prompts_are_dropped_at_their_rate(data):
    model = aligner(data, dropout=0.3)
    dropped = [bool((ids == data[2]).all()) for s in range(100) for ids in a_batch(data, model, s).ids]
    assert 0.25 < sum(dropped) / len(dropped) < 0.35


def step(model, batch, rate=0.05):
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], rate)
    for part in model(batch):
        part["loss"].backward()
    optimiser.step()
    return model


def test_a_frozen_reference_stays_and_a_refreshed_one_follows(data):
    for how in ("frozen", "refresh"):
        model = aligner(data, reference=how, refresh_every=2, unroll_every=0).train()
        batch = a_batch(data, model)
        z = model.noised(batch.z0, batch.t, batch.eps)
        before = model.reference(z, batch.t, batch)
        with torch.no_grad():
            for name, p in model.unet.named_parameters():
                if "lora_B.default" in name:
                    p.normal_(0, 0.05)
        assert torch.allclose(model.reference(z, batch.t, batch), before)
        assert not torch.allclose(model.predict(z, batch.t, batch), before)
        list(model(batch))
        list(model(batch))
        moved = model.reference(z, batch.t, batch)
        assert torch.allclose(moved, before) == (how == "frozen")
        if how == "refresh":
            assert torch.allclose(moved, model.predict(z, batch.t, batch), atol=1e-6)


def test_the_first_step_knows_no_difference(data):
    """LoRA starts at zero: gain 0, h = σ(0) = ½, identity 0, and the shift stays 0."""
    model = aligner(data, unroll_every=0).train()
    (out,) = list(model(a_batch(data, model)))
    assert out["h_safe"].item() == pytest.approx(0.5) and out["h_unsafe"].item() == pytest.approx(0.5)
    assert out["identity"].item() == pytest.approx(0.0, abs=1e-9) and model.delta.item() == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("method", ["bco", "kto"])
@pytest.mark.parametrize("reward", ["x0", "eps"])
def test_a_step_moves_both_classes_to_their_sides(data, method, reward):
    model = aligner(data, method=method, reward=reward, unroll_every=0, dropout=0.0).train()
    batch = replace(a_batch(data, model), t=torch.full((8,), 300))
    for _ in range(25):
        step(model, batch, 0.002)
    (out,) = list(model(batch))
    assert out["h_safe"].item() > 0.6 and out["h_unsafe"].item() > 0.6


def test_the_second_pass_comes_every_tenth_step_and_its_weights_are_halves(data):
    model = aligner(data, unroll_every=2).train()
    batch = replace(a_batch(data, model), t=torch.full((8,), 400))
    (alone,) = list(model(batch))
    assert alone["preference_unrolled"].isnan()
    first, second = list(model(batch))
    plain = 4 * first["preference"] + first["recon"] + first["identity"]
    assert first["loss"].item() == pytest.approx((plain - 2 * first["preference"]).item(), rel=1e-5)
    assert second["loss"].item() == pytest.approx(2 * second["preference_unrolled"].item(), rel=1e-5)


def test_no_second_pass_below_ten(data):
    model = aligner(data, unroll_every=1).train()
    batch = replace(a_batch(data, model), t=torch.full((8,), 9))
    assert len(list(model(batch))) == 1


def test_the_first_graph_is_freed_before_the_second_pass(data):
    """A tensor that only pass one's graph holds is gone once its loss was used."""
    model = aligner(data, unroll_every=1).train()
    batch = replace(a_batch(data, model), t=torch.full((8,), 400))
    kept = []

    def remember(module, args, out):
        if out.requires_grad:
            kept.append(weakref.ref(out))

    hook = model.unet.get_base_model().conv_in.register_forward_hook(remember)
    passes = model(batch)
    part = next(passes)
    part["loss"].backward()
    del part
    gc.collect()
    assert kept and all(k() is None for k in kept)
    assert "preference_unrolled" in next(passes)
    hook.remove()


def test_bands_tell_errors_by_noise(data):
    model = aligner(data, unroll_every=0)
    batch = replace(a_batch(data, model), t=torch.tensor([5, 50, 99, 100, 499, 500, 700, 999]))
    (out,) = list(model(batch))
    z = model.noised(batch.z0, batch.t, batch.eps)
    error = ((model.predict(z, batch.t, batch) - batch.eps) ** 2).mean((1, 2, 3))
    assert out["mse_0_100"].item() == pytest.approx(error[:3].mean().item(), rel=1e-4)
    assert out["mse_500_1000"].item() == pytest.approx(error[5:].mean().item(), rel=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "dpo"}, "method='dpo': choose sft, kto, bco"),
        ({"cap": "none"}, "cap='none'"),
        ({"reference": "old"}, "reference='old'"),
        ({"rank": 0}, "rank=0"),
        ({"kto": "old"}, "kto='old': choose mended, printed"),
        ({"mixture": (1, 2)}, r"mixture=\(1, 2\): policy 'default' has 3 categories"),
        ({"mixture": (0, 1, 2)}, r"mixture=\(0, 1, 2\): needs safe samples"),
        ({"weights": (1.0, 5.0)}, r"weights=\(1.0, 5.0\): policy 'default' has 3 categories"),
        ({"weights": (1.0, 5.0, -1.0)}, r"weights=\(1.0, 5.0, -1.0\): each must be positive"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(BadConfig, match=message):
        align.AlignConfig(**options).under(POLICY)


# Categories of the policy ------------------------------------------------------------------------------------


def policy_of(harms):
    """A policy with so many harms, whose weights are 2, 3, …"""
    names = ("safe", *(f"harm{k}" for k in range(harms)))
    return Policy("made", tuple(Category(name, repair_weight=k + 1.0) for k, name in enumerate(names)))


@pytest.mark.parametrize(
    ("harms", "want"), [(1, [8, 8]), (2, [8, 4, 4]), (4, [8, 2, 2, 2, 2])], ids=["one", "two", "four"]
)
def test_mixture_and_weights_come_from_the_policy(harms, want):
    config = align.AlignConfig().under(policy_of(harms))
    assert shares(config.mixture, 16, 0) == want
    assert config.weights == tuple(k + 1.0 for k in range(harms + 1))


@pytest.mark.parametrize("size", [4, 8, 16, 32])
def test_three_classes_have_the_papers_mixture_and_weights(size):
    """8 / 4 / 4 of 16 at every step and the weights 1 / 5 / 12, as when both were written in the code."""
    config = align.AlignConfig().under(POLICY)
    for step in range(10):
        assert shares(config.mixture, size, step) == [size // 2, size // 4, size // 4]
    assert config.weights == (1.0, 5.0, 12.0)


def test_every_harm_gets_its_share_when_a_batch_has_fewer_places():
    """Batches of 4 with four harms: 2 safe, and two of the harms in turn: 200 each in 400 steps."""
    drawn = [shares((8, 2, 2, 2, 2), 4, step) for step in range(400)]
    assert all(sum(counts) == 4 and counts[0] == 2 for counts in drawn)
    for harm in range(1, 5):
        assert sum(counts[harm] for counts in drawn) == pytest.approx(200, abs=8)
    uneven = [shares((3, 2, 2), 5, step) for step in range(700)]
    assert all(sum(counts) == 5 for counts in uneven)
    assert [sum(column) / 700 for column in zip(*uneven, strict=True)] == pytest.approx(
        [15 / 7, 10 / 7, 10 / 7], abs=0.02
    )


@pytest.mark.parametrize("harms", [1, 2, 4])
def test_a_step_under_any_number_of_categories(data, tmp_path, harms):
    """Pairs of every category, encoded under their policy, make batches and losses with that policy's weights."""
    policy, pipe = policy_of(harms), data[0]
    small_pairs(tmp_path, "train", {"safe": 4, **dict.fromkeys(policy.names[1:], 3)})
    encode_pairs(PairStore(tmp_path), "train", pipe, policy)
    pairs = load_pairs(tmp_path, "train", pipe.vae)
    assert align.chosen_policy(tmp_path, None) == policy
    model = aligner(data, policy=policy, unroll_every=0).train()
    batch = align.batch_of(pairs, 0, model.config, replace(TRAIN, batch_size=16), data[2])
    assert batch.category.bincount().tolist() == [8, *[8 // harms] * harms]
    (out,) = list(model(batch))
    # at the first step every margin is 0: the loss is ln 2 times the mean weight
    mean = (8 * 1.0 + sum(8 / harms * (k + 2) for k in range(harms))) / 16
    assert out["preference"].item() == pytest.approx(mean * math.log(2), rel=1e-5)


def test_a_policy_with_other_categories_than_the_pairs_is_refused(home):
    assert align.chosen_policy(home / "pairs", None).repair_weights == (1.0, 5.0, 12.0)
    heavier = replace(POLICY, categories=tuple(replace(c, repair_weight=7.0) for c in POLICY.categories))
    assert align.chosen_policy(home / "pairs", heavier).repair_weights == (7.0, 7.0, 7.0)
    with pytest.raises(
        BadConfig, match=r"has the categories safe, harm0, but .* was encoded with safe, nudity, violence"
    ):
        align.chosen_policy(home / "pairs", policy_of(1))


def test_a_category_without_pairs_is_named(data, home):
    shape = align.AlignConfig(rank=4).under(POLICY)
    lacking = replace(data[1], category=data[1].category.clamp(max=1))
    with pytest.raises(BadInput, match="no training pairs of violence"):
        align.check_categories(lacking, shape, POLICY.names, home)
    align.check_categories(lacking, replace(shape, mixture=(2, 2, 0)), POLICY.names, home)


# The whole batch ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"method": "sft"},
        {"method": "bco", "unroll_every": 0},
        {"method": "bco", "unroll_every": 1},
        {"method": "bco", "unroll_every": 0, "cap": "printed", "identity": "linear"},
        {"method": "kto", "identity": "batch"},
        {"method": "kto", "kto": "printed", "identity": "batch"},
    ],
    ids=["sft", "bco", "second pass", "printed cap", "kto", "printed kto"],
)
def test_a_step_is_the_same_in_one_part_and_in_four(data, monkeypatch, options):
    """Losses, logged values, shift and gradient of 1×8 are those of 4×2, with a policy that has left its reference."""
    seen, scale, capped = [], 0.3, L.capped
    gains: dict[int, list[torch.Tensor]] = {1: [], 4: []}

    def record(gain, *rest):
        out = capped(gain, *rest)
        gains[model.parts].append(torch.stack([gain, out]).detach())
        return out

    monkeypatch.setattr(L, "capped", record)
    for parts in (1, 4):
        model = aligner((load_again(data[0]), *data[1:]), parts=parts, **options).train()
        g = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, p in model.unet.named_parameters():
                if "lora_B" in name:
                    p.copy_(scale * torch.randn(p.shape, generator=g))
        values: dict[str, float] = {}
        for part in model(a_batch(data, model)):
            part["loss"].backward()
            for name, value in part.items():
                values[name] = values.get(name, 0.0) + float(value.detach())
        gradient = torch.cat([p.grad.flatten() for p in model.unet.parameters() if p.grad is not None])
        seen.append((values, gradient, float(model.delta)))
    (one, slope, delta), (four, slopes, deltas) = seen
    assert one.keys() == four.keys() and slope.abs().max() > 0
    for name in one:
        assert four[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6, nan_ok=True), name
    torch.testing.assert_close(slopes, slope, rtol=2e-3, atol=1e-5 * float(slope.abs().max()) + 1e-7)
    assert deltas == pytest.approx(delta, rel=1e-4, abs=1e-9)
    assert options["method"] == "sft" or delta != 0
    if options["method"] == "bco":
        whole, split = (torch.cat(gains[parts], 1) for parts in (1, 4))
        torch.testing.assert_close(split.sort().values, whole.sort().values, rtol=1e-3, atol=1e-5)
        assert "cap" in options or (whole[0] != whole[1]).any(), "the cap has to change a gain to be tested"


def load_again(pipe):
    """The pipeline with a UNet of its own: a LoRA changes the modules that it is put on."""
    return SimpleNamespace(unet=copy.deepcopy(pipe.unet), text_encoder=pipe.text_encoder, scheduler=pipe.scheduler)


@pytest.mark.parametrize("parts", [1, 2])
def test_mixed_precision_leaves_every_pass_its_gradient(data, parts):
    """Casts that autocast keeps from a pass without gradients are not used for the pass that has them."""
    model = aligner(data, unroll_every=1, parts=parts).train()
    batch = replace(a_batch(data, model), t=torch.full((8,), 400))
    passes, slopes = model(batch), []
    while True:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            part = next(passes, None)
        if part is None:
            break
        part["loss"].backward()
        slopes.append(sum(float(p.grad.abs().sum()) for p in model.parameters() if p.grad is not None))
    assert len(slopes) == 2 * parts and all(slope > 0 for slope in slopes)


# Alarms ------------------------------------------------------------------------------------------------------

FINE = alignment_watch.Measurement(100, 0.8, 0.8, 0.2, 0.5, 0.01, 0.9, 0.0, 1.0, 0.9, 0.85, 0.0, 0.1)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("off_manifold", {"off_manifold": 0.3}),
        ("smudging", {"identity_gap": 0.035, "detail": 0.4}),
        ("mask_conditioning", {"outside": 2.0}),
        ("saturation", {"saturated": 0.97}),
        ("word_keying", {"refusal": 0.9, "refusal_blind": 0.5}),
        ("reference_contamination", {"leaked": 0.1}),
        ("reference_drift", {"reference_drift": 0.01}),
    ],
)
def test_every_alarm_names_its_fault_and_no_other(name, change):
    faults = {k for k, alarm in alignment_watch.ALARMS.items() if alarm(replace(FINE, **change), FINE)}
    assert faults == {name}
    assert not any(alarm(FINE, None) for alarm in alignment_watch.ALARMS.values())


def test_saturation_is_no_fault_while_classes_still_move_apart():
    assert not alignment_watch.saturation(replace(FINE, saturated=0.97, gap_n=0.3), FINE)


def watch(data, home, tmp_path, model):
    pipe = data[0]
    held_out = load_pairs(home / "pairs", "validation", pipe.vae)
    return alignment_watch.AlignmentWatch(held_out, data[2], model.config, POLICY.names, tmp_path)


@pytest.mark.parametrize("how", ["off_manifold", "mask_conditioning", "reference_drift", "smudging"])
def test_provoked_faults_are_seen_on_real_models(data, home, tmp_path, how):
    """The policy (LoRA on) is spoiled while the reference (LoRA off) stays, or the reference is touched."""
    model = aligner(data, unroll_every=0).eval()
    look = watch(data, home, tmp_path, model)
    model.predict = lambda z, t, batch: batch.eps
    assert look(model)["step"] == 0 and not look.alarms()

    def spoiled(z, t, batch):
        out = batch.eps
        active = not model.unet.base_model.model.conv_in.disable_adapters
        if how == "reference_drift":
            return out if active else out + 0.1
        if not active:
            return out
        a = model.alphas[t].view(-1, 1, 1, 1)
        if how == "smudging":
            clean = (z - (1 - a).sqrt() * out) / a.sqrt()
            flat = clean.mean((2, 3), keepdim=True).expand_as(clean) + 0.3
            return (z - a.sqrt() * flat) / (1 - a).sqrt()
        return out + 30.0 if how == "off_manifold" else out + 3 * torch.randn_like(out) * (1 - batch.mask)

    model.predict = spoiled
    look(model)
    assert how in look.alarms()


def test_keying_on_words_is_seen(data, home, tmp_path):
    """A policy that ruins its fill whenever the prompt is not empty."""
    model = aligner(data, unroll_every=0).eval()
    look = watch(data, home, tmp_path, model)
    empty = data[2]

    def keyed(z, t, batch):
        out = batch.eps
        active = not model.unet.base_model.model.conv_in.disable_adapters
        prompted = (batch.ids != empty).any(1).view(-1, 1, 1, 1)
        return out + 2.0 * torch.randn(out.shape, generator=torch.Generator().manual_seed(0)) * prompted * active

    model.predict = keyed
    look(model)
    assert "word_keying" in look.alarms()


def test_a_held_out_set_that_was_trained_on_is_called_contamination(data, home, tmp_path):
    model = aligner(data, unroll_every=0).eval()
    look = alignment_watch.AlignmentWatch(
        data[1], data[2], model.config, POLICY.names, tmp_path, leaked(data[1], data[1])
    )
    assert look(model)["leaked"] == 1.0
    assert "reference_contamination" in look.alarms() and "reference_drift" not in look.alarms()
    assert "100% of the held-out pairs are in the training set" in (tmp_path / "watch.csv").read_text()


def test_a_resumed_watch_remembers(data, home, tmp_path):
    """Drift and ΔN are compared with what was measured before the stop; rows after the checkpoint are written anew."""
    model = aligner(data, unroll_every=0).eval()
    look = watch(data, home, tmp_path, model)
    look(model)
    kept = look.state_dict()
    text = (tmp_path / "watch.csv").read_text()
    look(model)
    resumed = watch(data, home, tmp_path, model)
    resumed.load_state_dict(kept)
    predict, moved = model.reference, 0.1
    model.reference = lambda z, t, batch: predict(z, t, batch) + moved
    resumed(model)
    assert "reference_drift" in resumed.alarms()
    lines = (tmp_path / "watch.csv").read_text().splitlines()
    assert len(lines) == 3 and lines[:2] == text.splitlines()
    forgetful = watch(data, home, tmp_path / "other", model)
    forgetful(model)
    assert "reference_drift" not in forgetful.alarms()


# Runs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["sft", "bco", "kto"])
def test_from_pairs_to_a_pipeline(home, tmp_path, method, capsys):
    """A run stops after a step and resumes; its merged pipeline loads, and the LoRA is saved alone as well."""
    model = {"method": method, "rank": 4, "unroll_every": 2}
    train = {"steps": 3, "batch_size": 8, "learning_rate": 0.01, "warmup": 1, "seed": 1, "validate_every": 1}
    (tmp_path / "c.yaml").write_text(json.dumps({"model": model, "train": train}))
    out = tmp_path / "run"
    for minutes in (0.0, None):
        run = Run(tmp_path / "c.yaml", out, minutes, quiet=True)
        align.run(run, method, str(home / "inpainter"), home / "pairs")
        assert (out / "model").exists() == (minutes is None)
        assert (out / "dynamics.png").stat().st_size > 0 and (out / "activations.png").stat().st_size > 0
        assert len((out / "watch.csv").read_text().splitlines()) == (2 if minutes == 0.0 else 4)
    state = torch.load(out / "state.pt", weights_only=True)["model"]
    assert all("lora_" in k or k in ("delta", "batches") for k in state)
    for name in ("dynamics.png", "dynamics.csv", "activations.png", "watch.csv", "lora/adapter_model.safetensors"):
        assert (out / name).stat().st_size > 0
    (out / "activations.png").unlink()
    align.run(run, method, str(home / "inpainter"), home / "pairs")
    assert (out / "activations.png").exists(), "a finished run draws its last figures again"
    card = json.loads((out / "model/card.json").read_text())
    assert card["method"]["method"] == method and card["parameters"]["lora"] > 0
    assert "memory: about" in capsys.readouterr().out
    before, after = load_pipeline(home / "inpainter"), load_pipeline(out / "model")
    changed = [k for k, v in after.unet.state_dict().items() if not torch.equal(v, before.unet.state_dict()[k])]
    assert changed and set(after.unet.state_dict()) == set(before.unet.state_dict())


def test_figures_come_with_checkpoints(home, tmp_path, monkeypatch):
    """A run that is cut in its second step leaves the figures of its first, beside that step's checkpoint."""
    train = {"steps": 3, "batch_size": 8, "learning_rate": 0.01, "warmup": 1, "validate_every": 1}
    config = {"model": {"rank": 4}, "train": {**train, "checkpoint_minutes": 0}}
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    measure = alignment_watch.AlignmentWatch.measure

    def cut(self, model):
        if self.history:
            raise KeyboardInterrupt
        return measure(self, model)

    monkeypatch.setattr(alignment_watch.AlignmentWatch, "measure", cut)
    with pytest.raises(KeyboardInterrupt):
        run = Run(tmp_path / "c.yaml", tmp_path / "run", quiet=True)
        align.run(run, "bco", str(home / "inpainter"), home / "pairs")
    assert torch.load(tmp_path / "run/state.pt", weights_only=True)["step"] == 1
    for name in ("dynamics.png", "dynamics.csv", "activations.png"):
        assert (tmp_path / "run" / name).stat().st_size > 0


def test_a_config_of_another_method_is_named(home, tmp_path):
    (tmp_path / "c.yaml").write_text(json.dumps({"model": {"method": "kto"}, "train": vars(TRAIN)}))
    with pytest.raises(BadConfig, match="its method is kto, not bco"):
        align.run(Run(tmp_path / "c.yaml", tmp_path / "run"), "bco", str(home / "inpainter"), home / "pairs")


def test_a_text_to_image_pipeline_is_refused(home, tmp_path):
    small.pipeline("sd").save_pretrained(tmp_path / "sd")
    (tmp_path / "c.yaml").write_text(json.dumps({"model": {"method": "sft"}, "train": vars(TRAIN)}))
    with pytest.raises(BadConfig, match="an inpainting UNet is needed"):
        align.run(Run(tmp_path / "c.yaml", tmp_path / "run"), "sft", str(tmp_path / "sd"), home / "pairs")


def test_missing_latents_are_named(home, tmp_path):
    with pytest.raises(BadInput, match="make them with `guardpaint data latents`"):
        load_pairs(tmp_path, "train", load_pipeline(home / "inpainter").vae)


def test_phases_by_hand():
    """The hinge is crossed at row 2 when ΔN had reached 0.2; it exceeds that at row 4."""
    import numpy as np

    gap = np.array([0.0, 0.01, 0.03, 0.03, 0.01])
    assert dynamics.phases(gap, np.array([0.1, 0.2, 0.2, 0.1, 0.4])) == [2, 4]
    assert dynamics.phases(gap, np.array([0.1, 0.2, 0.2, 0.1, 0.1])) == [2]
    assert dynamics.phases(gap * 0, gap) == []


def test_memory_is_counted_without_running(home):
    """Twice the batch: twice the activations; checkpointing needs less; adapters are 20 bytes a weight."""
    pipe = load_pipeline(home / "inpainter")
    shape = align.AlignConfig(rank=4)
    count = lambda s, t: memory.estimate(pipe.unet, s, t, (4, 16, 16), pipe.text_encoder.config)  # noqa: E731
    one, two = count(shape, replace(TRAIN, batch_size=1)), count(shape, replace(TRAIN, batch_size=2))
    assert one.weights == two.weights == 4 * sum(p.numel() for p in pipe.unet.parameters())
    assert two.activations == pytest.approx(2 * one.activations, rel=0.05)
    assert count(replace(shape, checkpointing=True), TRAIN).activations < count(shape, TRAIN).activations
    assert "memory: about" in memory.report(one)


def test_parts_of_a_batch_are_one_step(data):
    """Two parts a step: the second pass comes with both parts of every second step."""
    model = aligner(data, unroll_every=2, parts=2).train()
    batch = replace(a_batch(data, model), t=torch.full((8,), 400))
    assert [len(list(model(batch))) for _ in range(3)] == [2, 4, 2]
    assert model.steps == 3


def test_noise_of_training_measurements_and_figures_never_meets():
    """The ranges of two neighbouring training seeds, of the measurements and of the figures are disjoint."""
    last = noise_seeds.training(41, noise_seeds.SPAN - 1)
    assert noise_seeds.training(41, 0) < last < noise_seeds.training(42, 0)
    largest = noise_seeds.HELD_OUT // noise_seeds.SPAN - 1
    assert noise_seeds.training(largest, noise_seeds.SPAN - 1) < noise_seeds.held_out(0)
    assert noise_seeds.held_out(999) < noise_seeds.FIGURES < 2**63
    for seed, batches in ((0, noise_seeds.SPAN + 1), (-1, 1), (largest + 1, 1)):
        with pytest.raises(BadConfig, match="batches at most"):
            noise_seeds.check_range(seed, batches)
    noise_seeds.check_range(largest, noise_seeds.SPAN)


def test_leaks_into_the_training_set_are_counted(data, home):
    """Held-out pairs with a training pair's prompt, or nearly its picture, are leaks; those of a fresh split are not."""
    train = data[1]
    held_out = load_pairs(home / "pairs", "validation", data[0].vae)
    assert leaked(train, held_out) == 0.0
    n = len(held_out)
    noise = 0.05 * held_out.source.std() * torch.randn(4, 16, 16, generator=torch.Generator().manual_seed(0))
    source, ids = held_out.source.clone(), held_out.ids.clone()
    source[0] = train.source[3] + noise
    ids[1] = train.ids[5]
    assert leaked(train, replace(held_out, source=source, ids=ids)) == pytest.approx(2 / n)
    assert leaked(train, train) == 1.0
