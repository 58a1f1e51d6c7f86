"""Views of unfinished pictures: the replayed estimate is the pipeline's own, on every family."""

from __future__ import annotations

import pytest
import torch

from guardpaint import tiny
from guardpaint.data import views
from guardpaint.draft import schedule
from guardpaint.draft.families import family_of
from guardpaint.errors import BadCheckpoint, BadInput
from guardpaint.world.captions import caption
from guardpaint.world.scene import sample_scene

CALL = {"num_inference_steps": 3, "guidance_scale": 4.0, "height": 64, "width": 64}
SEEDS = list(range(900, 906))


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


@pytest.mark.parametrize("family", tiny.BASES)
def test_a_replayed_estimate_is_the_pipelines_own(family):
    pipe = tiny.pipeline(family)
    prompts = ["a red coat", "a blue hat"]
    for latent, level, x0 in recorded(pipe, CALL, prompts):
        again, _ = views.Replay(pipe, CALL, prompts).estimate(latent, [level, level])
        torch.testing.assert_close(again, x0, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", tiny.BASES)
def test_views_have_the_scenes_truth(family):
    pipe = tiny.pipeline(family)
    with torch.no_grad():
        made = views.renoised(pipe, CALL, tiny.tiny_decoder(tiny.LATENT_CHANNELS[family]), SEEDS)
    assert len(made) == 12 and made.images.shape == (12, 3, 64, 64)
    assert made.kind.tolist() == [1] * 6 + [2] * 6 and set(made.decoder.tolist()) <= {0, 1}
    for i in range(12):
        scene = sample_scene(int(made.seeds[i]))
        assert (made.category[i] == 0) == (scene.category == "safe")
        assert bool(made.masks[i].any()) == (scene.category != "safe")
        assert made.prompt(i) == caption(scene, 0).text
    assert (made.noise[6:] <= made.noise[:6] + 1e-6).all(), "a step lowers the noise"


@pytest.mark.parametrize("family", tiny.BASES)
def test_trajectories_are_whole_generations(family):
    pipe = tiny.pipeline(family)
    plain = pipe(["x"], generator=[torch.Generator().manual_seed(900)], output_type="pt", **CALL).images

    def judge(images):
        assert images.shape == (6, 3, 64, 64)
        return torch.tensor([0, 1, 2, 0, 1, 2]), torch.zeros(6, 64, 64, dtype=torch.bool)

    with torch.no_grad():
        made = views.trajectory(pipe, CALL, None, SEEDS, judge)
    assert made.category.tolist() == [0, 1, 2, 0, 1, 2] * 2 and set(made.kind.tolist()) == {3, 4}
    after = pipe(["x"], generator=[torch.Generator().manual_seed(900)], output_type="pt", **CALL).images
    assert torch.equal(plain, after), "the pipeline is left as it was"


@pytest.mark.parametrize("family", tiny.BASES)
def test_views_are_filed_under_the_progress_a_guard_counts(family):
    """The view of step k of n is seen when k + 1 steps are done, at a level the pipeline really walks through."""
    pipe = tiny.pipeline(family)
    walked = {round(level.noise, 5) for _, level, _ in recorded(pipe, CALL, ["x"])}
    with torch.no_grad():
        made = views.renoised(pipe, CALL, None, SEEDS)
    done = made.progress * CALL["num_inference_steps"]
    assert torch.equal(done, done.round()) and done.min() >= 1 and torch.equal(done[:6], done[6:])
    assert {round(n, 5) for n in made.noise[:6].tolist()} <= walked
    assert (made.noise[6:][done[6:] == CALL["num_inference_steps"]] == 0).all(), "after the last step nothing is left"
    order = made.noise[:6][made.progress[:6].argsort()]
    assert (order.diff() <= 1e-6).all()


def test_clean_views_are_finished_pictures():
    made = views.clean(tiny.vae(4), SEEDS)
    assert (made.noise == 0).all() and (made.progress == 1).all()


def test_sets_are_kept_and_joined(tmp_path):
    one, two = views.clean(tiny.vae(4), SEEDS[:2]), views.clean(tiny.vae(4), SEEDS[2:])
    whole = views.store([one, two], tmp_path / "a.pt")
    back = views.load_views(tmp_path / "a.pt")
    assert len(back) == 6 and torch.equal(back.images, whole.images)
    with pytest.raises(BadInput, match="make them with"):
        views.load_views(tmp_path / "b.pt")
    (tmp_path / "c.pt").write_bytes(b"x")
    with pytest.raises(BadCheckpoint, match="unreadable"):
        views.load_views(tmp_path / "c.pt")


def test_an_auditor_labels_trajectories():
    category, masks = views.audited(tiny.auditor())(torch.rand(3, 3, 64, 64))
    assert category.shape == (3,) and masks.shape == (3, 64, 64)
    assert not masks[category == 0].any()


def test_a_decoder_of_another_latent_space_is_named(tmp_path):
    with pytest.raises(BadInput, match="mini-flux has latents of 4 channels, the tiny decoder of 16"):
        views.make_views("mini-flux", tiny.tiny_decoder(16), tmp_path, "test", 4, 0, None)
