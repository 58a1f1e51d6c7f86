"""Train a model stage by stage: finished stages are skipped, an interrupted one resumes.

guardpaint train MODEL --out runs/MODEL

Every stage has its own folder in the run directory. `catalogue.py` lists the models and their stages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from guardpaint.errors import BadConfig, BadInput
from guardpaint.store.checkpoint import read_json, write_atomic, write_json
from guardpaint.train.catalogue import (
    Inputs,
    Model,
    Stage,
    catalogues,
    check_stage,
    find_trainer,
    load_model,
    model_names,
)
from guardpaint.train.engine import STATE, Run

RECORD = "stage.yaml"
"""File in a stage's folder that records its config and the inputs it started with."""


@dataclass(frozen=True)
class Step:
    """One step of a plan: a stage with its directory and its resolved inputs."""

    stage: Stage
    out: Path
    inputs: Inputs
    missing: tuple[str, ...]
    """One message per input that is missing."""
    command: str

    @property
    def finished(self) -> bool:
        return (self.out / "model" / "card.json").exists()

    @property
    def begun(self) -> bool:
        return (self.out / STATE).exists()


@dataclass(frozen=True)
class Plan:
    """The steps that `guardpaint train MODEL` will run."""

    model: Model
    steps: tuple[Step, ...]

    def lines(self) -> list[str]:
        """A readable line per step, for --dry-run."""
        out = []
        for step in self.steps:
            state = "finished, skipped" if step.finished else "resumes" if step.begun else "runs"
            inputs = " ".join(f"{name}={','.join(values)}" for name, values in step.inputs.items())
            lacks = f" (missing: {'; '.join(step.missing)})" if step.missing and not step.finished else ""
            out.append(f"{step.stage.name} [{step.stage.trainer}] {state}: {inputs or 'no inputs'} → {step.out}{lacks}")
        return out


@dataclass(frozen=True)
class Resolver:
    """Turns the inputs of a model's stages into paths."""

    model: Model
    out: Path
    settings: Mapping[str, tuple[str, ...]]
    """Values of --set: `name` fills `$name`, and `stage.input` replaces one input of one stage."""

    def step(self, stage: Stage, name: str) -> Step:
        """A stage with its inputs resolved; `name` is the model's name or file on the command line."""
        inputs, missing, used = Inputs(), [], {}
        own = {key.split(".", 1)[1]: key for key in self.settings if key.startswith(f"{stage.name}.")}
        for key in dict.fromkeys((*stage.inputs, *own)):
            values: list[str] = []
            for reference in stage.inputs.get(key, ()) if key not in own else (f"${own[key]}",):
                if reference.startswith("$"):
                    used[reference[1:]] = self.settings.get(reference[1:], ())
                try:
                    values += self.resolve(reference, stage)
                except BadInput as error:
                    missing.append(str(error))
                    values.append(reference)
            inputs[key] = tuple(values)
        options = "".join(f" --set {key}={value}" for key, values in used.items() for value in values)
        command = f"guardpaint train {name} --stage {stage.name} --out {self.out}{options}"
        return Step(stage, self.out / stage.name, inputs, tuple(missing), command)

    def resolve(self, reference: str, stage: Stage) -> list[str]:
        """The paths or values that one reference in a stage's inputs stands for."""
        if reference.startswith("$"):
            values = self.settings.get(reference[1:])
            if not values:
                raise BadInput(f"stage {stage.name} needs --set {reference[1:]}=…")
            return [
                self.named(value) if value in model_names() and not Path(value).exists() else value for value in values
            ]
        earlier = [s.name for s in self.model.stages[: self.model.stages.index(stage)]]
        if reference in earlier:
            return [str(self.out / reference / "model")]
        return [self.named(reference)]

    def named(self, reference: str) -> str:
        """The folder of another model or of one of its stages.

        A model trained in a sibling of this run directory is preferred to the shipped one.
        """
        name, _, stage = reference.partition("/")
        if name not in model_names():
            raise BadInput(f"{reference!r} is neither an earlier stage of {self.model.name} nor a model")
        other = load_model(name)
        beside = self.out.parent / name / (other.stage(stage) if stage else other.last).name / "model"
        if (beside / "card.json").exists():
            return str(beside)
        folder = None if stage else next((f for known in catalogues() if (f := known.shipped(name))), None)
        if folder is None:
            command = f"guardpaint train {name}{f' --stage {stage}' if stage else ''} --out {self.out.parent / name}"
            raise BadInput(f"{reference} is not trained yet: {command}")
        return str(folder)


