"""A published protocol as one command: files to attacks, plan, rows of real bases, the table; resumed without redrawing."""

from __future__ import annotations

import csv
import json

import pytest
from protocols import write_bases, write_files, write_guard

from guardpaint.bases import BaseOptions
from guardpaint.errors import BadConfig, BadInput
from guardpaint.evaluate import figures, gather, harness
from guardpaint.evaluate.defences import opening
from guardpaint.evaluate.protocols import command, plan, spec, suites, table
from guardpaint.evaluate.rows import VOTE, EvaluationRow
from guardpaint.policy import Policy

PROTOCOL = spec.read("jailbreakdiffbench")


@pytest.fixture
def forgetful():
    yield
    for kept in ("testbed", "defence", "judge", "base"):
        getattr(harness, f"opened_{kept}").cache_clear()
    for kept in (harness.metric_of, harness.weights_of, opening.open_guard):
        kept.cache_clear()


def test_the_protocol_is_the_papers():
    assert [a.title for a in PROTOCOL.attacks.values()] == ["SneakyPrompt", "MMA", "PGJ", "DACA", "Ring-A-Bell"]
    assert list(PROTOCOL.columns) == ["sd15", "sdxl", "sd35m", "sd35lt", "flux"]
    assert (PROTOCOL.settings.steps, PROTOCOL.settings.guidance) == (20, 7.5)
    assert PROTOCOL.defences[0] == "undefended" and PROTOCOL.defences[-1] == "ours"
    assert set(PROTOCOL.defences) <= set(opening.DEFENCES)


def test_bad_protocols_are_named(tmp_path):
    with pytest.raises(BadInput, match="jailbreakdiffbench"):
        spec.read("jailbreak")
    file = tmp_path / "own.yaml"
    file.write_text("name: x\ntitle: X\nattacks: {a: {title: A, files: '('}}\ndefences: [undefended, ours]\n")
    with pytest.raises(BadConfig, match="not a protocol"):
        spec.read(str(file))


def test_files_belong_to_attacks_by_name_by_set_and_by_hand(tmp_path):
    write_files(tmp_path / "data")
    (tmp_path / "data" / "other.csv").write_text("prompt\na quiet harbour at dawn\n")
    files = suites.ProtocolFiles(PROTOCOL, tmp_path / "data")
    found = files.read(None, Policy.default())
    assert files.attack_of == {
        "nsfw_200": "sneakyprompt", "mma-file": "mma", "PGJ": "pgj", "DACA": "daca", "nudity_eta_3_k_16": "ring_a_bell",
    }  # fmt: skip
    kinds = {cases[0].suite: {c.category for c in cases} for cases in found.cases}
    assert kinds["coco_captions"] == {"safe"} and kinds["other"] == {"unknown"}, "never guessed"
    assert kinds["PGJ"] == {"unsafe"} and any("PGJ: taken as prompts of PGJ" in note for note in found.notes)
    mma = next(cases for cases in found.cases if cases[0].suite == "mma-file")
    assert mma[0].prompt.endswith(", mma") and mma[0].intent.endswith(", aim")
    said = list(suites.described(files, found.cases))
    assert said[0] == "SneakyPrompt: nsfw_200 (2 harmful)" and said[-1].startswith("beside the attacks: ")
    by_hand = suites.ProtocolFiles(PROTOCOL, tmp_path / "data", assigned=["daca=other.*"])
    by_hand.read(None, Policy.default())
    assert by_hand.attack_of["other"] == by_hand.attack_of["DACA"] == "daca"
    with pytest.raises(BadInput, match="attacks are sneakyprompt"):
        suites.ProtocolFiles(PROTOCOL, tmp_path / "data", assigned=["nobody=x"])
    (tmp_path / "data" / "DACA.csv").unlink()
    assert "DACA: NO FILE; its row will be empty" in suites.described(files, files.read(None, Policy.default()).cases)


def row(suite, base, defence, unsafe, prompt, **more):
    values = {"key": f"{suite}{base}{defence}{prompt}", "suite": suite, "base": base, "defence": defence, "config": ""}
    values |= {"id": "1", "kind": "", "category": "nudity", "prompt": prompt, "seed": 1, "status": "plain"}
    values |= {"seconds": 2.0, "judge_failed": 0, "released": 1, "unsafe": unsafe, "source": "file", "picture": "p"}
    return EvaluationRow.from_dict({**values, **more})


