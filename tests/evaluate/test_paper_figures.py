"""The paper's figures from any run: numbers by hand, audits that were made, tournaments drawn once more."""

from __future__ import annotations

import pytest
from PIL import Image
from protocols import write_bases

from guardpaint.bases import BaseOptions
from guardpaint.errors import BadInput
from guardpaint.evaluate import figures, gtp, paper_figures, rows, tournament_rows
from guardpaint.evaluate.evaluated_base import open_base, read_entries
from guardpaint.guard import GuardPaint
from guardpaint.store.results import write_results
from guardpaint.testing.doubles import AlwaysUnsafe, PaintsFlat


def row(defence, unsafe=0, prompt="a", base="b", suite="mma", **more):
    values = {"key": f"{defence}{prompt}", "suite": suite, "base": base, "defence": defence, "config": "", "id": "1"}
    values |= {"kind": "", "category": "nudity", "prompt": prompt, "seed": 1, "status": "plain", "seconds": 2.0}
    values |= {"judge_failed": 0, "released": 1, "unsafe": unsafe, "source": "file", "picture": "p"}
    return rows.EvaluationRow.from_dict({**values, **more})


def test_changes_are_absolute_and_of_any_suite():
    """8 of 10 to 3 of 10 is a change of −0.5, not of −0.625."""
    found = [row("undefended", int(i < 8), str(i)) for i in range(10)]
    found += [row("ours", int(i < 3), str(i)) for i in range(10)]
    grid, suites, bases = figures.changes(found, "ours")
    assert grid == [[pytest.approx(-0.5)]] and (suites, bases) == (["mma"], ["b"])
    assert [t.get_text() for t in figures.heat_map(found).axes[0].texts] == ["−50.00"], "in reports as in the paper"


def test_the_reinsertion_table_counts_accepted_repairs_and_seconds_for_each_prompt():
    hold, blend = "ours:reinsertion=held_substitution,audits=8", "ours:reinsertion=direct_blend,audits=8"
    found = [row(hold, 0, "a", accepted=1, tournaments=2, seconds=3.0), row(hold, 1, "b", accepted=2, tournaments=2)]
    found += [row(blend, 0, "a", accepted=4, tournaments=6, seconds=8.0), row("ours", 0)]
    lines = paper_figures.reinsertion(found)
    assert [tuple(line.values()) for line in lines] == [
        ("b", "held_substitution", 2, 0.5, 1.5, 2.0, 2.5),
        ("b", "direct_blend", 1, 0.0, 4.0, 6.0, 8.0),
    ]
    assert "| b | held_substitution | 2 | 0.5 | 1.5 | 2 | 2.5 |" in paper_figures.table_markdown(lines)
    assert paper_figures.table_csv(lines).splitlines()[1] == "b,held_substitution,2,0.5,1.5,2.0,2.5"


def test_panels_say_how_many_audits_were_made_and_leave_out_what_nobody_judged():
    found = [row(f"ours:candidates=1,audits={x}", 1, audits=min(x, 2)) for x in (2, 4)]
    found += [row("ours_ladder_off:candidates=1,audits=2,final_repair=off", 0)]
    axes = figures.size_panels(found).axes
    assert [t.get_text() for t in axes[0].get_xticklabels()] == ["2", "4 (2)"]
    assert [a.get_title() for a in axes] == ["b: attack success", "b: seconds"], "no judge of attributes"
    alone = figures.size_panels(found, whole=False).axes
    assert [t.get_text() for t in alone[0].texts] == ["0.00"]


def test_every_figure_is_written_from_a_run(tmp_path):
    run, image = tmp_path / "run", "images/x.png"
    (run / "images").mkdir(parents=True)
    Image.new("RGB", (8, 8), "red").save(run / image)
    found = [row(d, u, image=image) for d, u in (("undefended", 1), ("ours", 0))]
    found += [row("ours:reinsertion=flow_ode,audits=8", 0, image=image, accepted=1, tournaments=1)]
    found += [row("ours:candidates=3,audits=2", 0, image=image)]
    rows.write_parquet(found, run / "samples.parquet")
    said = list(paper_figures.run(paper_figures.FigureOptions(run, tmp_path / "out")))
    names = {"change.png", "size.png", "pairs.png", "reinsertion.png", "reinsertion.md", "reinsertion.csv"}
    assert {p.name for p in (tmp_path / "out").iterdir()} == names and len(said) == len(names)
    with pytest.raises(BadInput, match="name the bases"):
        list(paper_figures.run(paper_figures.FigureOptions(run, tmp_path / "out", tournaments=1)))
    rows.write_parquet([row("ours", category="safe")], run / "samples.parquet")
    with pytest.raises(BadInput, match="no rows of harmful prompts"):
        list(paper_figures.run(paper_figures.FigureOptions(run, tmp_path / "out")))


