"""The generators' trainer: losses by hand, text as the pipelines encode it, runs from scenes to loadable pipelines."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from guardpaint.draft import flux
from guardpaint.draft.loading import load_pipeline
from guardpaint.errors import BadCheckpoint, BadConfig
from guardpaint.train.alignment_loss import min_snr_weight
from guardpaint.train.engine import Run, TrainConfig
from guardpaint.train.latents import fingerprint, tokenise
from paperdolls.models import flow_recipes, generator, recipes, teachers, vae
from paperdolls.models.latents import SceneLatents, SceneRange, encode_scenes
from paperdolls.models.recipe import Batch, GeneratorConfig, Latents
from paperdolls.tokenizer import train_t5_tokenizer, train_tokenizer, world_captions

FAMILIES = tuple(recipes.RECIPES)
SMALL = {
    "channels": (16, 16, 16),
    "layers": 1,
    "single_layers": 1,
    "heads": 2,
    "text_width": 32,
    "tokens": 24,
    "other_tokens": 24,
    "merges": 50,
    "scenes": 40,
    "captions": 1,
}


def small(family, **more):
    return GeneratorConfig(family=family, **{**SMALL, **more})


def latent_channels(family):
    return 16 if family in ("sd3", "flux") else 4


@pytest.fixture(scope="module")
def words():
    texts = list(world_captions(0, 60))
    return train_tokenizer(texts, merges=50, length=24), train_t5_tokenizer(texts, length=24)


def recipe(family, words):
    return recipes.build(small(family), len(words[0]), len(words[1]), Latents(latent_channels(family), 16), 1).eval()


def a_batch(family, words, n=2, **more):
    c = latent_channels(family)
    g = torch.Generator().manual_seed(0)
    z, eps = torch.randn(n, c, 16, 16, generator=g), torch.randn(n, c, 16, 16, generator=g)
    texts = ["a person in a red coat", "an empty view on the beach"][:n]
    ids, other = tokenise(words[0], texts), tokenise(words[1], texts)
    mask = torch.ones(n, 1, 16, 16)
    values = {"z": z, "eps": eps, "level": torch.full((n,), 0.5), "ids": ids, "other_ids": other, "mask": mask}
    values["guidance"] = torch.full((n,), 0.6)
    return Batch(**{**values, "masked": torch.zeros_like(z), "long": False, **more})


def test_min_snr_by_hand():
    """ᾱ = 0.9: SNR 9 → 5/9; ᾱ = 0.5: SNR 1 → 1."""
    w = min_snr_weight(torch.tensor([0.9, 0.5]), 5.0)
    torch.testing.assert_close(w, torch.tensor([5 / 9, 1.0]))


def test_unet_loss_by_hand(words):
    """A denoiser that predicts 0 against ε = 2 at SNR 9: error 4, weighted 20/9."""
    model = recipe("sd", words)
    model.alphas = torch.tensor([0.9])
    batch = a_batch("sd", words, eps=torch.full((2, 4, 16, 16), 2.0))
    out = model.weighted(torch.zeros(2, 4, 16, 16), batch, torch.tensor([0, 0]))
    assert out["mse"].item() == pytest.approx(4.0) and out["loss"].item() == pytest.approx(20 / 9)


@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_flow_loss_by_hand(family, words):
    """A denoiser that predicts 0: the loss is the mean square of ε − z, here (3 − 1)² = 4."""
    model = recipe(family, words)
    for p in model.transformer.proj_out.parameters():
        nn.init.zeros_(p)
    batch = a_batch(family, words, z=torch.ones(2, 16, 16, 16), eps=torch.full((2, 16, 16, 16), 3.0))
    assert model(batch)["loss"].item() == pytest.approx(4.0)


def test_a_shift_moves_levels_towards_noise(words):
    """σ = ½ under shift 3: 1.5/(1 + 1) = 0.75, and the latent is a quarter clean."""
    batch = a_batch("sd3", words, z=torch.ones(2, 16, 16, 16), eps=torch.zeros(2, 16, 16, 16))
    sigma, noisy = flow_recipes.interpolated(batch, 3.0)
    assert sigma.tolist() == pytest.approx([0.75, 0.75]) and noisy.mean().item() == pytest.approx(0.25)


def test_levels_are_logit_normal():
    """The median level is σ = ½; one deviation up is sigmoid(1) = 0.7311."""
    out = flow_recipes.logit_normal(torch.tensor([0.5, 0.841344746]))
    torch.testing.assert_close(out, torch.tensor([0.5, 0.7310586]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_encoded_as_the_pipeline_does(family, words, monkeypatch):
    """What the denoiser is trained with is what the finished pipeline will give it."""
    model = recipe(family, words)
    batch = a_batch(family, words, n=1)
    net = model.unet if hasattr(model, "unet") else model.transformer
    seen = {}

    def spy(*args, encoder_hidden_states=None, pooled_projections=None, added_cond_kwargs=None, **rest):
        extra = added_cond_kwargs or {}
        seen.update(states=encoder_hidden_states, pooled=pooled_projections, **extra)
        raise StopIteration

    monkeypatch.setattr(net, "forward", spy)
    with pytest.raises(StopIteration):
        model.losses(batch)
    trained = dict(seen)
    pipe = generator_pipe(model, words, family)
    call = {**model.settings, "num_inference_steps": 1, "guidance_scale": 1.0}
    if family == "inpaint":
        from PIL import Image

        call |= {"image": Image.new("RGB", (64, 64)), "mask_image": Image.new("L", (64, 64), 255)}
        call |= {"height": 64, "width": 64}
    with pytest.raises(StopIteration):
        pipe("a person in a red coat", **call)
    assert trained.keys() == seen.keys()
    for key, value in trained.items():
        if value is not None:
            torch.testing.assert_close(seen[key], value, atol=1e-5, rtol=1e-4)


def generator_pipe(model, words, family):
    net = vae.build(vae.VaeConfig(channels=(8, 8, 16), latent_channels=latent_channels(family)), 0).eval()
    return model.assemble(net, *words)


def test_flux_unpacks_what_it_packs():
    """With an identity transformer, prediction returns its input."""

    class Same(nn.Module):
        def forward(self, hidden_states, **_):
            return (hidden_states,)

    z, level = torch.randn(2, 16, 16, 16), torch.full((2,), 0.5)
    text = (torch.zeros(2, 4, 8), torch.zeros(2, 8))
    assert torch.equal(flow_recipes.flux_velocity(Same(), z, level, text, level), z)


def test_an_inpainter_starts_as_its_base(words):
    """New channels at zero: whatever the mask says, the first prediction is the base's."""
    base, fill = recipe("sd", words), recipe("inpaint", words)
    fill.adopt(generator_pipe(base, words, "sd"))
    batch = a_batch("sd", words)
    states = base.text(batch.ids).last_hidden_state
    t = torch.tensor([500, 500])
    wide = torch.cat([batch.z, batch.mask, torch.randn(2, 4, 16, 16)], 1)
    with torch.no_grad():
        a = base.unet(batch.z, t, encoder_hidden_states=states).sample
        b = fill.unet(wide, t, encoder_hidden_states=fill.text(batch.ids).last_hidden_state).sample
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert fill.adopted == (fill.text,)


