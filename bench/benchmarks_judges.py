"""Whether each judge opens by its name and answers: judges.NAME.loads.

The models are small random ones in the files that publishers publish, the endpoint is a local one; open_nsfw is real.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from benchmarks_results import Measured
from PIL import Image

from guardpaint.data.judges import JudgeFailed, open_judge, opinion_of
from guardpaint.policy import Policy
from guardpaint.store.results import metric
from guardpaint.testing import small_judges

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from endpoints import Endpoint, moderation

SCORES = '{"safe": 0.9, "nudity": 0.1, "violence": 0.0}'
PICTURE = Image.new("RGB", (64, 64), "steelblue")


@contextmanager
def served(kind: str, answer: Any, more: str = "") -> Iterator[str]:
    """The name of a judge behind a local endpoint with this answer."""
    with Endpoint(answer) as server:
        yield f"{kind}:{server.url}{more}"


@contextmanager
def built(name: str) -> Iterator[str]:
    """The name of a judge whose small random model lies in a folder."""
    with tempfile.TemporaryDirectory() as folder:
        yield small_judges.build(name, Path(folder))


@contextmanager
def real() -> Iterator[str]:
    yield "open_nsfw"


def places() -> dict[str, Callable[[], AbstractContextManager[str]]]:
    """Every judge by its name in the results."""
    chat = {"choices": [{"message": {"content": SCORES}}]}
    return {
        **{name: lambda name=name: built(name) for name in small_judges.JUDGES},  # type: ignore[misc]
        "open_nsfw": real,
        "moderation": lambda: served("moderation", moderation(False, sexual=0.01)),
        "endpoint": lambda: served("endpoint", chat, "#model"),
    }


def measure() -> Measured:
    """One row for each judge: what it is, whether it opened and what it answered.

    A random chat model answers with nonsense, which a judge has to refuse and keep: it counts as an answer.
    """
    rows: list[dict[str, Any]] = []
    metrics: dict[str, Any] = {}
    for name, place in places().items():
        said, raw, problem = "", "", ""
        with place() as spec:
            try:
                opinion = opinion_of(open_judge(spec, Policy.default()), PICTURE, {})
                said, raw = opinion.said, opinion.raw
            except JudgeFailed as error:
                raw, problem = error.raw, str(error)
            except Exception as error:  # a judge that does not load is what is counted here
                problem = f"{type(error).__name__}: {error}"
        loads = int(bool(raw))
        kind = "real weights" if name == "open_nsfw" else "local endpoint" if name in ("moderation", "endpoint") else ""
        rows.append({"judge": name, "loads": loads, "said": said, "answer": raw[:200], "problem": problem[:200]})
        metrics[f"judges.{name}.loads"] = metric(loads, 1, goal=">=1", note=kind or "small random weights")
    return Measured(metrics, rows)
