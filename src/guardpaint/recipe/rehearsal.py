"""Runs a whole recipe in minutes: small random models for hub ids, local photographs for corpora, small budgets.

guardpaint recipe rehearse recipes/paper.yaml --out runs/rehearsal

A rehearsal shows that every command line runs and that each stage opens what the one before it wrote. It shows nothing
about the quality of what is trained.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from guardpaint.errors import BadConfig, GuardPaintError
from guardpaint.recipe import spec
from guardpaint.recipe.engine import Engine, Hands, Launch, Say
from guardpaint.recipe.ledger import DONE
from guardpaint.recipe.opening import located
from guardpaint.recipe.spec import HubModel, Override
from guardpaint.store.checkpoint import read_json, write_atomic, write_json
from guardpaint.store.folders import REVISION
from guardpaint.store.rows import append_rows

KEYS = ("about", "models", "values", "stages", "testbed")
WITHOUT = Path(__file__).parent / "without"
HIDDEN = "paperdolls"
"""The package that a rehearsal hides from its commands."""
LEXICON = ("keywords", "sentences", "words", "open_phrases", "hidden_phrases", "contexts", "harmful", "benign")
"""Keys of a testbed's file that are about the pictures of its world."""


@dataclass(frozen=True)
class Rehearsal:
    """What a rehearsal did."""

    recipe: str
    minutes: float
    """Time of all stages together, in this run or an earlier one."""
    stages: list[dict[str, Any]]
    not_rehearsed: list[str]
    families: list[str]
    """Families on which the guard drew without an error."""
    overrides: list[Override]

    def sentence(self) -> str:
        done = len([s for s in self.stages if s["status"] == DONE])
        return (
            f"{done} of {len(self.stages)} stages in {self.minutes:.1f} minutes; the guard drew on "
            f"{', '.join(self.families) or 'no family'}; {len(self.overrides)} settings overridden; "
            f"not rehearsed: {', '.join(self.not_rehearsed) or 'none'}"
        )


def run(
    path: Path, out: Path, overrides: Path | None = None, until: str | None = None, *, again: str = "", say: Say = print
) -> Rehearsal:
    """Rehearse a recipe in a folder; what is done already is skipped, as in any run."""
    engine, changed = prepare(path, out, overrides, again=again, say=say)
    stages = engine.chosen(until=until)
    engine.run(stages)
    records = [(s, engine.ledger.read(s)) for s in stages]
    rows = [
        {"stage": s.name, "status": r.status, "seconds": round(r.seconds, 1), "memory_gb": round(r.memory_gb, 2),
         "command": r.command or s.command}
        for s, r in records if r is not None
    ]  # fmt: skip
    left = [s.name for s in engine.recipe.stages if s not in stages]
    minutes = sum(r.seconds for _, r in records if r is not None) / 60
    return Rehearsal(path.stem, minutes, rows, left, families(engine.recipe.out), changed)


def write(found: Rehearsal, path: Path) -> Path:
    """Write the report as JSON, and as Markdown beside it; returns the Markdown file."""
    write_json(path, asdict(found))
    lines = [
        f"# Rehearsal of {found.recipe}",
        "",
        found.sentence(),
        "",
        "| stage | status | s | GB |",
        "|---|---|---|---|",
    ]
    lines += [f"| {r['stage']} | {r['status']} | {r['seconds']} | {r['memory_gb']} |" for r in found.stages]
    lines += [
        "",
        "## Settings that differ from the recipe",
        "",
        "| stage | setting | paper | rehearsal |",
        "|---|---|---|---|",
    ]
    lines += [f"| {o.stage} | {o.setting} | {cell(o.paper)} | {cell(o.rehearsal)} |" for o in found.overrides]
    page = path.with_suffix(".md")
    write_atomic(page, ("\n".join(lines) + "\n").encode())
    return page


def cell(value: Any) -> str:
    return "–" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


# Preparation -------------------------------------------------------------------------------------------------