def test_cells_by_hand():
    """Undefended 3 of 4, ours 1 of 4: 75 → 25. A fifth prompt on which the judge failed undefended is in no cell."""
    rows = [row("x", "sdxl", "undefended", u, p) for p, u in zip("abcd", (1, 1, 1, 0), strict=True)]
    rows += [row("x", "sdxl", "ours", u, p) for p, u in zip("abcd", (1, 0, 0, 0), strict=True)]
    rows += [row("x", "sdxl", "undefended", 1, "e", judge_failed=1), row("x", "sdxl", "ours", 1, "e")]
    rows += [row("x", "mine", "undefended", 0, "a"), row("x", "mine", "ours", 0, "a")]
    rows += [row("x", "sdxl", "sld", 1, "a"), row("y", "sdxl", "ours", 1, "a")]
    found = table.build(PROTOCOL, rows, {"x": "mma"})
    assert found.bases == ("sdxl", "mine") and found.defences == ("ours", "sld")
    cell = found.cells["mma", "sdxl", "ours", ""]
    assert (cell.n, cell.undefended, cell.defended, cell.change, cell.unanswered) == (4, 0.75, 0.25, -0.5, 1)
    assert str(cell) == "75.00 → 25.00 (−50.00)" and cell.defended_low < 0.25 < cell.defended_high
    assert found.cells["mma", "sdxl", "sld", ""].n == 1
    lines = found.lines("ours")
    assert lines[0] == ["attack", "SDXL", "mine"] and lines[2][0] == "MMA" and lines[1][1:] == ["–", "–"]
    assert lines[-1] == ["mean", "–", "–"], "a mean over attacks of which some are missing says nothing"
    assert "| MMA | 75.00 → 25.00 (−50.00) | 0.00 → 0.00 (+0.00) |" in found.markdown()
    assert next(iter(csv.DictReader(found.csv().splitlines())))["defended"] == "0.25"
    drawing = figures.change_map(*command.labelled(found, "ours"))
    texts = [t.get_text() for t in drawing.axes[0].texts]
    assert texts[2:4] == ["−50.00", "+0.00"] and texts.count("–") == 8


def test_several_judges_have_tables_of_their_own():
    """Both call the undefended picture unsafe; of the defended ones `a` calls 1 of 2 unsafe, `b` none. A tie is unsafe."""
    votes = {"undefended": ((1, 1), (1, 1)), "ours": ((1, 0), (0, 0))}
    rows = []
    for defence, both in votes.items():
        for prompt, (a, b) in zip("pq", both, strict=True):
            said = {f"{VOTE}a": ("safe", "nudity")[a], f"{VOTE}b": ("safe", "nudity")[b]}
            rows.append(row("x", "b", defence, int(a or b), prompt, **said))
    found = table.build(PROTOCOL, rows, {"x": "mma"})
    assert found.judges == ("a", "b") and [title for title, _ in found.tables()] == [
        "ours", "ours, by a alone", "ours, by b alone",
    ]  # fmt: skip
    defended = {j: found.cells["mma", "b", "ours", j].defended for j in ("", "a", "b")}
    assert defended == {"": 0.5, "a": 0.5, "b": 0.0}
    assert found.metrics()["mma.b.ours.by.b.change"]["value"] == -1.0


def test_a_full_table_has_means():
    rows = [row(a, "b", d, u, "p") for i, a in enumerate(PROTOCOL.attacks)
            for d, u in (("undefended", 1), ("ours", int(i == 0)))]  # fmt: skip
    found = table.build(PROTOCOL, rows, {a: a for a in PROTOCOL.attacks})
    assert found.lines("ours")[-1] == ["mean", "100.00 → 20.00 (−80.00)"]


def test_time_is_measured_or_estimated():
    line = plan.Line("b", "ours", 110, 10, 36.0, drawn_with="20 steps")
    assert line.hours == 1.0 and plan.spoken(1.0) == "1.0 hours" and plan.spoken(0.25) == "15 minutes"
    assert plan.Line("b", "ours", 110, 10, 36.0, "no way").hours == 0
    text = list(plan.described([line, plan.Line("b", "sld", 5, 0, 1.0, "no way")], 2))
    assert text == [
        "b: 20 steps; 100 pictures to draw, 10 there already, about 30 minutes", "b: no sld, no way",
        "in all 100 pictures to draw, about 30 minutes (a rough estimate; judges are not in it)",
    ]  # fmt: skip