def test_an_sdxl_starts_with_the_words_of_its_base(words):
    """Given the base's text states, its new conditioning silenced, the first prediction is the base's."""
    base, wide = recipe("sd", words), recipe("sdxl", words)
    wide.adopt(generator_pipe(base, words, "sd"))
    nn.init.zeros_(wide.unet.add_embedding.linear_2.weight)
    nn.init.zeros_(wide.unet.add_embedding.linear_2.bias)
    batch = a_batch("sd", words)
    states = base.text(batch.ids).last_hidden_state
    t = torch.tensor([500, 500])
    extra = {"text_embeds": torch.randn(2, 32), "time_ids": torch.zeros(2, 6)}
    with torch.no_grad():
        a = base.unet(batch.z, t, encoder_hidden_states=states).sample
        both = torch.cat([states, torch.randn_like(states)], -1)
        b = wide.unet(batch.z, t, encoder_hidden_states=both, added_cond_kwargs=extra).sample
        assert torch.equal(wide.text(batch.ids).last_hidden_state, states)
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["sd", "sdxl", "sd3", "flux"])
def test_training_on_begins_where_the_first_part_ended(family, words):
    """A warm start from a model of the same family: the same loss on the same batch, all words taken over."""
    first = recipe(family, words)
    second = recipes.build(small(family), len(words[0]), len(words[1]), Latents(latent_channels(family), 16), 2).eval()
    batch = a_batch(family, words)
    with torch.no_grad():
        assert second(batch)["loss"] != first(batch)["loss"]
        second.adopt(generator_pipe(first, words, family))
        torch.testing.assert_close(second(batch)["loss"], first(batch)["loss"])
    assert len(second.adopted) == {"sd": 1, "sdxl": 2, "sd3": 3, "flux": 2}[family]


