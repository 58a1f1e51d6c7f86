"""The training loop every component shares: resume, EMA, learning-rate decay, progress, loss curve, samples.

A component supplies a function from batch to losses and a function from step to batch; the engine does the rest.
Batches depend on (seed, step) alone, so a resumed run sees exactly the batches of an uninterrupted one.
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import parse_flag_from_env, recursively_apply, send_to_device
from torch import Tensor, nn

from guardpaint.errors import BadCheckpoint, BadConfig
from guardpaint.store.checkpoint import read_json, write_json, write_tensors
from guardpaint.store.progress import bar
from guardpaint.store.seeds import derive
from guardpaint.train.interrupts import finishing_the_step


@dataclass(frozen=True)
class TrainConfig:
    """Settings that all trainers share: the part `train` of a config."""

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
    """Mixed precision, if the hardware supports it: no, fp16 or bf16."""
    validate_every: int = 0
    """Steps between validations, for trainers that validate; 0 turns validation off."""
    accumulate: int = 1
    """Batches per optimiser step."""
    patience: int = 0
    """Stop after this many validations without a better score; 0 turns early stopping off."""

    def __post_init__(self) -> None:
        if min(self.steps, self.batch_size, self.accumulate) < 1 or not self.learning_rate > 0:
            raise BadConfig(
                f"steps={self.steps}, batch_size={self.batch_size}, accumulate={self.accumulate}, "
                f"learning_rate={self.learning_rate}: all must be above 0"
            )
        if self.schedule not in ("cosine", "linear", "constant") or not 0 <= self.ema < 1:
            raise BadConfig(
                f"schedule={self.schedule!r} must be cosine, linear or constant; ema={self.ema} must be in [0, 1)"
            )
        if self.precision not in ("no", "fp16", "bf16"):
            raise BadConfig(f"precision={self.precision!r}: choose no, fp16 or bf16")

    def rate(self, step: int) -> float:
        """Learning rate at a step: linear warm-up, then the schedule down to a hundredth of the full rate."""
        warm = min(1.0, (step + 1) / max(1, self.warmup))
        progress = step / max(1, self.steps)
        decays = {"cosine": 0.5 * (1 + math.cos(math.pi * progress)), "linear": 1 - progress, "constant": 1.0}
        return self.learning_rate * warm * max(0.01, decays[self.schedule])


@dataclass(frozen=True)
class Run:
    """Where a training run reads its config and writes its results, and how long it may take before it stops."""

    config_file: Path
    """YAML with the parts `model` and `train`."""
    out: Path
    """Checkpoints, loss curve and samples; the finished model goes to `out/model`."""
    minutes: float | None = None
    """Stop after this many minutes, and resume at the next call. None: train until the last step."""
    quiet: bool = False
    """Show no progress bar."""

    def command(self, trainer: str, **inputs: Path | str | Sequence[Path] | None) -> str:
        """The command line that repeats this run, for the model card; inputs that are None are left out."""
        words = [f"guardpaint train stage {trainer} --config {self.config_file} --out {self.out}"]
        for name, value in inputs.items():
            several = [value] if value is None or isinstance(value, Path | str) else value
            words += [f"--set {name}={one}" for one in several if one is not None]
        return " ".join(words)


def load_config(path: Path, shape: Any) -> tuple[Any, TrainConfig]:
    """The parts `model` (as the dataclass `shape`) and `train` of a YAML file."""
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadConfig(f"{path}: no such config file") from error
    except yaml.YAMLError as error:
        raise BadConfig(f"{path}: needs the parts model and train, with known keys only ({error})") from error
    return parse_config(data, shape, str(path))


def parse_config(data: Any, shape: Any, where: str) -> tuple[Any, TrainConfig]:
    """The parts `model` and `train` of a parsed YAML file; error messages begin with `where`."""
    try:
        for name in ("learning_rate", "weight_decay", "clip", "ema"):
            if isinstance(data["train"].get(name), str):
                raise BadConfig(
                    f"{where}: {name}={data['train'][name]!r} is text; YAML takes 1e-3 for text, so write 1.0e-3"
                )
        model = {k: tuple(v) if isinstance(v, list) else v for k, v in data["model"].items()}
        return shape(**model), TrainConfig(**data["train"])
    except (KeyError, TypeError, AttributeError) as error:
        raise BadConfig(f"{where}: needs the parts model and train, with known keys only ({error})") from error


class Ema:
    """Exponential moving average of a model's weights; its decay starts low so that early averages are not stale."""

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
    """Let glibc reuse large blocks instead of returning them to the system after every layer: a sixth faster."""
    import ctypes
    import sys

    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        for option in (-1, -2, -3):  # trim threshold, top pad, mmap threshold
            libc.mallopt(option, 1 << 28 if option == -2 else 1 << 30)


