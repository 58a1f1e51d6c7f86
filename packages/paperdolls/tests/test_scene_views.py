"""Views of scenes: re-noised, redrawn and generated, with the scenes' own truth."""

from __future__ import annotations

import pytest
import torch

from guardpaint.data import views
from guardpaint.data.views import ViewedBase
from guardpaint.draft.tap import tapped
from guardpaint.errors import BadInput
from guardpaint.testing import small
from paperdolls import views as scene_views
from paperdolls.bases import NAMES, mini_sd
from paperdolls.captions import caption
from paperdolls.render import CODE
from paperdolls.scene import safe_version, sample_scene

CALL = {"num_inference_steps": 3, "guidance_scale": 4.0, "height": 64, "width": 64}
SEEDS = list(range(900, 906))


@pytest.mark.parametrize("family", small.BASES)
def test_views_have_the_scenes_truth(family):
    pipe = small.pipeline(family)
    with torch.no_grad():
        made = scene_views.renoised(ViewedBase(pipe, CALL, small.tiny_decoder(small.LATENT_CHANNELS[family])), SEEDS)
    assert len(made) == 12 and made.images.shape == (12, 3, 64, 64)
    assert made.kind.tolist() == [1] * 6 + [2] * 6 and set(made.decoder.tolist()) <= {0, 1}
    for i in range(12):
        scene = sample_scene(int(made.seeds[i]))
        assert (made.category[i] == 0) == (scene.category == "safe")
        assert bool(made.masks[i].any()) == (scene.category != "safe")
        assert made.prompt(i) == caption(scene, 0).text
    assert made.world == "paperdolls" and made.names == tuple(CODE)
    assert (made.noise[6:] <= made.noise[:6] + 1e-6).all(), "a step lowers the noise"


@pytest.mark.parametrize("family", small.BASES)
def test_trajectories_are_whole_generations(family):
    pipe = small.pipeline(family)
    plain = pipe(["x"], generator=[torch.Generator().manual_seed(900)], output_type="pt", **CALL).images

    asked = torch.tensor([CODE[sample_scene(s).category] for s in SEEDS])

    def judge(images):
        assert images.shape == (6, 3, 64, 64)
        return asked, torch.ones(6, 64, 64, dtype=torch.bool), torch.zeros(6)

    with torch.no_grad():
        made = scene_views.trajectory(ViewedBase(pipe, CALL), SEEDS, judge)
    sure = [CODE[s.category] for s in map(sample_scene, SEEDS) if s.kind != "blade"]
    n = len(sure)
    assert made.category.tolist() == sure * 3 and made.kind.tolist() == [3] * n + [4] * n + [7] * n
    assert torch.equal(made.masks.flatten(1).any(1), made.category != 0)
    assert (made.progress[2 * n :] == 1).all() and (made.noise[2 * n :] == 0).all()
    after = pipe(["x"], generator=[torch.Generator().manual_seed(900)], output_type="pt", **CALL).images
    assert torch.equal(plain, after), "the pipeline is left as it was"


@pytest.mark.parametrize("family", small.BASES)
def test_views_are_filed_under_the_progress_a_guard_counts(family):
    """The view of step k of n is seen when k + 1 steps are done, at a level the pipeline really walks through."""
    pipe = small.pipeline(family)
    followed = scene_views.Trajectory(pipe, CALL["num_inference_steps"])
    with tapped(pipe, followed.family, followed):
        pipe(["x"], generator=torch.Generator().manual_seed(1), **CALL)
    walked = {round(before.noise, 5) for _, _, before, _ in followed.seen}
    with torch.no_grad():
        made = scene_views.renoised(ViewedBase(pipe, CALL), SEEDS)
    done = made.progress * CALL["num_inference_steps"]
    assert torch.equal(done, done.round()) and done.min() >= 1 and torch.equal(done[:6], done[6:])
    assert {round(n, 5) for n in made.noise[:6].tolist()} <= walked
    assert (made.noise[6:][done[6:] == CALL["num_inference_steps"]] == 0).all(), "after the last step nothing is left"
    order = made.noise[:6][made.progress[:6].argsort()]
    assert (order.diff() <= 1e-6).all()


def test_clean_views_are_finished_pictures():
    made = scene_views.clean(small.vae(4), SEEDS)
    assert (made.noise == 0).all() and (made.progress == 1).all()


def test_an_auditor_labels_trajectories():
    category, masks, harm = scene_views.audited(small.auditor())(torch.rand(3, 3, 64, 64))
    assert category.shape == harm.shape == (3,) and masks.shape == (3, 64, 64)
    assert ((harm >= 0) & (harm <= 1)).all()
    assert not masks[category == 0].any()


def test_a_decoder_of_another_latent_space_is_named(tmp_path):
    with pytest.raises(BadInput, match="latents of 16 channels, mini-flux has 4: use tiny4"):
        scene_views.make_views("mini-flux", tmp_path, "test", {"renoised": 4}, small.tiny_decoder(16))


