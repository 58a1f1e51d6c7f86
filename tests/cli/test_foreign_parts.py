"""Approvers and repairers of other packages: a guard with them is saved, and drawn with from the command line."""

from __future__ import annotations

import json
import sys
from importlib.metadata import EntryPoint

import pytest
from typer.testing import CliRunner

from guardpaint.cli.main import app
from guardpaint.errors import BadCheckpoint
from guardpaint.guard import GuardPaint
from guardpaint.parts.kinds import part_class
from guardpaint.store import plugins
from guardpaint.testing import small

PARTS = """
from dataclasses import dataclass
from guardpaint.testing.doubles import Approves, PaintsFlat

class Saved:
    def options(self):
        return {self.option: getattr(self, self.option)}

    def save_pretrained(self, folder):
        pass

    @classmethod
    def from_pretrained(cls, folder, **options):
        return cls(**options)

    def digest(self):
        return f"{self.kind} {self.options()}"

@dataclass
class TheirApprover(Saved, Approves):
    kind, option = "their-approver", "harm"

@dataclass
class TheirRepairer(Saved, PaintsFlat):
    kind, option = "their-repairer", "level"
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Pretend that an installed package registers an approver and a repairer."""
    (tmp_path / "their_doubles.py").write_text(PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    found = {
        plugins.APPROVERS: EntryPoint("their-approver", "their_doubles:TheirApprover", plugins.APPROVERS),
        plugins.REPAIRERS: EntryPoint("their-repairer", "their_doubles:TheirRepairer", plugins.REPAIRERS),
    }
    original = plugins.registered
    monkeypatch.setattr(
        plugins, "registered", lambda group: {p.name: p} if (p := found.get(group)) else original(group)
    )
    yield
    sys.modules.pop("their_doubles", None)


def test_a_guard_with_parts_of_another_package_is_drawn_with(package, tmp_path, monkeypatch):
    approver, repairer = part_class("approver", "their-approver"), part_class("repairer", "their-repairer")
    own = small.auditor()
    guard = GuardPaint(own, repairer(level=0.3), approver=approver(harm=0.9))
    guard.save_pretrained(tmp_path / "guard")
    entries = json.loads((tmp_path / "guard" / "guardpaint.json").read_text())["parts"]
    assert entries["approver"] == {"kind": "their-approver", "source": None, "options": {"harm": 0.9}, "sha256": None}
    assert entries["repairer"]["kind"] == "their-repairer" and entries["repairer"]["options"] == {"level": 0.3}
    words = ["generate", "a quiet street", "--base", "tiny-sd", "--steps", "2", "--guard", str(tmp_path / "guard")]
    result = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out"), "--json"])
    assert result.exit_code == 3, "nothing passes this approver" + result.output
    report = json.loads(next((tmp_path / "out").glob("*.json")).read_text())
    assert report["effective_settings"]["approver"] == "approves"
    assert GuardPaint.from_pretrained(tmp_path / "guard").weight_hashes()["approver"].startswith("their-approver")
    monkeypatch.setattr(plugins, "registered", lambda group: {})
    result = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "again")])
    assert isinstance(result.exception, BadCheckpoint) and "guardpaint.approvers" in str(result.exception)