def test_a_flux_may_learn_its_own_words(words):
    """The T5 is taken over as a start, and is not among the parts that stay as they are."""
    own = recipes.build(small("flux", own_words=True), len(words[0]), len(words[1]), Latents(16, 16), 2)
    own.adopt(generator_pipe(recipe("flux", words), words, "flux"))
    assert own.adopted == (own.text,)


def test_a_flux_teaches_guidance_to_itself(words):
    """At guidance 1 the teacher says what it says of the prompt; at 3: empty + 3 · (prompt − empty), in velocity."""
    model = recipe("flux", words)
    teacher = teachers.FluxTeacher(generator_pipe(model, words, "flux"))
    batch = a_batch("flux", words)
    sigma, noisy = flow_recipes.interpolated(batch, 1.0)
    one = torch.ones(2)
    with torch.no_grad():
        said = []
        for ids, other in ((batch.ids, batch.other_ids), [tokenise(w, ["", ""]) for w in words]):
            text = (model.text2(other)[0], model.text(ids).pooler_output)
            said.append(teachers.flux_velocity(model.transformer, noisy, sigma, text, one))
        prompt, empty = said
    torch.testing.assert_close(teacher.velocity(batch, noisy, sigma, one), prompt, atol=1e-5, rtol=1e-4)
    at_three = teacher.velocity(batch, noisy, sigma, 3 * one)
    torch.testing.assert_close(at_three, empty + 3 * (prompt - empty), atol=1e-4, rtol=1e-3)
    student = recipe("flux", words)
    student.learn_from(generator_pipe(model, words, "flux"))
    assert student(batch)["loss"].isfinite() and isinstance(student.teacher, teachers.FluxTeacher)


def test_a_flux_starts_with_the_layers_of_an_sd3(words):
    """Layer by layer the same numbers, positions apart: patches in, text, time, joint layer, patches out."""
    config = small("sd3", layers=2)
    base = recipes.build(config, len(words[0]), len(words[1]), Latents(16, 16), 1).eval()
    model = recipe("flux", words)
    pipe = generator_pipe(base, words, "sd3")
    model.adopt(pipe)
    ours, theirs = model.transformer, base.transformer
    batch = a_batch("sd3", words)
    with torch.no_grad():
        tokens = ours.x_embedder(flux.Flux().pack(batch.z))
        theirs.pos_embed.pos_embed.zero_()
        torch.testing.assert_close(tokens, theirs.pos_embed(batch.z), atol=1e-5, rtol=1e-4)
        projected = base.text(batch.ids).text_embeds
        pooled = torch.cat([projected, torch.zeros_like(projected)], -1)
        guide = ours.time_text_embed
        nn.init.zeros_(guide.guidance_embedder.linear_2.weight)
        nn.init.zeros_(guide.guidance_embedder.linear_2.bias)
        level = torch.tensor([300.0, 300.0])
        time = guide(level, level, model.text(batch.ids).pooler_output)
        torch.testing.assert_close(time, theirs.time_text_embed(level, pooled), atol=1e-5, rtol=1e-4)
        words_in = ours.context_embedder(model.text2(batch.other_ids)[0])
        torch.testing.assert_close(words_in, theirs.context_embedder(base.text3(batch.other_ids)[0]))
        call = {"hidden_states": tokens, "encoder_hidden_states": words_in, "temb": time}
        for mine, other in zip(ours.transformer_blocks[0](**call), theirs.transformer_blocks[0](**call), strict=True):
            torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)
        single = ours.single_transformer_blocks[0](**call)[1]
        torch.testing.assert_close(single, tokens, atol=1e-6, rtol=0)
        mine = flux.Flux().unpack(ours.proj_out(tokens), (16, 16))
        other = theirs.proj_out(tokens).view(2, 8, 8, 2, 2, 16).permute(0, 5, 1, 3, 2, 4).reshape(2, 16, 16, 16)
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)


