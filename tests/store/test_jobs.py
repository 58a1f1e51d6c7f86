"""Jobs on a cluster: what is asked of Ray, with a double in its place. tests/evaluate/test_run.py runs the real one."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from guardpaint.store.jobs import spread


class FakeRay(ModuleType):
    """Runs the rows of a dataset here and notes what was asked for."""

    def __init__(self, resources):
        super().__init__("ray")
        self.resources, self.asked, self.running = resources, [], False
        self.data = SimpleNamespace(from_items=self.from_items)

    def is_initialized(self):
        return self.running

    def init(self, **options):
        self.running = True

    def cluster_resources(self):
        assert self.running
        return self.resources

    def from_items(self, rows, override_num_blocks):
        self.asked.append(override_num_blocks)
        return SimpleNamespace(map=lambda work, **more: self.mapped(rows, work, more))

    def mapped(self, rows, work, more):
        self.asked.append(more)
        return SimpleNamespace(iter_rows=lambda: map(work, rows))


@pytest.mark.parametrize(
    ("resources", "gpus"), [({"CPU": 8.0, "GPU": 2.0}, 1), ({"CPU": 8.0}, None), ({"GPU": 0.0}, None)]
)
def test_a_job_gets_a_gpu_where_the_cluster_has_any(monkeypatch, resources, gpus):
    ray = FakeRay(resources)
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert list(spread(abs, [-1, -2, 3], ray=True)) == [1, 2, 3]
    assert ray.asked == [3, {"num_gpus": gpus}]
