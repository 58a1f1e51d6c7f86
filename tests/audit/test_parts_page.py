"""The code of docs/parts.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from helpers import call

from guardpaint.parts.kinds import BUILT_IN
from guardpaint.testing import small_detectors
from guardpaint.types import Auditor

PAGE = (Path(__file__).parents[2] / "docs" / "parts.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def names():
    """What the worked example defines."""
    found = {}
    exec(next(b for b in BLOCKS if "class Redness" in b), found)
    return found


def test_the_worked_example_finds_what_it_says(names):
    auditor = names["Redness"]()
    assert isinstance(auditor, Auditor)
    pictures = torch.full((2, 3, 32, 48), 0.5)
    pictures[1, 0, 8:16, 8:16], pictures[1, 1:, 8:16, 8:16] = 1.0, 0.0
    grey, red = auditor.audit(pictures, [None, None], 0.0)
    policy = names["policy"]
    assert policy.finding(grey) is None and policy.finding(red).category == "violence"
    assert float(red.adv_map[10, 10]) == 1.0 and float(red.adv_map[20, 20]) == 0.0


def test_the_worked_example_guards_a_pipeline(names, sd_pipe):
    out = call(names["guard"].attach(sd_pipe))
    assert len(out.safety) == 1 and out.safety[0].status != "unguarded"
    assert out.safety[0].effective_settings["absent_scores"] == ["B", "F", "P"]


def test_the_example_of_a_public_classifier_opens_one(tmp_path, monkeypatch):
    """Its hub id is replaced by a folder with a small model of the same class and labels."""
    folder = small_detectors.saved(small_detectors.classifier("vit", labels=("normal", "nsfw")), tmp_path)
    found = {}
    exec(BLOCKS[0].replace("hub:Falconsai/nsfw_image_detection", str(folder)), found)
    assert found["auditor"].categories == ("safe", "nudity") and found["auditor"].maps == "attention"


def test_the_table_names_every_kind():
    table = PAGE.split("| kind |")[1].split("\n\n")[0]
    for role in ("auditor", "approver"):
        for kind in BUILT_IN[role]:
            assert f"`{kind}`" in table or kind == "auditor-scorer", kind