def make_plan(
    name: str, out: Path, only: Sequence[str] = (), settings: Mapping[str, Sequence[str]] | None = None
) -> Plan:
    """A plan of the stages `only`, or of all stages but the alternatives, with their inputs resolved."""
    model = load_model(name)
    wanted = [model.stage(n) for n in only] or [s for s in model.stages if not s.alternative]
    values = {key: tuple(several) for key, several in (settings or {}).items()}
    resolver = Resolver(model, out, values)
    known = {ref[1:] for s in model.stages for refs in s.inputs.values() for ref in refs if ref.startswith("$")}
    unknown = sorted(
        key for key in values if key not in known and key.split(".")[0] not in {s.name for s in model.stages}
    )
    if unknown:
        choices = ", ".join(sorted(known)) or "nothing by name"
        raise BadInput(f"--set {unknown[0]}: {name} takes {choices}, and STAGE.INPUT to replace one input of a stage")
    steps = tuple(resolver.step(stage, name) for stage in model.stages if stage in wanted)
    for step in steps:
        check_stage(replace(step.stage, inputs=step.inputs), f"{name}: {step.stage.name}")
    return Plan(model, steps)


def check_ready(plan: Plan) -> None:
    """Raise BadInput if a step lacks an input that no other step of the plan produces."""
    produced = {str(step.out / "model") for step in plan.steps}
    for step in plan.steps:
        if step.finished:
            continue
        if step.missing:
            raise BadInput(f"{plan.model.name}: {step.missing[0]} (or choose other stages with --stage)")
        runs = {str(step.out.parent / s.name / "model"): s.name for s in plan.model.stages}
        for value in (v for values in step.inputs.values() for v in values):
            if value in runs and value not in produced and not (Path(value) / "card.json").exists():
                raise BadInput(
                    f"stage {step.stage.name} starts from stage {runs[value]}, which is not finished in {value}; "
                    f"add --stage {runs[value]}"
                )


def execute(plan: Plan, minutes: float | None, say: Callable[[str], None], quiet: bool = False) -> bool:
    """Run the stages of a plan in order; returns whether all are finished.

    Finished stages are skipped, an interrupted one resumes. `minutes` limits all stages together.
    """
    from accelerate import PartialState

    check_ready(plan)
    start, ran = time.monotonic(), False
    for step in plan.steps:
        if step.finished:
            check_record(step)
            say(f"{step.stage.name}: finished, skipped")
            continue
        left = None if minutes is None else minutes - (time.monotonic() - start) / 60
        if ran and left is not None and left <= 0:
            say(f"{step.stage.name}: out of time; run the same command again to resume")
            return False
        say(f"{step.stage.name}: {'resumes' if step.begun else 'begins'} in {step.out}")
        run_step(step, left, quiet)
        ran = True
        PartialState().wait_for_everyone()  # under `accelerate launch` no process starts from a partly saved model
        if not step.finished:
            return False
        say(f"{step.stage.name}: finished, {step.out / 'model'}")
    return True


def run_step(step: Step, minutes: float | None, quiet: bool) -> None:
    """Train one stage and write the command that repeats it into its card."""
    check_record(step)
    write_atomic(step.out / RECORD, yaml.safe_dump(record(step), sort_keys=False).encode())
    find_trainer(step.stage.trainer, step.stage.name).run(Run(step.out / RECORD, step.out, minutes, quiet), step.inputs)
    card = step.out / "model" / "card.json"
    if card.exists():
        write_json(card, {**read_json(card), "command": step.command})


def record(step: Step) -> dict[str, Any]:
    """The trainer, inputs and config of a step, as stored in its folder."""
    inputs = {
        name: [str(Path(v).resolve()) if Path(v).exists() else v for v in values]
        for name, values in step.inputs.items()
    }
    return {"trainer": step.stage.trainer, "inputs": inputs, **step.stage.config}


def check_record(step: Step) -> None:
    """Raise BadConfig if a run was started with another trainer, config or (until it is finished) other inputs."""
    path = step.out / RECORD
    if not path.exists():
        return
    before, now = yaml.safe_load(path.read_text(encoding="utf-8")), record(step)
    if step.finished:
        before.pop("inputs"), now.pop("inputs")
    changed = [key for key in now if before.get(key) != now[key]]
    if changed:
        raise BadConfig(
            f"{path}: this run was started with another `{changed[0]}` "
            f"({before.get(changed[0])}, now {now[changed[0]]}); choose another --out, or move the old run away"
        )
