"""The training loop every component shares: resume, EMA, learning-rate decay, progress, loss curve, samples.

A component gives a batch-to-losses function and a sampler of batches by step; the engine does the rest. Batches
depend on (seed, step) alone, so a resumed run sees exactly what an uninterrupted one would have seen.
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply, send_to_device
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from guardpaint.errors import BadCheckpoint, BadConfig
from guardpaint.store.checkpoint import read_json, write_json, write_tensors
from guardpaint.store.seeds import derive


@dataclass(frozen=True)
class TrainConfig:
    """What every training run has."""

    steps: int
    batch_size: int
    learning_rate: float
    seed: int = 0
    warmup: int = 50
    schedule: str = "cosine"
    """cosine, linear or constant."""
    weight_decay: float = 0.0
    clip: float = 1.0
    ema: float = 0.999
    checkpoint_minutes: float = 5.0
    sample_minutes: float = 5.0
    threads: int = 1
    precision: str = "no"
    """Mixed precision where the hardware has it: no, fp16 or bf16."""
    validate_every: int = 0
    """Steps between validations, for trainers that have one; 0: never."""
    accumulate: int = 1
    """Batches per optimiser step."""
    patience: int = 0
    """Stop after so many validations without a better score; 0: never."""

    def __post_init__(self) -> None:
        if min(self.steps, self.batch_size, self.accumulate) < 1 or not self.learning_rate > 0:
            raise BadConfig(
                f"steps={self.steps}, batch_size={self.batch_size}, accumulate={self.accumulate}, "
                f"learning_rate={self.learning_rate}: all > 0"
            )
        if self.schedule not in ("cosine", "linear", "constant") or not 0 <= self.ema < 1:
            raise BadConfig(f"schedule={self.schedule!r} must be cosine, linear or constant; ema={self.ema} in [0, 1)")
        if self.precision not in ("no", "fp16", "bf16"):
            raise BadConfig(f"precision={self.precision!r}: choose no, fp16 or bf16")

    def rate(self, step: int) -> float:
        """Learning rate at a step: linear warm-up, then the schedule down to a hundredth."""
        warm = min(1.0, (step + 1) / max(1, self.warmup))
        done = step / max(1, self.steps)
        shape = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}[self.schedule]
        return self.learning_rate * warm * max(0.01, shape)


@dataclass(frozen=True)
class Run:
    """One sitting of a training run: its config file, its directory, and how long it may take."""

    config_file: Path
    """YAML with the parts `model` and `train`."""
    out: Path
    """Checkpoints, loss curve and samples; the finished model goes to `out/model`."""
    minutes: float | None = None
    """Stop after so many minutes; the next sitting resumes. None: train until the last step."""
    quiet: bool = False
    """Show no progress bar."""

    def command(self, trainer: str, **inputs: Path | str | Sequence[Path] | None) -> str:
        """The command line that repeats this run, for the model's card; inputs that are None are left out."""
        words = [f"guardpaint train stage {trainer} --config {self.config_file} --out {self.out}"]
        for name, value in inputs.items():
            several = [value] if value is None or isinstance(value, Path | str) else value
            words += [f"--set {name}={one}" for one in several if one is not None]
        return " ".join(words)


def load_config(path: Path, shape: Any) -> tuple[Any, TrainConfig]:
    """A YAML file with the parts `model` (of dataclass `shape`) and `train`."""
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadConfig(f"{path}: no such config file") from error
    except yaml.YAMLError as error:
        raise BadConfig(f"{path}: needs the parts model and train, with known keys only ({error})") from error
    return parse_config(data, shape, str(path))


def parse_config(data: Any, shape: Any, where: str) -> tuple[Any, TrainConfig]:
    """The parts `model` and `train` of a config that is already read; errors name `where` it comes from."""
    try:
        for name in ("learning_rate", "weight_decay", "clip", "ema"):
            if isinstance(data["train"].get(name), str):
                raise BadConfig(f"{where}: {name}={data['train'][name]!r} is text; YAML reads 1e-3 so, write 1.0e-3")
        model = {k: tuple(v) if isinstance(v, list) else v for k, v in data["model"].items()}
        return shape(**model), TrainConfig(**data["train"])
    except (KeyError, TypeError, AttributeError) as error:
        raise BadConfig(f"{where}: needs the parts model and train, with known keys only ({error})") from error


class Ema:
    """Exponential moving average of trainable weights, warmed up so that early averages are not stale."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay, self.updates = decay, 0
        self.shadow = {k: v.detach().clone() for k, v in weights(module).items()}

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        self.updates += 1
        keep = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for key, value in weights(module).items():
            if value.is_floating_point():
                self.shadow[key].lerp_(value, 1 - keep)
            else:
                self.shadow[key].copy_(value)


def keep_freed_memory() -> None:
    """Let glibc reuse large blocks instead of returning them to the system after every layer (a sixth faster)."""
    import ctypes
    import sys

    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        for option in (-1, -2, -3):  # trim threshold, top pad, mmap threshold
            libc.mallopt(option, 1 << 28 if option == -2 else 1 << 30)


Values = dict[str, Tensor]
Losses = Callable[[nn.Module, Any], Values | Iterator[Values]]
"""(model, batch) → named losses; `loss` is minimised, the others are logged.

