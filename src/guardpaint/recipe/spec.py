"""Reads a recipe: a YAML file that names models, corpora and budgets, and the commands that use them, in order.

A stage is one `guardpaint` command line with the files that it reads and writes, as paths in the recipe's folder. In
every text `{name}` stands for a model, a value under `values`, the folder (`{out}`) or the item of `each`; `{@item}`
stands for the model that an item of `each` names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from guardpaint.errors import BadConfig
from guardpaint.recipe.sources import SourceFile, source_files
from guardpaint.store.folders import HUB

STAGE_KEYS = (
    "name", "about", "command", "options", "train", "hand", "inputs", "outputs", "updates", "models", "each", "launch",
    "estimate", "optional",
)  # fmt: skip
RECIPE_KEYS = ("about", "models", "values", "stages")
GAP = re.compile(r"\{(@?[a-z][a-z0-9_-]*)\}")


@dataclass(frozen=True)
class HubModel:
    """A repository on the hub that a recipe names, or the folder that stands in for it."""

    name: str
    id: str
    gigabytes: float = 0.0
    gated: bool = False
    dataset: bool = False
    folder: str | None = None
    """A local folder that is used instead of the repository."""
    revision: str | None = None
    """Branch, tag or commit of a model; a dataset's is named in the manifest."""

    @property
    def value(self) -> str:
        """How command lines name it."""
        pinned = f"@{self.revision}" if self.revision else ""
        return self.folder or (self.id if self.dataset else f"{HUB}{self.id}{pinned}")


@dataclass(frozen=True)
class Estimate:
    """What a stage is expected to need, and what the numbers rest on."""

    hours: float | None = None
    memory_gb: float | None = None
    disk_gb: float | None = None
    rests_on: str = "nothing was measured"


@dataclass(frozen=True)
class Stage:
    """One stage with every name filled in."""

    name: str
    settings: Mapping[str, Any]
    """What decides its outputs besides its inputs: the words and options of the command, and the config, flattened."""
    words: tuple[str, ...] = ()
    """The command line after `guardpaint`; empty for a stage that a person does."""
    hand: str = ""
    """What a person has to do, for a stage without a command."""
    inputs: tuple[str, ...] = ()
    """Paths and patterns that it reads: in the recipe's folder, or absolute."""
    reads: tuple[SourceFile, ...] = ()
    """Files that no stage writes and its command names, or a testbed or manifest that the command names."""
    outputs: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()
    """Outputs of earlier stages that it changes in place."""
    models: tuple[HubModel, ...] = ()
    config: Mapping[str, Any] | None = None
    """Config of a training stage, which is written to `config_file`."""
    launch: str = ""
    """accelerate: started by `accelerate launch` with several processes or a GPU."""
    estimate: Estimate = field(default_factory=Estimate)
    optional: bool = False
    """Runs only if --stage names it."""
    about: str = ""
    group: str = ""
    """Name of its entry in the recipe, which stages of one `each` share."""

    @property
    def config_file(self) -> str:
        return f"configs/{self.name}.yaml"

    @property
    def command(self) -> str:
        """The command as a user would type it."""
        return " ".join(("guardpaint", *map(quoted, self.words))) if self.words else f"by hand: {self.hand}"


@dataclass(frozen=True)
class Recipe:
    """A recipe for one folder."""

    name: str
    out: Path
    stages: tuple[Stage, ...]
    values: Mapping[str, Any]
    about: str = ""

    def stage(self, name: str) -> Stage:
        """The stage of that name; raises BadConfig for an unknown one."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise BadConfig(f"{self.name}: no stage {name!r}; it has {', '.join(s.name for s in self.stages)}")

    def producers(self, path: str, before: Stage | None = None) -> list[Stage]:
        """The stages that write or change what `path` names, in order; only those before a stage if it is given."""
        stages = self.stages if before is None else self.stages[: self.stages.index(before)]
        return [s for s in stages if any(overlap(path, own) for own in (*s.outputs, *s.updates))]

    def dependants(self, names: Sequence[str]) -> list[str]:
        """The stages that read, directly or not, what the named stages write, in order; without the named ones."""
        touched = set(names)
        for stage in self.stages:
            if any(p.name in touched for path in stage.inputs for p in self.producers(path, stage)):
                touched.add(stage.name)
        return [s.name for s in self.stages if s.name in touched and s.name not in names]


def overlap(a: str, b: str) -> bool:
    """Whether two paths or patterns can name the same file or one a file inside of the other."""
    if a == b:
        return True
    first, second = a.split("/"), b.split("/")
    return all(segment_fits(x, y) for x, y in zip(first, second, strict=False))


def segment_fits(a: str, b: str) -> bool:
    """Whether two names, of which each may have stars, can be the same."""
    from fnmatch import fnmatchcase

    return a == b or fnmatchcase(a, b) or fnmatchcase(b, a)


def quoted(word: str) -> str:
    import shlex

    return shlex.quote(word)


# Files -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Override:
    """One setting in which a rehearsal differs from its recipe."""

    stage: str
    setting: str
    paper: Any
    rehearsal: Any


def read_yaml(path: Path, keys: Sequence[str]) -> dict[str, Any]:
    """A YAML mapping with known keys only."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadConfig(f"{path}: no such recipe ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path}: not YAML ({error})") from error
    if not isinstance(data, dict) or set(data) - set(keys):
        unknown = ", ".join(sorted(set(data) - set(keys))) if isinstance(data, dict) else "no mapping"
        raise BadConfig(f"{path}: a recipe has the keys {', '.join(keys)}; found {unknown}")
    return data


