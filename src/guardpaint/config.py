"""Settings of how the guard runs. What a picture may show is in the content policy (`policy.py`)."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from guardpaint.errors import BadConfig


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """A value for an error message, cut where it is long."""
    return reprlib.repr(value)


@dataclass(frozen=True)
class Band:
    """Calibrated thresholds that hold from `start` (a progress) until the next band begins."""

    start: float
    thresholds: Mapping[str, float]
    """A category is also flagged when its probability reaches this. A threshold can only make the policy stricter."""
    mask_level: float | None
    """Heat-map level of the calibrated mask threshold; None uses the configuration's."""
    n: Mapping[str, int]
    """Calibration examples per category."""
    glance: float | None = None
    """The adv_prob from which on a glance schedules an audit; None uses the policy's trigger minus `band`."""

    def __post_init__(self) -> None:
        if not isinstance(self.thresholds, Mapping) or not isinstance(self.n, Mapping):
            raise BadConfig(f"calibration band {shown(self)}: thresholds and n are numbers by category")
        values = [self.start, *self.thresholds.values(), *(v for v in (self.mask_level, self.glance) if v is not None)]
        if any(not is_number(v) or not 0 <= v <= 1 for v in values):
            raise BadConfig(f"calibration band {shown(self)}: start, thresholds, mask level and glance lie in [0, 1]")


@dataclass(frozen=True)
class Calibration:
    """Calibrated thresholds, the risks they guarantee, and the data they were computed from."""

    alpha: float
    """Largest miss rate per category, on data like the calibration's."""
    beta: float
    """Largest share of the unsafe area that masks leave uncovered, on average, with the default number of regions."""
    data: str
    """SHA-256 of the calibration rows."""
    bands: tuple[Band, ...]
    auditor: str = ""
    """Identity of the auditor that was calibrated; a guard with another one is not loaded. Empty if it is unknown."""
    views: tuple[str, ...] = ()
    """How the calibration's views were made: the decoder or exit and its weights. A guard that makes none of these is
    not attached. Empty if it is unknown."""
    finished_only: bool = False
    """Whether finished pictures alone were scored: the bound holds for the final verdict, and how much harm the same
    levels miss in views of unfinished pictures was not measured."""

    def __post_init__(self) -> None:
        starts = [b.start for b in self.bands]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)):
            raise BadConfig(
                f"calibration bands start at {shown(starts)}: the first must start at 0, the others must rise"
            )
        if any(not is_number(v) or not 0 < v < 1 for v in (self.alpha, self.beta)):
            raise BadConfig(f"calibration alpha={shown(self.alpha)}, beta={shown(self.beta)}: must lie in (0, 1)")
        if not isinstance(self.auditor, str) or not isinstance(self.data, str):
            raise BadConfig("calibration: auditor and data are texts")
        if not isinstance(self.finished_only, bool):
            raise BadConfig(f"calibration finished_only={shown(self.finished_only)}: must be true or false")

    @property
    def valid_for(self) -> str:
        """On what the bound was measured, in words."""
        return "finished pictures only" if self.finished_only else "views and finished pictures"

    def at(self, progress: float) -> Band:
        """The band that holds at this progress."""
        return next(b for b in reversed(self.bands) if progress >= b.start)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "bands": [asdict(b) for b in self.bands], "views": list(self.views)}

    @classmethod
    def from_dict(cls, data: Any) -> Calibration:
        try:
            bands = tuple(Band(**b) for b in data["bands"])
            return cls(**{**data, "bands": bands, "views": tuple(data.get("views", ()))})
        except (KeyError, TypeError, AttributeError) as error:
            raise BadConfig(f"calibration: {error}") from error


