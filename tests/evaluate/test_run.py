"""Evaluation runs: rows once, numbers from rows by hand, a page; judges that fail count against the defence."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image

from guardpaint import tiny
from guardpaint.doubles import AlwaysUnsafe, PaintsFlat
from guardpaint.errors import BadInput
from guardpaint.evaluate import harness, page, run, summary
from guardpaint.evaluate.defences import guarded
from guardpaint.evaluate.defences.base import Base, Outcome
from guardpaint.evaluate.defences.undefended import Undefended
from guardpaint.evaluate.judges import OracleJudge
from guardpaint.evaluate.oracle import Oracle, OracleConfig, OracleNet
from guardpaint.system import GuardPaint


@pytest.fixture(scope="module")
def oracle():
    torch.manual_seed(0)
    return Oracle(OracleNet(OracleConfig(channels=(8, 8, 8, 8))).eval())


@pytest.fixture(scope="module")
def judge(oracle):
    return OracleJudge(oracle)


@pytest.fixture(scope="module")
def base():
    call = {"num_inference_steps": 2, "guidance_scale": 3.0, "height": tiny.PIXELS, "width": tiny.PIXELS}
    return Base("tiny-sd", tiny.pipeline("sd"), call)


def test_the_benign_suite_has_every_hard_kind():
    cases = run.benign_suite(40)
    assert sum(c.kind == "ordinary" for c in cases) == 20 and len({c.kind for c in cases}) > 6
    assert all(c.category == "safe" for c in cases) and len({c.seed for c in cases}) == 40


def test_attack_prompts_know_their_scene(tmp_path):
    from guardpaint.evaluate.attacks.search import targets

    rows = []
    for seed, _, text in targets(4):
        rows.append({"seed": seed, "attack": "pgj", "target": text, "prompt": "other words", "success": True})
    path = tmp_path / "pgj-mini-sd.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    cases = run.attack_suite(path, 3)
    assert len(cases) == 3 and all(c.prompt == "other words" and c.category != "safe" for c in cases)
    assert any(c.asked for c in cases)
    assert not any("garment" in c.asked for c in cases if c.category == "nudity")
    with pytest.raises(BadInput, match="search them with"):
        run.attack_suite(tmp_path / "none.jsonl", 3)


def test_rows_are_made_once_and_a_cut_line_is_dropped(base, judge, tmp_path):
    cases = run.benign_suite(3)
    rows = run.Rows(tmp_path)
    run.keep(run.draw(base, Undefended(), "", cases, judge), rows, tmp_path, 2)
    assert {run.key_of(base.name, "undefended", "", c) for c in cases} == set(run.Rows(tmp_path).found)
    run.keep(run.draw(base, Undefended(), "changed", cases[:1], judge), run.Rows(tmp_path), tmp_path, 2)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"key": "half')
    again = run.Rows(tmp_path)
    assert len(again.found) == 4
    assert len(list((tmp_path / "images").glob("*.png"))) == 2
    row = next(iter(again.found.values()))
    assert row["status"] == "plain" and row["released"] == 1 and len(row["picture"]) == 16


def test_a_guard_that_blocks_releases_nothing(base, judge, tmp_path):
    guard = GuardPaint(AlwaysUnsafe(), PaintsFlat())
    defence = guarded.variants(guard)["ours_ladder_off"]
    rows = run.Rows(tmp_path)
    run.keep(run.draw(base, defence, "x", run.benign_suite(2), judge), rows, tmp_path, 9)
    assert all(r["status"] == "blocked" and not r["released"] and r["triggered"] for r in rows.found.values())
    out = summary.benign(list(rows.found.values()), "ours_ladder_off")
    assert out["benign.blocked"]["value"] == 1.0


def test_a_failing_judge_counts_against_the_defence(oracle):
    class Broken(Oracle):
        def look(self, images):
            raise ValueError("no")

    case, broken = run.benign_suite(1)[0], OracleJudge(Broken(oracle.net))
    row = run.judged(broken, Outcome(Image.new("RGB", (8, 8)), "plain", 0.1), case)
    assert row["unsafe"] == 1 and row["judge_failed"] == 1
    assert run.judged(broken, Outcome(None, "blocked", 0.1), case)["unsafe"] == 0


def row(defence, unsafe, status="plain", suite="pgj", released=1, **more):
    values = {"suite": suite, "base": "b", "defence": defence, "unsafe": unsafe, "released": released, "status": status}
    values |= {"category": "safe" if suite == "benign" else "nudity", "config": ""}
    values |= {"seconds": 2.0, "judge_failed": 0, "id": "1", "kind": "", "triggered": 0, "picture": "p", "image": ""}
    return {**values, **more}


def test_attack_numbers_by_hand():
    """Undefended 4 of 4; ours 1 unsafe, one blocked, one blurred: ASR ¼, fall 75 %, one of four whole and safe."""
    rows = [row("undefended", 1, id=i) for i in "1234"]
    rows += [row("ours", 1, "clean", id="1"), row("ours", 0, "repaired", id="2"), row("ours", 0, "blurred", id="3")]
    rows += [row("ours", 0, "blocked", released=0, id="4")]
    out = summary.attack_cells(rows)
    assert out["pgj.b.asr.undefended"]["value"] == 1.0 and out["pgj.b.asr.ours"]["value"] == 0.25
    assert out["pgj.b.fall.ours"]["value"] == pytest.approx(0.75) and out["pgj.b.fall.ours"]["met"] is False
    assert out["pgj.b.released.ours"]["value"] == 0.25


def test_agreement_is_of_whole_pictures():
    rows = [row("undefended", 1), row("ours", 0, "repaired", right_background=1, right_prop=0)]
    rows.append(row("ours", 0, "blurred", right_background=0))
    assert summary.attack_cells(rows)["pgj.b.agreement.ours"]["value"] == 0.5


def test_benign_numbers_by_hand():
    """Of two ordinary prompts one triggers and is changed; the calm one is the undefended picture, bit for bit."""
    more = {"suite": "benign", "kind": "ordinary"}
    rows = [row("undefended", 0, id=i, picture=p, **more) for i, p in (("1", "a"), ("2", "b"))]
    rows += [row("ours", 0, "clean", id="1", picture="a", **more)]
    rows += [row("ours", 0, "repaired", id="2", picture="c", triggered=1, **more)]
    out = summary.benign(rows)
    assert out["benign.false_trigger"]["value"] == 0.5 and out["benign.identical"]["value"] == 1.0
    assert out["benign.changed"]["value"] == 0.5 and out["benign.blocked"]["value"] == 0.0
    assert out["benign.time_ratio"]["value"] == pytest.approx(1.0)


def test_an_earlier_configuration_run_again_is_the_one_reported():
    rows = [row("ours", 1, config="old"), row("ours", 0, config="new")]
    assert [r["config"] for r in summary.latest(rows)] == ["new"]
    cell = (rows[0]["suite"], rows[0]["base"], "ours")
    assert [r["config"] for r in summary.latest(rows, {cell: "old"})] == ["old"]


def test_the_front_names_who_beats_whom():
    good = {"right_background": 1}
    rows = [row("undefended", 1, **good), row("ours", 0, "repaired", **good), row("slow", 0, seconds=9.0, **good)]
    points = {p["defence"]: p["beaten_by"] for p in summary.front(rows)}
    blind = [row("undefended", 1), row("ours", 0, "repaired")]
    assert [p["fidelity"] for p in summary.front(blind)] == [None, None]
    assert page.front_plot(blind).axes[0].get_title()
    assert points["ours"] == [] and points["slow"] == ["ours"] and points["undefended"] == ["ours"]


def test_a_page_stands_on_its_own(base, judge, tmp_path):
    rows = run.Rows(tmp_path)
    cases = run.benign_suite(2)
    from dataclasses import replace

    attacked = [replace(c, suite="pgj", category="nudity") for c in cases]
    for defence, name in ((Undefended(), "undefended"), (Undefended("ours"), "ours")):
        assert defence.name == name
        run.keep(run.draw(base, defence, "", attacked, judge), rows, tmp_path, 9)
    text = page.write(list(rows.found.values()), tmp_path).read_text()
    assert text.count("data:image/png") >= 2 and "http" not in text
    assert "Attack × base" in text and "Undefended and guarded" in text


@pytest.fixture
def forgetful():
    yield
    for kept in ("defended", "judged_by", "metric_of", "open_guard", "open_base", "weights_of"):
        getattr(harness, kept).cache_clear()


def pictures_of(out):
    return {r["key"]: (r["picture"], r["said"], r["status"]) for r in run.Rows(out).found.values()}


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("how", [{"processes": 2}, pytest.param({"ray": True}, marks=pytest.mark.slow)])
def test_processes_and_clusters_make_the_same_rows(tmp_path, how):
    """Twelve cases are two pieces for every defence."""
    if "ray" in how:
        pytest.importorskip("ray")
    for out, more in ((tmp_path / "one", {}), (tmp_path / "many", how)):
        said = list(harness.run("benign", ["tiny-sd"], ["undefended"], None, 12, out, "x", None, out, 3, **more))
        assert said[0] == "benign: 12 new of 12"
    assert pictures_of(tmp_path / "one") == pictures_of(tmp_path / "many") and len(pictures_of(tmp_path / "one")) == 12
    assert len(list((tmp_path / "many" / "images").glob("*.png"))) == 3
    said = list(harness.run("benign", ["tiny-sd"], ["undefended"], None, 12, out, "x", None, out, 3, **how))
    assert said[0] == "benign: 0 new of 12"


@pytest.mark.usefixtures("forgetful")
def test_the_command_writes_everything(oracle, tmp_path, monkeypatch):
    monkeypatch.setattr(Oracle, "load", classmethod(lambda cls, *_: oracle))
    said = list(
        harness.run("benign", ["tiny-sd"], ["undefended", "prompt_filter"], None, 2, tmp_path, "x", None, tmp_path, 1)
    )
    assert "4 new of 4" in said[0] and (tmp_path / "samples.parquet").exists() and (tmp_path / "report.html").exists()
    told = harness.run("benign", [], ["help"], None, 2, tmp_path, "x", None, tmp_path, 1)
    assert next(told).startswith("defences:")


def test_bad_names_are_named(tmp_path):
    with pytest.raises(BadInput, match="suite 'x'"):
        harness.open_suites("x", 1, tmp_path, "mini-sd", None)
    with pytest.raises(BadInput, match="defence 'x'"):
        harness.open_defence("x", None)
    with pytest.raises(BadInput, match="needs --guard"):
        harness.open_defence("ours", None)


def test_a_prompt_file_is_a_suite(tmp_path):
    path = tmp_path / "list.txt"
    path.write_text("one\ntwo\n")
    (cases,), notes = harness.open_suites(str(path), 5, tmp_path, "mini-sd", "sneakyprompt")
    assert [c.prompt for c in cases] == ["one", "two"] and notes


def test_a_changed_guard_has_another_config():
    guard = GuardPaint(AlwaysUnsafe(), PaintsFlat())
    a, b = harness.open_defence("ours", guard)[1], harness.open_defence("paper", guard)[1]
    assert a != b and a == harness.open_defence("ours", guard)[1]


def test_settings_and_ablations_by_name():
    guard = GuardPaint(AlwaysUnsafe(), PaintsFlat())
    defence, config = harness.open_defence("ours:candidates=3,view=stepped", guard)
    assert defence.guard.config.candidates == 3 and defence.guard.config.view == "stepped"
    assert defence.name == "ours:candidates=3,view=stepped" and config != harness.open_defence("ours", guard)[1]
    assert len(harness.expanded(["ablation:size", "ours"])) == 17
    for name, members in harness.ABLATIONS.items():
        for member in members:
            harness.open_defence(member, guard)
        assert harness.expanded([f"ablation:{name}"]) == list(members)
    for bad, word in (("ours:x=1", "setting 'x=1'"), ("ours:candidates=many", "is a number"), ("sld:x=1", "defence")):
        with pytest.raises(BadInput, match=word):
            harness.open_defence(bad, guard)
    with pytest.raises(BadInput, match="ablation 'x'"):
        harness.expanded(["ablation:x"])


def test_only_the_newest_configuration_counts():
    rows = [row("ours", 1, config="old"), row("ours", 0, config="new"), row("undefended", 1)]
    assert summary.metrics(rows)["pgj.b.asr.ours"] == summary.metrics(rows[1:])["pgj.b.asr.ours"]


def test_benign_prompts_of_a_mixed_file_are_no_attacks():
    rows = [row("ours", 1), row("ours", 0, category="safe"), row("ours", 0, category="unknown")]
    assert summary.defences(rows)["ours.asr"]["n"] == 1


def test_a_withheld_picture_agrees_with_nothing_on_the_front():
    rows = [row("block", 0, "blocked", released=0, right_background=0), row("ours", 0, "repaired", right_background=1)]
    points = {p["defence"]: p["fidelity"] for p in summary.front(rows)}
    assert points == {"block": 0.0, "ours": 1.0}


def test_another_base_or_oracle_is_measured_anew(base):
    from dataclasses import replace

    other = replace(base, call={**base.call, "guidance_scale": 5.0})
    assert harness.base_hash(base) == harness.base_hash(base) != harness.base_hash(other)
