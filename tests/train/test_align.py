"""Aligning an inpainter: LoRA where it belongs, frozen references, two passes, alarms, runs from pairs to pipelines."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace

import pytest
import torch
from helpers import small_inpainter
from pictures import small_pairs

from guardpaint.data.pairs import PairStore
from guardpaint.draft.loading import load_pipeline
from guardpaint.errors import BadConfig, BadInput
from guardpaint.policy import Policy
from guardpaint.testing import small
from guardpaint.train import align, alignment_watch, dynamics, memory
from guardpaint.train import aligner as aligner_module
from guardpaint.train.engine import Run, TrainConfig
from guardpaint.train.latents import tokenise
from guardpaint.train.pair_latents import encode_pairs, load_pairs

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
    config = align.AlignConfig(rank=4, **options)
    pipe = data[0]
    return align.Aligner(pipe.unet, pipe.text_encoder, pipe.scheduler.alphas_cumprod, config, 1)


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
        "none": (*aligner_module.ATTENTION, "conv1", "conv2", "conv_in"),
        "conv_in": (*aligner_module.ATTENTION, "conv1", "conv2"),
        "convs": aligner_module.ATTENTION,
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
        ({"mixture": (1, 2)}, r"mixture=\(1, 2\) three counts"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(BadConfig, match=message):
        align.AlignConfig(**options)


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
        ("reference_contamination", {"reference_drift": 0.01}),
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


@pytest.mark.parametrize("how", ["off_manifold", "mask_conditioning", "reference_contamination", "smudging"])
def test_provoked_faults_are_seen_on_real_models(data, home, tmp_path, how):
    """The policy (LoRA on) is spoiled while the reference (LoRA off) stays, or the reference is touched."""
    model = aligner(data, unroll_every=0).eval()
    look = watch(data, home, tmp_path, model)
    model.predict = lambda z, t, batch: batch.eps
    assert look(model)["step"] == 0 and not look.alarms()

    def spoiled(z, t, batch):
        out = batch.eps
        active = not model.unet.base_model.model.conv_in.disable_adapters
        if how == "reference_contamination":
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


# Runs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["sft", "bco", "kto"])
def test_from_pairs_to_a_pipeline(home, tmp_path, method, capsys):
    """A run stops after a step and resumes; its merged pipeline loads, and the LoRA is saved alone as well."""
    model = {"method": method, "rank": 4, "unroll_every": 2}
    train = {"steps": 3, "batch_size": 8, "learning_rate": 0.01, "warmup": 1, "seed": 1, "validate_every": 1}
    (tmp_path / "c.yaml").write_text(json.dumps({"model": model, "train": train}))
    for minutes in (0.0, None):
        run = Run(tmp_path / "c.yaml", tmp_path / "run", minutes, quiet=True)
        align.run(run, method, str(home / "inpainter"), home / "pairs")
        assert (tmp_path / "run/model").exists() == (minutes is None)
    out = tmp_path / "run"
    state = torch.load(out / "state.pt", weights_only=True)["model"]
    assert all("lora_" in k or k in ("delta", "batches") for k in state)
    for name in ("dynamics.png", "dynamics.csv", "activations.png", "watch.csv", "lora/adapter_model.safetensors"):
        assert (out / name).stat().st_size > 0
    card = json.loads((out / "model/card.json").read_text())
    assert card["method"]["method"] == method and card["parameters"]["lora"] > 0
    assert "memory: about" in capsys.readouterr().out
    before, after = load_pipeline(home / "inpainter"), load_pipeline(out / "model")
    changed = [k for k, v in after.unet.state_dict().items() if not torch.equal(v, before.unet.state_dict()[k])]
    assert changed and set(after.unet.state_dict()) == set(before.unet.state_dict())


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


def test_a_step_of_several_batches_counts_once(data):
    """Two batches a step: the second pass comes with both of every second step, and δ moves as for one batch."""
    config = align.AlignConfig(rank=4, unroll_every=2)
    pipe = data[0]
    model = align.Aligner(pipe.unet, pipe.text_encoder, pipe.scheduler.alphas_cumprod, config, 1, 2).train()
    batch = replace(a_batch(data, model), t=torch.full((8,), 400))
    assert [len(list(model(batch))) for _ in range(6)] == [1, 1, 2, 2, 1, 1]
    assert model.steps == 3
