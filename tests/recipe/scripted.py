"""A recipe whose commands are a small script instead of `guardpaint`: what the engine does, without models."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from guardpaint.recipe import spec
from guardpaint.recipe.engine import Engine, Launch

SCRIPT = '''
"""script.py KIND TARGET [SOURCE…] [--option VALUE]: writes TARGET from the options and the sources."""
import errno, os, signal, sys, time
from pathlib import Path

words = sys.argv[1:]
options = {words[i][2:]: words[i + 1] for i, w in enumerate(words) if w.startswith("--")}
plain = [w for i, w in enumerate(words) if not w.startswith("--") and not (i and words[i - 1].startswith("--"))]
kind, target, sources = plain[0], Path(plain[1]), plain[2:]
target.parent.mkdir(parents=True, exist_ok=True)
text = f"{sorted(options.items())} " + " ".join(Path(s).read_text() for s in sources)
journal = target.with_name(target.name + ".runs")
journal.open("a").write("x")
if kind == "slow":
    done = target.with_name(target.name + ".begun")
    if not done.exists():
        done.write_text("half")
        print("half way", flush=True)
        time.sleep(60)
    text += " resumed from " + done.read_text()
if kind == "full" and not Path(options["room"]).exists():
    target.with_name(target.name + ".shard").write_text("kept")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
if kind == "append":
    target.open("a").write("more ")
    sys.exit(0)
if kind == "forgets":
    sys.exit(0)
target.write_text(text)
'''
RECIPE = {
    "models": {"open": {"id": "someone/open", "gigabytes": 2}, "shut": {"id": "someone/shut", "gigabytes": 3, "gated": True}},
    "values": {"kind": "plain", "room": "room"},
    "stages": [
        {"name": "first", "command": ["{kind}", "{out}/a.txt"], "options": {"size": 3}, "models": ["open"], "outputs": ["a.txt"],
         "estimate": {"hours": 1, "disk_gb": 5, "rests_on": "a guess"}},
        {"name": "person", "hand": "Write b.txt.", "inputs": ["a.txt"], "outputs": ["b.txt"]},
        {"name": "many", "command": ["plain", "{out}/many/{item}.txt", "{out}/b.txt"], "each": {"item": {"one": {"level": 1}, "two": {}}},
         "inputs": ["b.txt"], "outputs": ["many/{item}.txt"]},
        {"name": "change", "command": ["append", "{out}/many/one.txt"], "inputs": ["many/one.txt"], "updates": ["many/one.txt"]},
        {"name": "last", "command": ["plain", "{out}/last.txt", "{out}/many/one.txt"], "inputs": ["many/*.txt"], "outputs": ["last.txt"],
         "models": ["shut"]},
        {"name": "extra", "command": ["plain", "{out}/extra.txt"], "optional": True, "outputs": ["extra.txt"]},
    ],
}  # fmt: skip


@dataclass(frozen=True)
class Scripted(Launch):
    """Starts the script with the words of a stage."""

    script: str = ""

    def argv(self, stage):
        return [sys.executable, self.script, *stage.words]


def engine(folder: Path, changes=None, hands=None) -> tuple[Engine, list[str]]:
    """The recipe in `folder`/out, changed by a mapping, and the list of what its engine says."""
    (folder / "script.py").write_text(SCRIPT)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    data = spec.read_recipe(folder / "recipe.yaml")
    if changes:
        data, _ = spec.overridden(data, changes, folder / "changes.yaml")
    said: list[str] = []
    recipe = spec.assemble(data, "recipe", folder / "out")
    launch = Scripted(again="the same command", script=str(folder / "script.py"))
    person = {"person": lambda out: (out / "b.txt").write_text("by hand")}
    return Engine(recipe, launch, said.append, person if hands is None else hands), said


def runs(folder: Path, name: str) -> int:
    """How often the command that writes a file has been started."""
    return len((folder / "out" / f"{name}.runs").read_text())
