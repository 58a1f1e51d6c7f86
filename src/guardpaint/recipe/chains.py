"""Takes the outputs of a finished run away, one after the other: whoever reads one must fail and name it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from guardpaint.errors import GuardPaintError
from guardpaint.recipe import spec
from guardpaint.recipe.engine import Engine
from guardpaint.store.checkpoint import short_hash


@dataclass(frozen=True)
class Break:
    """One output that was taken away, and what a stage that reads it did."""

    output: str
    producer: str
    consumer: str
    exit: int
    message: str
    alone: bool = True
    """Whether only this output was missing; else those of the other stages of the same entry were too, because the
    command reads a folder in which each of them puts its files."""

    @property
    def detected(self) -> bool:
        """Whether the consumer failed and named the file or its folder."""
        names = [part.split("*")[0] for part in self.output.split("/")]
        return self.exit != 0 and any(name and name in self.message for name in names[-2:])


def break_chain(engine: Engine, through_engine: bool = True) -> list[Break]:
    """Take every output away in turn, run a stage that reads it, and put it back.

    With `through_engine` the first consumer is checked as `guardpaint recipe run --stage` does. Otherwise command lines
    of consumers are started as they are, until one notices, so that only a command that opens the file can.
    """
    found = []
    for producer in engine.recipe.stages:
        for number, output in enumerate(producer.outputs):
            readers = consumers(engine, producer, output)
            if not readers:
                continue
            if through_engine:
                found.append(take_away(engine, producer, [output], readers[0], True))
                continue
            others = [s.outputs[number] for s in engine.recipe.stages if s.group == producer.group]
            tries = (
                take_away(engine, producer, some, reader, False)
                for some in ([output], *([others] if len(others) > 1 else []))
                for reader in readers
            )
            last = None
            for last in tries:
                if last.detected:
                    break
            assert last is not None
            found.append(last)
    return found


def consumers(engine: Engine, producer: spec.Stage, output: str) -> list[spec.Stage]:
    """The stages with a command that read an output of a stage, in order."""
    recipe = engine.recipe

    def reads(stage: spec.Stage) -> bool:
        return any(producer in recipe.producers(i, stage) and spec.overlap(i, output) for i in stage.inputs)

    return [s for s in recipe.stages if not s.optional and s.words and reads(s)]


def take_away(
    engine: Engine, producer: spec.Stage, outputs: Sequence[str], consumer: spec.Stage, through_engine: bool
) -> Break:
    """Run a consumer without some of its inputs; the first of them names the result."""
    out = engine.recipe.out
    hidden = out / f".hidden-{short_hash(list(outputs))}"
    places = [p for output in outputs for p in engine.ledger.matches(output)]
    moved = [(p, hidden / p.relative_to(out)) for p in places]
    for place, other in moved:
        other.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(place, other)
    alone = len(outputs) == 1
    try:
        if through_engine:
            try:
                engine.check_inputs(consumer)
                return Break(outputs[0], producer.name, consumer.name, 0, "", alone)
            except GuardPaintError as error:
                return Break(outputs[0], producer.name, consumer.name, 1, str(error), alone)
        result = subprocess.run(
            engine.launch.argv(consumer), env={**os.environ, **engine.launch.environment},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        return Break(outputs[0], producer.name, consumer.name, result.returncode, result.stdout[-3000:], alone)
    finally:
        for place, other in moved:
            if place.exists():
                shutil.rmtree(place) if place.is_dir() else place.unlink()
            shutil.move(other, place)
        shutil.rmtree(hidden, ignore_errors=True)
