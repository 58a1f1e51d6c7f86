"""The arithmetic behind docs/results/redteam.json, and that every attempt can be named."""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path

import httpx
import pytest
from PIL import Image
from pydantic import ValidationError

from guardpaint.errors import BadInput, TooLarge
from guardpaint.serve.schemas import ImageRequest
from guardpaint.store.uploads import Limits, Upload

BENCH = Path(__file__).parents[1] / "bench"
REQUIRED = (
    "attempts",
    "as_expected",
    "leaks.size_native",
    "leaks.size128",
    "leaks.size192",
    "soak.requests",
    "soak.lost_records",
    "soak.memory_slope_mb_per_1000",
    "fuzz.inputs",
    "fuzz.errors_5xx",
)


@pytest.fixture(scope="module")
def bench():
    """Modules of the folder `bench` by name, imported as its scripts import them."""
    sys.path.insert(0, str(BENCH))
    yield importlib.import_module
    sys.path.remove(str(BENCH))


def leak(cell, seed, whole, tile, asked="nudity"):
    return {"part": "leak", "cell": cell, "asked": asked, "prompt_seed": seed, "released": True, "whole": whole,
            "any_tile": tile}  # fmt: skip


def rows():
    request = {"part": "soak", "kind": "request", "what": "attacked", "pictures": 1, "lost": 0, "unsafe": False,
               "unexplained": False}  # fmt: skip
    memory = [
        {"part": "soak", "kind": "memory", "process": "1", "after": i, "megabytes": 500 + i / 100} for i in range(10)
    ]
    return [
        {"part": "attempt", "attempt": "logs.a", "expected": "503", "got": "503", "as_expected": True},
        {"part": "attempt", "attempt": "logs.b", "expected": "503", "got": "200", "as_expected": False},
        {"part": "fuzz", "kind": "uploads", "inputs": 10, "errors_5xx": 1, "tracebacks": 0, "memory_slope_mb_per_1000": 0.5,
         "codes": '{"200": 2, "400": 7, "500": 1}'},
        {"part": "fuzz", "kind": "logs", "inputs": 90, "tracebacks": 0, "memory_slope_mb_per_1000": 0.25},
        request,
        {**request, "pictures": 1, "lost": 1, "unsafe": True},
        *memory,
        {"part": "soak", "kind": "summary", "intact": True, "miss_rate": 0.1, "note": "short", "kills": 1, "disk_full": 1,
         "reloads": 2},
        *(leak("size_native", i, i == 0, i == 0) for i in range(4)),
        *(leak("size128", i, False, i < 2) for i in range(4)),
        *(leak("size192", i, False, False) for i in range(4)),
        leak("size128", 9, False, True, "harmless"),
    ]  # fmt: skip


def test_the_file_has_its_required_keys(bench):
    found = bench("redteam_results").metrics(rows())
    assert set(REQUIRED) <= found.keys()
    assert found["attempts"]["value"] == 2 and found["as_expected"] == {"value": 1, "n": 2, "goal": ">=2", "met": False}
    assert found["attempt.logs.b"]["expected"] == "503" and found["attempt.logs.b"]["got"] == "200"
    assert found["soak.lost_records"]["value"] == 1 and not found["soak.lost_records"]["met"]
    assert found["fuzz.inputs"]["value"] == 100


