"""Settings that let unsafe pictures through, on purpose or by neglect: the library warns, the service refuses."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass

from guardpaint.audit.levels import UNCHANGED
from guardpaint.config import GuardConfig
from guardpaint.errors import BadConfig
from guardpaint.policy import Policy

HIGHEST_TRIGGER, HIGHEST_ALPHA = 0.9, 0.2
"""A trigger above this fires on nothing but the most blatant; a promised miss rate above this promises little."""
ACCEPTABLE = ("last_resort", "trigger", "calibration", "scope")
"""What a service may be told to accept; it never runs in another mode than enforce."""


@dataclass(frozen=True)
class WeakSetting:
    """A setting that opens a door."""

    name: str
    value: str
    why: str

    def __str__(self) -> str:
        return f"{self.name} is {self.value}: {self.why}"

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def weak_settings(policy: Policy, config: GuardConfig) -> list[WeakSetting]:
    """The settings of a guard that open a door, each with what it lets through. A sound guard has none."""
    found = []
    if config.mode != "enforce":
        what = "pictures are audited but never changed or blocked" if config.mode == "monitor" else "nothing is audited"
        found.append(WeakSetting("mode", config.mode, what))
    if policy.last_resort[-1] == "keep":
        found.append(WeakSetting("last_resort", "keep", "pictures that stay flagged are released"))
    if policy.trigger > HIGHEST_TRIGGER:
        why = f"above {HIGHEST_TRIGGER} the binary score hardly ever flags a picture"
        found.append(WeakSetting("trigger", f"{policy.trigger:g}", why))
    if config.scope is None:
        why = (
            "large pictures are only seen whole, shrunk to the auditor's size, so small harm in them may not be seen; "
        )
        found.append(WeakSetting("scope", "missing", why + "run `guardpaint calibrate-scope`, or name a scope"))
    elif not config.scope.calibrated:
        why = "nobody has measured what its tiles miss, nor how often they alarm; run `guardpaint calibrate-scope`"
        found.append(WeakSetting("scope", "not calibrated", why))
    calibration = config.calibration
    if calibration is None:
        why = "nobody has measured how many unsafe pictures these thresholds miss; run `guardpaint calibrate`"
        found.append(WeakSetting("calibration", "missing", why))
        return found
    if calibration.alpha > HIGHEST_ALPHA:
        why = "the thresholds were chosen to miss up to that share of a category"
        found.append(WeakSetting("calibration", f"made for alpha={calibration.alpha:g}", why))
    if not calibration.auditor:
        why = "its thresholds may belong to another auditor"
        found.append(WeakSetting("calibration", "of an unnamed auditor", why))
    return found


def refuse_weak(policy: Policy, config: GuardConfig, accepted: Collection[str] = ()) -> None:
    """Raise BadConfig if a weak setting is not among those that were accepted by name."""
    unknown = sorted(set(accepted) - set(ACCEPTABLE))
    if unknown:
        raise BadConfig(f"weak setting {unknown[0]!r}: a service can accept {', '.join(ACCEPTABLE)}")
    left = [w for w in weak_settings(policy, config) if w.name not in accepted]
    if left:
        options = " ".join(dict.fromkeys(f"--weak {w.name}" for w in left if w.name in ACCEPTABLE))
        way_out = f", or start the service with {options}" if options else ""
        raise BadConfig(
            f"a service refuses settings that open a door: {'; '.join(map(str, left))}. Mend the guard's folder or "
            f"policy{way_out}"
        )


def refuse_weaker(policy: Policy, current: Policy) -> None:
    """Raise BadConfig if a policy opens a door that the current one keeps closed.

    The levels of detectors, and what was calibrated with them, put a category at 0.5. A trigger above that would let
    pictures through that reach a level, so no more than the service's own trigger is taken there.
    """
    most = max(UNCHANGED, current.trigger)
    if policy.trigger > most:
        raise BadConfig(
            f"trigger is {policy.trigger:g}: a running service takes at most {most:g}, since a score at its category's "
            "level is 0.5 and a higher trigger would let it pass. To flag less, calibrate the levels; to start with "
            "another trigger, name a policy file when the service is started"
        )
    open_now = {w.name for w in weak_settings(current, GuardConfig())}
    refuse_weak(policy, GuardConfig(), open_now)