def test_a_taught_flux_follows_its_teachers_guidance(words):
    """At input 0.6 the guidance is 1 + 5·0.6 = 4: what is wanted is the teacher's v∅ + 4·(v − v∅)."""
    base, model = recipe("sd3", words), recipe("flux", words)
    pipe = generator_pipe(base, words, "sd3")
    model.learn_from(pipe)
    for p in model.transformer.proj_out.parameters():
        nn.init.zeros_(p)
    batch = a_batch("flux", words)
    sigma, noisy = flow_recipes.interpolated(batch, 1.0)
    encoders = (base.text, base.text2, base.text3)
    with torch.no_grad():
        said = teachers.sd3_velocity(
            base.transformer, noisy, sigma, teachers.sd3_texts(encoders, batch.ids, batch.other_ids)
        )
        blank = tokenise(words[0], ["", ""]), tokenise(words[1], ["", ""])
        unsaid = teachers.sd3_velocity(base.transformer, noisy, sigma, teachers.sd3_texts(encoders, *blank))
    want = unsaid + 4 * (said - unsaid)
    assert model(batch)["loss"].item() == pytest.approx(float((want**2).mean()), rel=1e-4)
    assert not any(k.startswith("teacher") for k in model.state_dict())


def test_a_diffusion_teacher_is_shown_its_own_latents(words):
    """Where σ/(1 − σ) is the teacher's ratio at step 500: its own latent there, and v = ε̂ − x̂ of its guided ε̂."""
    base = recipe("sd", words)
    pipe = generator_pipe(base, words, "sd")
    teacher = teachers.SdTeacher(pipe)
    batch = a_batch("sd", words)
    alpha = pipe.scheduler.alphas_cumprod[500]
    ratio = float(((1 - alpha) / alpha).sqrt())
    sigma = torch.full((2,), ratio / (1 + ratio))
    t, found = teacher.levels(sigma)
    assert t.tolist() == pytest.approx([500, 500], abs=1e-2) and found[0].item() == pytest.approx(
        float(alpha), rel=1e-4
    )
    noisy = (1 - sigma).view(-1, 1, 1, 1) * batch.z + sigma.view(-1, 1, 1, 1) * batch.eps
    z = alpha.sqrt() * batch.z + (1 - alpha).sqrt() * batch.eps
    with torch.no_grad():
        states = [base.text(ids).last_hidden_state for ids in (tokenise(words[0], ["", ""]), batch.ids)]
        unsaid, said = (base.unet(z, torch.tensor([500, 500]), encoder_hidden_states=s).sample for s in states)
        eps = unsaid + 3 * (said - unsaid)
        want = eps - (z - (1 - alpha).sqrt() * eps) / alpha.sqrt()
    torch.testing.assert_close(teacher.velocity(batch, noisy, sigma, torch.full((2,), 3.0)), want, atol=1e-3, rtol=1e-3)
    t, found = teacher.levels(torch.tensor([0.001, 1.0]))
    assert t.tolist() == [0, 999] and found[1].item() == pytest.approx(
        float(pipe.scheduler.alphas_cumprod[-1]), rel=1e-3
    )


def test_an_sd3_starts_from_another_with_other_latents(words):
    """Words and layers come along, frozen words; the patches, of another size, are its own."""
    base = recipe("sd3", words)
    model = recipes.build(small("sd3", patch=1), len(words[0]), len(words[1]), Latents(16, 8), 5)
    fresh = model.transformer.pos_embed.proj.weight.clone()
    model.adopt(generator_pipe(base, words, "sd3"))
    assert torch.equal(model.transformer.pos_embed.proj.weight, fresh) and len(model.adopted) == 3
    mine, other = (m.transformer.transformer_blocks[0].attn.to_q.weight for m in (model, base))
    assert torch.equal(mine, other) and torch.equal(model.text3.shared.weight, base.text3.shared.weight)
    batch = a_batch("sd3", words, z=torch.ones(2, 16, 8, 8), eps=torch.zeros(2, 16, 8, 8), mask=None, masked=None)
    assert model(batch)["loss"].isfinite()


