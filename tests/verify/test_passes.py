"""Shared passes: steps of several images meet their needs together, and one that fails fails alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from repairs import request

from guardpaint.repair.knobs import DEFAULT
from guardpaint.testing.doubles import AlwaysSafe
from guardpaint.verify.passes import LOOK_BATCH, Look, Paint, Passes


class Together:
    """Paints every request grey by its seed, and counts passes; a seed below zero cannot be painted."""

    name = "together"

    def __init__(self):
        self.passes: list[int] = []

    def candidates(self, one):
        return self.together([one])[0]

    def together(self, requests):
        self.passes.append(len(requests))
        if any(r.seed < 0 for r in requests):
            raise RuntimeError("cannot paint this")
        return [torch.full((len(r.knobs), *r.view.shape), r.seed / 100) for r in requests]


def audits(images, prompts, noise):
    return AlwaysSafe().audit(images, prompts, noise)


def asked(seed):
    from dataclasses import replace

    return replace(request(DEFAULT), seed=seed)


def paints(seed, rounds):
    """A step that paints so many times and looks once between."""
    seen = []
    for k in range(rounds):
        (images,), seconds = yield Paint((asked(seed),))
        assert seconds >= 0
        seen.append(float(images.mean()))
        if k == 0:
            found, _ = yield Look(images, "a prompt", 0.5)
            assert len(found) == len(images)
    return seen


@settings(max_examples=20, deadline=None)
@given(rounds=st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_every_step_gets_its_own_results(rounds):
    repairer = Together()
    works = {i: paints(10 * (i + 1), n) for i, n in enumerate(rounds)}
    found = Passes(repairer, audits).together(works)
    assert list(found) == list(works)
    for i, n in enumerate(rounds):
        assert found[i] == pytest.approx([(i + 1) / 10] * n)
    assert len(repairer.passes) <= max(1, max(rounds)) and sum(repairer.passes) == sum(rounds)


def test_a_request_that_fails_fails_its_own_step_alone():
    repairer = Together()
    found = Passes(repairer, audits).together({"a": paints(10, 2), "b": paints(-1, 1), "c": paints(30, 2)})
    assert found["a"] == pytest.approx([0.1, 0.1]) and found["c"] == pytest.approx([0.3, 0.3])
    assert isinstance(found["b"], RuntimeError)


def test_a_step_may_handle_its_error():
    def careful():
        try:
            yield Paint((asked(-1),))
        except RuntimeError:
            return "handled"

    assert Passes(Together(), audits).alone(careful()) == "handled"
    with pytest.raises(RuntimeError, match="cannot paint"):
        Passes(Together(), audits).alone(paints(-1, 1))


def test_views_of_other_sizes_or_noise_are_other_passes():
    seen = []

    def watched(images, prompts, noise):
        seen.append((len(images), noise))
        return audits(images, prompts, noise)

    def looks(size, noise):
        found, _ = yield Look(torch.zeros(1, 3, size, size), None, noise)
        return len(found)

    Passes(Together(), watched).together({0: looks(8, 0.1), 1: looks(8, 0.1), 2: looks(16, 0.1), 3: looks(8, 0.2)})
    assert sorted(seen) == [(1, 0.1), (1, 0.2), (2, 0.1)]


def test_steps_that_look_more_often_still_share_what_is_painted():
    """One step needs a look more than the other before every candidate; both paint three times in three passes."""

    def eager(seed, looks):
        for _ in range(3):
            for _ in range(looks):
                yield Look(torch.zeros(1, 3, 8, 8), None, 0.1)
            yield Paint((asked(seed),))

    repairer = Together()
    Passes(repairer, audits).together({0: eager(10, 1), 1: eager(20, 2)})
    assert repairer.passes == [2, 2, 2]


def test_many_views_are_scored_a_few_at_a_time():
    sizes = []

    def watched(images, prompts, noise):
        sizes.append(len(images))
        assert len(prompts) == len(images)
        return audits(images, prompts, noise)

    def looks(count):
        found, _ = yield Look(torch.zeros(count, 3, 8, 8), None, 0.1)
        return len(found)

    assert Passes(Together(), watched).together({k: looks(9) for k in range(4)}) == dict.fromkeys(range(4), 9)
    assert max(sizes) <= LOOK_BATCH and sum(sizes) == 36
