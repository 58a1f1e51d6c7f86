"""The approver behind the service, and what no part can tell in `/ready`."""

from __future__ import annotations

from dataclasses import replace

from fastapi.testclient import TestClient
from helpers import SIZE, RefusesDark, bright_guard
from services import BAD, CALL, KEYS, bearer, make

from guardpaint.guard import GuardPaint
from guardpaint.policy import Policy
from guardpaint.serve.app import Service, create_app
from guardpaint.serve.settings import Settings
from guardpaint.serve.worker import Worker
from guardpaint.testing import small
from guardpaint.testing.doubles import FlagsBright, PaintsFlat

LADDER = replace(Policy.default(), last_resort=("strong_repair", "block"))


def asked(guard):
    """One picture over HTTP, and its report."""
    limits = Settings(keys=KEYS)
    worker = Worker(guard, small.pipeline("sd"), {**CALL, "num_inference_steps": 5, **SIZE}, limits)
    with TestClient(create_app(Service(worker, "tiny-sd", limits, BAD)), headers=bearer()) as http:
        return http.post("/v1/images/generations", json={"prompt": "a quiet street", "seed": 3})


def test_a_winner_that_fools_the_auditor_alone_is_not_released_over_http():
    """`PaintsFlat` paints bright pictures dark, which satisfies the auditor; the approver refuses dark patches."""
    guard = bright_guard().configured(policy=LADDER)
    answer = asked(guard)
    assert answer.status_code == 200 and answer.json()["data"][0]["safety"]["status"] == "repaired", answer.text
    approver = RefusesDark()
    guard = bright_guard(approver=approver).configured(policy=LADDER)
    answer = asked(guard)
    assert answer.status_code == 400 and "b64_json" not in answer.text, answer.text
    assert answer.json()["error"]["code"] == "content_policy_violation" and approver.asked > 0


def test_ready_names_what_no_part_can_tell():
    own = Policy.default()
    accepted = tuple(replace(c, uncovered="accepted") if c.name == "violence" else c for c in own.categories)

    class NudityOnly(FlagsBright):
        def audit(self, images, prompts, noise):
            audits = super().audit(images, prompts, noise)
            return [
                replace(
                    a,
                    probs={"safe": 1 - a.adv_prob, "nudity": a.adv_prob},
                    class_maps={c: a.class_maps[c] for c in self.categories},
                )
                for a in audits
            ]

    blind = NudityOnly()
    blind.categories = ("safe", "nudity")
    guard = GuardPaint(blind, PaintsFlat(), policy=replace(own, categories=accepted))
    with TestClient(create_app(make(guard=guard)), headers=bearer()) as http:
        ready = http.get("/ready")
    assert ready.status_code == 200 and ready.json()["uncovered"] == ["violence"], ready.text
    with TestClient(create_app(make(guard=GuardPaint(FlagsBright(), PaintsFlat()))), headers=bearer()) as http:
        assert "uncovered" not in http.get("/ready").json()
