"""Runs the stages of a recipe: skips what is done, resumes what was cut, and stops with a message that says what next.

guardpaint recipe run recipes/paper.yaml --out DIR
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from guardpaint.errors import BadInput, GuardPaintError
from guardpaint.recipe.ledger import (
    DONE,
    FAILED,
    INTERRUPTED,
    RUNNING,
    Change,
    Ledger,
    Record,
    change_of,
    commits_of,
    now,
)
from guardpaint.recipe.spec import Recipe, Stage, overlap
from guardpaint.store.checkpoint import write_atomic

FULL = ("No space left on device", "[Errno 28]", "Disk quota exceeded")
PATIENCE = 120.0
"""Seconds that a stage has to end after Ctrl-C before it is killed."""
Say = Callable[[str], None]


class StageFailed(GuardPaintError):
    """A stage ended with an error; the message says which and how to go on."""


class Waiting(GuardPaintError):
    """The next stage is a person's; the message says what to do."""


class Interrupted(GuardPaintError):
    """Ctrl-C; the message has the command that goes on."""


@dataclass(frozen=True)
class Launch:
    """How commands are started."""

    processes: int = 1
    """Processes of each training stage."""
    gpu: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    again: str = "guardpaint recipe run …"
    """The command that goes on after an interruption."""

    def accelerated(self, stage: Stage) -> bool:
        """Whether a launcher starts a stage: training, with several processes or a GPU."""
        return stage.launch == "accelerate" and (self.processes > 1 or self.gpu)

    def argv(self, stage: Stage) -> list[str]:
        """The command line of a stage as a list for the operating system."""
        return [sys.executable, *self.launcher(stage), "-m", "guardpaint.cli", *stage.words]

    def launcher(self, stage: Stage) -> list[str]:
        """How processes of a stage are started; without a GPU accelerate would start only one."""
        if not self.accelerated(stage):
            return []
        if not self.gpu:
            return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.processes)]
        start = ["-m", "accelerate.commands.launch", "--num_processes", str(self.processes)]
        return [*start, "--num_machines", "1", "--dynamo_backend", "no", "--mixed_precision", "no"]

    def shown(self, stage: Stage) -> str:
        """The command line of a stage as a user would type it."""
        if not self.accelerated(stage):
            return stage.command
        start = f"accelerate launch --num_processes {self.processes}"
        if not self.gpu:
            start = f"torchrun --standalone --nproc-per-node {self.processes}"
        return stage.command.replace("guardpaint", f"{start} -m guardpaint.cli", 1)


Hands = Mapping[str, Callable[[Path], None]]
"""What stands in for a person, by the name of the stage; it is given the recipe's folder."""