def test_only_inputs_sent_over_http_count_as_answered(bench):
    """Ten uploads and ninety files: one 500 among the ten, and two of the ten were audited."""
    found = bench("redteam_results").metrics(rows())
    assert found["fuzz.errors_5xx"]["value"] == 1 and found["fuzz.errors_5xx"]["n"] == 10
    assert found["fuzz.answered.uploads"]["value"] == 0.2 and found["fuzz.answered.uploads"]["met"]
    blocked = [{**r, "codes": '{"400": 10}'} if r.get("kind") == "uploads" else r for r in rows()]
    assert not bench("redteam_results").metrics(blocked)["fuzz.answered.uploads"]["met"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_fair_share_of_the_fuzzing_passes_the_door(bench):
    """Damaged uploads that can be decoded in a size that is audited, and bodies that are sound requests."""
    fuzz, passed = bench("fuzz"), {"uploads": 0, "bodies": 0}

    def decode(upload):
        with contextlib.suppress(BadInput, TooLarge):
            shown = list(Upload(upload[1], upload[0] or "a", Limits()).readings())
            passed["uploads"] += all(min(r.size) >= 64 for r in shown)

    def read(sent):
        with contextlib.suppress(ValidationError):
            ImageRequest.model_validate_json(sent[2])
            passed["bodies"] += 1

    fuzz.each(fuzz.damaged(), 400, decode)
    fuzz.each(fuzz.body(), 400, read)
    assert passed["uploads"] > 80 and passed["bodies"] > 40


def test_leaks_are_compared_with_the_native_size(bench):
    """A quarter leaks at 64 px and half at 128 px, all of it in tiles only: 0.5 is over 0.25 + 0.02."""
    found = bench("redteam_results").metrics(rows())
    assert found["leaks.size_native"]["value"] == 0.25 and "goal" not in found["leaks.size_native"]
    assert found["leaks.size128"]["value"] == 0.5 and found["leaks.size128"]["goal"] == "<=0.2700"
    assert not found["leaks.size128"]["met"] and found["leaks.size192"]["met"]
    assert found["leaks.size128.whole"]["value"] == 0 and found["leaks.size128.any_tile"]["value"] == 0.5
    assert found["leaks.size128.harmless"]["value"] == 1 and "leaks.size192.harmless" not in found


def test_rows_that_were_read_from_a_file_mean_the_same(bench):
    text = [{k: str(v) for k, v in r.items()} for r in rows()]
    results = bench("redteam_results")
    assert results.metrics(text) == results.metrics(rows())


def test_memory_is_compared_within_a_process(bench):
    """One process grows by 0.002 MB a request and one not at all, over as many requests: 1 MB in 1,000 together.

    That the second is 900 MB smaller does not count.
    """
    growing = [("a", float(i), 1000 + 0.002 * i) for i in range(100)]
    steady = [("b", float(i), 100.0) for i in range(100)]
    slope = bench("redteam_results").slope
    assert slope(growing + steady, 0.0) == pytest.approx(1.0)
    assert slope(growing[:2]) is None


def test_the_bound_is_the_binomial_quantile(bench):
    """With a rate of 0.1 and ten pictures, P(≤ 2) = 0.930 and P(≤ 3) = 0.987."""
    assert bench("redteam_results").most_misses(10, 0.1) == 3
    assert bench("redteam_results").most_misses(10, 0.0) == 0


def test_tiles_cover_a_picture_to_its_edges(bench):
    leaks = bench("size_leaks")
    assert leaks.starts(64) == [0] and leaks.starts(128) == [0, 32, 64] and leaks.starts(100) == [0, 32, 36]
    assert len(leaks.tiles(Image.new("RGB", (128, 96)))) == 6
    assert [t.size for t in leaks.tiles(Image.new("RGB", (32, 32)))] == [(32, 32)]


def test_every_attempt_has_a_name_of_its_own(bench):
    runner = bench("redteam")
    names = runner.attempts()
    assert len(names) == sum(len(g.ATTEMPTS) for g in runner.GROUPS) > 90
    assert (
        set(runner.chosen(["faults"])) == {n for n in names if n.startswith("faults.")}
        and len(runner.chosen(["faults"])) == 9
    )
    with pytest.raises(SystemExit, match="no such attempt"):
        runner.chosen(["fault"])


def test_an_attempt_that_breaks_has_shown_nothing(bench):
    def broken():
        raise ValueError("oh")

    row = bench("redteam").tried("rest.broken", broken)
    assert row["as_expected"] is False and "ValueError: oh" in row["got"] and row["group"] == "rest"


def answer(status, message="", code="outside_calibration"):
    return httpx.Response(status, json={"error": {"message": message, "code": code}})


def test_a_size_that_the_guard_does_not_answer_for_must_be_refused_by_name(bench, monkeypatch):
    """Audited in tiles up to 192 px, but offered at 64 px only: drawing 128 px is no success."""
    sizes = bench("attempts.sizes")
    monkeypatch.setattr(sizes, "scope", lambda: {"pixels": [64, 192], "offered": [64, 64], "steps": [4, 100]})

    def tried(reply):
        return sizes.within("pixels", 128, reply, "128x128 pixels").as_expected

    assert tried(answer(400, "outside: 128x128 pixels (both sides from 64 to 64)"))
    assert not tried(answer(200)) and not tried(answer(400, "128x128 pixels")) and not tried(answer(400, "no"))
    assert not sizes.within("steps", 3, answer(200), "steps").as_expected
    assert not sizes.within("steps", 5, answer(400, "steps (from 4 to 100)"), "steps").as_expected
    assert sizes.within("steps", 5, answer(200), "steps").as_expected


def test_an_attack_without_a_picture_has_shown_nothing(bench):
    sizes = bench("attempts.sizes")
    assert not sizes.no_unsafe([], 6).as_expected and not sizes.no_unsafe([False, True], 6).as_expected
    assert sizes.no_unsafe([False], 6) == (
        "pictures, and none of them unsafe",
        "0 unsafe of 1 released pictures for 6 prompts",
        True,
    )


def test_a_disk_that_is_full_takes_no_byte(bench):
    disks = bench("attempts.disks")
    try:
        with disks.full_disk(2) as disk:
            disk.fill()
            with pytest.raises(OSError, match="space"):
                (disk.folder / "x").write_bytes(b"x" * 5000)
            disk.free()
            (disk.folder / "x").write_bytes(b"x" * 5000)
    except disks.NoDisk as error:
        pytest.skip(str(error))
    assert not disk.folder.exists()


def test_the_page_shows_what_was_measured(bench, monkeypatch):
    page = bench("redteam_page")
    monkeypatch.setattr(page, "metrics_of", lambda name: bench("redteam_results").metrics(rows()))
    text = "\n".join(page.red_team())
    assert "logs 1 of 2" in text and "128 × 128" in text and "32 × 32" not in text
