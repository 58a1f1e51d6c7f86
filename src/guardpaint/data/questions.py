"""The labelling prompt, built from the policy file, and the parser of a labeler's answers.

The prompt states the policy with its exemptions in terms of visible evidence, then asks for a continuous score per
category. An answer that cannot be read is recorded as unreadable and never counts as "safe".
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from guardpaint.errors import BadConfig, BadInput
from guardpaint.policy import Policy

STYLES = ("single", "reasoned", "examples")
"""How the question is put: plainly, with a reason before the scores, or with worked examples. Any of them can be
repeated for self-consistency."""

CAPTION = (
    "Write one prompt for a text-to-image model that would make this picture. Name subjects, clothing, actions, "
    "place, light and style in a single line of at most 40 words. Say only what is visible. Do not judge, warn or "
    "comment. Answer with the prompt alone."
)


@dataclass(frozen=True)
class Answer:
    """A labeler's answer about one image."""

    scores: dict[str, float] | None
    """Category → score in [0, 1]; None if the answer could not be read."""
    raw: str
    problem: str = ""
    """Why the answer could not be read, or how it contradicts itself."""
    spread: float = field(default=0.0)
    """Largest standard deviation of a score over repeated passes."""


def rewriting(prompt: str, instead: str) -> str:
    """The instruction to rewrite a prompt for the same picture with its unsafe part replaced."""
    return (
        f"This picture was made from the prompt: {prompt!r}. Write one prompt for the same scene, with the same "
        f"people, place, light and style, in which the unsafe part is replaced by: {instead}. Answer with the prompt."
    )


ONE = "Give every category a score from 0 to 1: how clearly the picture belongs to it. The scores add up to 1."
SEVERAL = (
    "A picture may belong to several categories. Give every category a score of its own from 0 to 1: how clearly the "
    "picture belongs to it."
)


def question(
    policy: Policy,
    style: str = "single",
    examples: Sequence[tuple[str, Mapping[str, float]]] = (),
    several: bool = False,
) -> str:
    """The labelling prompt of a policy; with `several` it says that a picture may belong to several categories."""
    if style not in STYLES:
        raise BadConfig(f"style={style!r}: choose {', '.join(STYLES)}")
    if style == "examples" and not examples:
        raise BadConfig("style='examples' needs worked examples: pairs of a description and its scores")
    lines = ["You apply a content policy to one picture. Judge only what can be seen.", "", "Policy:"]
    for category in policy.categories:
        lines.append(f"- {category.name}: {category.definition}")
        if category.exemptions:
            lines.append(f"  Not {category.name}: {'; '.join(category.exemptions)}.")
    lines += [
        "",
        "Visible skin, closeness, a pose or a colour alone are no evidence. Art and objects follow the policy's words.",
        SEVERAL if several else ONE,
    ]
    if style == "examples":
        lines += ["", "Examples:"]
        for description, scores in examples:
            lines.append(f"{description} → {json.dumps(dict(scores))}")
    shape = json.dumps(dict.fromkeys(policy.names, 0.0))
    if style == "reasoned":
        lines += [
            "",
            "First write one sentence on the evidence. Then a line `label: <category>`.",
            f"End with one line of JSON of this form: {shape}",
        ]
    else:
        lines += ["", f"Answer with one line of JSON of this form and nothing else: {shape}"]
    return "\n".join(lines)


def read_examples(path: Path, policy: Policy) -> list[tuple[str, dict[str, float]]]:
    """Worked examples from a JSONL file; each has a description and a score for every category of the policy."""
    out = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read ({error})") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            scores = {name: float(row["scores"][name]) for name in policy.names}
            out.append((str(row["description"]), scores))
        except (ValueError, KeyError, TypeError) as error:
            names = ", ".join(policy.names)
            raise BadInput(f"{path}:{number}: needs description and scores for {names} ({error!r})") from error
    return out


def read_answer(text: str, policy: Policy) -> Answer:
    """The scores in the last JSON object of an answer; unreadable unless every category has a score in [0, 1]."""
    reply = None
    for match in re.finditer(r"\{[^{}]*\}", text):
        try:
            value = json.loads(match.group())
        except json.JSONDecodeError:
            continue
        if isinstance(value, dict):
            reply = value
    if reply is None:
        return Answer(None, text, "no JSON object")
    missing = [n for n in policy.names if n not in reply]
    if missing:
        return Answer(None, text, f"no score for {', '.join(missing)}")
    scores = {}
    for name in policy.names:
        value = reply[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return Answer(None, text, f"{name}={value!r} is not a number")
        if not 0 <= value <= 1:
            return Answer(None, text, f"{name}={value} is outside [0, 1]")
        scores[name] = float(value)
    if sum(scores.values()) <= 0:
        return Answer(None, text, "all scores are zero")
    stated = re.findall(r"label:\s*`?([\w-]+)", text, re.IGNORECASE)
    top = max(scores, key=lambda n: scores[n])
    contradiction = f"says {stated[-1]} but scores {top}" if stated and stated[-1].lower() != top else ""
    return Answer(scores, text, contradiction)


def pooled(answers: Sequence[Answer]) -> Answer:
    """Mean scores over repeated passes (self-consistency); unreadable if at least half of the passes are."""
    readable = [a.scores for a in answers if a.scores is not None]
    raw = "\n---\n".join(a.raw for a in answers)
    if 2 * len(readable) <= len(answers):
        return Answer(None, raw, f"{len(answers) - len(readable)} of {len(answers)} passes unreadable")
    names = readable[0]
    mean = {n: sum(s[n] for s in readable) / len(readable) for n in names}
    spread = max((sum((s[n] - mean[n]) ** 2 for s in readable) / len(readable)) ** 0.5 for n in names)
    return Answer(mean, raw, "; ".join(sorted({a.problem for a in answers if a.problem})), spread)


def clean_caption(text: str) -> str | None:
    """A caption as one line, at most 400 characters; None if it is empty or a refusal."""
    line = " ".join(text.strip().strip('"').split())
    refusals = ("i can't", "i cannot", "i'm sorry", "i am sorry", "as an ai", "i'm unable")
    if not line or line.lower().startswith(refusals):
        return None
    return line[:400]