@dataclass
class Engine:
    """Runs one recipe in its folder."""

    recipe: Recipe
    launch: Launch = field(default_factory=Launch)
    say: Say = print
    hands: Hands = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.recipe.out)

    def chosen(self, only: Sequence[str] = (), until: str | None = None) -> list[Stage]:
        """The stages to run: the named ones, or all up to and including `until` but the optional ones."""
        if only:
            return [s for s in self.recipe.stages if s in [self.recipe.stage(n) for n in only]]
        last = self.recipe.stages.index(self.recipe.stage(until)) if until else len(self.recipe.stages) - 1
        return [s for s in self.recipe.stages[: last + 1] if not s.optional]

    def changes(self, stages: Sequence[Stage]) -> list[Change]:
        """How the stages that have run before differ from what their folder remembers."""
        records = [(s, self.ledger.read(s)) for s in stages]
        return [c for s, r in records if r is not None and (c := change_of(self.ledger, self.recipe, s, r))]

    def announce(self, stages: Sequence[Stage]) -> None:
        """Say which settings have changed since the last run, and which stages will run again for it.

        A hub repository that has moved on is only named: to run its stages again, pin another `revision` in the recipe.
        """
        for stage in stages:
            record = self.ledger.read(stage)
            before, current = {} if record is None else record.commits, commits_of(stage)
            for name in (n for n in before if current.get(n, before[n]) != before[n]):
                self.say(f"{stage.name} used {name} at {before[name][:12]}; this machine now has {current[name][:12]}")
        changes = self.changes(stages)
        if not changes:
            return
        names = [c.stage for c in changes]
        self.say("changed since the last run:")
        for change in changes:
            for line in change.lines():
                self.say(f"  {line}")
        begun = {s.name for s in stages if self.ledger.read(s) is not None}
        again = [n for n in (s.name for s in stages) if n in names or n in self.recipe.dependants(names)]
        self.say(
            f"run again: {', '.join(n for n in again if n in begun)}; old outputs are kept in {self.recipe.out}/old"
        )

    def run(self, stages: Sequence[Stage]) -> None:
        """Run stages in order; raises StageFailed, Waiting or Interrupted."""
        self.announce(stages)
        for stage in stages:
            self.one(stage)

    def one(self, stage: Stage) -> None:
        """Run one stage unless it is done and unchanged."""
        record = self.ledger.read(stage)
        change = None if record is None else change_of(self.ledger, self.recipe, stage, record)
        if record is not None and record.status == DONE and change is None:
            self.say(f"{stage.name}: done, neither its settings nor its inputs have changed")
            return
        self.check_inputs(stage)
        if record is not None and change is not None and (change.settings or change.inputs):
            self.move_aside(stage)
            record = None
        if not stage.words:
            self.by_hand(stage)
            return
        resumed = record is not None
        self.say(f"{stage.name}: {'resumes' if resumed else 'begins'}: {self.launch.shown(stage)}")
        self.execute(stage, record)

    def check_inputs(self, stage: Stage) -> None:
        """Raise BadInput if an input is missing; the message names the file and the stage that writes it."""
        for path in stage.inputs:
            if Path(path).is_absolute():
                if not self.ledger.digest(path):
                    raise BadInput(f"stage {stage.name}: {path} is missing")
                continue
            for maker in self.recipe.producers(path, stage):
                for own in (o for o in maker.outputs if overlap(o, path)):
                    wanted = path if path.startswith(f"{own}/") else own  # a file inside of an output, or the output
                    if not self.ledger.digest(wanted):
                        raise BadInput(
                            f"stage {stage.name}: {self.recipe.out / wanted} is missing, which stage {maker.name} "
                            f"writes; run it with --stage {maker.name}"
                        )

    def move_aside(self, stage: Stage) -> None:
        """Move the outputs of an earlier run into OUT/old, under the stage's name and a number."""
        places = [p for path in stage.outputs for p in self.ledger.matches(path)]
        if not places:
            return
        old = self.recipe.out / "old"
        number = 1 + sum(1 for _ in old.glob(f"{stage.name}-*"))
        for place in places:
            target = old / f"{stage.name}-{number}" / place.relative_to(self.recipe.out)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(place, target)
        self.say(f"{stage.name}: its old outputs are in {old / f'{stage.name}-{number}'}")

    def by_hand(self, stage: Stage) -> None:
        """Accept what a person has made, or stop and say what to do."""
        started = time.monotonic()
        inputs = self.ledger.input_digests(self.recipe, stage)
        if self.ledger.missing_outputs(stage) and stage.name in self.hands:
            self.hands[stage.name](self.recipe.out)
        missing = self.ledger.missing_outputs(stage)
        if missing:
            raise Waiting(
                f"stage {stage.name} is yours: {stage.hand} When {self.recipe.out / missing[0]} exists, run "
                f"{self.launch.again}"
            )
        record = Record(DONE, dict(stage.settings), inputs, started=now(), seconds=time.monotonic() - started)
        record.outputs, record.exit = self.ledger.output_digests(stage), 0
        self.ledger.write(stage, record)
        self.say(f"{stage.name}: done by hand")

    def execute(self, stage: Stage, record: Record | None) -> None:
        """Start a stage's command and wait for it, with its output on the screen and in its log."""
        before = 0.0 if record is None else record.seconds
        record = Record(RUNNING, dict(stage.settings), self.ledger.input_digests(self.recipe, stage), started=now())
        record.command, record.seconds = self.launch.shown(stage), before
        if stage.config is not None:
            path = self.recipe.out / stage.config_file
            write_atomic(path, yaml.safe_dump(dict(stage.config), sort_keys=False).encode())
        self.ledger.write(stage, record)
        log = self.recipe.out / "logs" / f"{stage.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        child = Child(self.launch.argv(stage), self.launch.environment, log)
        try:
            code = child.wait()
            cut = False
        except KeyboardInterrupt:
            code, cut = child.stop(), True
        record.seconds, record.exit = before + time.monotonic() - start, code
        record.memory_gb = child.memory_gb
        missing = [] if code or cut else self.ledger.missing_outputs(stage)
        record.status = INTERRUPTED if cut else FAILED if code or missing else DONE
        if record.status == DONE:
            record.outputs = self.ledger.output_digests(stage)
            record.commits = commits_of(stage)
        self.ledger.write(stage, record)
        if cut:
            raise Interrupted(
                f"stage {stage.name} was interrupted; what it has done is kept. Go on with {self.launch.again}"
            )
        if code or missing:
            raise StageFailed(self.failure(stage, code, missing, log))
        self.say(f"{stage.name}: done in {record.seconds:.0f} s")

    def failure(self, stage: Stage, code: int, missing: Sequence[str], log: Path) -> str:
        """What went wrong in a stage, and how to go on."""
        again = f"go on with {self.launch.again}"
        if not code:
            return f"stage {stage.name}: ended well, but {self.recipe.out / missing[0]} is not there; its log is {log}"
        end = tail(log)
        if any(sign in end for sign in FULL):
            free = shutil.disk_usage(self.recipe.out).free / 1e9
            need = stage.estimate.disk_gb
            need_text = "" if need is None else f", the stage needs about {need:g} GB"
            return (
                f"stage {stage.name}: the disk is full ({free:.1f} GB free{need_text}). What was finished is kept; "
                f"make room, then {again}"
            )
        last = next((line for line in reversed(end.splitlines()) if line.strip()), "no output")
        return f"stage {stage.name}: ended with exit code {code}: {last.strip()} (log: {log}); {again}"