def test_an_sd3_that_reads_more_words_starts_from_one_that_reads_fewer(words):
    """The new positions repeat the last one, and the CLIP encoders go on learning; T5 has no table of positions."""
    base = recipe("sd3", words)
    length = base.text.config.max_position_embeddings
    model = recipes.build(small("sd3", tokens=2 * length), len(words[0]), len(words[1]), Latents(16, 16), 5)
    model.adopt(generator_pipe(base, words, "sd3"))
    mine, theirs = (
        next(v for k, v in m.text.state_dict().items() if k.endswith("position_embedding.weight"))
        for m in (model, base)
    )
    assert torch.equal(mine[:length], theirs) and torch.equal(mine[length:], theirs[-1:].expand(length, -1))
    assert model.adopted == () and torch.equal(model.text3.shared.weight, base.text3.shared.weight)


@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_a_wrong_start_or_teacher_is_named(family, words):
    with pytest.raises(BadConfig, match="cannot start from"):
        recipe(family, words).adopt(object())
    with pytest.raises(BadConfig, match="cannot be taught by"):
        recipe(family, words).learn_from(object())


def test_a_start_with_other_words_is_named(words, tmp_path):
    pipe = generator_pipe(recipe("sd", words), words, "sd")
    others = train_tokenizer(list(world_captions(0, 60)), merges=20, length=24)
    assert generator.with_words(pipe, words[0], None, tmp_path) is pipe
    with pytest.raises(BadConfig, match="its tokenizer is another"):
        generator.with_words(pipe, others, None, tmp_path)
    longer = train_tokenizer(list(world_captions(0, 60)), merges=50, length=30)
    with pytest.raises(BadConfig, match="its tokenizer is another"):
        generator.with_words(pipe, longer, None, tmp_path)
    assert generator.with_words(pipe, longer, None, tmp_path, shorter=True) is pipe
    three = generator_pipe(recipe("sd3", words), words, "sd3")
    with pytest.raises(BadConfig, match="its tokenizer is another"):
        generator.with_words(three, words[0], train_t5_tokenizer(["a b c d"] * 9, length=24), tmp_path)


def test_a_flux_on_other_latents_takes_what_fits(words):
    """The shipped shapes: 16 channels with a patch of 1 there, 4 packed channels here, which only look alike."""
    base = recipes.build(small("sd3", layers=2, patch=1), len(words[0]), len(words[1]), Latents(16, 8), 1)
    model = recipes.build(small("flux", text_width=64, other_width=64), len(words[0]), len(words[1]), Latents(4, 16), 1)
    fresh = model.transformer.x_embedder.weight.clone()
    assert fresh.shape == base.transformer.pos_embed.proj.weight.flatten(1).shape
    model.adopt(generator_pipe(base, words, "sd3"))
    assert torch.equal(model.transformer.x_embedder.weight, fresh)
    mine, other = (m.transformer.transformer_blocks[0].attn.to_q.weight for m in (model, base))
    assert torch.equal(mine, other) and model.adopted == (model.text2,)
    batch = a_batch("sd", words)
    assert model(batch)["loss"].isfinite()


def test_batches_depend_on_seed_and_step_alone_and_drop_captions():
    data = SceneLatents(torch.randn(50, 4, 2, 2), torch.randint(5, 9, (50, 2, 3)), torch.zeros(50, dtype=torch.bool))
    shape, empty = GeneratorConfig(caption_drop=0.5), torch.tensor([1, 1, 1])
    config = TrainConfig(steps=1, batch_size=40, learning_rate=1.0)
    a, b = (generator.batch_of(data, 7, config, shape, empty) for _ in range(2))
    assert torch.equal(a.eps, b.eps) and torch.equal(a.ids, b.ids) and torch.equal(a.level, b.level)
    assert not torch.equal(a.eps, generator.batch_of(data, 8, config, shape, empty).eps)
    assert 0.25 < float((a.ids == 1).all(1).float().mean()) < 0.75
    assert sorted((a.level * 40).long().tolist()) == list(range(40)), "one level in every fortieth"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"family": "sd9"}, "sd, inpaint, sdxl, sd3, flux"),
        ({"caption_drop": 1.0}, "caption_drop=1.0"),
        ({"family": "flux", "rope": (8, 8, 8)}, "add up to head_dim=32"),
    ],
)
def test_bad_shapes_are_named(change, message):
    with pytest.raises(BadConfig, match=message):
        GeneratorConfig(**change)


