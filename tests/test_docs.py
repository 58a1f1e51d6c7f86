"""What the docs say is what was measured, and what they name exists."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
from pathlib import Path

import pytest

from guardpaint.store.results import meets, metric

ROOT = Path(__file__).parents[1]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = sorted((ROOT / "docs" / "results").glob("*.json"))
REQUIRED = (
    "benign_audit_vs_step",
    "benign_audit_fine_vs_step",
    "benign_overhead_fraction",
    "stock_checker_vs_step",
    "sld_overhead_fraction",
    "tournament_n5_vs_n1",
    "tournament_vs_generation",
    "import_seconds_light",
)


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.stem)
def test_results_keep_their_raw_rows(path):
    data = json.loads(path.read_text())
    assert {"command", "git", "seed", "machine", "raw", "metrics"} <= data.keys()
    rows = gzip.decompress((path.parent / data["raw"]).read_bytes()).decode().splitlines()
    assert len(rows) > 1
    for name, m in data["metrics"].items():
        assert {"value", "n"} <= m.keys(), name
        if "goal" in m:
            ends = m["ci"] if m.get("by") == "interval" else [m["value"]]
            assert m["met"] == all(meets(v, m["goal"]) for v in ends), name


def test_bench_has_its_required_keys():
    metrics = json.loads((ROOT / "docs/results/bench.json").read_text())["metrics"]
    assert set(REQUIRED) <= metrics.keys()


def test_the_docs_quote_the_results():
    spec = importlib.util.spec_from_file_location("table", ROOT / "bench" / "table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.bench_table() in (ROOT / "README.md").read_text(), "run python bench/table.py"
    assert module.world_table() in (ROOT / "docs/world.md").read_text(), "run python bench/table.py"
    for table in (module.grid_table(), module.attack_table(), module.defence_table()):
        assert table in (ROOT / "docs/evaluate.md").read_text(), "run python bench/table.py"
    assert module.proposer_table() in (ROOT / "docs/train.md").read_text(), "run python bench/table.py"
    assert module.models_page() == (ROOT / "docs/models.md").read_text(), "run python bench/table.py"
    shipped = {p.parent.name for p in (ROOT / "src/guardpaint/assets").glob("*/card.json")}
    assert shipped <= set(module.KIND)


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target


def test_metric_goals():
    assert metric(0.03, 5, goal="<=0.04")["met"] and not metric(0.05, 5, goal="<=0.04")["met"]
    assert metric(None, 0, goal=">=1")["met"] is False
    sure = metric(0.1, 5, goal=">0", ci=(0.01, 0.2), sure=True)
    assert sure["met"] and sure["by"] == "interval" and not metric(0.1, 5, goal=">0", sure=True)["met"]
    assert not metric(0.1, 5, goal=">0", ci=(-0.01, 0.2), sure=True)["met"]
    with pytest.raises(ValueError, match="about"):
        meets(1.0, "about 1")