@dataclass(frozen=True)
class Scope:
    """The settings that a guard was calibrated for (`guardpaint calibrate-scope`).

    Outside of them a service refuses, and the library warns and says so in the report.
    """

    side: int
    """Shorter side in pixels of the pictures that the auditor learned from; larger pictures are audited in tiles."""
    pixels: tuple[int, int]
    """Smallest and largest side of a picture."""
    guidance: tuple[float, float]
    steps: tuple[int, int]
    tile_offset: float = 0.0
    """Logits by which the scores of tiles are lowered before they are compared with the thresholds."""
    calibrated: bool = True
    """Whether `tile_offset` was measured. If not, tiles are judged by the thresholds of the whole picture, and nobody
    knows how many more false alarms that makes."""
    offered: tuple[int, int] | None = None
    """Smallest and largest side that the guard answers for, if measured leaks make that less than `pixels`. Larger
    pictures are still audited in tiles, but count as outside of the scope."""

    def __post_init__(self) -> None:
        for name in ("pixels", "guidance", "steps", *(("offered",) if self.offered is not None else ())):
            value = getattr(self, name)
            if not isinstance(value, tuple) or len(value) != 2 or not all(map(is_number, value)):
                raise BadConfig(f"scope {name}={shown(value)}: give two numbers")
            if not 0 <= value[0] <= value[1]:
                raise BadConfig(f"scope {name}={shown(value)}: give the lowest and the highest value, in this order")
        low, high = self.pixels
        if self.offered is not None and not low <= self.offered[0] <= self.offered[1] <= high:
            raise BadConfig(f"scope offered={shown(self.offered)}: must lie within pixels={shown(self.pixels)}")
        good = is_number(self.side) and is_number(self.tile_offset)
        if not good or not 8 <= self.side <= self.pixels[1] or not -20 <= self.tile_offset <= 20:
            raise BadConfig(
                f"scope side={shown(self.side)}, tile_offset={shown(self.tile_offset)}: the side is at least 8 and at "
                f"most pixels[1]={self.pixels[1]}, the offset lies in [-20, 20]"
            )
        if not isinstance(self.calibrated, bool):
            raise BadConfig(f"scope calibrated={shown(self.calibrated)}: must be true or false")
        whole = (self.side, *self.pixels, *self.steps, *(self.offered or ()))
        if not all(isinstance(v, int) for v in whole):
            raise BadConfig(f"scope {shown(self)}: side, pixels, offered and steps are whole numbers")

    def outside(self, size: tuple[int, int], guidance: float | None = None, steps: int | None = None) -> list[str]:
        """What of a call lies outside of the calibrated settings, in words; None is not checked."""
        low, high = self.offered or self.pixels
        found = []
        if min(size) < low or max(size) > high:
            found.append(f"{size[1]}x{size[0]} pixels (both sides from {low} to {high})")
        if guidance is not None and not self.guidance[0] <= guidance <= self.guidance[1]:
            found.append(f"guidance {guidance:g} (from {self.guidance[0]:g} to {self.guidance[1]:g})")
        if steps is not None and not self.steps[0] <= steps <= self.steps[1]:
            found.append(f"{steps} steps (from {self.steps[0]} to {self.steps[1]})")
        return found

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Scope:
        try:
            pairs = {k: tuple(data[k]) for k in ("pixels", "guidance", "steps")}
            if data.get("offered") is not None:
                pairs["offered"] = tuple(data["offered"])
            return cls(**{**data, **pairs})
        except (KeyError, TypeError) as error:
            raise BadConfig(f"scope: {error}") from error


CHOICES: dict[str, tuple[str, ...]] = {
    "mode": ("enforce", "monitor", "off"),
    "on_error": ("block", "raise"),
    "view": ("x0", "stepped"),
    "resolution": ("adaptive", "paper", "coarse", "fine"),
    "view_decoder": ("auto", "tiny", "full"),
    "heat_map": ("adv", "class"),
    "mask_threshold": ("percentile", "calibrated"),
    "f_gate": ("absolute", "relative", "off"),
    "last_f_gate": ("same", "absolute", "relative", "off"),
    "final_repair": ("on", "off"),
    "p_gate": ("on", "off"),
    "regions_together": ("on", "off"),
    "selection": ("best", "first"),
    "blend_alpha": ("one_minus_noise", "progress_ramp"),
    "reinsertion": (
        "auto",
        "ddpm_noise",
        "direct_blend",
        "ddim_inversion",
        "null_text",
        "null_text_single",
        "flow_ode",
        "x0_substitution",
        "held_substitution",
    ),
}

