"""What the docs say is what was measured, and what they name exists."""

from __future__ import annotations

import gzip
import importlib
import json
import re
import sys
from pathlib import Path

import pytest

from guardpaint.store.results import meets, metric

ROOT = Path(__file__).parents[1]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ASSETS = ROOT / "packages" / "paperdolls" / "src" / "paperdolls" / "assets"
RECORDS = ("models.md", "results.md", "LOG.md")
"""Pages that show commands and paths of the time when they were typed."""
RESULTS = sorted((ROOT / "docs" / "results").glob("*.json"))
REQUIRED = {
    "bench": (
        "benign_audit_vs_step benign_audit_fine_vs_step benign_overhead_fraction stock_checker_vs_step "
        "sld_overhead_fraction tournament_all_five_vs_generation tournament_vs_generation tournament_peak_gib "
        "cost_model_explained import_seconds_light"
    ),
    "views": "view_vs_step glance_vs_step "
    + " ".join(
        f"{family}.{side}.{kind}_db"
        for family in ("sd", "sdxl", "sd3", "flux")
        for side in (512, 1024)
        for kind in ("glance", "view", "full")
    ),
    "repairs": (
        "safety.attack_success.change safety.whole.change times.fast.mini-sd times.fast.mini-flux "
        "times.fast.mini-sd3-turbo waves.ended_after_first scaling.few.n7"
    ),
    "redteam": (
        "attempts as_expected leaks.size128 leaks.size192 leaks.size_native soak.requests soak.lost_records "
        "soak.memory_slope_mb_per_1000 fuzz.inputs fuzz.errors_5xx"
    ),
    "benchmarks": "layouts.right layouts.total protocol.stages_ok ppi.coverage seedpairs.auditor.auc_within "
    "judges.open_nsfw.loads attacks.mma.over_random",
    "recipe": (
        "rehearsal.stages_run rehearsal.minutes rehearsal.broken_chain_detected device_truth.stages "
        "device_truth.planted_found auditor_fullsize.seconds_per_step auditor_fullsize.peak_gb "
        "nulltext.per_step_over_single seam.spearman_trained"
    ),
    "dayone": (
        "false_alarm.photos false_alarm.photos_calibrated audit_vs_stock_checker half_precision_families_ok "
        "parts_roundtrip_ok presets.dolls.verified presets.dolls-fast.verified presets.nudity-lite.verified presets.zero-shot.verified"
    ),
}
"""Metrics that readers of a results file count on."""


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


@pytest.mark.parametrize("name", REQUIRED)
def test_results_have_their_required_keys(name):
    metrics = json.loads((ROOT / f"docs/results/{name}.json").read_text())["metrics"]
    assert set(REQUIRED[name].split()) <= metrics.keys()


@pytest.fixture(scope="module")
def bench_modules():
    """The scripts that write the tables, importable the way `python bench/table.py` imports them."""
    sys.path.insert(0, str(ROOT / "bench"))
    yield {name: importlib.import_module(name) for name in ("table", "results_page", "models_page")}
    sys.path.remove(str(ROOT / "bench"))


def test_the_docs_quote_the_results(bench_modules):
    for path, text in bench_modules["table"].pages().items():
        assert path.read_text() == text, f"{path.name}: run python bench/table.py"
    assert bench_modules["results_page"].cost_table() in (ROOT / "docs/performance.md").read_text()


def test_every_results_file_is_on_the_page():
    page = (ROOT / "docs/results.md").read_text() + (ROOT / "docs/performance.md").read_text()
    for path in RESULTS:
        assert f"(results/{path.name})" in page and f"(results/{path.stem}.rows.csv.gz)" in page, path.name


def test_every_goal_that_is_missed_is_said():
    """A column of goals says "not met" as often as its metrics do."""
    metrics = json.loads((ROOT / "docs/results/serve.json").read_text())["metrics"]
    section = (ROOT / "docs/results.md").read_text().split("## Service")[1].split("## ")[0]
    missed = sum(m.get("met") is False for m in metrics.values())
    assert missed and section.count("**not met**") == missed


def test_every_shipped_model_has_a_card_that_fits_a_screen(bench_modules):
    shipped = {p.parent.name for p in ASSETS.glob("*/card.json")}
    assert shipped == set(bench_modules["models_page"].CARDS)
    for name in shipped:
        assert len(bench_modules["models_page"].model_card(name)) <= 20, name


def test_tables_replace_what_lies_between_their_marks(bench_modules):
    with_table = bench_modules["table"].with_table
    page = "a\n<!-- x: written by bench/table.py -->\nold\n<!-- /x -->\nb\n"
    assert with_table(page, "x", "new\n") == page.replace("old", "new")
    assert with_table("no marks", "x", "new\n") == "no marks"


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def anchors(path):
    """The anchors that a Markdown renderer gives the headings of a page."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", [p for p in DOCS if p.name not in RECORDS], ids=lambda p: p.name)
def test_the_files_that_docs_name_exist(path):
    for name in re.findall(r"(?:src/guardpaint|packages/paperdolls|configs|bench|tests)/[\w./-]*\w", path.read_text()):
        assert (ROOT / name).exists(), name


def test_the_tests_that_docs_name_exist():
    """A link whose text is the name of a test leads to the file that holds it; the threat model has one per promise."""
    found = 0
    for path in DOCS:
        for name, target in re.findall(r"\[`(test_\w+)`\]\(([^)\s]+)\)", path.read_text()):
            code = (path.parent / target).read_text()
            assert re.search(rf"^(async )?def {name}\(", code, re.MULTILINE), f"{path.name}: {target} has no {name}"
            found += path.name == "threat-model.md"
    assert found > 30


def test_every_promise_of_the_threat_model_names_a_test():
    page = (ROOT / "docs" / "threat-model.md").read_text()
    promises = page.split("## What is promised")[1].split("## What is not promised")[0]
    for promise in re.split(r"^- ", promises, flags=re.MULTILINE)[1:]:
        assert "[`test_" in promise, promise


def test_the_documentation_stays_short():
    words = {path.name: len(path.read_text().split()) for path in DOCS}
    assert sum(words.values()) <= 38_000, words
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130
    for name, most in (("results.md", 400), ("models.md", 350)):
        assert len((ROOT / "docs" / name).read_text().splitlines()) <= most


def test_metric_goals():
    assert metric(0.03, 5, goal="<=0.04")["met"] and not metric(0.05, 5, goal="<=0.04")["met"]
    assert metric(None, 0, goal=">=1")["met"] is False
    sure = metric(0.1, 5, goal=">0", ci=(0.01, 0.2), sure=True)
    assert sure["met"] and sure["by"] == "interval" and not metric(0.1, 5, goal=">0", sure=True)["met"]
    assert not metric(0.1, 5, goal=">0", ci=(-0.01, 0.2), sure=True)["met"]
    with pytest.raises(ValueError, match="about"):
        meets(1.0, "about 1")
