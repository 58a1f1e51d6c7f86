"""The report page: every part of the story, and reports of both versions."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

from guardpaint.loop.evidence import Evidence
from guardpaint.loop.report_page import render

SETTINGS = {"trigger": 0.4, "mode": "<enforce>", "skipped": [{"what": "guard", "why": "one <reason>"}]}
GATES = [
    {"name": "S", "value": 0.9, "need": 0.5, "passed": True},
    {"name": "F", "value": 0.1, "need": None, "passed": 0},
]
KNOBS = {"cfg": 3.0, "dilation": 0.1, "feather": 0.2, "jitter": 0.3, "depth": 4, "seed_offset": 5}
SCORES = {"S": 0.9, "F": 0.8, "P": 0.7, "B": 0.6, "Q": 0.5}


def step(number=2, winner=0):
    audit = {"pixels": 224, "decoder": "tiny", "scores": {**SCORES, "adv_prob": 0.5, "F": None}, "reason": "nudity"}
    candidates = [
        {"knobs": KNOBS, "scores": SCORES, "gates": GATES, "utility": 0.25},
        {"knobs": KNOBS, "scores": {}, "gates": [], "utility": 0.0},
    ]
    tournament = {
        "region": "a", "category": "nudity", "coverage": 0.125, "candidates": candidates, "winner": winner,
    }  # fmt: skip
    return {
        "step": number, "steps": 5, "progress": 0.5, "noise": 0.25, "view": "estimate", "audits": [audit],
        "tournaments": [tournament], "reinsertion": {"rule": "anchor"}, "notes": ["a note"], "timings": {"audit": 0.5},
    }  # fmt: skip


def report(**values):
    return {
        "request_id": "0123456789abcdef", "image": 0, "status": "repaired", "mode": "enforce", "pipeline": "P",
        "family": "sd", "seed": 1, "prompt": None, "prompt_sha256": "f" * 64, "seconds": 1.5, "errors": [],
        "steps": [step()], "effective_settings": SETTINGS,
        "final": {"verdict": "benign", "ladder": [{"rung": "repair", "outcome": "ok"}]}, **values,
    }  # fmt: skip


def evidence(blurred=False):
    picture = Image.new("RGB", (300, 300), "white")
    kinds = (("view", 0), ("control", 0), ("why nudity", 0), ("candidate 0", 0))
    return [Evidence(2, kind, index, picture, blurred, torch.rand(8, 8)) for kind, index in kinds]


def test_the_page_shows_every_part():
    page = render(report(), evidence())
    for text in (
        "GuardPaint report · 0123456789ab · image 0", "sha256 ffffffffffffffff…", "trigger 0.40", "224 px, tiny",
        "Step 3 of 5 · progress 0.50 · noise 0.250 · view estimate", "Grad-CAM, nudity", "heat map", "u = 0.2500",
        "Region a · nudity · 12.5 % of the view · candidate 1 wins", "1 ★", "left out after its preview",
        '<span class="gate passed">S 0.900/0.500</span>', '<span class="gate failed">F 0.100/–</span>',
        "Reinserted by <b>anchor</b>.", "a note", "audit 0.500 s", "<h2>Final verdict: benign</h2>", "repair: ok",
        "<h2>Effective settings</h2>", "guard: one &lt;reason&gt;", "&lt;enforce&gt;",
    ):  # fmt: skip
        assert text in page, text
    assert page.count('class="won"') == 1 and "<script" not in page and "http" not in page
    assert "Pictures are blurred" not in page and "Pictures are blurred" in render(report(), evidence(blurred=True))


def test_a_report_of_version_1_renders_the_same():
    old = report()
    old["posture"] = old.pop("effective_settings")
    assert render(old) == render(report())


@pytest.mark.parametrize(("winner", "text"), [(None, "the control stays"), (1, "candidate 2 wins")])
def test_the_winner_is_named(winner, text):
    assert text in render(report(steps=[step(winner=winner)]))


def test_two_records_of_one_step_show_its_pictures_once():
    page = render(report(steps=[step(), step()]), evidence())
    assert page.count("<figcaption>control</figcaption>") == 1


def test_nothing_audited_is_said():
    page = render(report(steps=[], prompt="a <b>hat</b>", errors=["<wrong>"]))
    assert "No step was audited." in page and "a &lt;b&gt;hat" in page and "&lt;wrong&gt;" in page
