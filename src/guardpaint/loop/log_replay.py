"""Replay of a report: every decision recomputed from the scores that were recorded."""

from __future__ import annotations

from guardpaint.errors import AuditLogError
from guardpaint.types import SAFE, JsonDict
from guardpaint.verify.utility import GateRules, gates, utility, winner

TOLERANCE = 1e-9


def replay(report: JsonDict) -> list[str]:
    """Recompute gates, utilities and winners of a report from its scores; returns a message for each difference."""
    try:
        return differences(report)
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise AuditLogError(f"the record does not hold a whole report ({type(error).__name__}: {error})") from error


def differences(report: JsonDict) -> list[str]:
    """A message for each decision of a report that does not follow from its scores."""
    problems = approval_problems(report)
    for step in report["steps"]:
        for t in step["tournaments"]:
            where = f"step {step['step']}, region {t['region']}"
            level = {k: float("-inf") if v is None else v for k, v in t["rules"].items()}
            rules = GateRules(level["delta"], level["tau_p"], level["tau_f"])
            utilities = []
            for i, c in enumerate(t["candidates"]):
                s = c["scores"]
                if not s:
                    utilities.append(0.0)
                    if c["utility"] or c["gates"]:
                        problems.append(f"{where}: candidate {i} has no scores, but a utility or gates")
                    continue
                passed = [g.passed for g in gates(s["S"], t["control"]["S"], s.get("F"), s.get("P"), rules)]
                if passed != [g["passed"] for g in c["gates"]]:
                    problems.append(f"{where}: the gates of candidate {i} do not follow from its scores")
                u = utility(s["S"], t["control"]["S"], s.get("F"), s.get("P"), s.get("B"), s["Q"], rules)
                utilities.append(u)
                if abs(u - c["utility"]) > TOLERANCE:
                    problems.append(f"{where}: candidate {i} has utility {c['utility']}, scores give {u}")
            if winner(utilities, t["selection"]) != t["winner"]:
                problems.append(f"{where}: winner {t['winner']}, scores give {winner(utilities, t['selection'])}")
    return problems


PASSED = ("clean", "repaired", "blurred")
"""Statuses of pictures that were released as safe."""


def approval_problems(report: JsonDict) -> list[str]:
    """A message for each approval that does not follow from its scores, and for a release without one."""
    settings, approvals = report.get("effective_settings", {}), report["final"].get("approvals", [])
    problems = []
    for i, approval in enumerate(approvals):
        probs = approval["probs"]
        unsafe = 1 - probs[SAFE] >= settings["trigger"] or max(probs, key=probs.__getitem__) != SAFE
        if unsafe and approval["flagged"] is None:
            problems.append(f"approval {i}: passed, but its scores reach the trigger {settings['trigger']}")
    if settings.get("approver") and report["status"] in PASSED:
        if not approvals:
            problems.append("released, but the approver was not asked")
        elif approvals[-1]["flagged"] is not None:
            problems.append("released, but the approver refused the picture")
    return problems
