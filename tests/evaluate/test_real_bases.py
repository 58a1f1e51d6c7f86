"""Evaluation on bases from folders: names, settings, the base's own safety checker, named repairers, benign files."""

from __future__ import annotations

import pytest
import torch
from protocols import write_bases

from guardpaint.bases import BaseOptions
from guardpaint.errors import BadInput
from guardpaint.evaluate import benign_files, page, run, summary
from guardpaint.evaluate.defences import opening, sld
from guardpaint.evaluate.defences.stock_checker import StockCheckerDefence
from guardpaint.evaluate.defences.undefended import Undefended
from guardpaint.evaluate.evaluated_base import (
    StockChecker,
    drawn_with,
    open_base,
    read_entries,
    with_settings,
    without_checker,
)
from guardpaint.evaluate.rows import EvaluationRow
from guardpaint.testing import hub_pipelines, small
from guardpaint.testing.doubles import FlagsBright, PaintsFlat
from guardpaint.testing.small_inpainters import safety_checker

SMALL = BaseOptions(steps=2, size=64)


@pytest.fixture(scope="module")
def sd15(tmp_path_factory):
    (text,) = write_bases(tmp_path_factory.mktemp("hub"), ("sd15",))
    return text.partition("=")[2]


def strict(base):
    """The base with a checker that flags everything."""
    base.pipe.safety_checker = safety_checker()
    return base


def opened(folder):
    return open_base(read_entries([f"mine={folder}"], SMALL)["mine"], None)


def test_bases_have_names_and_settings_of_their_own(sd15):
    entries = read_entries([f"a={sd15}", sd15, "tiny-sd"], SMALL, ["a:steps=7,guidance=2"])
    assert list(entries) == ["a", sd15, "tiny-sd"] and entries["a"].path == sd15
    assert (entries["a"].opening.steps, entries["a"].opening.guidance, entries["a"].opening.size) == (7, 2.0, 64)
    assert entries["tiny-sd"].opening == SMALL and [e.real for e in entries.values()] == [True, True, False]
    with pytest.raises(BadInput, match="each base once"):
        read_entries(["a=x", "a=y"], SMALL)
    assert with_settings(SMALL, "jbdb") == BaseOptions(steps=2, guidance=7.5, size=64)
    assert with_settings(BaseOptions(), None) == BaseOptions()
    with pytest.raises(BadInput, match="jbdb"):
        with_settings(SMALL, "other")


def test_what_pictures_were_drawn_with_is_the_pipelines_own_where_nobody_says(sd15):
    plain = open_base(read_entries([sd15], BaseOptions())[sd15], None)
    assert drawn_with(plain) == "50 steps, guidance 7.5, 64 × 64 pixels, PNDMScheduler"
    assert drawn_with(opened(sd15)).startswith("2 steps, guidance 7.5")


def test_a_bases_checker_is_off_for_all_but_the_defence_that_it_is(sd15):
    base = opened(sd15)
    assert base.name == "mine" and base.pipe.safety_checker is None and base.checker is not None
    own = small_base(safety_checker())
    bare = without_checker(own)
    ask = (["a lamp"], [1])
    drawn = Undefended().generate(bare, *ask)[0].image
    assert max(e[1] for e in drawn.getextrema()) > 0, "not blackened"
    assert max(e[1] for e in Undefended().generate(own, *ask)[0].image.getextrema()) == 0, "the pipeline is as it was"
    flagged = StockCheckerDefence().generate(bare, *ask)[0]
    assert flagged.image is None and flagged.status == "blocked" and flagged.detail == {"triggered": True}
    calm = StockCheckerDefence().generate(without_checker(small_base(hub_pipelines.calm_checker())), *ask)[0]
    assert calm.status == "clean" and calm.image.tobytes() == drawn.tobytes()
    assert "no safety checker" in StockCheckerDefence().applies(without_checker(tiny("sdxl")))


def small_base(checker):
    from guardpaint.bases import Base

    with small.seeded(3):
        pipe = hub_pipelines.sd()
    pipe.safety_checker = checker
    pipe.set_progress_bar_config(disable=True)
    return Base("b", pipe, {"num_inference_steps": 2, "height": 64, "width": 64})


def tiny(family, **call):
    from guardpaint.bases import Base

    return Base(f"tiny-{family}", small.pipeline(family), {"height": small.PIXELS, "width": small.PIXELS, **call})


def test_a_named_checker_looks_at_every_base(sd15):
    defence, config = opening.open_defence(f"stock_checker@{sd15}", None)
    base = without_checker(tiny("sdxl", num_inference_steps=2))
    assert defence.name == "stock_checker" and defence.applies(base) == ""
    assert defence.generate(base, ["a"], [1])[0].status == "clean"
    assert config != opening.open_defence("stock_checker", None)[1] and not opening.needs_guard("stock_checker@x")
    with pytest.raises(BadInput, match="has no safety checker"):
        StockChecker.from_pretrained(without(sd15))


def without(folder):
    """A copy of a pipeline without its checker."""
    from guardpaint.draft.loading import load_pipeline

    pipe = load_pipeline(folder)
    pipe.register_modules(safety_checker=None, feature_extractor=None)
    out = f"{folder}-bare"
    pipe.save_pretrained(out)
    return out


def test_post_hoc_inpainting_takes_the_repairer_that_is_named(sd15):
    from guardpaint.guard import GuardPaint

    guard = GuardPaint(FlagsBright(gain=1.6), PaintsFlat())
    named, _ = opening.open_defence(f"post_hoc_inpaint@{sd15}", guard, None)
    assert named.name == "post_hoc_inpaint" and named.repairer.name == "pipeline" and named.pipe is None
    base = opened(sd15)
    outcome = named.generate(base, ["a lamp"], [1])[0]
    assert outcome.status in ("clean", "repaired", "blocked")
    with pytest.raises(BadInput, match="post_hoc_inpaint@FOLDER"):
        opening.open_defence("post_hoc_inpaint", guard, None)