def test_scenes_are_encoded_once(tmp_path):
    net = vae.build(vae.VaeConfig(channels=(8, 8, 16)), 0).eval()
    words = train_tokenizer(world_captions(0, 50), merges=50)
    first = encode_scenes(net, words, SceneRange(5, 6, 2, 2), tmp_path / "z.pt")
    assert first.latents.shape == (6, 4, 16, 16) and first.ids.shape == (6, 2, 64) and len(first) == 6
    assert first.masks.shape == (6, 2, 1, 16, 16) and first.masked.shape == (6, 2, 4, 16, 16)
    assert set(first.masks.unique().tolist()) <= {0.0, 1.0}
    stamp = (tmp_path / "z.pt").stat().st_mtime_ns
    again = encode_scenes(net, words, SceneRange(5, 6, 2, 2), tmp_path / "z.pt")
    assert torch.equal(first.latents, again.latents) and (tmp_path / "z.pt").stat().st_mtime_ns == stamp
    other = encode_scenes(net, words, SceneRange(6, 6, 2), tmp_path / "z.pt")
    assert torch.equal(other.latents[:5], first.latents[1:]) and other.masks is None


def test_encoding_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    """The cache is written after every second batch; an interruption after the third loses one batch, not all."""
    from paperdolls.models import latents

    net = vae.build(vae.VaeConfig(channels=(8, 8, 16)), 0).eval()
    words = train_tokenizer(world_captions(0, 50), merges=50)
    whole = encode_scenes(net, words, SceneRange(5, 8, 2, 1), tmp_path / "whole.pt", batch=2)
    monkeypatch.setattr(latents, "WRITE_EVERY", 2)
    seen, encoded = [], latents.encoded

    def failing(autoencoder, pixels):
        seen.append(len(pixels))
        if len(seen) == 7:
            raise KeyboardInterrupt
        return encoded(autoencoder, pixels)

    monkeypatch.setattr(latents, "encoded", failing)
    with pytest.raises(KeyboardInterrupt):
        encode_scenes(net, words, SceneRange(5, 8, 2, 1), tmp_path / "z.pt", batch=2)
    again = encode_scenes(net, words, SceneRange(5, 8, 2, 1), tmp_path / "z.pt", batch=2)
    assert len(seen) == 7 + 4, "two batches of two calls each were left"
    for name in ("latents", "ids", "unsafe", "masks", "masked"):
        assert torch.equal(getattr(again, name), getattr(whole, name)), name


def test_a_broken_cache_is_named(tmp_path):
    (tmp_path / "z.pt").write_bytes(b"half")
    net = vae.build(vae.VaeConfig(channels=(8, 8, 16)), 0).eval()
    with pytest.raises(BadCheckpoint, match=r"z\.pt: unreadable"):
        encode_scenes(net, train_tokenizer(world_captions(0, 50), merges=50), SceneRange(5, 6, 2), tmp_path / "z.pt")


def test_balanced_latents_change_no_picture():
    """Same reconstructions; latents uncorrelated in what they do to the picture, largest first, mean variance one."""
    net = vae.build(vae.VaeConfig(channels=(8, 8, 16)), 3).eval()
    images = vae.scenes(vae.TRAIN_SEEDS, 32)
    with torch.no_grad():
        first, key = net.encode(images).latent_dist, fingerprint(net)
        picture, before_noise = net.decode(first.mode()).sample, first.std
        was = ((net.decode(first.mean + first.std).sample - picture) ** 2).mean().sqrt()
        vae.balance_latents(net, *vae.latent_statistics(net, 32))
        noise = net.encode(images).latent_dist
        after = noise.mode()
        torch.testing.assert_close(net.decode(after).sample, picture, atol=1e-3, rtol=1e-3)
    spread = after.std((0, 2, 3))
    assert (spread[:-1] >= spread[1:] - 1e-3).all() and float((spread**2).mean()) == pytest.approx(1.0, rel=0.05)
    assert after.mean((0, 2, 3)).abs().max() < 0.05 and net.config.scaling_factor == 1.0
    assert not torch.equal(noise.std, before_noise) and fingerprint(net) != key
    moved = net.decode(noise.mean + noise.std).sample - net.decode(noise.mean).sample
    torch.testing.assert_close((moved**2).mean().sqrt(), was, rtol=0.5, atol=0)
    flat = after.permute(1, 0, 2, 3).reshape(4, -1)
    assert (torch.corrcoef(flat) - torch.eye(4)).abs().max() < 0.05


