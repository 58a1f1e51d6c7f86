"""Every published layout of prompt files is read right, under its own name and under one that says nothing."""

from __future__ import annotations

import copy

import pytest
from layouts import LAYOUTS, faults


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x["file"])
def test_layout(layout, tmp_path):
    assert faults(layout, tmp_path / "files") == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"harmful": False}, "harmful: True"),
        ({"usable": 4700}, "4700"),
        ({"notes": []}, "notes: "),
        ({"reads": {"prompts": ["another sentence"]}}, "prompts: "),
        ({"kind": "words"}, "prompts in a file that has none"),
    ],
)
def test_a_wrong_description_is_noticed(change, said, tmp_path):
    layout = {**copy.deepcopy(LAYOUTS[0]), **change}
    assert any(said in fault for fault in faults(layout, tmp_path / "files"))


def test_there_are_as_many_layouts_as_were_described():
    assert len(LAYOUTS) == 45 and len({x["file"] for x in LAYOUTS}) == 45
