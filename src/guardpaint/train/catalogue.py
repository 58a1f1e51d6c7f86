"""The models that can be trained by name, their stages, and the trainers that run them.

One YAML file per model names its stages in order. A stage names its trainer, its inputs and the parts `model` and
`train` of its config. An input is an earlier stage of the same file (`first`), another model (`vae4`), a stage of
another model (`mini-sd/first`), or a value from the command line (`$views`, filled by `--set views=…`). This module has
the product's own models and trainers; packages add theirs under the entry point group `guardpaint.models`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from guardpaint.errors import BadConfig, BadInput
from guardpaint.store import plugins
from guardpaint.train.engine import Run, parse_config

CONFIGS = Path(__file__).parent / "configs"


class Inputs(dict[str, tuple[str, ...]]):
    """Inputs of a stage by name; each has one or more values: paths or model names."""

    def text(self, name: str) -> str | None:
        """The first value of an input, or None without one."""
        return self[name][0] if self.get(name) else None

    def path(self, name: str) -> Path:
        """The first value of a required input, as a path."""
        return Path(self[name][0])

    def optional(self, name: str) -> Path | None:
        """The first value of an input as a path, or None without one."""
        return self.path(name) if self.get(name) else None

    def paths(self, name: str) -> list[Path]:
        """All values of an input, as paths."""
        return [Path(value) for value in self.get(name, ())]


@dataclass(frozen=True)
class Trainer:
    """The function that trains one component, with the config and the inputs it takes."""

    run: Callable[[Run, Inputs], object]
    shape: Any = None
    """Dataclass of the config's part `model`; None if the trainer has no config."""
    needs: tuple[str, ...] = ()
    """Required inputs."""
    takes: tuple[str, ...] = ()
    """Optional inputs."""


@dataclass(frozen=True)
class Catalogue:
    """Models and trainers of one package."""

    configs: Path
    """Folder with one YAML file per model."""
    load_trainers: Callable[[], dict[str, Trainer]]
    """Returns the trainers by name. It imports their dependencies, so call it only to run or check a stage."""
    shipped: Callable[[str], Path | None] = lambda name: None
    """Folder of the trained model in the package, or None if the package does not ship that model."""

    def names(self) -> list[str]:
        """Names of the models."""
        return sorted(file.stem for file in self.configs.glob("*.yaml"))

    def path(self, name: str) -> Path:
        """The YAML file of a model."""
        return self.configs / f"{name}.yaml"


def product_trainers() -> dict[str, Trainer]:
    """Trainers of the guard's own components."""
    from guardpaint.policy import Policy
    from guardpaint.train import align, alignment_config, auditor, auditor_start, few_steps, proposer, ranker, stack

    def train_auditor(run: Run, inputs: Inputs) -> None:
        file = inputs.optional("policy")
        policy = Policy.load(file) if file is not None else None
        start = auditor_start.Start(inputs.optional("warm"), inputs.text("backbone") or "")
        auditor.run(run.config_file, inputs.path("views"), run.out, run.minutes, start, run.quiet, policy=policy)

    def train_proposer(run: Run, inputs: Inputs) -> None:
        guard = inputs.text("guard")
        proposer.run(run.config_file, inputs.path("rollouts"), run.out, run.minutes, guard, run.quiet)

    def train_ranker(run: Run, inputs: Inputs) -> None:
        ranker.run(run.config_file, inputs.path("rollouts"), run.out, run.minutes, run.quiet)

    def alignment(method: str) -> Trainer:
        def train(run: Run, inputs: Inputs) -> None:
            align.run(run, method, inputs["inpainter"][0], inputs.path("pairs"), inputs.optional("policy"))

        return Trainer(train, alignment_config.AlignConfig, ("inpainter", "pairs"), ("policy",))

    def train_few_steps(run: Run, inputs: Inputs) -> None:
        few_steps.run(run, inputs["inpainter"][0], inputs.path("pairs"), inputs.optional("lora"))

    def join(run: Run, inputs: Inputs) -> None:
        stack.run([model.parent for model in inputs.paths("runs")], run.out)

    return {
        "auditor": Trainer(train_auditor, auditor.AuditorRecipe, ("views",), ("warm", "policy", "backbone")),
        **{method: alignment(method) for method in alignment_config.METHODS},
        "few-steps": Trainer(train_few_steps, few_steps.FewStepsConfig, ("inpainter", "pairs"), ("lora",)),
        "stack": Trainer(join, needs=("runs",)),
        "proposer": Trainer(train_proposer, proposer.ProposerTraining, ("rollouts",), ("guard",)),
        "ranker": Trainer(train_ranker, ranker.RankerTraining, ("rollouts",)),
    }


PRODUCT = Catalogue(CONFIGS, product_trainers)


