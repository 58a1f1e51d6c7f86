"""bench/benchmarks.py: its parts exist, and each keeps what the others wrote."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from guardpaint.errors import BadInput
from guardpaint.store.results import metric, read_rows


BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture
def bench(monkeypatch):
    """Imports a script the way `python bench/benchmarks.py` does."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module


def test_every_part_can_be_found(bench):
    script = bench("benchmarks")
    for part in script.PARTS:
        assert callable(script.function(part))


def test_parts_keep_each_other(bench, tmp_path):
    results, out = bench("benchmarks_results"), tmp_path / "benchmarks.json"
    results.write("one", results.Measured({"one.a": metric(1, 1), "one.b": metric(2, 1)}, [{"x": 1}]), out)
    results.write("two", results.Measured({"two.a": metric(3, 1)}, [{"y": 5}, {"y": 6}]), out)
    results.write("one", results.Measured({"one.a": metric(4, 1)}, [{"x": 7}]), out)
    stored = json.loads(out.read_text())["metrics"]
    assert {name: m["value"] for name, m in stored.items()} == {"one.a": 4, "two.a": 3}
    assert [(r["part"], r["x"], r["y"]) for r in read_rows(out)] == [("one", "7", ""), ("two", "", "5"), ("two", "", "6")]
    with pytest.raises(BadInput, match=r"metric 'two.b': the metrics of this part are named one.NAME"):
        results.write("one", results.Measured({"two.b": metric(1, 1)}, []), out)