def read_recipe(path: Path) -> dict[str, Any]:
    """A recipe as a mapping, with `stages` by name and the configs of training stages filled in from their models."""
    data = read_yaml(path, RECIPE_KEYS)
    stages: dict[str, dict[str, Any]] = {}
    for entry in data.get("stages") or ():
        unknown = set(entry) - set(STAGE_KEYS)
        if "name" not in entry or unknown:
            raise BadConfig(
                f"{path}: a stage has {', '.join(STAGE_KEYS)}; not {', '.join(sorted(unknown)) or 'a name'}"
            )
        if entry["name"] in stages:
            raise BadConfig(f"{path}: two stages are named {entry['name']}")
        if sum(key in entry for key in ("command", "train", "hand")) != 1:
            raise BadConfig(f"{path}: stage {entry['name']} needs exactly one of command, train and hand")
        stages[entry["name"]] = {**entry, **({"train": with_config(entry["train"])} if "train" in entry else {})}
    if not stages:
        raise BadConfig(f"{path}: a recipe needs at least one stage")
    return {"models": {}, "values": {}, **data, "stages": stages}


def with_config(train: Mapping[str, Any]) -> dict[str, Any]:
    """A stage's `train` with the config of the catalogue's model, changed by its own `config`."""
    from guardpaint.train.catalogue import load_model

    model, _, stage = str(train["from"]).partition("/")
    known = load_model(model).stage(stage)
    config = merged(known.config, train.get("config") or {})
    return {"trainer": known.trainer, "set": {}, **train, "config": config}


def merged(base: Any, change: Any) -> Any:
    """Mappings are merged key by key; anything else is replaced."""
    if isinstance(base, Mapping) and isinstance(change, Mapping):
        return {**base, **{k: merged(base[k], v) if k in base else v for k, v in change.items()}}
    return change


def overridden(data: dict[str, Any], changes: Mapping[str, Any], where: Path) -> tuple[dict[str, Any], list[Override]]:
    """A recipe changed by a rehearsal's overrides, and every setting that differs."""
    unknown = set(changes.get("stages") or {}) - set(data["stages"])
    if unknown:
        raise BadConfig(f"{where}: no stage {', '.join(sorted(unknown))}; the recipe has {', '.join(data['stages'])}")
    new = merged(data, changes)
    found = []
    for part in ("models", "values"):
        before, after = flat(data[part]), flat(new[part])
        found += [Override(part, k, before.get(k), after.get(k)) for k in after if before.get(k) != after.get(k)]
    for name, stage in new["stages"].items():
        before, after = flat(data["stages"][name]), flat(stage)
        keys = dict.fromkeys((*before, *after))
        found += [Override(name, k, before.get(k), after.get(k)) for k in keys if before.get(k) != after.get(k)]
    return new, found


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """A nested mapping as one level with dotted keys."""
    out: dict[str, Any] = {}
    for key, part in value.items():
        name = f"{prefix}{key}"
        if isinstance(part, Mapping) and part:
            out |= flat(part, f"{name}.")
        else:
            out[name] = part
    return out


# Stages ------------------------------------------------------------------------------------------------------


