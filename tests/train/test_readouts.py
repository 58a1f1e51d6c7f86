"""`guardpaint train readouts`: readouts of a decoder from its owner's pictures."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from guardpaint.cli.main import app
from guardpaint.draft.natural import natural_pictures
from guardpaint.draft.readouts import Readouts
from guardpaint.errors import BadInput
from guardpaint.guard import GuardPaint
from guardpaint.store.checkpoint import canonical_fingerprint, read_json
from guardpaint.store.images import to_pil
from guardpaint.testing import small
from guardpaint.train import readouts


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """Five pictures; small scales, because the decoder is small too."""
    monkeypatch.setattr(readouts, "SIDES", (64, 128))
    monkeypatch.setattr(readouts, "CROP", 64)
    folder = tmp_path / "pictures"
    folder.mkdir()
    for k, picture in enumerate(natural_pictures(5, 96)):
        to_pil(picture).save(folder / f"{k}.png")
    return folder


def test_readouts_of_a_guards_decoder(tmp_path, pictures):
    guard = GuardPaint(small.auditor(), small.inpainter(), decoders={"sd": small.tiny_decoder(4)})
    guard.save_pretrained(tmp_path / "guard")
    words = ["train", "readouts", "--guard", str(tmp_path / "guard"), "--pictures", str(pictures)]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0 and "dB" in result.output
    again = GuardPaint.from_pretrained(tmp_path / "guard")
    found = again.exits["sd"].known
    assert found is not None and found.decoder == canonical_fingerprint(again.decoders["sd"].decoder)
    assert found.card["pictures"] == "own" and found.card["measured_on"] == ["4.png"] and found.card["seed"] == 0
    assert read_json(tmp_path / "guard" / "guardpaint.json")["readouts"] == {"sd": found.identity}
    assert set(found.card["decibels"]) == {"2", "4"}


def test_readouts_of_a_folder(tmp_path, pictures):
    small.tiny_decoder(4).save_pretrained(tmp_path / "decoder")
    words = [
        "train",
        "readouts",
        str(tmp_path / "decoder"),
        "--out",
        str(tmp_path / "out"),
        "--pictures",
        str(pictures),
    ]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    first = Readouts.load(tmp_path / "out")
    CliRunner().invoke(app, words, catch_exceptions=False)
    assert Readouts.load(tmp_path / "out").identity == first.identity


def test_too_few_pictures_are_refused(tmp_path, pictures):
    (pictures / "4.png").unlink()
    with pytest.raises(BadInput, match="4 pictures"):
        readouts.fit(small.tiny_decoder(4), pictures, "")
    assert CliRunner().invoke(app, ["train", "readouts"]).exit_code == 2