def test_a_filled_hole_leaves_the_rest_as_it_was(sd15):
    import numpy as np
    from PIL import Image

    from guardpaint.evaluate.defences import post_hoc
    from guardpaint.guard import GuardPaint

    defence, _ = opening.open_defence(f"post_hoc_inpaint@{sd15}", GuardPaint(FlagsBright(gain=1.6), PaintsFlat()), None)
    picture = Image.new("RGB", (64, 64), (30, 30, 30))
    picture.paste((255, 255, 255), (0, 0, 64, 40))
    found = post_hoc.check(defence.parts, picture, "a person")
    hole = Image.fromarray(((post_hoc.flagged_mask(defence.parts, found, 0.5) > 0.5).numpy() * 255).astype(np.uint8))
    fill = defence.repaired(opened(sd15), found, hole, "a person", 1)
    assert fill.size == picture.size and fill.tobytes() != picture.tobytes()
    image = Image.composite(fill, picture, hole)
    kept = np.array(hole) == 0
    assert kept.any() and (np.array(image)[kept] == np.array(picture)[kept]).all()


def test_without_a_world_the_filter_forbids_its_own_words():
    from guardpaint.evaluate.defences.prompt_filter import WORDS

    assert opening.open_defence("prompt_filter", None, None)[0].words == WORDS


@pytest.mark.parametrize(("steps", "expected"), [(None, 7), (20, 3)])
def test_safe_latent_diffusion_warms_up_by_the_steps_of_the_call(steps, expected):
    """SD 1.5 runs 50 steps if nobody says otherwise; its warm-up is 7 of 50."""
    base = tiny("sd", **({} if steps is None else {"num_inference_steps": steps}))
    assert sld.warmup(base) == expected
    assert sld.warmup(tiny("flux")) == round(7 / 50 * tiny("flux").settings.steps) != 7


def row(defence, status, prompt="a", suite="coco", **more):
    values = {"key": "", "suite": suite, "base": "b", "defence": defence, "config": "", "id": "1", "kind": ""}
    values |= {"category": "safe", "prompt": prompt, "seed": 1, "status": status, "seconds": 2.0, "judge_failed": 0}
    values |= {"released": 1, "unsafe": 0, "source": "coco", "picture": "p"}
    return EvaluationRow.from_dict({**values, **more})


def test_benign_files_by_hand():
    """Of four prompts one is repaired, one blocked, and of the two let pass one is the base's picture, bit for bit."""
    rows = [row("undefended", "plain", p, clip=20.0) for p in "abcd"]
    rows += [row("ours", "clean", "a", clip=20.0, seconds=3.0), row("ours", "clean", "b", picture="q", seconds=3.0)]
    rows += [row("ours", "repaired", "c", picture="r", triggered=1, clip=18.0, seconds=3.0)]
    rows += [row("ours", "blocked", "d", picture="", released=0, triggered=1, seconds=3.0)]
    rows += [row("prompt_filter", "refused", "a", picture="", released=0)]
    out = benign_files.metrics(rows)
    top = "benign.coco.b.ours"
    values = {k.removeprefix(f"{top}."): m["value"] for k, m in out.items() if k.startswith(top)}
    assert values["false_trigger"] == values["false_trigger.all"] == values["identical"] == 0.5
    assert values["withheld"] == values["changed"] == 0.25 and values["clip.change"] == -1.0
    assert values["time_ratio"] == 1.5 and values["seconds"] == 3.0
    assert out["benign.coco.b.prompt_filter.false_trigger"]["value"] == 1.0, "a refusal is a trigger"
    assert not any(".undefended." in key for key in out)
    assert benign_files.metrics([row("ours", "clean", source="")]) == {}, "a testbed's have metrics of their own"


def test_a_trigger_on_what_the_base_drew_unsafe_is_not_false():
    rows = [row("undefended", "plain", unsafe=1), row("ours", "repaired", triggered=1)]
    out = benign_files.metrics(rows)
    assert out["benign.coco.b.ours.false_trigger"]["n"] == 0 and out["benign.coco.b.ours.false_trigger.all"]["n"] == 1


def test_pictures_lie_in_folders_by_base_and_defence(tmp_path):
    from PIL import Image

    picture = Image.new("RGB", (8, 8))
    names = [run.save(picture, tmp_path, row(d, "clean", key="k")) for d in ("ours", "ours:candidates=3", "ours@/a/b")]
    assert names[0] == "images/b/ours/coco/k.png" and len(set(names)) == 3
    assert all((tmp_path / name).is_file() and name.count("/") == 4 for name in names)


def test_reports_on_files_have_neither_goals_nor_scenes(tmp_path):
    attacked = [row(d, "plain", p, suite="mma", category="nudity", unsafe=u, drawn_with="20 steps")
                for d, u in (("undefended", 1), ("ours", 0)) for p in "ab"]  # fmt: skip
    out = summary.metrics(attacked)
    assert not any("goal" in m for m in out.values()) and out["ours.asr"]["note"].endswith("2 prompts")
    assert out["attacks.asr.ours"]["n"] == 2
    text = page.write(attacked, tmp_path).read_text()
    assert "20 steps" in text and "own safety checker is off" in text and "scene" not in text
    assert "agreement with the harmless part" not in text


def test_the_filters_encoder_follows_the_pipeline():
    from guardpaint.evaluate.defences.prompt_filter import base_encoder

    states = base_encoder(small.pipeline("sd"))(["a lamp", "a river"])
    assert states.shape[0] == 2 and states.device == torch.device("cpu") and states.dtype == torch.float32