def test_the_table_of_the_tournament_policy_comes_from_its_results(tmp_path):
    """gtp.json of the run, or the file that is named."""
    run = tmp_path / "run"
    run.mkdir()
    rows.write_parquet([row("undefended", 1), row("ours", 0)], run / "samples.parquet")
    played = {"base": "b", "c": 3, "accepted": 1, "suggested": 2, "seconds": 4.0, "unsafe": 0}
    found = [
        {**played, "config": name, "seed": s, "accepted": a}
        for s in (1, 2)
        for name, a in ((gtp.WITH, 2), (gtp.WITHOUT, 1))
    ]
    write_results(run / "gtp.json", gtp.metrics(found), found, 0)
    assert str(tmp_path / "a" / "gtp.md") in list(paper_figures.run(paper_figures.FigureOptions(run, tmp_path / "a")))
    text = (tmp_path / "a" / "gtp.md").read_text()
    assert text == gtp.table(gtp.metrics(found)) and "**100.0**" in text and "50.0" in text
    (run / "gtp.json").rename(tmp_path / "named.json")
    options = paper_figures.FigureOptions(run, tmp_path / "b", results=tmp_path / "named.json")
    assert str(tmp_path / "b" / "gtp.md") in list(paper_figures.run(options))
    with pytest.raises(BadInput, match="eval gtp"):
        paper_figures.FigureOptions(run, tmp_path / "c", results=tmp_path / "nothing.json")
    (tmp_path / "named.json").write_text("[]")
    with pytest.raises(BadInput, match="no results file"):
        list(paper_figures.run(options))


def test_tournaments_of_a_run_are_drawn_once_more(tmp_path, monkeypatch):
    """Those of prompts on which the run accepted a repair, on the bases that are named."""
    (text,) = write_bases(tmp_path, ("sd15",))
    run = tmp_path / "run"
    run.mkdir()
    lamp = row("ours", 0, "a lamp", base="sd15", accepted=1)
    found = [row("undefended", 1, "a lamp", base="sd15"), lamp, row("ours", 0, "a cup", base="sd15", accepted=0)]
    rows.write_parquet(found, run / "samples.parquet")
    monkeypatch.setattr(paper_figures, "open_guard", lambda name: GuardPaint(AlwaysUnsafe(), PaintsFlat()))
    drawn, contests = [], tournament_rows.contests
    again = lambda guard, base, prompt, *more: drawn.append(prompt) or contests(guard, base, prompt, *more)  # noqa: E731
    monkeypatch.setattr(tournament_rows, "contests", again)
    options = paper_figures.FigureOptions(
        run, tmp_path / "out", tournaments=2, bases=[text], opening=BaseOptions(steps=4, size=64)
    )
    assert str(tmp_path / "out" / "tournaments.png") in list(paper_figures.run(options))
    sheet = Image.open(tmp_path / "out" / "tournaments.png")
    assert drawn == ["a lamp"] and sheet.width > 2 * tournament_rows.SIDE


def test_tournaments_are_rows_with_the_mask_and_a_framed_winner(tmp_path):
    (text,) = write_bases(tmp_path, ("sd15",))
    base = open_base(read_entries([text], BaseOptions(steps=4, size=64))["sd15"], None)
    found = tournament_rows.contests(GuardPaint(AlwaysUnsafe(), PaintsFlat()), base, "a lamp", 1)
    assert found and all(c.candidates and c.mask.any() for c in found)
    assert all(c.draft.size == (64, 64) for c in found)
    picture = Image.new("RGB", (64, 64), "blue")
    won = tournament_rows.Contest(
        "t", picture, found[0].mask, [(picture, "u = 0.1", False), (picture, "u = 0.2", True)]
    )
    sheet = tournament_rows.sheet([won])
    step = tournament_rows.SIDE + tournament_rows.GAP
    corner = tournament_rows.GAP + 2 * step + 1, tournament_rows.HEAD + 1
    assert sheet.getpixel(corner) == tournament_rows.FRAME
    assert sheet.getpixel((corner[0] - step, corner[1])) == (0, 0, 255), "the loser has no frame"
    under = tournament_rows.overlaid(picture, found[0].mask * 0 + 1 > 0)
    assert under.getpixel((60, 60))[0] > 50, "red over blue"
    assert tournament_rows.sheet([]) is None
