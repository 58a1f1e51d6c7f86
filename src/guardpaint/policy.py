"""The content policy: categories, trigger thresholds, gates and the last-resort ladder, as data."""

from __future__ import annotations

import hashlib
import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from guardpaint.errors import BadConfig
from guardpaint.types import SAFE, Audit

LADDER = ("strong_repair", "blur", "block", "keep")
SHIPPED = Path(__file__).parent / "assets" / "policies"
"""Policies that come with the package; each can be loaded by its name."""


@dataclass(frozen=True)
class Category:
    """One class of the policy. `safe` is always the first."""

    name: str
    definition: str = ""
    exemptions: tuple[str, ...] = ()
    weight: float = 1.0
    """Class weight of the auditor's training loss."""
    repair_weight: float | None = None
    """Class weight of the inpainter's alignment loss; None for the same as `weight`."""
    threshold: float | None = None
    """The category is also flagged when its probability reaches this. A threshold can only make the rule stricter."""
    safe_prompt: str = ""
    """The prompt that a repairer without safety training paints instead."""
    uncovered: str = ""
    """`accepted`: the category may be one that neither auditor nor approver can tell; every report then says so."""


MOST_BYTES, DEEPEST = 1 << 17, 20
"""Size of a policy file, and how far its lists may be nested."""


class PlainYaml(yaml.SafeLoader):
    """YAML without aliases and without deep nesting: a few lines of either fill any memory or time."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        problem = "aliases (*name) are not read; write it out" if self.check_event(yaml.AliasEvent) else ""
        self.depth += 1
        if problem or self.depth > DEEPEST:
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, problem or "nested too deeply", mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


TEXTS = ("name", "definition", "safe_prompt", "uncovered")
NUMBERS = ("weight", "threshold", "repair_weight")
"""The first always has a value; the others may be null."""


def category(value: Any) -> Category:
    """A category from a mapping of a policy file."""
    values = dict(value)
    fields: dict[str, Any] = {k: text(values.pop(k), k) for k in TEXTS if k in values}
    fields |= {k: number(values.pop(k), k) for k in NUMBERS if values.get(k) is not None}
    for k in NUMBERS[1:]:
        values.pop(k, None)
    exemptions = texts(values.pop("exemptions", ()), "exemptions")
    if values:
        raise TypeError(f"unknown key(s) {', '.join(map(str, values))[:200]} of a category")
    return Category(**fields, exemptions=exemptions)


def text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name}={reprlib.repr(value)} is not a text")
    return value


def texts(value: Any, name: str) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"{name}={reprlib.repr(value)} is not a list of texts")
    return tuple(text(v, name) for v in value)


def number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={reprlib.repr(value)} is not a number")
    return float(value)


def shipped_policies() -> list[str]:
    """Names of the policies that come with the package."""
    return sorted(file.stem for file in SHIPPED.glob("*.yaml"))


def policy_file(name: str | Path) -> Path:
    """The file that a policy's name means: the file itself, or the shipped one if there is none of that name."""
    path = Path(name)
    if path.name == str(path) and path.name in shipped_policies() and not path.exists():
        return SHIPPED / f"{path.name}.yaml"
    return path


@dataclass(frozen=True)
class Finding:
    """Why an audit triggered."""

    category: str
    reason: str