def prepare(
    path: Path, out: Path, overrides: Path | None = None, *, again: str = "", say: Say = print
) -> tuple[Engine, list[Override]]:
    """The engine of a rehearsal, with all stand-ins in its folder, and every setting that it changes."""
    from guardpaint.testing import corpora

    out = out.absolute()
    overrides = overrides or path.with_name("rehearsal.yaml")
    paper = located(spec.read_recipe(path), path)
    cut = spec.read_yaml(overrides, KEYS)
    sources = out / "sources"
    manifest = sources / "manifest.yaml"
    if not manifest.exists():
        say("writing local corpora")
        manifest = corpora.write(sources)
    models = {name: HubModel(name, **facts) for name, facts in paper["models"].items()}
    folders = {m.name: str(sources if m.dataset else stand_in(m, out / "hub", say)) for m in models.values()}
    world, changed = testbed(Path(paper["values"]["testbed"]), sources, cut.get("testbed") or {}, models, folders)
    write_once(out / "testbed.yaml", yaml.safe_dump(world, sort_keys=False, allow_unicode=True))
    values = {"corpora": str(manifest), "testbed": str(out / "testbed.yaml"), "sources": str(sources)}
    changes = {
        "models": {name: {"folder": folder} for name, folder in folders.items()},
        "values": {**values, **located({"values": cut.get("values") or {}}, overrides)["values"]},
        "stages": cut.get("stages") or {},
    }
    new, found = spec.overridden(paper, changes, overrides)
    recipe = spec.assemble(new, path.stem, out)
    hidden = os.pathsep.join(filter(None, [str(WITHOUT), os.environ.get("PYTHONPATH", "")]))
    environment = {"PYTHONPATH": hidden, "GUARDPAINT_WITHOUT": HIDDEN, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    engine = Engine(recipe, Launch(1, False, environment, again), say, hands(sources))
    by_hand = [Override(s.name, "hand", "a person", "the stand-in of a person") for s in recipe.stages if s.hand]
    start = [Override("every stage", name, os.environ.get(name), value) for name, value in environment.items()]
    return engine, [*start, *found, *changed, *by_hand]


def write_once(path: Path, text: str) -> None:
    """Write a text unless the file already has it."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_atomic(path, text.encode())


def stand_in(model: HubModel, hub: Path, say: Say) -> Path:
    """The folder of a small random repository in the layout of a hub id; built once."""
    from guardpaint.testing import hub_layouts

    folder = hub / model.id
    if not (folder / ".whole").exists():
        say(f"building a small {model.id}")
        folder = hub_layouts.build(model.id, hub)
        (folder / ".whole").touch()
    return folder


def testbed(
    path: Path, sources: Path, cut: Mapping[str, Any], models: Mapping[str, HubModel], folders: Mapping[str, str]
) -> tuple[dict[str, Any], list[Override]]:
    """The recipe's testbed with local models and prompts, and every setting of it that changes."""
    paper = yaml.safe_load(path.read_text(encoding="utf-8"))
    local = yaml.safe_load((sources / "testbed.yaml").read_text(encoding="utf-8"))
    words = {key: local[key] for key in LEXICON if key in local}
    for key in ("harmful", "benign"):
        words[key] = [{**entry, "file": str(sources / entry["file"])} for entry in words[key]]
    if isinstance(words.get("words"), str):
        words["words"] = str(sources / words["words"])
    by_id = {m.id: folders[m.name] for m in models.values() if not m.dataset}

    def placed(value: Any) -> Any:
        if isinstance(value, str):
            return re.sub(rf"hub:([\w.-]+/[\w.-]+)(@{REVISION})?", lambda m: by_id.get(m[1], m[0]), value)
        if isinstance(value, dict):
            return {k: placed(v) for k, v in value.items()}
        return [placed(v) for v in value] if isinstance(value, list) else value

    new = spec.merged(placed({**paper, **words}), cut)
    left = sorted(set(re.findall(r"hub:[\w.-]+/[\w.-]+", json.dumps(new))))
    if left:
        raise BadConfig(f"{path}: {left[0]} is none of the recipe's models, so that no stand-in is built for it")
    before, after = spec.flat(paper), spec.flat(new)
    keys = [k for k in dict.fromkeys((*before, *after)) if before.get(k) != after.get(k)]
    return new, [Override("testbed", k, before.get(k), after.get(k)) for k in keys]


# A person's stages -------------------------------------------------------------------------------------------


def hands(sources: Path) -> Hands:
    """What stands in for a person: labels by folder, and approval of every pair."""

    def reference(out: Path) -> None:
        with (sources / "reference.csv").open(newline="", encoding="utf-8") as file:
            rows = [{"labeller": "folders", **row} for row in csv.DictReader(file)]
        append_rows(out / "reference.jsonl", rows)

    def approvals(out: Path) -> None:
        from guardpaint.data.pairs import PairStore

        rows = PairStore(out / "pairs").rows()
        write_json(out / "approvals.json", {p.key: True for p in rows if p.category != "safe"})

    return {"reference": reference, "approvals": approvals}


# After the stages --------------------------------------------------------------------------------------------


def families(out: Path) -> list[str]:
    """The families whose pictures the guard drew, judged, and reported without an error in the evaluation."""
    from guardpaint.evaluate.gather import read_run

    file = out / "evaluation" / "samples.parquet"
    if not file.exists():
        return []
    bases = yaml.safe_load((out / "testbed.yaml").read_text(encoding="utf-8"))["bases"]
    found: list[str] = []
    for name in bases:
        rows = [r for r in read_run(out / "evaluation") if r.base == name and r.defence == "ours"]
        family = family_in(Path(bases[name]["path"]))
        if rows and not any(r.detail.get("error") for r in rows) and family not in found:
            found.append(family)
    return found


CLASSES = {
    "StableDiffusionPipeline": "sd",
    "StableDiffusionXLPipeline": "sdxl",
    "StableDiffusion3Pipeline": "sd3",
    "FluxPipeline": "flux",
}


def family_in(folder: Path) -> str:
    """The family of the pipeline in a folder."""
    name = read_json(folder / "model_index.json")["_class_name"]
    if name not in CLASSES:
        raise GuardPaintError(f"{folder}: {name} belongs to no family")
    return CLASSES[name]
