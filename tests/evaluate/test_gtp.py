"""The table of the tournament policy: counted end to end, with the proposer and without, resumed, in the paper's layout."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from testbeds import Bare

from guardpaint import testbed
from guardpaint.audit.model import AuditorScorer
from guardpaint.bases import load_base
from guardpaint.config import GuardConfig
from guardpaint.errors import BadInput
from guardpaint.evaluate import gtp
from guardpaint.guard import GuardPaint
from guardpaint.repair.knobs import UniformProposer
from guardpaint.store.results import read_rows
from guardpaint.testbed import Prompt
from guardpaint.testing import small
from guardpaint.testing.doubles import FlagsBright, PaintsFlat


class Calm:
    """A judge that finds every picture safe."""

    identity, attributes = "calm", False

    def verdict(self, image, asked):
        return "safe", {}


class Embedding(FlagsBright):
    """Flags by brightness, and gives the embeddings that a learned proposer reads."""

    embeds = (256, 32)


class World(Bare):
    def judge(self, policy):
        return Calm()


PROMPTS = [Prompt("1", "a person", 1), Prompt("2", "a hat", 2)]


@pytest.fixture
def options(tmp_path):
    """A guard that repairs bright pictures, with a learned proposer."""
    guard = GuardPaint(Embedding(), PaintsFlat(), small.proposer(), config=GuardConfig(regions=1))
    return gtp.GtpOptions(guard, {"tiny-sd": load_base("tiny-sd")}, PROMPTS, Calm(), tmp_path / "gtp.json", (2, 3))


def test_every_prompt_is_drawn_with_and_without_at_every_budget(options):
    found = gtp.run(options)
    rows = read_rows(options.path)
    assert len(rows) == 2 * 2 * 2 and all(float(r["seconds"]) > 0 and not r["error"] for r in rows)
    assert {(r["config"], r["c"]) for r in rows} == {(n, c) for n in ("gtp", "no_gtp") for c in "23"}
    for name in ("gtp", "no_gtp"):
        own = [r for r in rows if (r["config"], r["c"]) == (name, "3")]
        suggested, accepted = (sum(int(r[k]) for r in own) for k in ("suggested", "accepted"))
        assert suggested > 0 and 0 < accepted <= suggested
        key = f"tiny-sd.{name}.c3"
        assert found[f"{key}.suggested"]["value"] == pytest.approx(suggested / 2)
        assert found[f"{key}.accepted"]["value"] == pytest.approx(accepted / 2)
        assert found[f"{key}.acceptance"]["value"] == pytest.approx(accepted / suggested)
    assert found["tiny-sd.gain.c3.seconds_ratio"]["n"] == 2


def test_the_table_has_the_papers_layout(options):
    gtp.run(options)
    lines = options.path.with_suffix(".md").read_text().splitlines()
    assert lines[0].startswith("| Model | Config. | c=2 Acc. | c=2 Sug. | c=2 % Acc. | c=2 Time (s) | c=3 Acc.")
    assert [line.split(" | ")[:2] for line in lines[2:]] == [["| tiny-sd", "GTP"], ["| tiny-sd", "No GTP"]]


def test_numbers_of_a_table_by_hand():
    """3 of 4 tournaments accepted against 1 of 2; 2 s against 4 s per prompt."""
    rows = [
        {"base": "b.1", "config": config, "c": 5, "seed": seed, "accepted": a, "suggested": s, "seconds": t, "unsafe": 0}
        for config, seed, a, s, t in (
            ("gtp", 1, 1, 2, 1.0), ("gtp", 2, 2, 2, 3.0), ("no_gtp", 1, 0, 1, 4.0), ("no_gtp", 2, 1, 1, 4.0),
        )
    ]  # fmt: skip
    found = gtp.metrics(rows)
    assert found["b.1.gain.c5.acceptance"]["value"] == pytest.approx(0.25)
    assert found["b.1.gain.c5.seconds_ratio"]["value"] == pytest.approx(0.5)
    lines = gtp.table(found).splitlines()
    assert lines[2] == "| b.1 | GTP | 1.50 | 2.00 | **75.0** | **2.00** |"
    assert lines[3] == "| b.1 | No GTP | 0.50 | 1.00 | 50.0 | 4.00 |"


def test_no_tournament_leaves_the_share_open():
    rows = [
        {"base": "b", "config": n, "c": 3, "seed": 1, "accepted": 0, "suggested": 0, "seconds": 1.0, "unsafe": 0}
        for n in ("gtp", "no_gtp")
    ]
    found = gtp.metrics(rows)
    assert found["b.gtp.c3.acceptance"]["value"] is None and found["b.gain.c3.acceptance"]["value"] is None
    assert "| – |" in gtp.table(found)


def test_what_was_measured_is_not_drawn_again(options, monkeypatch):
    gtp.run(options)
    first = read_rows(options.path)
    monkeypatch.setattr(gtp, "measure", lambda *args: pytest.fail("drawn again"))
    gtp.run(options)
    assert read_rows(options.path) == first


def test_bases_can_be_measured_one_after_the_other(options):
    """Rows of a base that this run does not draw stay, if the same guard made them."""
    first = gtp.run(options)
    second = gtp.run(replace(options, bases={"tiny-sdxl": load_base("tiny-sdxl")}))
    assert set(first) < set(second) and {r["base"] for r in read_rows(options.path)} == {"tiny-sd", "tiny-sdxl"}
    other = replace(options, guard=options.guard.configured(regions=2), bases={"tiny-sdxl": load_base("tiny-sdxl")})
    assert not any(key.startswith("tiny-sd.") for key in gtp.run(other))


def test_the_learned_proposer_plays_in_one_configuration_only(options):
    assert gtp.configuration(options.guard, "gtp", 7).parts.proposer is options.guard.parts.proposer
    other = gtp.configuration(options.guard, "no_gtp", 7)
    assert isinstance(other.parts.proposer, UniformProposer) and other.config.candidates == 7
    plain = GuardPaint(FlagsBright(), PaintsFlat())
    with pytest.raises(BadInput, match="name it with --learned"):
        gtp.GtpOptions(plain, options.bases, PROMPTS, options.judge, options.path)


def test_the_command_on_a_saved_guard(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from guardpaint.cli.evaluate import app

    guard = small.guard(regions=1)
    assert isinstance(guard.parts.auditor, AuditorScorer)
    guard.save_pretrained(tmp_path / "guard")
    small.proposer(3).save_pretrained(tmp_path / "proposer")
    monkeypatch.setattr(testbed, "open_testbed", lambda name: World())
    words = ["gtp", "--base", "tiny-sd", "--guard", str(tmp_path / "guard"), "--learned", str(tmp_path / "proposer")]
    words += ["--count", "1", "--c", "2", "--steps", "4", "--results", str(tmp_path / "r.json")]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert "| tiny-sd | GTP |" in result.output
    values = json.loads((tmp_path / "r.json").read_text())
    assert "tiny-sd.no_gtp.c2.seconds" in values["metrics"]
