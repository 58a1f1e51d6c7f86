"""Replicas and the ingress, without a cluster: whose policy counts, and what an ingress begun anew remembers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from guardpaint.errors import BadConfig
from guardpaint.guard import GuardPaint
from guardpaint.loop.audit_log import AuditLog
from guardpaint.serve.cluster import Cluster, Facts, Generator, Rule
from guardpaint.serve.settings import Settings
from guardpaint.serve.worker import Ask, Worker
from guardpaint.testing import small
from guardpaint.testing.doubles import AlwaysSafe, PaintsFlat

CALL = {"num_inference_steps": 2, "height": small.PIXELS, "width": small.PIXELS}


@pytest.fixture
def replica():
    made = Generator(
        lambda name: Worker(GuardPaint(AlwaysSafe(), PaintsFlat()), small.pipeline("sd"), CALL, Settings()), "a"
    )
    yield made
    made.worker.close()


def facts(policy, **more):
    return Facts(Ask(2, 3.0, (64, 64)), 4, False, policy, False, **more)


def test_the_later_rule_counts(replica):
    own = replica.worker.policy
    strict, stricter = replace(own, trigger=0.2), replace(own, trigger=0.1)
    replica.take(Rule(strict, (5, 0)))
    replica.take(Rule(stricter, (5, 1)))
    replica.take(Rule(strict, (5, 0)))
    assert replica.worker.policy.trigger == 0.1
    replica.take(Rule(own, (6, 0)))
    assert replica.worker.policy == own


def test_an_ingress_begun_anew_finds_its_policy_again(replica, tmp_path):
    own = replica.worker.policy
    strict = replace(own, trigger=0.2)
    with AuditLog(tmp_path / "log") as log:
        first = Cluster(None, facts(own, deployment="x"), Settings(), log)
        assert first.policy == own
        first.change_policy(strict, "olga")
        again = Cluster(None, facts(own, deployment="x"), Settings(), log)
        other = Cluster(None, facts(own, deployment="y"), Settings(), log)
    assert again.policy == strict and other.policy == own
    assert again.rule.version > first.rule.version
    replica.take(first.rule)
    replica.take(again.rule)
    assert replica.version == again.rule.version


def test_an_ingress_takes_no_policy_its_replicas_cannot(replica):
    own = replica.worker.policy
    ingress = Cluster(None, facts(own), Settings())
    with pytest.raises(BadConfig, match="started with a policy that blocks"):
        ingress.change_policy(replace(own, last_resort=("keep",)), "olga")
    with pytest.raises(BadConfig, match="the guard knows"):
        ingress.change_policy(replace(own, categories=own.categories[:2]), "olga")
    assert ingress.policy == own
