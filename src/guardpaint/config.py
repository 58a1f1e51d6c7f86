"""Settings of how the guard runs. What a picture may show is in the content policy (`policy.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from guardpaint.errors import BadConfig


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

    def __post_init__(self) -> None:
        values = [*self.thresholds.values(), *([] if self.mask_level is None else [self.mask_level])]
        if not 0 <= self.start <= 1 or any(not 0 <= v <= 1 for v in values):
            raise BadConfig(f"calibration band {self}: start, thresholds and mask level lie in [0, 1]")


@dataclass(frozen=True)
class Calibration:
    """Calibrated thresholds, the risks they guarantee, and the data they were computed from."""

    alpha: float
    """Largest miss rate per category, on data like the calibration's."""
    beta: float
    """Largest share of the unsafe area that masks leave uncovered, on average."""
    data: str
    """SHA-256 of the calibration rows."""
    bands: tuple[Band, ...]
    auditor: str = ""
    """Identity of the auditor that was calibrated; a guard with another one is not loaded. Empty if it is unknown."""

    def __post_init__(self) -> None:
        starts = [b.start for b in self.bands]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)):
            raise BadConfig(
                f"calibration bands start at {starts}: the first must start at 0, and each later than the one before"
            )
        if not (0 < self.alpha < 1 and 0 < self.beta < 1):
            raise BadConfig(f"calibration alpha={self.alpha}, beta={self.beta}: must lie in (0, 1)")

    def at(self, progress: float) -> Band:
        """The band that holds at this progress."""
        return next(b for b in reversed(self.bands) if progress >= b.start)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "bands": [asdict(b) for b in self.bands]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Calibration:
        try:
            return cls(**{**data, "bands": tuple(Band(**b) for b in data["bands"])})
        except (KeyError, TypeError) as error:
            raise BadConfig(f"calibration: {error}") from error


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
    "p_gate": ("on", "off"),
    "selection": ("best", "first"),
    "blend_alpha": ("one_minus_noise", "progress_ramp"),
    "reinsertion": (
        "auto",
        "ddpm_noise",
        "direct_blend",
        "ddim_inversion",
        "null_text",
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
    "repair_batch": (1, 64),
    "timeout_s": (0.0, 86400.0),
}


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
    doubt: float = 0.15
    """A repaired picture whose 1 − S is at this or above gets one more tournament before release; 1 turns this off."""
    strong_candidates: int = 8
    """N of the last-resort strong repair."""
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
    seed: int = 0
    """Request seed where the caller gives no generator."""
    calibration: Calibration | None = None
    """Thresholds found by `guardpaint calibrate`, per band of progress; they tighten the policy's."""

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise BadConfig(f"{name}={getattr(self, name)!r}: choose one of {', '.join(allowed)}")
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise BadConfig(f"{name}={value!r}: must be a number in [{low}, {high}]")
        for name in ("candidates", "keep", "audits", "regions", "strong_candidates", "repair_batch", "seed"):
            if not isinstance(getattr(self, name), int):
                raise BadConfig(f"{name}={getattr(self, name)!r}: must be a whole number")

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        return {**values, "calibration": None if self.calibration is None else self.calibration.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> GuardConfig:
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise BadConfig(f"unknown guard setting(s) {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        calibration = values.get("calibration")
        if calibration is not None and not isinstance(calibration, Calibration):
            values = {**values, "calibration": Calibration.from_dict(calibration)}
        return cls(**values)

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
