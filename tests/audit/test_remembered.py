"""What the auditor remembers for the seam metric: within a step only, the same numbers, and within its bound."""

from __future__ import annotations

import pytest
import torch

from guardpaint.audit.remembered import StagesSeen
from guardpaint.testing import small
from guardpaint.verify.seam import BackboneSeam


@pytest.fixture
def auditor():
    return small.auditor().eval()


def pictures(count, size=64):
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(count))


def passes(auditor, work):
    """The number of times that the backbone runs."""
    count = []
    hook = auditor.backbone.register_forward_hook(lambda *_: count.append(1))
    work()
    hook.remove()
    return len(count)


def test_the_seam_of_audited_pictures_takes_no_further_pass(auditor):
    """And its numbers are those of the passes that it saves."""
    some, seam = pictures(3), BackboneSeam(auditor)
    alone = seam.distance(some[1:], some[0])

    def audited():
        auditor.audit(some, [None] * 3, 0.1)
        torch.testing.assert_close(seam.distance(some[1:], some[0]), alone)

    def remembered():
        with seam.remembering():
            audited()

    assert passes(auditor, audited) == 3 and passes(auditor, remembered) == 1


def test_nothing_outlives_the_step(auditor):
    seam, some = BackboneSeam(auditor), pictures(2)
    auditor.audit(some, [None] * 2, 0.1)
    assert auditor.stages_seen.kept is None
    with pytest.raises(RuntimeError), seam.remembering():
        auditor.audit(some, [None] * 2, 0.1)
        assert len(auditor.stages_seen.kept) == 2
        with seam.remembering():
            pass
        assert len(auditor.stages_seen.kept) == 2
        raise RuntimeError("a step that fails")
    assert auditor.stages_seen.kept is None


def test_the_oldest_pictures_are_forgotten_first():
    seen = StagesSeen(most=20)
    with seen.remembering():
        some = pictures(3, 4)
        seen.keep(some, [torch.ones(3, 10)])
        assert seen.recall(some[1:]) is not None and seen.recall(some[:1]) is None
        kept = next(iter(seen.kept.values()))[0]
        assert kept.untyped_storage().nbytes() == 40, "no map holds on to the whole batch"


def test_the_shape_is_part_of_the_name():
    seen = StagesSeen()
    with seen.remembering():
        seen.keep(torch.zeros(1, 3, 4, 8), [torch.ones(1, 2)])
        assert seen.recall(torch.zeros(1, 3, 8, 4)) is None
