"""A labeler as an approver: ShieldGemma 2, or any model that `guardpaint data label` can ask.

An answer that cannot be read, or that contradicts itself, counts as unsafe in every category, and the approval says
why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from guardpaint.audit.levels import checked_levels, graded
from guardpaint.audit.part import Graded, digest_of, read_card, settings_from, write_card
from guardpaint.data.labelers import Asking, Labeler, open_labeler
from guardpaint.draft.options import LoadOptions
from guardpaint.errors import BadConfig
from guardpaint.policy import Policy
from guardpaint.store.checkpoint import fingerprint
from guardpaint.store.images import to_pil
from guardpaint.types import Approval, JsonDict

MODEL = "model"


@dataclass(frozen=True)
class VlmSettings:
    """Which labeler is asked, and what."""

    labeler: str
    """As for `guardpaint data label`: shieldgemma:MODEL, vlm:MODEL, detector:MODEL or endpoint:URL#MODEL."""
    policy: Mapping[str, Any]
    """The policy that the question states, as `Policy.to_dict` gives it."""
    levels: Mapping[str, float] = field(default_factory=dict)
    style: str = "single"
    passes: int = 1

    def asking(self) -> Asking:
        return Asking(Policy.from_dict(dict(self.policy)), style=self.style, passes=self.passes)


class VlmApprover(Graded):
    """A vision–language model that is shown every finished picture and asked what the policy says of it."""

    kind: ClassVar[str] = "vlm"

    def __init__(self, labeler: Labeler, settings: VlmSettings) -> None:
        self.labeler, self.settings = labeler, settings
        self.categories: tuple[str, ...] = settings.asking().policy.names
        checked_levels(settings.levels, self.categories)

    @property
    def name(self) -> str:
        return self.settings.labeler

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path | None = None,
        policy: Policy | Mapping[str, Any] | None = None,
        token: str | None = None,
        **options: Any,
    ) -> VlmApprover:
        """The approver that options describe, or that was saved in a folder, which may hold its model.

        A preset names no folder, which arrives here as `Path()`. It opens on the CPU; `GuardPaint.to` moves it with all
        other parts.
        """
        place = None if folder is None or Path(folder) == Path() else Path(folder)
        values = {**({} if place is None else read_card(place, cls.kind)), **options}
        if policy is not None:
            values["policy"] = policy.to_dict() if isinstance(policy, Policy) else policy
        missing = [name for name in ("labeler", "policy") if name not in values]
        if missing:
            raise BadConfig(f"approver of kind vlm: {' and '.join(missing)} must be named")
        settings = settings_from(VlmSettings, values, cls.kind)
        spec = settings.labeler
        if place is not None and (place / MODEL).is_dir():
            spec = f"{spec.partition(':')[0]}:{place / MODEL}"
        return cls(open_labeler(spec, settings.asking(), LoadOptions(device="cpu", token=token)), settings)

    def save_pretrained(self, folder: Path) -> None:
        """Write the card, and the model if the labeler runs in this process."""
        model = self.model
        if model is not None:
            model.save_pretrained(folder / MODEL)
            self.labeler.processor.save_pretrained(folder / MODEL)  # type: ignore[attr-defined]
        write_card(folder, self.kind, self.options())

    @property
    def model(self) -> Any | None:
        """The model that runs in this process; an endpoint has only a name."""
        model = getattr(self.labeler, "model", None)
        return model if isinstance(model, nn.Module) else None

    def digest(self) -> str:
        """SHA-256 over options and weights. Nobody here can tell which weights an endpoint runs."""
        return digest_of(self, "" if self.model is None else fingerprint(self.model))

    def to(self, device: Any) -> VlmApprover:
        if self.model is not None:
            self.model.to(device)
        return self

    def options(self) -> JsonDict:
        return {**super().options(), "policy": Policy.from_dict(dict(self.settings.policy)).to_dict()}

    def approve(self, image: Float[Tensor, "3 h w"], prompt: str | None, edited: bool) -> Approval:
        answer = self.labeler.label([to_pil(image.float())])[0]
        harms = self.categories[1:]
        scores = answer.scores or {}
        if answer.problem or not all(0 <= scores.get(c, -1.0) <= 1 for c in harms):
            problem = answer.problem or f"scores {answer.scores} are no answer for {', '.join(harms)}"
            return Approval(graded(dict.fromkeys(harms, 1.0), self.levels), f"{self.name}: unreadable ({problem})")
        return Approval(graded({c: scores[c] for c in harms}, self.levels), self.name)