def test_a_picture_is_labelled_where_prompt_and_judge_agree():
    """Asked safe: safe, unless the judge is sure of harm. Asked for harm: only what the judge sees too."""
    asked, said = torch.tensor([0, 0, 1, 1, 2]), torch.tensor([1, 1, 1, 0, 1])
    harm = torch.tensor([0.5, 0.99, 0.9, 0.1, 0.9])
    where = torch.ones(5, 2, 2, dtype=torch.bool)
    category, masks, known = scene_views.labels(asked, said, where, harm)
    assert known.tolist() == [True, False, True, False, False]
    where[2] = False
    assert scene_views.labels(asked, said, where, harm)[2].tolist() == [True, False, False, False, False], (
        "seen nowhere"
    )
    assert torch.equal(category, asked) and masks.flatten(1).any(1).tolist() == [False, False, True, True, True]


@pytest.mark.parametrize("family", small.BASES)
def test_redrawn_scenes_end_finished_and_keep_their_truth(family):
    pipe = small.pipeline(family)
    seeds = list(range(900, 912))
    with torch.no_grad():
        made = scene_views.redrawn(ViewedBase(pipe, {**CALL, "num_inference_steps": 6}), seeds)
    end = made.rows(torch.nonzero(made.kind == views.KINDS.index("redrawn"))[:, 0])
    late = made.rows(torch.nonzero(made.kind == views.KINDS.index("redrawn_x0"))[:, 0])
    assert len(end) + len(late) == len(made) and torch.equal(end.seeds, late.seeds)
    assert (end.noise == 0).all() and (end.progress == 1).all() and torch.allclose(late.progress, torch.tensor(5 / 6))
    for i in range(len(end)):
        scene = sample_scene(int(end.seeds[i]))
        assert int(end.category[i]) == CODE[scene.category] and bool(end.masks[i].any()) == (scene.category != "safe")
    safe = {s for s in seeds if sample_scene(s).category == "safe"}
    assert safe <= set(end.seeds.tolist()), "only harm that was lost is left out"


def test_harm_that_a_base_lost_is_not_there():
    """The render shows it, its safe version does not; what is safe has nothing to lose."""
    scenes = [sample_scene(7, kind) for kind in ("blade", "nudity", "splash", "ordinary")]
    drawn_as = scene_views.scene_truth(scenes)[0]
    repaired = scene_views.scene_truth([safe_version(s) for s in scenes])[0]
    assert scene_views.still_there(drawn_as, scenes).tolist() == [True] * 4
    assert scene_views.still_there(repaired, scenes).tolist() == [False, False, False, True]


def test_a_render_drawn_on_by_a_trained_base_still_shows_the_scene():
    """Half noised and drawn on by mini-sd, a scene is nearer to its own render than to any other's."""
    seeds = list(range(910, 918))
    with torch.no_grad():
        made = scene_views.redrawn(ViewedBase(mini_sd.load(), mini_sd.call()), seeds)
    end = made.rows(torch.nonzero(made.kind == views.KINDS.index("redrawn"))[:, 0])
    renders = scene_views.scene_truth([sample_scene(int(s)) for s in end.seeds])[0]
    gaps = (end.images[:, None].float() / 255 - renders[None]).square().flatten(2).mean(2)
    assert torch.equal(gaps.argmin(1), torch.arange(len(end)))


def test_a_set_of_views_goes_on_where_it_stopped(tmp_path):
    """Counts are rounded up to whole batches, so that nothing is skipped and nothing is made twice."""
    path = scene_views.make_views("mini-sd3-turbo", tmp_path, "oracle", {"renoised": 6, "redrawn": 3}, batch=4)
    one = views.load_views(path)
    scene_views.make_views("mini-sd3-turbo", tmp_path, "oracle", {"renoised": 10, "redrawn": 8}, batch=4)
    two = views.load_views(path)
    assert torch.equal(two.images[: len(one)], one.images)
    first = scene_views.VIEW_SEEDS["oracle"] + 50_000 * NAMES.index("mini-sd3-turbo")
    assert two.seeds[two.kind == 1].tolist() == list(range(first, first + 12))
    assert set(two.seeds[two.kind == 6].tolist()) <= set(range(first + 30_000, first + 30_008))
    scene_views.make_views("mini-sd3-turbo", tmp_path, "oracle", {"renoised": 10, "redrawn": 8}, batch=4)
    assert len(views.load_views(path)) == len(two)
    with pytest.raises(BadInput, match="give --count, --redrawn or --trajectories"):
        scene_views.make_views("mini-sd", tmp_path, "oracle", {})
    with pytest.raises(BadInput, match="name it with --judge"):
        scene_views.make_views("mini-sd", tmp_path, "oracle", {"trajectories": 4})
    with pytest.raises(BadInput, match="choose one of mini-sd"):
        scene_views.make_views("tiny-sd", tmp_path, "oracle", {"renoised": 4})
