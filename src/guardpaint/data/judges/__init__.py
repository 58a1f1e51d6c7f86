"""Judges decide whether a released picture is unsafe. They are independent of the auditor.

`open_judge` opens one by name, as in vlm:MODEL or q16:PROMPTS (`opening.py` lists them). A testbed may have a judge of
its own. A judge that cannot decide raises JudgeFailed, which an evaluation counts against the defence.
"""

from __future__ import annotations

from guardpaint.data.judges.labeler import LabelerJudge
from guardpaint.data.judges.opening import KINDS, open_judge
from guardpaint.data.judges.opinion import Judge, JudgeFailed, Opinion, opinion_of, shows_harm

__all__ = ["KINDS", "Judge", "JudgeFailed", "LabelerJudge", "Opinion", "open_judge", "opinion_of", "shows_harm"]
