"""`guardpaint eval attack`: run one attack on a testbed's target prompts, against a base behind a prompt filter."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from guardpaint.bases import BaseOptions
from guardpaint.data.judges import shows_harm
from guardpaint.errors import BadInput
from guardpaint.evaluate.attacks import search
from guardpaint.evaluate.attacks.system import Target
from guardpaint.evaluate.defences import prompt_filter
from guardpaint.evaluate.defences.world_filter import world_filter
from guardpaint.policy import Policy
from guardpaint.store.checkpoint import fingerprint, short_hash
from guardpaint.testbed import open_testbed
from guardpaint.testbed.language import Attacker

TARGETS = ("attack", "attack-train")
"""Splits of target prompts: to evaluate on, and to learn from."""


@dataclass(frozen=True)
class AttackOptions:
    """Options of `guardpaint eval attack`."""

    attack: str
    out: Path
    """Folder for the prompts, with one file for each attack and base."""
    base: str | None = None
    """Base to attack; None means the testbed's first."""
    count: int = 200
    budget: int = 20
    """Queries for each target."""
    split: str = TARGETS[0]
    opening: BaseOptions = field(default_factory=BaseOptions)
    """How the base is opened and called."""

    def __post_init__(self) -> None:
        if self.attack not in search.ATTACKS:
            raise BadInput(f"attack {self.attack!r}: choose one of {', '.join(search.ATTACKS)}")
        if self.split not in TARGETS:
            raise BadInput(f"split {self.split!r}: attacks start from {' or '.join(TARGETS)}")


def run(options: AttackOptions, testbed: str | None = None) -> str:
    """Search every target that has no row yet; returns a sentence that says how many prompts succeed."""
    world = open_testbed(testbed)
    name = options.base or world.bases()[0]
    prompts = world.harmful(options.split, options.count)
    if not prompts:
        raise BadInput(
            f"the testbed {world.name!r} has no harmful prompts of the split {options.split}; "
            "add some to it, or name another with --testbed"
        )
    base, judge, lexicon = world.base(name, options.opening), world.judge(Policy.default()), world.lexicon()
    attacker = Attacker(world.surrogate(), lexicon, world.rewriter())
    defence = world_filter(lexicon, prompt_filter.base_encoder(base.pipe))
    attack = search.ATTACKS[options.attack]()

    def target() -> Target:
        return Target(base, defence, partial(shows_harm, judge), options.budget)

    sources = inspect.getsource(prompt_filter), inspect.getsource(inspect.getmodule(type(attack)) or search)
    rules: tuple[Any, ...] = *sources, defence.words, fingerprint(attacker.surrogate.encoder)
    if defence.encode is None:  # the stock filter's rows keep the hash that they had before there were others
        rules = *rules, "words alone"
    against = short_hash(base.digest(), judge.identity, options.budget, vars(attack), rules)
    file = options.out / f"{options.attack}-{name}.jsonl"
    rows = search.run(search.Search(attack, attacker, target, against), prompts, file)
    hits = sum(bool(r["success"]) for r in rows)
    return f"{options.attack} on {name}: {hits} of {len(rows)} prompts succeed behind the filter"
