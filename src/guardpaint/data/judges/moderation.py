"""A moderation endpoint of OpenAI's type as a judge: moderation:URL#MODEL, as in moderation:https://api.openai.com/v1.

The key is read from GUARDPAINT_API_KEY.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from PIL import Image

from guardpaint.data.judges.opinion import Explained, JudgeFailed, Opinion, named_by
from guardpaint.errors import BadConfig
from guardpaint.policy import Policy
from guardpaint.store.images import data_url
from guardpaint.types import SAFE

MODEL = "omni-moderation-latest"
MEANINGS = {"sexual": ("nudity", "sexual"), "violence": ("violence",), "self-harm": ("self-harm", "violence")}
"""What the first word of an endpoint's category may be called in a policy."""
HOPELESS = (400, 401, 403, 404, 422)
"""Statuses for which asking again does not help."""


@dataclass
class ModerationJudge(Explained):
    """The endpoint's own decision: unsafe if it flags the picture, under the flagged category that scores most."""

    url: str
    policy: Policy
    model: str = MODEL
    key: str | None = None
    timeout: float = 60.0
    retries: int = 3
    wait: float = 1.0
    """Seconds before the first retry, doubled each time."""
    attributes: bool = False

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise BadConfig(f"moderation endpoint {self.url!r}: must start with http:// or https://")

    @classmethod
    def open(cls, where: str, policy: Policy) -> ModerationJudge:
        url, _, model = where.partition("#")
        return cls(url, policy, model or MODEL, os.environ.get("GUARDPAINT_API_KEY"))

    @property
    def identity(self) -> str:
        return json.dumps(["moderation", self.url, self.model, list(self.policy.names)])

    def opinion(self, image: Image.Image) -> Opinion:
        raw = self.ask(image)
        try:
            result = json.loads(raw)["results"][0]
            flagged, categories, scores = result["flagged"], result["categories"], result["category_scores"]
            values = {str(name): float(score) for name, score in scores.items() if score is not None}
            named = [name for name, value in categories.items() if value is True]
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise JudgeFailed(f"not a moderation result ({type(error).__name__})", raw) from error
        if not isinstance(flagged, bool) or not values:
            raise JudgeFailed(f"flagged={flagged!r} with {len(values)} scores", raw)
        harm = max(values.values())
        if not flagged:
            return Opinion(SAFE, raw=raw, harm=harm)
        worst = max(named or values, key=lambda name: values.get(name, 0.0))
        return Opinion(named_by(self.policy, worst, *MEANINGS.get(worst.partition("/")[0], ())), raw=raw, harm=harm)

    def ask(self, image: Image.Image) -> str:
        """The endpoint's answer as text; raises JudgeFailed with what went wrong last."""
        content = [{"type": "image_url", "image_url": {"url": data_url(image)}}]
        body: dict[str, Any] = {"model": self.model, "input": content}
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        problem = ""
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(self.wait * 2 ** (attempt - 1))
            call = urllib.request.Request(f"{self.url.rstrip('/')}/moderations", json.dumps(body).encode(), headers)
            try:
                with urllib.request.urlopen(call, timeout=self.timeout) as reply:
                    return reply.read().decode("utf-8")
            except urllib.error.HTTPError as error:
                problem = f"HTTP {error.code}"
                if error.code in HOPELESS:
                    break
            except (OSError, TimeoutError, UnicodeDecodeError) as error:
                problem = f"no answer ({error})"
        raise JudgeFailed(problem)