def catalogues() -> list[Catalogue]:
    """The product's catalogue and those of installed packages."""
    others = [plugins.load(plugins.MODELS, name, f"models of {name}") for name in plugins.registered(plugins.MODELS)]
    return [PRODUCT, *others]


def trainers() -> dict[str, Trainer]:
    """All trainers by name."""
    return {name: trainer for catalogue in catalogues() for name, trainer in catalogue.load_trainers().items()}


def find_trainer(name: str, where: str) -> Trainer:
    """The trainer of that name; raises BadConfig for an unknown one. Error messages begin with `where`."""
    known = trainers()
    if name not in known:
        raise BadConfig(f"{where}: trainer {name!r} is unknown; choose {', '.join(sorted(known))}")
    return known[name]


@dataclass(frozen=True)
class Stage:
    """One training run of a model, as its YAML file describes it."""

    name: str
    trainer: str
    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    """The parts `model` and `train` for the trainer."""
    alternative: bool = False
    """Runs only if --stage names it: a baseline, or another way to train the same model."""
    about: str = ""


@dataclass(frozen=True)
class Model:
    """A model and the stages that train it, in order."""

    name: str
    stages: tuple[Stage, ...]
    about: str = ""

    @property
    def last(self) -> Stage:
        """The stage that produces the finished model: the last one that is not an alternative."""
        return [stage for stage in self.stages if not stage.alternative][-1]

    def stage(self, name: str) -> Stage:
        """The stage of that name; raises BadInput for an unknown one."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise BadInput(f"{self.name} has no stage {name!r}; it has {', '.join(s.name for s in self.stages)}")


def model_names() -> list[str]:
    """Names of all models in all catalogues."""
    return sorted(name for known in catalogues() for name in known.names())


def load_model(name: str) -> Model:
    """The model of that name, or the model that a YAML file describes."""
    file = next((known.path(name) for known in catalogues() if name in known.names()), Path(name))
    if not file.is_file():
        hint = (
            "" if plugins.registered(plugins.MODELS) else f"; models such as mini-sd come with {plugins.HOW_TO_INSTALL}"
        )
        raise BadInput(f"model {name!r}: not one of {', '.join(model_names())}, and no such file{hint}")
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
        stages = tuple(parse_stage(entry) for entry in data["stages"])
        model = Model(file.stem, stages, data.get("about", ""))
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise BadConfig(f"{file}: needs `stages`, each with a name and a trainer ({error!r})") from error
    names = [stage.name for stage in stages]
    if not any(not stage.alternative for stage in stages) or len(set(names)) < len(names):
        raise BadConfig(
            f"{file}: stages {', '.join(names) or 'missing'}; "
            "each needs its own name, and at least one must not be an alternative"
        )
    return model


def parse_stage(entry: Mapping[str, Any]) -> Stage:
    """A stage from its entry in the YAML file."""
    inputs = {k: tuple(v) if isinstance(v, list) else (str(v),) for k, v in entry.get("inputs", {}).items()}
    config = {part: entry[part] for part in ("model", "train") if part in entry}
    unknown = set(entry) - {"name", "trainer", "inputs", "model", "train", "alternative", "about"}
    if unknown:
        raise BadConfig(f"stage {entry['name']}: unknown keys {', '.join(sorted(unknown))}")
    alternative, about = bool(entry.get("alternative", False)), entry.get("about", "")
    return Stage(str(entry["name"]), entry["trainer"], inputs, config, alternative, about)


def check_stage(stage: Stage, where: str) -> None:
    """Raise BadConfig if a stage has unknown or missing inputs, or a config that does not fit its trainer."""
    check_inputs(stage.trainer, stage.inputs, where)
    shape = find_trainer(stage.trainer, where).shape
    if shape is not None:
        parse_config(stage.config, shape, where)


def check_inputs(trainer: str, inputs: Iterable[str], where: str) -> None:
    """Raise BadConfig if inputs are unknown to the trainer or required ones are missing."""
    spec = find_trainer(trainer, where)
    known = (*spec.needs, *spec.takes)
    unknown, missing = set(inputs) - set(known), set(spec.needs) - set(inputs)
    if unknown or missing:
        raise BadConfig(
            f"{where}: {trainer} takes the inputs {', '.join(known) or 'none'}; "
            f"unknown: {', '.join(sorted(unknown)) or 'none'}, missing: {', '.join(sorted(missing)) or 'none'}"
        )


def described(model: Model) -> list[str]:
    """Readable lines for --list: the model, then each of its stages."""
    lines = [f"{model.name}: {model.about}"]
    for stage in model.stages:
        inputs = " ".join(f"{name}={','.join(values)}" for name, values in stage.inputs.items())
        note = " (only with --stage)" if stage.alternative else ""
        lines.append(f"  {stage.name:<12} {stage.trainer:<10} {inputs}{note}".rstrip())
    return lines
