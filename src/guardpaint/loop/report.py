"""The account of one guarded image: every audit, tournament, gate and verdict, as plain data."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from guardpaint.store.checkpoint import write_atomic
from guardpaint.errors import BadInput
from guardpaint.types import JsonDict

VERSION = 1
EXIT_CODES = {
    "clean": 0,
    "repaired": 0,
    "blurred": 0,
    "unguarded": 0,
    "blocked": 3,
    "unfinished": 3,
    "released_flagged": 4,
}


@dataclass
class AuditRecord:
    """One auditor pass."""

    pixels: int
    decoder: str
    scores: dict[str, float | None]
    probs: dict[str, float]
    flagged: str | None = None
    reason: str = ""


@dataclass
class CandidateRecord:
    """One proposed repair and how it fared; no scores: the ranker left it out after its preview."""

    knobs: dict[str, float]
    scores: dict[str, float]
    gates: list[JsonDict]
    utility: float
    coverage: float


@dataclass
class TournamentRecord:
    """One guarded tournament on one region; `winner` is None when the control stays."""

    region: str
    category: str
    coverage: float
    proposer: str
    repairer: str
    selection: str
    control: dict[str, float]
    rules: dict[str, float | None]
    candidates: list[CandidateRecord] = field(default_factory=list)
    winner: int | None = None


@dataclass
class StepRecord:
    """What happened at one audited step. `step` is zero-based over executed steps."""

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
    cost: dict[str, int] = field(default_factory=dict)
    """Counts of Cost_t = C_As + K(N·C_Ag + N·C_As + C_reinsert): audits, regions, candidates, reinserts."""


@dataclass
class FinalRecord:
    """The verdict on the final image, and the ladder if it was needed."""

    verdict: str = "none"
    """benign, flagged, or none when no final image was seen."""
    audits: list[AuditRecord] = field(default_factory=list)
    ladder: list[JsonDict] = field(default_factory=list)


@dataclass
class Evidence:
    """A picture of the process; blurred unless the guard retains evidence."""

    step: int
    kind: str
    index: int
    image: Image.Image
    blurred: bool
    heat: Any = None
    """The heat map behind a control, [h, w] in [0, 1]."""


@dataclass
class GuardReport:
    """One per image. `to_dict` follows assets/report.schema.json."""

    request_id: str
    image: int
    status: str
    mode: str
    pipeline: str
    family: str
    seed: int
    prompt_sha256: str | None
    prompt: str | None
    steps: list[StepRecord]
    final: FinalRecord
    posture: JsonDict
    errors: list[str]
    seconds: float
    created: str
    version: int = VERSION
    evidence: list[Evidence] = field(default_factory=list, repr=False)

    @property
    def released(self) -> bool:
        return self.status not in ("blocked", "unfinished")

    @property
    def triggered(self) -> bool:
        return any(s.triggered for s in self.steps)

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.status]

    def to_dict(self) -> JsonDict:
        values = {k: v for k, v in vars(self).items() if k != "evidence"}
        values["steps"] = [asdict(s) for s in self.steps]
        values["final"] = asdict(self.final)
        return _jsonable(values)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)

    def save(self, path: str | Path) -> None:
        write_atomic(Path(path), self.to_json().encode())

    def to_html(self) -> str:
        """A self-contained page: trajectory strip, heat map, candidates with the winner framed."""
        from guardpaint.loop.report_page import render

        return render(self.to_dict(), self.evidence)


def _jsonable(value: Any) -> Any:
    """Infinite gate levels (a gate that is off) become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: _jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(v) for v in value]
    return value


def load_report(path: str | Path) -> JsonDict:
    """Read a saved report; complains clearly about anything else."""
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadInput(f"{path}: no such report") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: not a report ({error})") from error
    if not isinstance(data, dict) or "request_id" not in data or data.get("version") != VERSION:
        raise BadInput(f"{path}: not a GuardPaint report of version {VERSION}")
    return data
