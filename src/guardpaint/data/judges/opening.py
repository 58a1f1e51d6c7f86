"""Judges by name.

vlm:MODEL                 any vision–language model of transformers, such as InternVL or Qwen-VL
llavaguard:MODEL          LlavaGuard, or llavaguard:endpoint:URL#MODEL
shieldgemma:MODEL         ShieldGemma 2
detector:MODEL            Grounding DINO
endpoint:URL#MODEL        a vision–language model behind OpenAI's chat completions
moderation:URL#MODEL      a moderation endpoint of OpenAI's type
q16:PROMPTS#CLIP          Q16
multiheaded:FOLDER#CLIP   the multi-headed classifier of unsafe-diffusion
stock:FOLDER              the safety checker that comes with Stable Diffusion
open_nsfw                 Yahoo's open_nsfw
classifier:FOLDER#LABEL=CATEGORY,…   any image classifier of transformers
"""

from __future__ import annotations

from collections.abc import Callable

from guardpaint.data.judges.auditor import open_classifier, open_nsfw_judge
from guardpaint.data.judges.clip_heads import MultiHeadedJudge, Q16Judge
from guardpaint.data.judges.labeler import LabelerJudge
from guardpaint.data.judges.llavaguard import LlavaGuardJudge
from guardpaint.data.judges.moderation import ModerationJudge
from guardpaint.data.judges.opinion import Judge
from guardpaint.data.judges.stock import StockJudge
from guardpaint.data.labelers import LOADING, Asking, open_labeler
from guardpaint.errors import BadConfig, BadInput, GuardPaintError
from guardpaint.policy import Policy
from guardpaint.store import plugins

LABELERS = ("vlm", "shieldgemma", "detector", "endpoint")
WITHOUT_PLACE = ("open_nsfw",)
OTHERS: dict[str, Callable[[str, Policy], Judge]] = {
    "llavaguard": LlavaGuardJudge.open,
    "moderation": ModerationJudge.open,
    "q16": Q16Judge.open,
    "multiheaded": MultiHeadedJudge.open,
    "stock": StockJudge.open,
    "open_nsfw": open_nsfw_judge,
    "classifier": open_classifier,
}
KINDS = (*LABELERS, *OTHERS)
"""The judges that ship, by the word before the colon."""


def open_judge(spec: str, policy: Policy) -> Judge:
    """The judge that a description such as vlm:MODEL names."""
    kind, _, where = spec.partition(":")
    installed = plugins.registered(plugins.JUDGES)
    if kind not in KINDS and kind not in installed:
        known = ", ".join(f"{k}" if k in WITHOUT_PLACE else f"{k}:…" for k in (*KINDS, *installed))
        raise BadConfig(f"judge {spec!r}: write one of {known}")
    if not where and kind not in (*WITHOUT_PLACE, *installed):
        raise BadConfig(f"judge {spec!r}: name a model after the colon, as in {kind}:MODEL")
    if kind in LABELERS:
        return LabelerJudge(open_labeler(spec, Asking(policy)), policy, spec=spec)
    make = OTHERS.get(kind)
    if make is None:
        make = plugins.load(plugins.JUDGES, kind, f"the judge {kind!r}")
    try:
        return make(where, policy)
    except GuardPaintError:
        raise
    except LOADING as error:
        raise BadInput(f"judge {spec!r} cannot be loaded: {error}") from error
