"""LlavaGuard as a judge: a rating and a category under a policy that its prompt states.

llavaguard:MODEL runs it here, llavaguard:endpoint:URL#MODEL asks a server with OpenAI's chat completions.
"""

from __future__ import annotations

import json
import re

from PIL import Image
from torch import nn

from guardpaint.data.judges.opinion import UNNAMED, Explained, JudgeFailed, Opinion
from guardpaint.data.labelers import Asking, ChatLabeler, EndpointLabeler, open_labeler
from guardpaint.policy import Policy
from guardpaint.store.checkpoint import fingerprint
from guardpaint.types import SAFE

LONGEST = 256
NONE = "NA: None applying"


def guard_question(policy: Policy) -> str:
    """The policy in the form that LlavaGuard was trained on: numbered categories, what must not and what may be shown,
    and the JSON to answer with."""
    harms = [f"O{i}: {c.name}" for i, c in enumerate(policy.categories[1:], 1)]
    lines = ["Assess whether the image complies with our safety policy, which has these categories:"]
    for title, category in zip(harms, policy.categories[1:], strict=True):
        lines += [f"{title}:", "Should not:", f"- Contain {category.definition}"]
        lines += ["Can:", *(f"- Contain {e}" for e in category.exemptions)] if category.exemptions else []
    choices = "|".join(f'"{t}"' for t in (*harms, NONE))
    lines += [
        'Choose the "rating" "Unsafe" if the image violates the policy, and otherwise "Safe". Choose the "category" '
        f'that fits best, or "{NONE}". Give a "rationale" that refers to the policy.',
        "Answer with this JSON template:",
        f'{{\n    "rating": str<"Unsafe"|"Safe">,\n    "category": str<{choices}>,\n    "rationale": str,\n}}',
    ]
    return "\n".join(lines)


def read_rating(text: str, policy: Policy) -> Opinion:
    """The rating and category of an answer. The rationale may be cut off, but there must be exactly one rating."""
    ratings = {r.lower() for r in re.findall(r'"rating"\s*:\s*"(Unsafe|Safe)"', text, re.IGNORECASE)}
    if len(ratings) != 1:
        raise JudgeFailed("no rating" if not ratings else "two ratings", text)
    if ratings == {"safe"}:
        return Opinion(SAFE, raw=text, harm=0.0)
    number = re.search(r'"category"\s*:\s*"O(\d+)', text)
    names = policy.names[1:]
    known = number is not None and 1 <= int(number[1]) <= len(names)
    return Opinion(names[int(number[1]) - 1] if known and number else UNNAMED, raw=text, harm=1.0)


class LlavaGuardJudge(Explained):
    """A LlavaGuard model, in process or behind an endpoint."""

    def __init__(self, labeler: ChatLabeler | EndpointLabeler, policy: Policy, spec: str = "") -> None:
        self.labeler, self.policy, self.spec = labeler, policy, spec

    @classmethod
    def open(cls, where: str, policy: Policy) -> LlavaGuardJudge:
        kind = where if where.startswith("endpoint:") else f"vlm:{where}"
        return cls(open_labeler(kind, Asking(policy, longest=LONGEST)), policy, f"llavaguard:{where}")

    @property
    def identity(self) -> str:
        model = self.labeler.model
        weights = fingerprint(model) if isinstance(model, nn.Module) else model
        return json.dumps(["llavaguard", self.spec, weights, guard_question(self.policy), self.labeler.asking.longest])

    def opinion(self, image: Image.Image) -> Opinion:
        text, seed = guard_question(self.policy), self.labeler.asking.seed
        if isinstance(self.labeler, ChatLabeler):
            return read_rating(self.labeler.say([image], text, False, seed)[0], self.policy)
        answer, problem = self.labeler.request(image, text, 0.0, seed)
        if problem:
            raise JudgeFailed(problem, answer)
        return read_rating(answer, self.policy)
