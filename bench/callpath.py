"""Count the calls in one flagged step: functions of the package that run, their files, and calls between files.

python bench/callpath.py

One small random SD pipeline is guarded by doubles that flag a bright picture and repair it; the first audited step is
traced from the scheduler's step to the latent that goes on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import guardpaint

try:
    from guardpaint.guard import GuardPaint
    from guardpaint.testing import small
    from guardpaint.testing.doubles import FlagsBright, PaintsFlat
except ImportError:  # earlier revisions, to compare with
    from guardpaint import tiny as small  # type: ignore[attr-defined,no-redef]
    from guardpaint.doubles import FlagsBright, PaintsFlat  # type: ignore[import-not-found,no-redef]
    from guardpaint.system import GuardPaint  # type: ignore[import-not-found,no-redef]

ROOT = str(Path(guardpaint.__file__).parent)
COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<lambda>")


class Trace:
    """Records calls between functions of the package while a step is guarded."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str]] = []
        self.inside, self.done = False, False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if event not in ("call", "return") or not file.startswith(ROOT):
            return
        if name == "guard_step" and not self.done:
            self.inside = event == "call"
            self.done = event == "return"
        if event == "call" and self.inside and name not in COMPREHENSIONS:
            self.calls.append((self.caller(frame), file, name))

    def caller(self, frame: FrameType) -> str:
        """The file of the nearest caller within the package."""
        back = frame.f_back
        while back is not None and not back.f_code.co_filename.startswith(ROOT):
            back = back.f_back
        return back.f_code.co_filename if back is not None else ""


def traced(run: Callable[[], Any]) -> Trace:
    """The calls that are made while `run` is called."""
    trace = Trace()
    sys.setprofile(trace)
    try:
        run()
    finally:
        sys.setprofile(None)
    return trace


def main() -> None:
    guard = GuardPaint(FlagsBright(), PaintsFlat()).configured(regions=1)
    twin = guard.attach(small.pipeline("sd"))
    call = {"num_inference_steps": 5, "height": 64, "width": 64, "output_type": "pt"}
    trace = traced(lambda: twin("a quiet street", generator=torch.Generator().manual_seed(1), **call))
    files = sorted({Path(f).relative_to(ROOT).as_posix() for _, f, _ in trace.calls})
    functions = {(f, name) for _, f, name in trace.calls}
    hops = [(a, b) for a, b, _ in trace.calls if a != b]
    summary = {
        "calls": len(trace.calls),
        "functions": len(functions),
        "files": len(files),
        "hops_between_files": len(hops),
        "kinds_of_hops": len(set(hops)),
        "names": files,
    }
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
