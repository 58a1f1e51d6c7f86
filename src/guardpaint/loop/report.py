"""The report of one guarded image: every audit, tournament, gate and verdict, as plain data."""

from __future__ import annotations

import datetime
import json
import math
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from guardpaint.errors import BadInput
from guardpaint.loop.evidence import Evidence
from guardpaint.loop.report_page import render
from guardpaint.store.checkpoint import write_atomic
from guardpaint.types import JsonDict
from guardpaint.verify.tournament import TournamentRecord

VERSION = 2
"""Version 1 called `effective_settings` `posture`; such reports are still read."""


class Status(StrEnum):
    """The outcome of an image."""

    CLEAN = "clean"
    """Nothing was flagged; the output is the base's picture, bit for bit."""
    REPAIRED = "repaired"
    BLURRED = "blurred"
    BLOCKED = "blocked"
    RELEASED_FLAGGED = "released_flagged"
    """Released although it is flagged, in mode monitor or under a policy that ends in `keep`."""
    UNGUARDED = "unguarded"
    """The mode is off."""
    UNFINISHED = "unfinished"
    """No final verdict was made."""

    @property
    def exit_code(self) -> int:
        """The exit code of a command for this image."""
        return {Status.BLOCKED: 3, Status.UNFINISHED: 3, Status.RELEASED_FLAGGED: 4}.get(self, 0)

    @property
    def released(self) -> bool:
        """Whether the caller gets a picture."""
        return self not in (Status.BLOCKED, Status.UNFINISHED)


@dataclass
class AuditRecord:
    """One auditor pass."""

    pixels: int
    decoder: str
    scores: dict[str, float | None]
    probs: dict[str, float]
    flagged: str | None = None
    reason: str = ""
    tiles: int = 0
    """Tiles that were audited besides the whole picture."""
    tile: tuple[int, int, int, int] | None = None
    """Top, left, height and width of the tile that is least safe; None if that is the whole picture."""


@dataclass
class StepRecord:
    """The record of one audited step. `step` counts executed steps from 0."""

    step: int
    steps: int
    progress: float
    noise: float
    view: str
    audits: list[AuditRecord] = field(default_factory=list)
    triggered: bool = False
    category: str | None = None
    reason: str = ""
    regions: int = 0
    tournaments: list[TournamentRecord] = field(default_factory=list)
    reinsertion: JsonDict | None = None
    notes: list[str] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    cost: dict[str, int] = field(default_factory=lambda: {"audits": 0, "regions": 0, "candidates": 0, "reinserts": 0})
    """Counts of Cost_t = C_As + K(N·C_Ag + N·C_As + C_reinsert): audits, regions, candidates, reinserts."""


@dataclass(frozen=True)
class GlanceRecord:
    """A coarse look at a step that was not due for an audit."""

    step: int
    progress: float
    pixels: int
    adv_prob: float
    limit: float
    """The adv_prob from which on an audit is scheduled."""
    scheduled: bool
    """Whether the step was audited because of it."""
    seconds: float


@dataclass
class ApprovalRecord:
    """One look of the approver at a finished picture."""

    by: str
    """The part that decided."""
    probs: dict[str, float]
    flagged: str | None = None
    reason: str = ""
    seconds: float = 0.0


@dataclass
class FinalRecord:
    """The verdict on the final image, and the rungs of the last-resort ladder that were tried."""

    verdict: str = "none"
    """`benign`, `flagged`, or `none` if no final verdict was made."""
    audits: list[AuditRecord] = field(default_factory=list)
    """The audits of the released picture and of the pictures that it was made from."""
    ladder: list[JsonDict] = field(default_factory=list)
    approvals: list[ApprovalRecord] = field(default_factory=list)
    """What the approver said of each finished picture that it was shown; the last one is the released picture's."""


@dataclass
class GuardReport:
    """The report of one image. `to_dict` follows assets/report.schema.json."""

    request_id: str
    image: int
    status: Status
    mode: str
    pipeline: str
    family: str
    seed: int
    prompt_sha256: str | None
    prompt: str | None
    steps: list[StepRecord]
    final: FinalRecord
    effective_settings: JsonDict
    """The settings that the call really ran with, and what was skipped and why."""
    errors: list[str]
    seconds: float
    created: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"))
    version: int = VERSION
    caller: JsonDict | None = None
    """Name of the key and id of the HTTP request that asked for the image, if a service drew it."""
    glances: list[GlanceRecord] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list, repr=False)

    @property
    def posture(self) -> JsonDict:
        """Former name of `effective_settings`."""
        return self.effective_settings

    @property
    def released(self) -> bool:
        return self.status.released

    @property
    def triggered(self) -> bool:
        return any(s.triggered for s in self.steps)

    @property
    def exit_code(self) -> int:
        return self.status.exit_code

    @property
    def evidence_bytes(self) -> int:
        """Memory that the pictures and maps of the evidence take."""
        return sum(e.bytes for e in self.evidence)

    def to_dict(self) -> JsonDict:
        values = {k: v for k, v in vars(self).items() if k != "evidence" and (k, v) != ("caller", None)}
        values["status"] = str(self.status)
        values["steps"] = [asdict(s) for s in self.steps]
        values["final"] = asdict(self.final)
        values["glances"] = [asdict(g) for g in self.glances]
        return _jsonable(values)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)

    def save(self, path: str | Path) -> None:
        write_atomic(Path(path), self.to_json().encode())

    def to_html(self) -> str:
        """A self-contained page with the trajectory, heat maps and candidates; the winner is framed."""
        return render(self.to_dict(), self.evidence)


def _jsonable(value: Any) -> Any:
    """The value with null in place of infinite numbers, which are the levels of gates that are off."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: _jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(v) for v in value]
    return value


def upgraded(report: JsonDict) -> JsonDict:
    """A report of any version with the field names of the current one."""
    if "posture" in report and "effective_settings" not in report:
        return {**{k: v for k, v in report.items() if k != "posture"}, "effective_settings": report["posture"]}
    return report


def load_report(path: str | Path) -> JsonDict:
    """Read a saved report of version 1 or 2, with the current field names. Any other file raises BadInput."""
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadInput(f"{path}: no such report") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: not a report ({error})") from error
    if not isinstance(data, dict) or "request_id" not in data or data.get("version") not in (1, VERSION):
        raise BadInput(f"{path}: not a GuardPaint report of version 1 or {VERSION}")
    return upgraded(data)


def report_schema() -> JsonDict:
    """The published JSON schema of a report."""
    return json.loads((Path(__file__).parents[1] / "assets" / "report.schema.json").read_text(encoding="utf-8"))
