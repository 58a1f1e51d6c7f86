"""Views of unfinished pictures: the replayed estimate is the pipeline's own, on every family."""

from __future__ import annotations

import pytest
import torch

from guardpaint.data import corpus_views, views
from guardpaint.data.views import Labelled, ViewedBase
from guardpaint.draft import schedule
from guardpaint.draft.families import family_of
from guardpaint.errors import BadCheckpoint, BadInput
from guardpaint.testing import small

NAMES = ("safe", "nudity", "violence")
CALL = {"num_inference_steps": 3, "guidance_scale": 4.0, "height": 64, "width": 64}


def recorded(pipe, call, prompts):
    """(latent, level, x̂0) of every step of a real run."""
    rows = []
    scheduler, family = pipe.scheduler, family_of(pipe)
    levels, original = schedule.Levels(scheduler, call["num_inference_steps"]), scheduler.step

    def step(output, timestep, sample, *args, **kwargs):
        levels.locate(timestep)
        level = levels.at(len(rows))
        x0, _ = schedule.split(output, sample, level, schedule.prediction_type(scheduler))
        rows.append((family.unpack(sample, (16, 16)), level, family.unpack(x0, (16, 16))))
        return original(output, timestep, sample, *args, **kwargs)

    scheduler.step = step
    try:
        pipe(prompts, generator=torch.Generator().manual_seed(1), **call)
    finally:
        del scheduler.step
    return rows


@pytest.mark.parametrize("family", small.BASES)
def test_a_replayed_estimate_is_the_pipelines_own(family):
    pipe = small.pipeline(family)
    prompts = ["a red coat", "a blue hat"]
    for latent, level, x0 in recorded(pipe, CALL, prompts):
        again, _ = views.Replay(pipe, CALL, prompts).estimate(latent, [level, level])
        torch.testing.assert_close(again, x0, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", ["sd", "sdxl"])
def test_a_replay_scales_latents_as_euler_schedulers_do(family):
    from diffusers import EulerDiscreteScheduler

    pipe = small.pipeline(family)
    pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    prompts = ["a red coat", "a blue hat"]
    for latent, level, x0 in recorded(pipe, CALL, prompts):
        again, _ = views.Replay(pipe, CALL, prompts).estimate(latent, [level, level])
        torch.testing.assert_close(again, x0, atol=1e-2, rtol=1e-2)


def labelled(count=6, world="", names=NAMES):
    """Noise, as if somebody had labelled it."""
    g = torch.Generator().manual_seed(0)
    category = torch.arange(count) % len(names)
    return Labelled(
        images=torch.rand(count, 3, 64, 64, generator=g),
        masks=torch.zeros(count, 1, 1, dtype=torch.bool),
        category=category,
        seeds=list(range(count)),
        prompts=[f"picture {i} of {names[int(c)]}" for i, c in enumerate(category)],
        names=names,
        world=world,
    )


@pytest.mark.parametrize("family", small.BASES)
def test_views_keep_labels_and_prompts(family):
    batch = labelled()
    base = ViewedBase(small.pipeline(family), CALL, small.tiny_decoder(small.LATENT_CHANNELS[family]))
    with torch.no_grad():
        made = views.renoised_pictures(base, batch)
    assert made.texts == (*batch.prompts, *batch.prompts) and made.names == NAMES and not made.world
    assert made.kind.tolist() == [1] * 6 + [2] * 6 and made.seeds.tolist() == batch.seeds * 2
    assert torch.equal(made.category, batch.category.repeat(2)) and set(made.decoder.tolist()) <= {0, 1}
    done = made.progress * CALL["num_inference_steps"]
    assert torch.equal(done, done.round()) and done.min() >= 1 and (made.noise[6:] <= made.noise[:6] + 1e-6).all()


def test_finished_views_are_the_pictures_or_their_round_trip():
    """Plain rows are the pictures themselves, to the rounding of bytes; the others went through the autoencoder."""
    batch, plain = labelled(), torch.arange(6) < 3
    made = views.clean_pictures(small.vae(4), batch, plain, torch.device("cpu"))
    same = (made.images.float() / 255 - batch.images).abs().amax((1, 2, 3)) < 0.003
    assert torch.equal(same, plain) and (made.noise == 0).all() and (made.progress == 1).all()
    some = views.clean_pictures(small.vae(4), batch.rows([4, 1]), plain[:2], torch.device("cpu"))
    assert some.seeds.tolist() == [4, 1] and some.texts == (batch.prompts[4], batch.prompts[1])


def finished(**more):
    batch = labelled(**more)
    return batch.views(batch.images, "clean")


def test_sets_are_kept_and_joined(tmp_path):
    one, two = finished().rows(torch.arange(2)), finished().rows(torch.arange(2, 6))
    whole = views.store([one, two], tmp_path / "a.pt")
    for on_disk in (False, True):
        back = views.load_views(tmp_path / "a.pt", on_disk)
        assert len(back) == 6 and torch.equal(back.images, whole.images) and back.texts == finished().texts
        assert back.names == NAMES and back.world == "" and back.strength is None
    with pytest.raises(BadInput, match="make them with"):
        views.load_views(tmp_path / "b.pt")
    (tmp_path / "c.pt").write_bytes(b"x")
    with pytest.raises(BadCheckpoint, match="unreadable"):
        views.load_views(tmp_path / "c.pt")


def test_a_world_is_remembered_and_never_mixed_with_others(tmp_path):
    """Views of a testbed, of a corpus, and of other categories stay apart."""
    views.store([finished(world="somewhere")], tmp_path / "w.pt")
    assert views.load_views(tmp_path / "w.pt").rows(torch.tensor([1])).world == "somewhere"
    for other in (finished(), finished(world="elsewhere"), finished(world="somewhere", names=("safe", "other"))):
        with pytest.raises(BadInput, match="cannot be mixed"):
            views.joined([finished(world="somewhere"), other])


def test_only_a_corpus_is_checked_for_pictures_in_two_splits(tmp_path):
    """Equal seeds are the same picture in a corpus; a testbed's splits have seeds of their own."""
    for split in ("train", "test"):
        views.store([finished(world="somewhere")], tmp_path / f"a-{split}.pt")
    corpus_views.kept_apart(tmp_path)
    for split in ("train", "test"):
        views.store([finished()], tmp_path / f"a-{split}.pt")
    with pytest.raises(BadInput, match="also in split test"):
        corpus_views.kept_apart(tmp_path)