def assemble(data: Mapping[str, Any], name: str, out: Path) -> Recipe:
    """The recipe of a folder, with every stage expanded and every name filled in."""
    models = {key: HubModel(key, **facts) for key, facts in data["models"].items()}
    values: dict[str, Any] = {**{k: m.value for k, m in models.items()}, **data["values"], "out": str(out)}
    for _ in range(3):  # values may name values
        values = {k: filled(v, values) if isinstance(v, str) else v for k, v in values.items()}
    stages: list[Stage] = []
    for entry in data["stages"].values():
        for items, options in expansions(entry.get("each") or {}):
            stages.append(stage_of(entry, items, options, values, models, out))
    names = [s.name for s in stages]
    if len(set(names)) < len(names):
        raise BadConfig(f"{name}: stages of the same name: {', '.join(sorted(n for n in names if names.count(n) > 1))}")
    recipe = Recipe(name, out, tuple(stages), values, data.get("about", ""))
    for stage in recipe.stages:
        for path in stage.inputs:
            if not Path(path).is_absolute() and not recipe.producers(path, stage):
                raise BadConfig(f"{name}: stage {stage.name} reads {path}, which no earlier stage writes")
    return recipe


def expansions(each: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """The items of `each` by variable, with the options that belong to them."""
    if not each:
        yield {}, {}
        return
    if len(each) > 1:
        raise BadConfig(f"each: one variable at a time, not {', '.join(each)}")
    [(variable, items)] = each.items()
    for item, options in items.items():
        yield {variable: str(item)}, dict(options or {})


def stage_of(
    entry: Mapping[str, Any],
    items: Mapping[str, str],
    more: Mapping[str, Any],
    values: Mapping[str, Any],
    models: Mapping[str, HubModel],
    out: Path,
) -> Stage:
    """One stage of a recipe's folder."""
    known = {**values, **items, **{f"@{k}": values.get(v) for k, v in items.items()}}

    def fill(value: Any) -> Any:
        if isinstance(value, str):
            return filled(value, known)
        if isinstance(value, Mapping):
            return {k: fill(v) for k, v in value.items()}
        return [fill(v) for v in value] if isinstance(value, list) else value

    name = "-".join((entry["name"], *items.values()))
    options = fill({**(entry.get("options") or {}), **more})
    config, words = None, [str(fill(w)) for w in entry.get("command", ())]
    if "train" in entry:
        train = fill(entry["train"])
        config = train["config"]
        words = ["train", "stage", train["trainer"]]
        options = {"config": f"{out}/configs/{name}.yaml", "set": train["set"], "out": f"{out}/{name}", **options}
    arguments = words[:]
    words += option_words(options)
    used = [fill(m) for m in entry.get("models", ())]
    unknown = [m for m in used if m not in models]
    if unknown:
        raise BadConfig(f"stage {name}: no model {unknown[0]!r}; the recipe has {', '.join(models)}")
    settings = {"command": " ".join(arguments), **flat(options), **({} if config is None else flat(config, "config."))}
    settings = {k: portable(v, out) for k, v in settings.items()}
    inputs, outputs, updates = (tuple(fill(list(entry.get(k) or ()))) for k in ("inputs", "outputs", "updates"))
    return Stage(
        name=name,
        settings=settings,
        words=tuple(words),
        hand=fill(entry.get("hand", "")),
        inputs=inputs,
        reads=tuple(f for f in source_files(options, arguments, out) if str(f.path) not in inputs),
        outputs=outputs,
        updates=updates,
        models=tuple(models[m] for m in used),
        config=config,
        launch=entry.get("launch", ""),
        estimate=Estimate(**(entry.get("estimate") or {})),
        optional=bool(entry.get("optional", False)),
        about=entry.get("about", ""),
        group=entry["name"],
    )


def filled(text: str, values: Mapping[str, Any]) -> Any:
    """A text with its gaps filled in; a text that is one gap becomes the value itself."""

    def value(match: re.Match[str]) -> Any:
        if match[1] not in values:
            raise BadConfig(f"{match[0]} in {text!r}: the recipe has no such model or value")
        return values[match[1]]

    whole = GAP.fullmatch(text)
    return value(whole) if whole else GAP.sub(lambda match: str(value(match)), text)


def option_words(options: Mapping[str, Any]) -> list[str]:
    """Options as words of a command line; lists repeat an option, a mapping becomes NAME=VALUE, false leaves it out."""
    words: list[str] = []
    for name, value in options.items():
        flag = f"--{name}"
        if value is None or value is False:
            continue
        if value is True:
            words.append(flag)
        elif isinstance(value, Mapping):
            words += [w for k, v in value.items() if v is not None for w in (flag, f"{k}={v}")]
        elif isinstance(value, list):
            words += [w for v in value for w in (flag, str(v))]
        else:
            words += [flag, str(value)]
    return words


def portable(value: Any, out: Path) -> Any:
    """A setting with the recipe's folder written as {out}, so that a folder can be moved."""
    if isinstance(value, str):
        return value.replace(str(out), "{out}")
    return [portable(v, out) for v in value] if isinstance(value, list) else value
