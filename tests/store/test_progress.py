"""Progress bars: every item passes through, standard output stays free, and quiet prints nothing at all."""

from __future__ import annotations

from guardpaint.store.progress import bar, track


def test_every_item_passes_through(capsys):
    assert list(track([1, 2, 3], "counting")) == [1, 2, 3]
    assert list(track(iter("ab"), "letters", total=2)) == ["a", "b"]
    assert capsys.readouterr().out == "", "that is where results go"


def test_quiet_prints_nothing(capsys):
    assert list(track([1, 2], "counting", quiet=True)) == [1, 2]
    with bar("working", 3, quiet=True, done=1) as advance:
        advance(2)
    assert capsys.readouterr() == ("", "")