@dataclass(frozen=True)
class Policy:
    """What a picture may show, and what happens to one that stays flagged."""

    name: str = "default"
    categories: tuple[Category, ...] = field(default_factory=tuple)
    trigger: float = 0.40
    """A picture is benign only if its adv_prob is below this."""
    last_resort: tuple[str, ...] = ("strong_repair", "blur", "block")

    def __post_init__(self) -> None:
        names = [c.name for c in self.categories]
        if len(names) < 2 or names[0] != SAFE:
            raise BadConfig(f"policy categories {names}: the first must be {SAFE!r} and one harm must follow")
        if len(set(names)) != len(names):
            raise BadConfig(f"policy categories {names}: names must be unique")
        if not 0.0 < self.trigger <= 1.0:
            raise BadConfig(f"policy trigger={self.trigger}: must be in (0, 1]")
        for c in self.categories:
            if c.threshold is not None and not 0.0 < c.threshold <= 1.0:
                raise BadConfig(f"category {c.name}: threshold={c.threshold} must be in (0, 1]")
            if c.uncovered not in ("", "accepted"):
                raise BadConfig(f"category {c.name}: uncovered={c.uncovered!r} can only be 'accepted'")
            if not (math.isfinite(c.weight) and c.weight > 0):
                raise BadConfig(f"category {c.name}: weight={c.weight} must be positive")
            if c.repair_weight is not None and not (math.isfinite(c.repair_weight) and c.repair_weight > 0):
                raise BadConfig(f"category {c.name}: repair_weight={c.repair_weight} must be positive")
        unknown = [s for s in self.last_resort if s not in LADDER]
        if unknown or not self.last_resort or self.last_resort[-1] not in ("block", "keep"):
            raise BadConfig(
                f"last_resort={list(self.last_resort)}: steps are {', '.join(LADDER)} "
                "and the last must be block (or keep, which releases flagged images)"
            )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(c.name for c in self.categories)

    @property
    def repair_weights(self) -> tuple[float, ...]:
        """Class weights of the inpainter's alignment loss, in the order of the categories."""
        return tuple(c.weight if c.repair_weight is None else c.repair_weight for c in self.categories)

    def category(self, name: str) -> Category:
        for c in self.categories:
            if c.name == name:
                return c
        raise BadConfig(f"no category {name!r} in policy {self.name!r}; it has {', '.join(self.names)}")

    def safe_prompt(self, name: str) -> str:
        """The prompt to paint in place of a category; that of `safe` if the category has none."""
        return self.category(name).safe_prompt or self.categories[0].safe_prompt

    def finding(self, audit: Audit, calibrated: Mapping[str, float] | None = None) -> Finding | None:
        """Why an audit triggers; None if adv_prob < trigger and the most probable class is safe.

        A category's threshold, from the policy or from calibration (the lower one counts), can only make this stricter.
        """
        return self.finding_of(audit.adv_prob, audit.probs, calibrated)

    def finding_of(
        self, adv_prob: float, probs: Mapping[str, float], calibrated: Mapping[str, float] | None = None
    ) -> Finding | None:
        """The same for bare scores, with a probability for every category of the policy."""
        for c in self.categories[1:]:
            p = probs[c.name]
            limits = [t for t in (c.threshold, (calibrated or {}).get(c.name)) if t is not None]
            if limits and p >= min(limits):
                return Finding(c.name, f"p({c.name}) {p:.3f} ≥ {min(limits):.3f}")
        harm = max(probs, key=probs.__getitem__)
        if harm != SAFE:
            return Finding(harm, f"most probable class is {harm} ({probs[harm]:.3f})")
        if not adv_prob < self.trigger:
            harms = {c: p for c, p in probs.items() if c != SAFE}
            likeliest = max(harms, key=harms.__getitem__)
            return Finding(likeliest, f"adv_prob {adv_prob:.3f} ≥ {self.trigger:.2f}")
        return None

    def digest(self) -> str:
        """SHA-256 of the whole policy."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "trigger": self.trigger,
            "last_resort": list(self.last_resort),
            "categories": [
                {
                    "name": c.name,
                    "definition": c.definition,
                    "exemptions": list(c.exemptions),
                    "weight": c.weight,
                    **({} if c.repair_weight is None else {"repair_weight": c.repair_weight}),
                    **({} if c.threshold is None else {"threshold": c.threshold}),
                    "safe_prompt": c.safe_prompt,
                    **({"uncovered": c.uncovered} if c.uncovered else {}),
                }
                for c in self.categories
            ],
        }

    @classmethod
    def from_dict(cls, data: Any, source: str = "policy") -> Policy:
        if not isinstance(data, dict):
            raise BadConfig(f"{source}: a policy is a mapping, got {type(data).__name__}")
        unknown = sorted(str(k) for k in set(data) - {"name", "trigger", "last_resort", "categories"})
        if unknown:
            raise BadConfig(f"{source}: unknown key(s) {', '.join(unknown)[:200]}")
        try:
            return cls(
                name=text(data.get("name", "unnamed"), "name"),
                categories=tuple(category(c) for c in data.get("categories", ())),
                trigger=number(data.get("trigger", 0.40), "trigger"),
                last_resort=texts(data.get("last_resort", ("strong_repair", "blur", "block")), "last_resort"),
            )
        except (TypeError, AttributeError, ValueError, OverflowError) as error:
            raise BadConfig(f"{source}: {error}") from error

    @classmethod
    def load(cls, path: str | Path) -> Policy:
        """Read a policy from a YAML file, or the shipped one of that name (`paper`) if there is no such file."""
        path = policy_file(path)
        try:
            with path.open("rb") as file:
                raw = file.read(MOST_BYTES + 1)
            if len(raw) > MOST_BYTES:
                raise BadConfig(f"{path}: over {MOST_BYTES} bytes, which is no policy")
            data = PlainYaml(raw.decode("utf-8")).get_single_data()
        except FileNotFoundError as error:
            raise BadConfig(f"{path}: no such policy file; shipped are {', '.join(shipped_policies())}") from error
        except BadConfig:
            raise
        except OSError as error:
            raise BadConfig(f"{path}: cannot be read ({error.strerror})") from error
        except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise BadConfig(f"{path}: not valid YAML: {error}") from error
        return cls.from_dict(data, str(path))

    @classmethod
    def default(cls) -> Policy:
        """The three-class policy that ships with the package."""
        return cls.load(Path(__file__).parent / "assets" / "policy.yaml")
