"""Measuring the bases: on small random pipelines, so that every row and every refusal is real."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image

from guardpaint.bases import Base
from guardpaint.errors import BadInput
from guardpaint.testing import small
from paperdolls import measure as world
from paperdolls.oracle import JUDGED, Oracle, OracleConfig, OracleNet

PICTURES = [Image.new("RGB", (64, 64), c) for c in ("red", "blue")]
CALL = {"num_inference_steps": 2, "guidance_scale": 3.0, "height": 64, "width": 64}


@pytest.fixture
def oracle():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Oracle(OracleNet(OracleConfig(channels=(8, 8, 16, 16))))


@pytest.fixture(autouse=True)
def small_bases(monkeypatch):
    def load(name):
        pipe = small.inpainter().pipe if name == "mini-inpaint" else small.pipeline("sd")
        pipe.set_progress_bar_config(disable=True)
        return Base(name, pipe, CALL)

    monkeypatch.setattr(world, "load_base", load)
    monkeypatch.setattr(world, "shipped", lambda: ("mini-sd",))


def test_a_base_is_judged_on_prompts_it_has_not_seen(oracle):
    rows = world.measure_base("mini-sd", oracle, 6)
    benign, unsafe = ([r for r in rows if r["what"] == w] for w in ("benign", "unsafe"))
    assert len(benign) == len(unsafe) == 6 and rows[-1]["what"] == "kid"
    assert all(r["category"] == "safe" for r in benign) and all(r["category"] != "safe" for r in unsafe)
    assert all("right_background" in r for r in benign) and min(r["seed"] for r in benign) >= world.PROMPT_SEEDS
    found = world.metrics(rows)
    assert {"mini-sd.agreement", "mini-sd.unsafe_yield", "mini-sd.benign_unsafe", "mini-sd.kid"} <= set(found)


def test_a_picture_depends_on_its_seed_not_on_its_batch():
    base = Base("tiny-sd", small.pipeline("sd"), CALL)
    pair = base.draw(["a", "b"], [5, 6])
    alone = base.draw(["b"], [6])
    assert max(abs(x - y) for x, y in zip(pair[1].tobytes(), alone[0].tobytes(), strict=True)) <= 1


def test_an_inpainter_is_judged_inside_and_outside(oracle):
    rows = world.measure_inpainter(oracle, 4)
    assert len(rows) == 4 and all(r["outside_error"] is None or r["outside_error"] >= 0 for r in rows)
    judged = {k.removeprefix("right_") for r in rows for k in r if k.startswith("right_")}
    assert judged <= set(JUDGED) - {"background"}
    assert world.metrics(rows)["mini-inpaint.inpaint_outside_error"]["n"] >= 1


def test_labels_by_eye(oracle, tmp_path, monkeypatch):
    sheets = world.label_sheets("mini-sd", tmp_path, count=12, columns=4, rows=2)
    assert [p.name for p in sheets] == ["mini-sd-000.png", "mini-sd-008.png"] and all(p.exists() for p in sheets)
    file = tmp_path / "labels.csv"
    file.write_text("index,label\n" + "".join(f"{i},safe\n" for i in range(199)))
    monkeypatch.setattr(
        world, "eye_pictures", lambda name, pictures=None: iter([(i, "p", p) for i, p in enumerate(PICTURES * 100)])
    )
    with pytest.raises(BadInput, match="needs one label"):
        world.measure_eye("mini-sd", oracle, file)
    file.write_text("index,label\n" + "".join(f"{i},safe\n" for i in range(200)))
    rows = world.measure_eye("mini-sd", oracle, file)
    assert len(rows) == 200 and {r["label"] for r in rows} == {"safe"}


def test_parts_are_measured_one_by_one_and_the_others_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(world, "measure_render", lambda: [{"part": "render", "what": "rate", "value": 400.0}])
    monkeypatch.setattr(world, "measure_vae", lambda name: [{"part": name, "what": "psnr", "seed": 1, "value": 30.0}])
    path = tmp_path / "world.json"
    world.run(["render"], path)
    world.run(["vae4"], path)
    monkeypatch.setattr(world, "measure_vae", lambda name: [{"part": name, "what": "psnr", "seed": 1, "value": 31.0}])
    found = world.run(["vae4"], path)
    assert found["render_per_second"]["value"] == 400.0 and found["vae4.vae_psnr"]["value"] == 31.0
    assert json.loads(path.read_text())["metrics"] == json.loads(json.dumps(found))
    with pytest.raises(BadInput, match="part 'vae9'"):
        world.run(["vae9"], path)


def test_time_and_rendering_are_measured():
    assert len(world.measure_render(repeats=2, count=5)) == 2
    rows = world.measure_time(repeats=1)
    assert [r["part"] for r in rows] == ["mini-sd"] and rows[0]["value"] > 0


def test_kept_pictures_are_not_drawn_again(tmp_path, monkeypatch):
    """The same weights, prompts and seeds: read back bit for bit. Other seeds or other weights: drawn."""
    first = world.Album("mini-sd", tmp_path).draw(["a", "b"], [5, 6])
    real, calls = Base.draw, []
    monkeypatch.setattr(Base, "draw", lambda *a: calls.append(a) or real(*a))
    again = world.Album("mini-sd", tmp_path).draw(["a", "b"], [5, 6])
    assert not calls and [p.tobytes() for p in again] == [p.tobytes() for p in first]
    world.Album("mini-sd", tmp_path).draw(["a", "b"], [5, 7])
    other = world.Album("mini-sd", tmp_path)
    with torch.no_grad():
        other.base.pipe.unet.conv_out.bias.add_(1.0)
    monkeypatch.setattr(world, "load_base", lambda name: other.base)
    world.Album("mini-sd", tmp_path).draw(["a", "b"], [5, 6])
    assert len(calls) == 2 and not list(tmp_path.glob("*.part"))


def test_metrics_come_from_rows():
    rows = [
        {"part": "mini-sd", "what": "benign", "said": "safe", "right_background": 1},
        {"part": "mini-sd", "what": "benign", "said": "nudity", "right_background": 0},
        {"part": "mini-sd", "what": "unsafe", "said": "nudity", "hidden": "True"},
        {"part": "vae4", "what": "psnr", "value": "30"},
        {"part": "vae4", "what": "psnr", "value": 32.0},
        {"part": "mini-sd", "what": "eye", "label": "violence", "said": "nudity"},
        {"part": "mini-sd", "what": "eye", "label": "safe", "said": "nudity"},
        {"part": "mini-inpaint", "what": "fill", "outside_error": "0.02", "vae_error": "0.03", "right_garment": "1"},
    ]
    found = world.metrics(rows)
    assert found["mini-sd.agreement"]["value"] == 0.5 and found["mini-sd.benign_unsafe"]["value"] == 0.5
    assert found["mini-sd.unsafe_yield"]["met"] and found["mini-sd.unsafe_yield.euphemism"]["n"] == 1
    assert found["vae4.vae_psnr"]["value"] == 31.0 and found["vae4.vae_psnr"]["met"]
    assert found["oracle.generated_agreement"]["value"] == 0.5, "unsafe is unsafe, whichever category"
    assert found["mini-inpaint.inpaint_outside_error"]["goal"] == "<=0.0300"
    assert found["mini-inpaint.inpaint_outside_error"]["met"]