def test_a_deeper_autoencoder_starts_with_the_levels_of_a_shallower_one():
    old, new = (vae.build(vae.VaeConfig(channels=c), seed) for c, seed in (((8, 8, 16), 1), ((8, 8, 16, 16), 2)))
    vae.take_over(new, old)
    assert torch.equal(new.encoder.conv_in.weight, old.encoder.conv_in.weight)
    finest = new.decoder.up_blocks[3].resnets[0].conv1.weight
    assert torch.equal(finest, old.decoder.up_blocks[2].resnets[0].conv1.weight)
    with pytest.raises(BadCheckpoint, match="another shape"):
        vae.take_over(vae.build(vae.VaeConfig(channels=(8, 16, 16)), 0), old)


def test_salience_weighs_what_stands_out():
    """A lone dot counts more than its surroundings; the mean weight stays one; no contrast, no weighting."""
    image = torch.zeros(1, 3, 32, 32)
    image[..., 16, 16] = 1.0
    weight = vae.salience(image, 4.0)
    assert weight.mean().item() == pytest.approx(1.0) and weight[0, 0, 16, 16] > 4 * weight[0, 0, 0, 0]
    assert torch.equal(vae.salience(image, 0.0), torch.ones(1, 1, 32, 32))


@pytest.mark.parametrize("family", FAMILIES)
def test_from_scenes_to_a_pipeline(tmp_path, family):
    """Stop after one step, go on, load the result with diffusers and draw a picture."""
    net = vae.build(vae.VaeConfig(channels=(8, 8, 16), latent_channels=latent_channels(family)), 0)
    net.save_pretrained(tmp_path / "vae")
    config = tmp_path / "c.yaml"
    shape = {k: list(v) if isinstance(v, tuple) else v for k, v in SMALL.items()}
    train = {"steps": 3, "batch_size": 2, "learning_rate": 0.001, "warmup": 1, "seed": 1}
    config.write_text(json.dumps({"model": {"family": family, **shape, "tokens": 48}, "train": train}))
    generator.run(Run(config, tmp_path / "run", 0.0, quiet=True), tmp_path / "vae", generator.Start())
    assert not (tmp_path / "run" / "model").exists()
    generator.run(Run(config, tmp_path / "run", quiet=True), tmp_path / "vae", generator.Start())
    pipe = load_pipeline(tmp_path / "run" / "model")
    card = json.loads((tmp_path / "run" / "model" / "card.json").read_text())
    assert card["steps"] == 3 and sum(card["parameters"].values()) > 0 and "starts_from" not in card
    sheet, prompts = generator.sample_sheet(pipe, {**card["settings"], "num_inference_steps": 1}, rows=1, columns=2)
    assert len(prompts) == 2 and sheet.width == 260
    assert list((tmp_path / "run").glob("sample-*.png")) and (tmp_path / "run" / "samples.png").exists()


def test_a_folder_that_is_no_pipeline_is_named(tmp_path):
    with pytest.raises(BadCheckpoint, match="no model_index.json"):
        load_pipeline(tmp_path)
    with pytest.raises(BadCheckpoint, match="not a saved autoencoder"):
        vae.load_autoencoder(tmp_path)


def test_a_teachers_velocity_counts_less_at_the_start():
    """4·(1 − σ)², at most 1."""
    from paperdolls.models.flow_recipes import trust

    assert trust(torch.tensor([0.0, 0.5, 0.75, 1.0])).tolist() == pytest.approx([1.0, 1.0, 0.25, 0.0])