Values = dict[str, Tensor]
Losses = Callable[[nn.Module, Any], Values | Iterator[Values]]
"""(model, batch) → named losses; `loss` is minimised, the others are logged.

The parts of an iterator are added up, and the graph of each part is freed before the next one is computed.
"""


@runtime_checkable
class Resumable(Protocol):
    """A validation function with a state, which checkpoints keep."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def weights(module: nn.Module) -> Values:
    """The tensors that checkpoints and EMA hold: the model's `kept_state()` if it has one, else its whole state."""
    kept = getattr(module, "kept_state", None)
    return module.state_dict() if kept is None else kept()


def load_weights(module: nn.Module, state: Values) -> None:
    """Load what `weights` returned; a missing tensor is an error."""
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
    """Train until the last step or for `run.minutes`, resuming from `run.out`; returns the model with EMA weights.

    Under `accelerate launch` every process takes its own batches and the first one writes the files. With `validate`,
    the EMA weights with the highest `score` are returned, and training stops when `config.patience` runs out. Ctrl-C
    finishes the running step and writes a checkpoint before it raises KeyboardInterrupt.
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
    step, seconds = resume(out, model, optimiser, ema, validate)
    best = Best.read(out)
    model, optimiser = accelerator.prepare(model, optimiser)
    model.train()
    started = saved = sampled = time.monotonic()
    log: list[dict[str, float]] = []
    with (
        finishing_the_step() as interrupt,
        bar(out.name, config.steps, quiet=run.quiet or not main, done=step) as advance,
    ):
        while step < config.steps and not best.exhausted(config):
            for group in optimiser.param_groups:
                group["lr"] = config.rate(step)
            values: dict[str, float] = {}
            for k in range(config.accumulate):
                index = (step * config.accumulate + k) * accelerator.num_processes + accelerator.process_index
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(derive(config.seed, "dropout", index))
                    batch = moved(batches(index), accelerator.device)
                    found = losses(model, batch)
                    for part in parts(found, accelerator.autocast):
                        if not torch.isfinite(part["loss"]):
                            raise FloatingPointError(
                                f"loss is {part['loss'].item()} at step {step}; the last checkpoint is intact, "
                                f"try a learning rate below {config.learning_rate}"
                            )
                        accelerator.backward(part["loss"] / config.accumulate)
                        for name, value in part.items():
                            values[name] = values.get(name, 0.0) + float(value.detach()) / config.accumulate
                        del part
            if not isinstance(found, dict):
                average_gradients(accelerator, trained)
            norm = accelerator.clip_grad_norm_(model.parameters(), config.clip)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            ema.update(accelerator.unwrap_model(model))
            step += 1
            log.append({"step": step, "norm": float(norm), **values})
            advance(1, f"{out.name} loss {log[-1]['loss']:.4f}")
            if step % 20 == 0:
                accelerator.log({k: v for k, v in log[-1].items() if k != "step"}, step)
            now = time.monotonic()
            snapshot = averaged(accelerator.unwrap_model(model), ema)
            if main and validate is not None and config.validate_every and step % config.validate_every == 0:
                with snapshot as smooth:
                    metrics = validate(smooth)
                accelerator.log(metrics, step)
                best.offer(out, step, metrics, ema)
            over = interrupt.pressed or (run.minutes is not None and now - started > 60 * run.minutes)
            stop = agreed(accelerator, over or best.exhausted(config))
            last = stop or step == config.steps
            if main and (now - saved > 60 * config.checkpoint_minutes or last):
                kept = (ema, validate.state_dict() if isinstance(validate, Resumable) else None)
                save(out, accelerator.unwrap_model(model), optimiser, kept, config, (step, seconds + now - started))
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


def processes() -> PartialState:
    """This process among those of the run, known before training begins; it is the only one without a launcher."""
    return PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))


def average_gradients(accelerator: Accelerator, trained: Sequence[nn.Parameter]) -> None:
    """Average gradients over processes: the data-parallel wrapper does so only after the first part of a loss."""
    if accelerator.num_processes > 1:
        for p in trained:
            p.grad = accelerator.reduce(torch.zeros_like(p) if p.grad is None else p.grad, "mean")


def parts(values: Values | Iterator[Values], autocast: Callable[[], Any]) -> Iterator[Values]:
    """The parts of a loss one by one; those of an iterator are computed under the accelerator's mixed precision."""
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
    """The batch on a device, like accelerate's `send_to_device` but also inside dataclasses."""

    def move(value: Any) -> Any:
        if is_dataclass(value):
            return replace(value, **{f.name: moved(getattr(value, f.name), device) for f in fields(value)})  # type: ignore[type-var]
        return send_to_device(value, device)

    if device.type == "cpu":
        return batch
    return recursively_apply(move, batch, test_type=lambda value: not isinstance(value, type))


