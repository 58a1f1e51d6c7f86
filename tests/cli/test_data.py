"""Commands that need a world ask the testbed for a capability, and say so when it has none."""

from __future__ import annotations

import pytest
import torch
import yaml
from PIL import Image
from testbeds import Bare
from typer.testing import CliRunner

from guardpaint import testbed
from guardpaint.cli.data import app
from guardpaint.data.store import Corpus
from guardpaint.errors import MissingCapability
from guardpaint.store.images import png_bytes
from guardpaint.testing import small


class Drawing(Bare):
    """A testbed with every capability that the data commands ask for; it remembers what it was asked."""

    def __init__(self):
        self.asked = []

    def capability(self, kind):
        return self if isinstance(self, kind) else None

    def make_views(self, base, out, split, counts, tiny=None, auditor=None, options=None):
        self.asked.append((base, split, dict(counts), type(tiny).__name__, type(auditor).__name__))
        return out / "views.pt"

    def lessons(self, views, settings):
        raise AssertionError("the data commands train nothing")

    def make_pairs(self, out, split, unsafe, safe, auditor=None, config=None):
        self.asked.append((split, unsafe, safe, type(auditor).__name__))
        return 7

    def rows(self, split, skip=0):
        for i in range(skip, 5):
            image = Image.new("RGB", (8, 8), (i, 0, 0))
            yield {"image": {"bytes": png_bytes(image)}, "caption": f"{split} {i}", "category": "safe"}


def opened(monkeypatch, world):
    monkeypatch.setattr(testbed, "open_testbed", lambda name=None: world)
    assert isinstance(world, testbed.Testbed)
    return CliRunner().invoke


def manifest(tmp_path):
    path = tmp_path / "m.yaml"
    source = {"name": "s", "format": "testbed", "path": "bare:train", "prompt": "caption", "limit": 4}
    path.write_text(yaml.safe_dump({"sources": [source]}))
    return path


def test_without_the_capability_each_command_names_it(tmp_path, monkeypatch):
    run = opened(monkeypatch, Bare())
    for command, message in (
        (["views", "tiny-sd", "--out", str(tmp_path)], "data views needs views of its own pictures"),
        (["pairs", str(tmp_path)], "data pairs without --corpus needs pairs of its own pictures"),
        (["ingest", str(manifest(tmp_path)), "--out", str(tmp_path / "c")], "data ingest needs its own pictures as a"),
    ):
        error = run(app, command).exception
        assert isinstance(error, MissingCapability) and message in str(error)
        assert "the testbed 'bare' does not have" in str(error)
    assert not (tmp_path / "c").exists(), "nothing was begun"


def test_with_it_each_command_does_its_work(tmp_path, monkeypatch):
    world = Drawing()
    run = opened(monkeypatch, world)
    small.tiny_decoder(4).save_pretrained(tmp_path / "tiny")
    small.auditor().save_pretrained(tmp_path / "auditor", torch.float32)
    made = run(
        app,
        ["views", "tiny-sd", "--out", str(tmp_path), "--split", "test", "--count", "3", "--redrawn", "2",
         "--trajectories", "1", "--judge", str(tmp_path / "auditor"), "--tiny", str(tmp_path / "tiny")],
        catch_exceptions=False,
    )  # fmt: skip
    assert made.output.strip().endswith("views.pt")
    counts = {"renoised": 3, "redrawn": 2, "trajectories": 1}
    assert world.asked.pop() == ("tiny-sd", "test", counts, "AutoencoderTiny", "AuditorScorer")
    for options, kind in (
        (["--auditor", str(tmp_path / "auditor")], "AuditorScorer"),
        (["--masks", "truth"], "NoneType"),
    ):
        made = run(app, ["pairs", str(tmp_path), "--count", "4", "--safe", "1", *options], catch_exceptions=False)
        assert "7 new pairs" in made.output and world.asked.pop() == ("train", 4, 1, kind)
    made = run(app, ["ingest", str(manifest(tmp_path)), "--out", str(tmp_path / "c")], catch_exceptions=False)
    assert "4 kept" in made.output
    assert [e.prompt for e in Corpus(tmp_path / "c")] == [f"train {i}" for i in range(4)]


@pytest.mark.parametrize("option", [[], ["--testbed", "paperdolls"]])
def test_the_testbed_is_named_by_an_option(option, tmp_path, monkeypatch):
    names = []
    monkeypatch.setattr(testbed, "open_testbed", lambda name=None: names.append(name) or Drawing())
    assert CliRunner().invoke(app, ["pairs", str(tmp_path), *option]).exit_code == 0
    assert names == [option[-1] if option else None]


def test_trajectories_need_somebody_who_labels_them(tmp_path, monkeypatch):
    error = opened(monkeypatch, Drawing())(app, ["views", "x", "--out", str(tmp_path), "--trajectories", "1"]).exception
    assert "name it with --judge" in str(error)
