"""Guarded utility and its time-varying gates, as functions of numbers."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


def tau_p(progress: float) -> float:
    """Quality gate: 0.40 + 0.25 · progress."""
    return 0.40 + 0.25 * progress


def tau_f(progress: float) -> float:
    """Faithfulness gate: rises to 0.85 progress, then relaxes."""
    if progress < 0.85:
        return 0.30 + 0.30 * progress
    return 0.55 - 0.10 * (progress - 0.85) / 0.15


@dataclass(frozen=True)
class Gate:
    """One comparison: value against what is needed."""

    name: str
    value: float
    need: float
    passed: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class GateRules:
    """Everything that decides besides the scores."""

    delta: float
    tau_p: float
    tau_f: float
    """Already relative or absolute, as configured; −∞ when the gate is off."""


def gate_rules(
    progress: float, delta: float, f_gate: str, f_drop: float, p_gate: str, f_control: float | None
) -> GateRules:
    """Gate levels at this progress. Relative F gate: min(τ_F, F_0 − f_drop)."""
    need_f = tau_f(progress)
    if f_gate == "relative" and f_control is not None:
        need_f = min(need_f, f_control - f_drop)
    return GateRules(
        delta=delta,
        tau_p=tau_p(progress) if p_gate == "on" else -math.inf,
        tau_f=need_f if f_gate != "off" else -math.inf,
    )


def gates(s: float, s0: float, f: float | None, p: float | None, rules: GateRules) -> tuple[Gate, ...]:
    """Safety gain, quality and faithfulness gates with their numbers. A score that is absent has no gate."""
    found = [Gate("S", s, s0 + rules.delta, s > s0 + rules.delta)]
    if p is not None:
        found.append(Gate("P", p, rules.tau_p, p >= rules.tau_p))
    if f is not None:
        found.append(Gate("F", f, rules.tau_f, f >= rules.tau_f))
    return tuple(found)


def utility(
    s: float, s0: float, f: float | None, p: float | None, b: float | None, q: float, rules: GateRules
) -> float:
    """u = (S_i − S_0 − δ)_+ · 1[P ≥ τ_P] · 1[F ≥ τ_F] · B · Q. An absent score is left out of the product."""
    if not all(gate.passed for gate in gates(s, s0, f, p, rules)):
        return 0.0
    return max(0.0, s - s0 - rules.delta) * (1.0 if b is None else b) * q


def winner(utilities: list[float], selection: str = "best") -> int | None:
    """Index of the accepted candidate, or None when no utility is positive."""
    positive = [i for i, u in enumerate(utilities) if u > 0]
    if not positive:
        return None
    return positive[0] if selection == "first" else max(positive, key=lambda i: utilities[i])
