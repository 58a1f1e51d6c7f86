"""Replicas and the ingress, without a cluster: whose policy counts, and what an ingress begun anew remembers."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from PIL import Image

from guardpaint.errors import BadConfig, BadInput
from guardpaint.guard import GuardPaint
from guardpaint.loop.audit_log import AuditLog
from guardpaint.serve.cluster import Cluster, Deployment, Generator, Rule
from guardpaint.serve.jobs import Ask, Facts, Job, Order
from guardpaint.serve.records import Records
from guardpaint.serve.settings import Key, Settings
from guardpaint.serve.worker import Worker
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


def deployment(policy, **more):
    return Deployment(Facts(Ask(2, 3.0, (64, 64)), 4, False, policy, False), policy, **more)


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
        records = Records(log)
        first = Cluster(None, deployment(own, name="x"), Settings(), records)
        assert first.policy == own
        first.change_policy(strict, "olga")
        again = Cluster(None, deployment(own, name="x"), Settings(), records)
        other = Cluster(None, deployment(own, name="y"), Settings(), records)
    assert again.policy == strict and other.policy == own
    assert again.rule.version > first.rule.version
    replica.take(first.rule)
    replica.take(again.rule)
    assert replica.version == again.rule.version


def test_an_ingress_takes_no_policy_its_replicas_cannot(replica):
    own = replica.worker.policy
    ingress = Cluster(None, deployment(own), Settings())
    with pytest.raises(BadConfig, match="started with a policy that blocks"):
        ingress.change_policy(replace(own, last_resort=("keep",)), "olga")
    with pytest.raises(BadConfig, match="the guard knows"):
        ingress.change_policy(replace(own, categories=own.categories[:2]), "olga")
    assert ingress.policy == own


def test_a_replica_draws_an_order_under_its_rule(replica):
    async def replies():
        order = Order("a person", 1, Ask(2, 3.0, (64, 64)), "ann", True, False)
        strict = Rule(replace(replica.worker.policy, trigger=0.005), (7, 0))
        return [reply async for reply in replica.draw(order, strict)]

    told = asyncio.run(replies())
    kinds = [kind for kind, _ in told]
    assert kinds[-1] == "done" and kinds.count("step") == 2 and "audit" in kinds
    assert told[-1][1].report.triggered


class Waits(AlwaysSafe):
    """Sleeps longer than a picture may take."""

    def audit(self, images, prompts, noise):
        time.sleep(1.5)
        return super().audit(images, prompts, noise)


def test_a_replica_that_hangs_is_not_healthy():
    worker = Worker(
        GuardPaint(Waits(), PaintsFlat()), small.pipeline("sd"), CALL, Settings(linger=0.0, picture_timeout=0.5)
    )
    hanging = Generator(lambda name: worker, "a")
    hanging.check_health()
    job = Job("a person", 1, Ask(2, 3.0, (64, 64)), "ann")
    worker.submit([job])
    time.sleep(1.0)
    with pytest.raises(RuntimeError, match="hangs"):
        hanging.check_health()
    job.future.result(60)
    hanging.check_health()
    worker.close()


@pytest.mark.parametrize(
    ("cause", "raised"), [(BadInput("no picture"), BadInput), (RuntimeError("broke"), RuntimeError)]
)
def test_what_a_replica_says_of_an_upload_is_not_called_a_missing_answer(replica, cause, raised):
    """A bad picture would be answered with 503, and a broken auditor would be in no log."""
    exceptions = pytest.importorskip("ray.exceptions", reason="needs the extra `ray`")

    class Handle:
        class audit:
            @staticmethod
            async def remote(*args):
                raise exceptions.RayTaskError("audit", "its traceback", cause).as_instanceof_cause()

    ingress = Cluster(Handle(), deployment(replica.worker.policy), Settings())
    with pytest.raises(raised, match=str(cause)) as found:
        asyncio.run(ingress.audit(Image.new("RGB", (8, 8)), None, Key("ann")))
    assert type(found.value) is raised