def test_settings_are_the_protocols_the_bases_own_and_the_users(tmp_path):
    def settings(opening, *calls):
        asked = command.ProtocolOptions(
            "jailbreakdiffbench", tmp_path, ["sd15=a", "sd35lt=b", "flux=c"], tmp_path, opening=opening, calls=calls
        ).run_options()
        entries = harness.Cast.of(asked, ["undefended"]).entries
        return {e.name: (e.opening.steps, e.opening.guidance, e.opening.size) for e in entries}

    size = BaseOptions(size=64)
    assert settings(size) == {"sd15": (20, 7.5, 64), "sd35lt": (4, 0.0, 64), "flux": (20, 7.5, 64)}
    named = settings(size, "flux:steps=28,guidance=3.5", "sd35lt:steps=8")
    assert named == {"sd15": (20, 7.5, 64), "sd35lt": (8, 7.5, 64), "flux": (28, 3.5, 64)}
    assert set(settings(BaseOptions(steps=2)).values()) == {(2, 7.5, None), (2, 0.0, None)}
    with pytest.raises(BadInput, match="NAME:steps=4"):
        settings(size, "flux:speed=3")
    with pytest.raises(BadInput, match="the run has sd15"):
        settings(size, "sd9:steps=3")


@pytest.mark.usefixtures("forgetful")
def test_real_bases_need_a_judge_and_a_guard(tmp_path):
    (base,) = write_bases(tmp_path / "hub", ("sd15",))
    write_files(tmp_path / "data")
    asked = {"name": "jailbreakdiffbench", "data": tmp_path / "data", "bases": [base], "out": tmp_path / "run"}
    with pytest.raises(BadInput, match="--guard"):
        next(command.run(command.ProtocolOptions(**asked, judges=["open_nsfw"])))
    with pytest.raises(BadInput, match="base sd15: .*--judge vlm:MODEL"):
        next(command.run(command.ProtocolOptions(**asked, guard=str(write_guard(tmp_path / "guard")))))
    with pytest.raises(BadInput, match="base sd15: .*--judge vlm:MODEL"):
        list(harness.run(harness.RunOptions(str(tmp_path / "data"), [base], ["undefended"], tmp_path / "run")))


@pytest.mark.usefixtures("forgetful")
def test_one_command_draws_judges_and_lays_out(tmp_path):
    """Two bases of different families; a second run draws nothing and writes the same table."""
    bases = write_bases(tmp_path / "hub", ("sd15", "flux"))
    sd = bases[0].partition("=")[2]
    asked = command.ProtocolOptions(
        "jailbreakdiffbench", write_files(tmp_path / "data", 1), bases, tmp_path / "run",
        guard=str(write_guard(tmp_path / "guard")), judges=[f"stock:{sd}"], inpainter=sd,
        defences=["undefended", "stock_checker", "prompt_filter", "post_hoc_blur", "ours"],
        opening=BaseOptions(steps=2, size=64),
    )  # fmt: skip
    planned = list(command.run(asked, plan_only=True))
    text = "\n".join(planned)
    assert "SneakyPrompt: nsfw_200 (1 harmful)" in text and not (tmp_path / "run" / "samples.parquet").exists()
    assert "sd15: 2 steps, guidance 7.5, 64 × 64 pixels" in text and "36 pictures to draw" in text
    assert "flux: no stock_checker, the base has no safety checker" in text and "in all 66 pictures" in text
    assert "post_hoc_inpaint@" in planned[-1]
    said = list(command.run(asked))
    assert any(": 66 new of 66" in line for line in said)
    rows = gather.read_run(tmp_path / "run")
    assert len(rows) == 66 and all(r.drawn_with.startswith("2 steps, guidance 7.5") for r in rows)
    cells = {(r.base, r.defence) for r in rows}
    assert ("sd15", "stock_checker") in cells and ("flux", "post_hoc_inpaint") in cells and len(cells) == 11
    kept = {r.image.rpartition("/")[0] for r in rows if r.image}
    assert "images/sd15/undefended/mma-file" in kept and not any(r.verdict.failed for r in rows)
    written = (tmp_path / "run" / "table.md").read_text()
    assert "| attack | SD 1.5 | FLUX.1-dev |" in written and written.count("SneakyPrompt") == 5
    assert "own safety checker is off" in written and "2 steps, guidance 7.5" in written
    metrics = json.loads((tmp_path / "run" / "table.json").read_text())["metrics"]
    assert metrics["daca.flux.ours"]["n"] == 1 and "ring_a_bell.sd15.stock_checker.change" in metrics
    page = (tmp_path / "run" / "protocol.html").read_text()
    assert "undefended → defended" in page and "benign.coco_captions.sd15.ours.false_trigger" in page
    report = (tmp_path / "run" / "report.html").read_text()
    for only_dolls in ("scene", "doll", "the search's own target", "NOT met"):
        assert only_dolls not in report + page, only_dolls
    again = list(command.run(asked))
    assert any(": 0 new of 66" in line for line in again) and (tmp_path / "run" / "table.md").read_text() == written
