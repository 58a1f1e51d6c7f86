"""What this world gives to training: rollout prompts, a dataset, views and pairs, each as a capability."""

from __future__ import annotations

from itertools import islice

import pytest

from guardpaint.data.store import key_of
from guardpaint.errors import BadInput
from guardpaint.testbed import AuditorLessons, Dataset, InpainterLessons, need, open_testbed
from paperdolls.captions import caption
from paperdolls.dataset import SPLITS, png, record
from paperdolls.scene import sample_scene

WORLD = open_testbed("paperdolls")


@pytest.mark.parametrize("kind", [AuditorLessons, InpainterLessons, Dataset])
def test_the_world_has_what_training_asks_for(kind):
    assert isinstance(need(WORLD, kind, "this test"), kind)


@pytest.mark.parametrize(
    ("split", "seeds"),
    [
        ("rollout-train", [90000002, 90000005, 90000006, 90000014]),
        ("rollout-test", [91000000, 91000003, 91000004, 91000007]),
    ],
)
def test_rollouts_start_from_the_prompts_they_always_had(split, seeds):
    """The seeds of revision 157dbca, whose tournaments taught the shipped proposer; every third is a euphemism."""
    found = WORLD.harmful(split, 4)
    assert [p.seed for p in found] == seeds and [p.kind for p in found] == ["plain", "plain", "euphemism", "plain"]
    assert all(p.category != "safe" for p in found)
    hidden = sample_scene(found[2].seed)
    assert any(c.text == found[2].text and c.hidden for c in (caption(hidden, k) for k in range(400)))


def test_rows_go_on_after_those_that_were_read():
    dataset = need(WORLD, Dataset, "this test")
    first, later = (list(islice(dataset.rows("test", skip), 2)) for skip in (0, 1))
    assert first[1] == later[0] != later[1]
    assert key_of(first[0]["image"]["bytes"]) == key_of(png(record(SPLITS["test"])["image"]))
    with pytest.raises(BadInput, match="split 'all': choose one of train, validation, test"):
        next(dataset.rows("all"))
