"""Fair turns: a key with many pictures makes nobody else wait for more than its own turn."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from services import CALL, KEYS, OTHER, USER, bearer

from guardpaint.guard import GuardPaint
from guardpaint.serve.fairness import FairQueue
from guardpaint.serve.jobs import Ask, Crowded, Job, Overloaded
from guardpaint.serve.settings import Settings
from guardpaint.serve.worker import Worker
from guardpaint.testing import small
from guardpaint.testing.doubles import AlwaysSafe, PaintsFlat


def job(owner, steps=2):
    return Job("a person", 0, Ask(steps, 3.0, (64, 64)), owner)


OWNERS = st.sampled_from("abcd")
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), OWNERS, st.integers(1, 3), st.integers(1, 4)),
        st.just(("take",)),
        st.tuples(st.just("leave"), OWNERS),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(EVENTS, st.integers(1, 4))
def test_nobody_waits_for_more_than_one_turn_of_each_other_key(events, most):
    queue = FairQueue(1000, 1000)
    waiting = {}  # owner → owners of the turns since its oldest picture became the oldest
    everything, drawn, left = [], [], []

    def take():
        oldest = {owner: line[0] for owner, line in queue.lines.items()}
        batch = queue.take(most)
        if not batch:
            return
        leader = batch[0].owner
        assert len(batch) <= most and len({j.ask for j in batch}) == 1 and batch[0] is oldest[leader]
        drawn.extend(batch)
        for owner, turns in list(waiting.items()):
            if oldest.get(owner) in batch:
                del waiting[owner]
            elif owner in oldest:
                turns.append(leader)
                assert len(turns) == len(set(turns)) and owner not in turns, (owner, turns)
        for owner in queue.lines:
            waiting.setdefault(owner, [])

    for event in events:
        if event[0] == "add":
            _, owner, steps, count = event
            jobs = [job(owner, steps) for _ in range(count)]
            queue.add(jobs)
            everything += jobs
            waiting.setdefault(owner, [])
        elif event[0] == "take":
            take()
        else:
            gone = [j for j in everything if j.owner == event[1] and j not in drawn]
            for j in gone:
                j.gone.set()
            left += gone
            waiting.pop(event[1], None)
    while queue:
        take()
    assert {id(j) for j in drawn} == {id(j) for j in everything} - {id(j) for j in left}
    for owner in "abcd":
        for steps in (1, 2, 3):
            order = [everything.index(j) for j in drawn if j.owner == owner and j.ask.steps == steps]
            assert order == sorted(order), "pictures of one key with equal settings keep their order"


def test_a_key_has_a_share_of_the_queue():
    queue = FairQueue(6, 4)
    queue.add([job("a") for _ in range(4)])
    with pytest.raises(Crowded, match="4 of your pictures are waiting already; a key may have 4"):
        queue.add([job("a")])
    queue.add([job("b") for _ in range(2)])
    with pytest.raises(Overloaded, match="6 pictures are waiting") as full:
        queue.add([job("c")])
    assert not isinstance(full.value, Crowded)
    queue.lines["a"][0].gone.set()
    queue.add([job("c")])
    assert len(queue) == 6


def test_the_share_of_a_key():
    assert Settings().share == 32, "one caller has the whole queue"
    assert Settings(keys=KEYS).share == 8 and Settings(keys=KEYS, queue=64).share == 16
    assert Settings(keys=KEYS, per_key=3).share == 3


def test_another_key_does_not_wait_for_a_long_queue():
    """Twelve pictures of one key wait; the first one of another key is next but one."""
    worker = Worker(GuardPaint(AlwaysSafe(), PaintsFlat()), small.pipeline("sd"), CALL, Settings(batch=1, linger=0.0))
    many, late = [job("ann") for _ in range(12)], job("bob")
    worker.submit(many)
    worker.submit([late])
    late.future.result(60)
    assert sum(j.future.done() for j in many) <= 3
    for j in many:
        j.gone.set()
    worker.close()


def test_a_crowded_key_gets_429_and_others_are_served():
    from fastapi.testclient import TestClient
    from services import make

    from guardpaint.serve.app import create_app

    service = make(batch=1, per_key=2, linger=0.0)
    ask = {"prompt": "a person", "n": 3}
    with TestClient(create_app(service)) as test:
        answer = test.post("/v1/images/generations", json=ask, headers=bearer(USER))
        assert answer.status_code == 429 and answer.headers["retry-after"]
        assert answer.json()["error"]["code"] == "too_many_waiting"
        answer = test.post("/v1/images/generations", json={**ask, "n": 2}, headers=bearer(OTHER))
        assert answer.status_code == 200


def test_a_cluster_sends_no_more_than_its_replicas_draw_and_takes_turns():
    import asyncio

    from guardpaint.policy import Policy
    from guardpaint.serve.cluster import Cluster, Deployment
    from guardpaint.serve.jobs import Facts

    sent = []

    class Recording(Cluster):
        async def follow(self, job):
            sent.append(job.owner)
            await asyncio.sleep(0.01)

    async def run():
        facts = Facts(Ask(2, 3.0, (64, 64)), 4, False, Policy.default(), False)
        cluster = Recording(None, Deployment(facts, facts.policy, replicas=2), Settings(batch=1))
        cluster.submit([job("ann") for _ in range(6)])
        await asyncio.sleep(0.005)
        assert len(sent) == 2 and cluster.depth == 6
        cluster.submit([job("bob") for _ in range(2)])
        while cluster.depth:
            await asyncio.sleep(0.01)
        waiting = [job("ann")]
        cluster.closing = False
        cluster.most = 0
        cluster.submit(waiting)
        cluster.close()
        with pytest.raises(Overloaded, match="closing"):
            waiting[0].future.result(0)

    asyncio.run(run())
    assert sent[:2] == ["ann", "ann"] and sorted(sent[2:6]) == ["ann", "ann", "bob", "bob"]