An iterator's parts add up, and each part's graph is freed before the next is computed.
"""


def weights(module: nn.Module) -> Values:
    """What a run keeps of a model: everything, or what the model itself names (adapters on a frozen giant)."""
    kept = getattr(module, "kept_state", None)
    return module.state_dict() if kept is None else kept()


def load_weights(module: nn.Module, state: Values) -> None:
    """The counterpart of `weights`."""
    missing = sorted(set(weights(module)) - set(state))
    if missing:
        raise KeyError(f"weights of {missing[0]} are missing")
    module.load_state_dict(state, strict=not hasattr(module, "kept_state"))


def fit(
    model: nn.Module,
    batches: Callable[[int], Any],
    losses: Losses,
    config: TrainConfig,
    run: Run,
    *,
    sample: Callable[[nn.Module, Path], None] | None = None,
    validate: Callable[[nn.Module], dict[str, float]] | None = None,
) -> nn.Module:
    """Train until done (or for the run's `minutes`), resuming from `run.out`; returns the model with EMA weights.

    Under `accelerate launch` every process takes its own batches and the first one writes. With `validate` (its
    `score` counts) the best EMA weights are kept and returned, and training stops when patience runs out.
    """
    out = run.out
    torch.set_num_threads(config.threads)
    keep_freed_memory()
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    out.mkdir(parents=True, exist_ok=True)
    accelerator = Accelerator(
        mixed_precision=config.precision,
        log_with="tensorboard" if find_spec("tensorboard") is not None else None,
        project_dir=out,
    )
    accelerator.init_trackers("board")
    main = accelerator.is_main_process
    trained = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, config.learning_rate, weight_decay=config.weight_decay, fused=True)
    model = model.to(accelerator.device)
    ema = Ema(model, config.ema)
    step, seconds = resume(out, model, optimiser, ema)
    best = Best.read(out)
    model, optimiser = accelerator.prepare(model, optimiser)
    model.train()
    started = saved = sampled = time.monotonic()
    log: list[dict[str, float]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=run.quiet or not main) as progress:
        task = progress.add_task(out.name, total=config.steps, completed=step)
        while step < config.steps and not best.exhausted(config):
            for group in optimiser.param_groups:
                group["lr"] = config.rate(step)
            values: dict[str, float] = {}
            for k in range(config.accumulate):
                index = (step * config.accumulate + k) * accelerator.num_processes + accelerator.process_index
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(derive(config.seed, "dropout", index))
                    given = moved(batches(index), accelerator.device)
                    for part in parts(losses(model, given), accelerator.autocast):
                        if not torch.isfinite(part["loss"]):
                            raise FloatingPointError(
                                f"loss is {part['loss'].item()} at step {step}; the last checkpoint is intact"
                            )
                        accelerator.backward(part["loss"] / config.accumulate)
                        for name, value in part.items():
                            values[name] = values.get(name, 0.0) + float(value.detach()) / config.accumulate
                        del part
            norm = accelerator.clip_grad_norm_(model.parameters(), config.clip)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            ema.update(accelerator.unwrap_model(model))
            step += 1
            log.append({"step": step, "norm": float(norm), **values})
            progress.update(task, completed=step, description=f"{out.name} loss {log[-1]['loss']:.4f}")
            if step % 20 == 0:
                accelerator.log({k: v for k, v in log[-1].items() if k != "step"}, step)
            now = time.monotonic()
            snapshot = averaged(accelerator.unwrap_model(model), ema)
            if main and validate is not None and config.validate_every and step % config.validate_every == 0:
                with snapshot as smooth:
                    found = validate(smooth)
                accelerator.log(found, step)
                best.offer(out, step, found, ema)
            over = run.minutes is not None and now - started > 60 * run.minutes
            stop = agreed(accelerator, over or best.exhausted(config))
            last = stop or step == config.steps
            if main and (now - saved > 60 * config.checkpoint_minutes or last):
                save(out, accelerator.unwrap_model(model), optimiser, ema, config, step, seconds + now - started)
                write_log(out, log)
                log, saved = [], now
            if main and sample is not None and (now - sampled > 60 * config.sample_minutes or last):
                with snapshot as smooth:
                    sample(smooth, out / f"sample-{step:06d}.png")
                sampled = time.monotonic()
            if stop:
                break
    accelerator.wait_for_everyone()
    accelerator.end_training()
    final: nn.Module = accelerator.unwrap_model(model)
    load_weights(final, best.weights(out) if best.step else ema.shadow)
    return final.eval()


def parts(values: Values | Iterator[Values], autocast: Callable[[], Any]) -> Iterator[Values]:
    """Losses one after the other; those of an iterator are computed under the accelerator's precision."""
    if isinstance(values, dict):
        yield values
        return
    while True:
        with autocast():
            part = next(values, None)
        if part is None:
            return
        yield part
        del part


def moved(batch: Any, device: torch.device) -> Any:
    """A batch on the device: what accelerate's `send_to_device` does, inside dataclasses too."""

    def move(value: Any) -> Any:
        if is_dataclass(value):
            return replace(value, **{f.name: moved(getattr(value, f.name), device) for f in fields(value)})  # type: ignore[type-var]
        return send_to_device(value, device)

    if device.type == "cpu":
        return batch
    return recursively_apply(move, batch, test_type=lambda value: not isinstance(value, type))


def agreed(accelerator: Accelerator, stop: bool) -> bool:
    """The first process decides for all; otherwise the others would wait for it for ever."""
    if accelerator.num_processes == 1:
        return stop
    if stop and accelerator.is_main_process:
        accelerator.set_trigger()
    return bool(accelerator.check_trigger())


BEST, BEST_NOTE = "best.pt", "best.json"


@dataclass
class Best:
    """The best validated weights so far, on disk."""

    step: int = 0
    score: float = -math.inf
    since: int = 0
    """Validations since."""

    @classmethod
    def read(cls, out: Path) -> Best:
        path = out / BEST_NOTE
        return cls(**{k: read_json(path)[k] for k in ("step", "score", "since")}) if path.exists() else cls()

    def offer(self, out: Path, step: int, found: dict[str, float], ema: Ema) -> None:
        """Keep these weights if they score higher."""
        if not math.isfinite(found["score"]):
            raise FloatingPointError(f"validation score is {found['score']} at step {step}")
        self.since += 1
        if found["score"] > self.score:
            self.step, self.score, self.since = step, found["score"], 0
            write_tensors(out / BEST, ema.shadow)
        write_json(out / BEST_NOTE, {"step": self.step, "score": self.score, "since": self.since, "last": found})

    def exhausted(self, config: TrainConfig) -> bool:
        return bool(config.patience) and self.since >= config.patience

    def weights(self, out: Path) -> dict[str, Tensor]:
        return torch.load(out / BEST, weights_only=True)


class averaged:
    """The model with EMA weights, inside a with block."""

    def __init__(self, model: nn.Module, ema: Ema) -> None:
        self.model, self.ema = model, ema

    def __enter__(self) -> nn.Module:
        self.kept = {k: v.detach().clone() for k, v in weights(self.model).items()}
        load_weights(self.model, self.ema.shadow)
        return self.model.eval()

    def __exit__(self, *_: object) -> None:
        load_weights(self.model, self.kept)
        self.model.train()


STATE = "state.pt"


def save(out: Path, model: nn.Module, optimiser: Any, ema: Ema, config: TrainConfig, step: int, seconds: float) -> None:
    """Everything a later sitting needs, in one atomic file."""
    state = {
        "model": weights(model),
        "optimiser": optimiser.state_dict(),
        "ema": ema.shadow,
        "updates": ema.updates,
        "step": step,
        "seconds": seconds,
    }
    write_tensors(out / STATE, state)
    write_json(out / "run.json", {"step": step, "minutes": seconds / 60, "config": asdict(config)})


def resume(out: Path, model: nn.Module, optimiser: Any, ema: Ema) -> tuple[int, float]:
    path = out / STATE
    if not path.exists():
        return 0, 0.0
    try:
        state = torch.load(path, weights_only=True)
        load_weights(model, state["model"])
        optimiser.load_state_dict(state["optimiser"])
        ema.shadow, ema.updates = state["ema"], state["updates"]
    except Exception as error:
        raise BadCheckpoint(f"{path}: cannot resume from it ({error}); move it away to start anew") from error
    return int(state["step"]), float(state["seconds"])


def write_log(out: Path, rows: list[dict[str, float]]) -> None:
    """Append rows under the columns the file began with; a value that some steps lack stays empty there."""
    if not rows:
        return
    path = out / "loss.csv"
    new = not path.exists()
    if new:
        columns = list(dict.fromkeys(k for row in rows for k in row))
    else:
        with path.open(newline="") as file:
            columns = next(csv.reader(file))
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def finished(out: Path, config: TrainConfig) -> dict[str, Any] | None:
    """The run's note if it is done (all steps, or out of patience); otherwise says how to go on."""
    done = read_json(out / "run.json")
    if done["step"] >= config.steps or Best.read(out).exhausted(config):
        return done
    print(f"stopped at step {done['step']} of {config.steps}; run the same command to go on")
    return None


def write_card(out: Path, command: str, done: dict[str, Any], warm: Path | None = None, **more: Any) -> None:
    """How the model in `out` was made, beside it; and how the one was made that it started from."""
    made = {"command": command, "seed": done["config"]["seed"], "steps": done["step"], "minutes": done["minutes"]}
    if warm is not None and (warm / "card.json").exists():
        more["starts_from"] = read_json(warm / "card.json")
    write_json(out / "model" / "card.json", {**made, **more})
