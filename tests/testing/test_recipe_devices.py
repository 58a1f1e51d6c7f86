"""The numbers of device truth: what a test report says becomes rows, and other numbers of the file stay."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from guardpaint.store.checkpoint import read_json
from guardpaint.store.results import read_rows, write_results

REPORT = """<testsuites><testsuite>
<testcase classname="tests.testing.test_other_device" name="test_planted_leak_is_found[concatenating]" time="0.1"/>
<testcase classname="tests.train.test_other_device_training" name="test_stage_views[sd]" time="2.0"/>
<testcase classname="tests.train.test_other_device_training" name="test_stage_auditor" time="3.0"><failure/></testcase>
<testcase classname="tests.train.test_other_device_training" name="test_something_else" time="9.0"/>
</testsuite></testsuites>"""


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    import recipe_devices

    yield recipe_devices
    sys.modules.pop("recipe_devices")


def test_a_report_becomes_rows_and_numbers(bench):
    rows = bench.rows_of(ElementTree.ElementTree(ElementTree.fromstring(REPORT)))
    assert [(r["kind"], r["name"], r["passed"]) for r in rows] == [
        ("leak", "concatenating", 1), ("stage", "training: views sd", 1), ("stage", "training: auditor", 0),
    ]  # fmt: skip
    found = bench.metrics(rows)
    assert found["device_truth.stages"]["value"] == 1 and not found["device_truth.stages"]["met"]
    assert not found["device_truth.planted_found"]["met"], "ten leaks are asked for"
    assert found["device_truth.seconds"]["value"] == 5.1


def test_numbers_of_other_scripts_stay(bench, tmp_path):
    out = tmp_path / "recipe.json"
    before = {"rehearsal.minutes": {"value": 3, "n": 1}, "device_truth.old": {"value": 1, "n": 1}}
    write_results(out, before, [{"part": "rehearsal", "stage": "split"}, {"part": "device_truth", "name": "x"}], 0)
    rows = bench.rows_of(ElementTree.ElementTree(ElementTree.fromstring(REPORT)))
    write_results(out, *bench.merged(bench.metrics(rows), rows, out), seed=0)
    found = read_json(out)["metrics"]
    assert found["rehearsal.minutes"]["value"] == 3 and "device_truth.old" not in found
    kept = read_rows(out)
    assert [r["part"] for r in kept].count("device_truth") == 3 and kept[0]["stage"] == "split"


def test_every_file_of_stages_is_run(bench):
    names = [Path(f).name for f in bench.files()]
    assert "test_other_device.py" in names and len(names) == len(set(names)) >= 6