def tail(path: Path, size: int = 8000) -> str:
    """The end of a log."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode("utf-8", "replace")


class Child:
    """A command in its own process group, whose output goes to the screen and to a log."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.memory_gb = 0.0
        self.log = log.open("ab")
        self.process = subprocess.Popen(
            argv,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.copier = threading.Thread(target=self.copy, daemon=True)
        self.copier.start()

    def copy(self) -> None:
        stream = self.process.stdout
        assert stream is not None
        while piece := os.read(stream.fileno(), 1 << 16):
            with contextlib.suppress(OSError):  # a full disk ends the stage, not its copy on the screen
                self.log.write(piece)
                self.log.flush()
            sys.stderr.write(piece.decode("utf-8", "replace"))
            sys.stderr.flush()

    def wait(self) -> int:
        """Wait for the end; returns the exit code, and notes the largest memory."""
        _, status, usage = os.wait4(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        self.memory_gb = usage.ru_maxrss / 1e6
        self.copier.join(timeout=10)
        self.log.close()
        return self.process.returncode

    def stop(self) -> int:
        """Pass Ctrl-C on and wait; a command that does not end is killed, as it is at the second Ctrl-C."""
        self.signal(signal.SIGINT)
        timer = threading.Timer(PATIENCE, self.signal, (signal.SIGKILL,))
        timer.start()
        try:
            while True:
                try:
                    return self.wait()
                except KeyboardInterrupt:
                    self.signal(signal.SIGKILL)
        finally:
            timer.cancel()

    def signal(self, number: int) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
