"""A guard's folder: every part by kind, source, options and hash; parts of other packages through entry points."""

from __future__ import annotations

import json
import sys
from importlib.metadata import EntryPoint

import pytest
import torch
from helpers import call

from guardpaint.errors import BadCheckpoint, BadConfig
from guardpaint.guard import GuardPaint
from guardpaint.parts.kinds import BUILT_IN, folder_digest, kind_of, part_class
from guardpaint.repair.native import NativeRepairer
from guardpaint.store import plugins
from guardpaint.testing import small
from guardpaint.testing.doubles import AlwaysSafe, PaintsFlat
from guardpaint.verify.lpips import LpipsVGG
from guardpaint.verify.seam import PixelSeam

OWN = """
from dataclasses import dataclass
from pathlib import Path
from guardpaint.types import Audit

@dataclass
class Greyness:
    kind = "greyness"
    limit: float = 0.5
    categories = ("safe", "nudity", "violence")
    absent = frozenset({"F", "P", "B"})
    sizes = (32, 64)

    def audit(self, images, prompts, noise):
        return [Audit.from_scores({"safe": 0.9, "nudity": 0.1, "violence": 0.0}, pixels=32) for _ in images]

    def options(self):
        return {"limit": self.limit}

    def save_pretrained(self, folder):
        pass

    @classmethod
    def from_pretrained(cls, folder, limit=0.5):
        return cls(limit)

    def digest(self):
        return f"greyness {self.limit}"
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Pretend that an installed package registers auditors: one that works, one that breaks on import, one of no kind."""
    (tmp_path / "their_parts.py").write_text(OWN)
    (tmp_path / "their_ruin.py").write_text("raise RuntimeError('no licence key')")
    monkeypatch.syspath_prepend(tmp_path)
    points = {
        "greyness": EntryPoint("greyness", "their_parts:Greyness", plugins.AUDITORS),
        "ruin": EntryPoint("ruin", "their_ruin:Ruin", plugins.AUDITORS),
        "path": EntryPoint("path", "their_parts:Path", plugins.AUDITORS),
    }
    original = plugins.registered
    monkeypatch.setattr(plugins, "registered", lambda group: points if group == plugins.AUDITORS else original(group))
    yield
    sys.modules.pop("their_parts", None)


def manifest_of(folder):
    return json.loads((folder / "guardpaint.json").read_text())


def changed(folder, role, **entry):
    values = manifest_of(folder)
    values["parts"][role] |= entry
    (folder / "guardpaint.json").write_text(json.dumps(values))


def test_every_kind_that_ships_has_its_class_and_its_name():
    for role, kinds in BUILT_IN.items():
        for kind in kinds:
            assert part_class(role, kind).kind == kind


def test_the_manifest_names_kind_source_options_and_hash_of_every_part(tmp_path):
    guard = small.guard()
    guard.save_pretrained(tmp_path)
    values = manifest_of(tmp_path)
    assert values["version"] == 2 and set(values["parts"]) == {"auditor", "repairer", "proposer", "seam"}
    for role in ("auditor", "repairer"):
        assert values["parts"][role]["sha256"] == folder_digest(tmp_path / role)
    again = GuardPaint.from_pretrained(tmp_path)
    assert again.weight_hashes() == guard.weight_hashes()


def test_a_seam_metric_of_its_own_is_saved_too(tmp_path):
    base, lpips = small.guard(), LpipsVGG()
    GuardPaint(base.parts.auditor, NativeRepairer(), seam=lpips).save_pretrained(tmp_path / "a")
    again = GuardPaint.from_pretrained(tmp_path / "a").parts.seam
    pictures = torch.rand(2, 3, 32, 32)
    assert torch.equal(again.distance(pictures, pictures[0]), lpips.distance(pictures, pictures[0]))
    GuardPaint(base.parts.auditor, NativeRepairer(), seam=PixelSeam()).save_pretrained(tmp_path / "b")
    assert isinstance(GuardPaint.from_pretrained(tmp_path / "b").parts.seam, PixelSeam)


def test_a_changed_file_is_found_before_it_is_read(tmp_path):
    small.guard().save_pretrained(tmp_path)
    weights = tmp_path / "auditor" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(BadCheckpoint, match="fetch the guard again"):
        GuardPaint.from_pretrained(tmp_path)


def test_half_a_download_is_found(tmp_path):
    small.guard().save_pretrained(tmp_path)
    (tmp_path / "repairer" / "vae" / "config.json").unlink()
    with pytest.raises(BadCheckpoint, match="incomplete"):
        GuardPaint.from_pretrained(tmp_path)


def test_her_own_auditor_is_saved_and_loaded_through_its_entry_point(package, tmp_path, sd_pipe):
    greyness = part_class("auditor", "greyness")
    GuardPaint(greyness(0.7), NativeRepairer()).save_pretrained(tmp_path)
    assert manifest_of(tmp_path)["parts"]["auditor"] == {
        "kind": "greyness", "source": None, "options": {"limit": 0.7}, "sha256": None,
    }  # fmt: skip
    guard = GuardPaint.from_pretrained(tmp_path)
    assert guard.parts.auditor == greyness(0.7) and guard.weight_hashes()["auditor"] == "greyness 0.7"
    assert call(guard.attach(sd_pipe)).safety[0].status == "clean"


@pytest.mark.parametrize(
    ("kind", "word"),
    [("ruin", "no licence key"), ("path", "is no part of that kind"), ("unheard-of", "entry point group")],
)
def test_entry_points_that_cannot_serve_say_why(package, tmp_path, kind, word):
    small.guard().save_pretrained(tmp_path)
    changed(tmp_path, "auditor", kind=kind)
    with pytest.raises(BadCheckpoint, match=word):
        GuardPaint.from_pretrained(tmp_path)


def test_a_part_of_no_kind_is_refused_before_anything_is_written(tmp_path):
    for guard in (GuardPaint(AlwaysSafe(), NativeRepairer()), GuardPaint(small.auditor(), PaintsFlat())):
        with pytest.raises(BadConfig, match="cannot be saved"):
            guard.save_pretrained(tmp_path / "guard")
        assert not (tmp_path / "guard").exists()
    with pytest.raises(BadConfig, match=r"entry point group guardpaint\.auditors"):
        kind_of("auditor", AlwaysSafe())