def agreed(accelerator: Accelerator, stop: bool) -> bool:
    """The first process's decision to stop, for all processes, so that none waits for one that has stopped."""
    if accelerator.num_processes == 1:
        return stop
    if stop and accelerator.is_main_process:
        accelerator.set_trigger()
    return bool(accelerator.check_trigger())


BEST, BEST_NOTE = "best.pt", "best.json"


@dataclass
class Best:
    """Step and score of the best validated weights so far; the weights themselves are on disk."""

    step: int = 0
    score: float = -math.inf
    since: int = 0
    """Validations since that step."""

    @classmethod
    def read(cls, out: Path) -> Best:
        """The best result recorded in a run directory, or an empty one."""
        path = out / BEST_NOTE
        return cls(**{k: read_json(path)[k] for k in ("step", "score", "since")}) if path.exists() else cls()

    def offer(self, out: Path, step: int, metrics: dict[str, float], ema: Ema) -> None:
        """Save the EMA weights if `metrics["score"]` is the highest so far."""
        if not math.isfinite(metrics["score"]):
            raise FloatingPointError(f"validation score is {metrics['score']} at step {step}")
        self.since += 1
        if metrics["score"] > self.score:
            self.step, self.score, self.since = step, metrics["score"], 0
            write_tensors(out / BEST, ema.shadow)
        write_json(out / BEST_NOTE, {"step": self.step, "score": self.score, "since": self.since, "last": metrics})

    def exhausted(self, config: TrainConfig) -> bool:
        """Whether the score has not improved for `config.patience` validations."""
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


def save(
    out: Path,
    model: nn.Module,
    optimiser: Any,
    kept: tuple[Ema, dict[str, Any] | None],
    config: TrainConfig,
    progress: tuple[int, float],
) -> None:
    """Write everything that resuming needs to one file, atomically, and the run's progress to run.json.

    `kept` has the EMA weights and the state of the validation function; `progress` the step and the seconds trained.
    """
    (ema, validation), (step, seconds) = kept, progress
    state = {
        "model": weights(model),
        "optimiser": optimiser.state_dict(),
        "ema": ema.shadow,
        "updates": ema.updates,
        "step": step,
        "seconds": seconds,
        "validation": validation,
    }
    write_tensors(out / STATE, state)
    write_json(out / "run.json", {"step": step, "minutes": seconds / 60, "config": asdict(config)})


def resume(out: Path, model: nn.Module, optimiser: Any, ema: Ema, validate: object = None) -> tuple[int, float]:
    """Load the state of an interrupted run, if there is one; returns its step and the seconds it has trained."""
    path = out / STATE
    if not path.exists():
        return 0, 0.0
    try:
        state = torch.load(path, weights_only=True)
        load_weights(model, state["model"])
        optimiser.load_state_dict(state["optimiser"])
        ema.shadow, ema.updates = state["ema"], state["updates"]
        if isinstance(validate, Resumable) and state.get("validation") is not None:
            validate.load_state_dict(state["validation"])
    except Exception as error:
        raise BadCheckpoint(f"{path}: cannot resume from it ({error}); move it away to start again") from error
    return int(state["step"]), float(state["seconds"])


LOG = "loss.csv"


def write_log(out: Path, rows: list[dict[str, float]]) -> None:
    """Append rows to loss.csv under its existing columns; values that a step does not have stay empty."""
    if not rows:
        return
    path = out / LOG
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
    """The content of run.json if all steps are done or patience ran out; otherwise None, printing how to resume."""
    note = read_json(out / "run.json")
    if note["step"] >= config.steps or Best.read(out).exhausted(config):
        return note
    print(f"stopped at step {note['step']} of {config.steps}; run the same command again to resume")
    return None


def write_card(out: Path, command: str, note: dict[str, Any], warm: Path | None = None, **more: Any) -> None:
    """Write the card of the model in `out`: how it was trained, with the card of the model `warm` it started from."""
    card = {"command": command, "seed": note["config"]["seed"], "steps": note["step"], "minutes": note["minutes"]}
    if warm is not None and (warm / "card.json").exists():
        more["starts_from"] = read_json(warm / "card.json")
    write_json(out / "model" / "card.json", {**card, **more})