RANGES: dict[str, tuple[float, float]] = {
    "candidates": (1, 64),
    "keep": (0, 64),
    "audits": (1, 1000),
    "audit_start": (0.0, 1.0),
    "regions": (1, 16),
    "min_region": (0.0, 1.0),
    "delta": (0.0, 1.0),
    "percentile": (0.0, 100.0),
    "mask_level": (0.0, 1.0),
    "band": (0.0, 1.0),
    "hold": (0.0, 1.0),
    "doubt": (0.0, 1.0),
    "f_drop": (0.0, 1.0),
    "strong_candidates": (1, 64),
    "wave_safety": (0.0, 1.0),
    "wave_margin": (0.0, 1.0),
    "repair_batch": (1, 64),
    "timeout_s": (0.0, 86400.0),
}


@dataclass(frozen=True)
class GateSettings:
    """Which gates the utility has. A proposer learns under them, so it should be used under the same."""

    f_gate: str
    f_drop: float
    p_gate: str

    @classmethod
    def from_dict(cls, values: Any) -> GateSettings:
        try:
            return cls(**values)
        except TypeError as error:
            raise BadConfig(f"gate={shown(values)}: give {', '.join(f.name for f in fields(cls))}") from error

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in asdict(self).items())


@dataclass(frozen=True)
class GuardConfig:
    """Settings of the loop. Some defaults differ from the paper's."""

    mode: str = "enforce"
    """enforce: repair or block. monitor: audit and report, change nothing. off: do nothing, and report that."""
    on_error: str = "block"
    """What an exception, NaN, timeout or unwritable log does to the image: block it, or raise."""
    candidates: int = 5
    """N, repairs per tournament."""
    audits: int = 2
    """X, the last X executed steps are audited …"""
    audit_start: float = 0.70
    """… but never before this progress."""
    view: str = "x0"
    """Audit the decoded clean estimate, or the decoded stepped latent (the paper's)."""
    resolution: str = "adaptive"
    """adaptive: coarse, then fine if it triggers or is in the band; paper: switch at progress 0.65."""
    view_decoder: str = "auto"
    """auto: audit views of the tiny decoder if one is loaded, repair those of the VAE. tiny, full: always that one."""
    band: float = 0.10
    """A coarse adv_prob less than this below the trigger is followed by a fine pass."""
    glance_from: float | None = None
    """From this progress on, steps that are not audited get a coarse look, which may schedule an audit; None is off."""
    heat_map: str = "adv"
    """The map that regions are mined from: adv, the binary one; class, that of the flagged category."""
    mask_threshold: str = "percentile"
    percentile: float = 85.0
    mask_level: float = 0.5
    """Heat-map level of the calibrated mask threshold."""
    regions: int = 3
    """K, at most this many regions, largest first."""
    min_region: float = 0.002
    """Regions below this share of the view are dropped."""
    delta: float = 0.01
    """δ, the improvement margin."""
    f_gate: str = "absolute"
    """absolute: F ≥ τ_F. relative: F ≥ min(τ_F, F_0 − f_drop). off: no gate (ablation)."""
    f_drop: float = 0.10
    p_gate: str = "on"
    selection: str = "best"
    """best: argmax utility. first: the first candidate with u > 0 (baseline)."""
    reinsertion: str = "auto"
    """auto takes the family's default."""
    hold: float = 1.0
    """h of held_substitution: 1 keeps the repair fixed, lower lets the base harmonise."""
    blend_alpha: str = "one_minus_noise"
    """α of the blending rules: 1 − noise, or the paper's 0.30 + 0.60·progress."""
    keep: int = 0
    """How many candidates are painted after the ranker has seen previews of all; 0 paints all, without previews."""
    waves: str = "off"
    """off: paint all candidates at once. 1, 2, 1+2, …: paint so many first, the rest only if none is good enough."""
    wave_safety: float = 0.9
    """S from which on a candidate is good enough to end a tournament between waves (`guardpaint calibrate-waves`)."""
    wave_margin: float = 0.0
    """By how much it must be above the P and F gates, too."""
    regions_together: str = "off"
    """on: regions that are apart are painted in one pass, and what is painted is tried on all of them at once before
    their union is. off: one region after the other."""
    doubt: float = 0.15
    """A repaired picture whose 1 − S is at this or above gets one more tournament before release; 1 turns this off."""
    strong_candidates: int = 8
    """N of the last-resort strong repair."""
    final_repair: str = "on"
    """Whether a flagged finished picture gets a tournament in pixels before the ladder; off shows what repairs within
    the trajectory do alone, as far as the policy's ladder does not repair."""
    last_f_gate: str = "same"
    """Its F gate; same is `f_gate`. off gives a picture where otherwise only a blur or nothing is left."""
    repair_batch: int = 8
    """Largest number of candidates denoised in one batch; lower it to save memory."""
    timeout_s: float = 0.0
    """Guard time allowed per image in seconds; 0 = no limit."""
    retain_evidence: bool = False
    """Keep un-blurred views and candidates in the report (operators only)."""
    log_prompts: bool = False
    """Write prompts in clear into reports and the audit log; otherwise only their SHA-256."""
    seed: int | None = None
    """Request seed where the caller gives no generator; None draws a fresh one for each request."""
    calibration: Calibration | None = None
    """Thresholds found by `guardpaint calibrate`, per band of progress; they tighten the policy's."""
    scope: Scope | None = None
    """The settings that the guard was calibrated for; None if they are unknown, and no picture is audited in tiles."""

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise BadConfig(f"{name}={shown(getattr(self, name))}: choose one of {', '.join(allowed)}")
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if not is_number(value) or not low <= value <= high:
                raise BadConfig(f"{name}={shown(value)}: must be a number in [{low}, {high}]")
        if not isinstance(self.waves, str) or not re.fullmatch(r"off|[1-9]\d?(\+[1-9]\d?)*", self.waves):
            raise BadConfig(f"waves={shown(self.waves)}: off, or sizes of the first waves such as 1 or 1+2")
        start = self.glance_from
        if start is not None and (not is_number(start) or not 0 <= start <= 1):
            raise BadConfig(f"glance_from={shown(start)}: must be None or a number in [0, 1]")
        for name in ("candidates", "keep", "audits", "regions", "strong_candidates", "repair_batch", "seed"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole and not (name == "seed" and value is None):
                raise BadConfig(f"{name}={shown(value)}: must be a whole number")
        for name in ("retain_evidence", "log_prompts"):
            if not isinstance(getattr(self, name), bool):
                raise BadConfig(f"{name}={shown(getattr(self, name))}: must be true or false")

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        return {**values, "calibration": None if self.calibration is None else self.calibration.to_dict()}

    @classmethod
    def from_dict(cls, values: Any) -> GuardConfig:
        if not isinstance(values, dict):
            raise BadConfig(f"guard settings are a mapping, got {type(values).__name__}")
        known = {f.name for f in fields(cls)}
        unknown = sorted(str(v) for v in set(values) - known)
        if unknown:
            named = ", ".join(unknown)[:200]
            raise BadConfig(f"unknown guard setting(s) {named}; known: {', '.join(sorted(known))}")
        calibration = values.get("calibration")
        if calibration is not None and not isinstance(calibration, Calibration | dict):
            raise BadConfig(f"calibration={shown(calibration)}: is a mapping")
        if isinstance(calibration, dict):
            values = {**values, "calibration": Calibration.from_dict(calibration)}
        if isinstance(values.get("waves"), bool | int):  # YAML reads `waves: off` and `waves: 1` so
            values = {**values, "waves": str(values["waves"] or "off")}
        scope = values.get("scope")
        if scope is not None and not isinstance(scope, Scope | dict):
            raise BadConfig(f"scope={shown(scope)}: is a mapping")
        if isinstance(scope, dict):
            values = {**values, "scope": Scope.from_dict(scope)}
        try:
            return cls(**values)
        except TypeError as error:
            raise BadConfig(f"guard settings: {error}") from error

    @property
    def gate(self) -> GateSettings:
        """The gates of the utility."""
        return GateSettings(self.f_gate, self.f_drop, self.p_gate)

    def mask_level_at(self, progress: float) -> float:
        """Heat-map level of the calibrated mask threshold at this progress."""
        level = None if self.calibration is None else self.calibration.at(progress).mask_level
        return self.mask_level if level is None else level

    def with_(self, **changes: Any) -> GuardConfig:
        """A copy with some settings changed."""
        return replace(self, **changes)


def audited_steps(steps: int, config: GuardConfig) -> frozenset[int]:
    """Steps to audit: the last X executed ones with progress ≥ audit_start."""
    return frozenset(
        i for i in range(max(0, steps - config.audits), steps) if (i + 1) / steps >= config.audit_start - 1e-9
    )
