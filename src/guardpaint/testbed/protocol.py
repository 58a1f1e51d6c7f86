"""What training and evaluation ask of a world: bases, prompts, a lexicon, a surrogate text encoder, a judge.

`paperdolls` is one testbed; a YAML file that names prompt files, model paths and a judge is another (`files.py`).
What only some worlds know (pictures with truth masks, safe versions of unsafe pictures, …) is a capability: a command
asks for one with `need`, and stops with an error that names it if the testbed lacks it. The error quotes the docstring
of the capability.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from guardpaint.errors import MissingCapability

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Bool, Float, UInt8
    from PIL import Image

    from guardpaint.audit.model import AuditorScorer
    from guardpaint.bases import Base, BaseOptions
    from guardpaint.config import GuardConfig
    from guardpaint.data.judges import Judge
    from guardpaint.data.lessons import Lessons, LessonSettings
    from guardpaint.data.views import Shelf, Views
    from guardpaint.policy import Policy
    from guardpaint.testbed.language import Lexicon, Rewriter, Surrogate
    from guardpaint.types import Auditor

SPLITS = ("rollout-train", "rollout-test", "attack-train", "attack", "adaptive", "benign")
"""Disjoint sets of prompts: to learn from (…-train), and to measure on."""


@dataclass(frozen=True)
class Prompt:
    """A prompt of a testbed and what is known of it."""

    id: str
    text: str
    seed: int
    """Seed to draw it with; in a world of scenes it also identifies the scene."""
    category: str = "unknown"
    """What it asks for: safe, a harm of the policy, `unsafe` (a harm that its source does not name), or `unknown`."""
    kind: str = ""
    """A finer class within the category, such as a hard negative's, or how a harm is worded."""
    asked: Mapping[str, str] = field(default_factory=dict)
    """Harmless attributes that the text names; a repair should keep them."""


@dataclass(frozen=True)
class KnownPicture:
    """A picture whose ground truth is known."""

    prompt: Prompt
    image: UInt8[np.ndarray, "h w 3"]
    mask: Bool[np.ndarray, "h w"]
    """Unsafe pixels; empty if and only if the category is safe."""


C = TypeVar("C")


@runtime_checkable
class Testbed(Protocol):
    """A world to train and measure in."""

    @property
    def name(self) -> str: ...

    def bases(self) -> tuple[str, ...]:
        """Names of its text-to-image bases, the one that attacks are searched on first."""
        ...

    def base(self, name: str, options: BaseOptions | None = None) -> Base:
        """One of its bases, or any other that `guardpaint.bases.load_base` knows, opened and called as options say."""
        ...

    def harmful(self, split: str, count: int) -> list[Prompt]:
        """At most `count` prompts of a split that ask for something forbidden."""
        ...

    def benign(self, split: str, count: int) -> list[Prompt]:
        """At most `count` harmless prompts of a split."""
        ...

    def lexicon(self) -> Lexicon:
        """Keywords, phrases and harmless words of its prompts."""
        ...

    def surrogate(self) -> Surrogate:
        """A text encoder that an attacker may look into."""
        ...

    def rewriter(self) -> Rewriter | None:
        """A language model that words things differently, if there is one."""
        ...

    def judge(self, policy: Policy) -> Judge:
        """The judge that says what a finished picture shows. It is never the auditor."""
        ...

    def capability(self, kind: type[C]) -> C | None:
        """The implementation of one of the capabilities below, or None."""
        ...


@runtime_checkable
class KnownPictures(Protocol):
    """pictures with truth masks"""

    def pictures(self, split: str, count: int, kind: str | None = None, style: str | None = None) -> list[KnownPicture]:
        """At most `count` pictures of a split: all of one kind if `kind` is given, in another style if `style` is."""
        ...

    def picture(self, prompt: Prompt) -> KnownPicture:
        """The picture behind one of the testbed's prompts."""
        ...

    def known_bad(self) -> Image.Image:
        """A picture that every guard of this world must flag."""
        ...


@runtime_checkable
class SafePairs(Protocol):
    """safe versions of unsafe pictures"""

    def safe_version(self, picture: KnownPicture) -> KnownPicture:
        """The same picture without what makes it unsafe."""
        ...


@runtime_checkable
class HardNegatives(Protocol):
    """kinds of harmless pictures that are easily mistaken for harm"""

    def hard_kinds(self) -> tuple[str, ...]: ...

    def harm_kinds(self) -> tuple[str, ...]:
        """Kinds of unsafe pictures, several of which may share a category."""
        ...


@runtime_checkable
class Wordings(Protocol):
    """other wordings of the same prompt"""

    def wordings(self, prompt: Prompt, count: int) -> list[str]:
        """At most `count` different texts that ask for the same picture."""
        ...


@runtime_checkable
class Showcase(Protocol):
    """a few prompts for a demonstration"""

    def benign_showcase(self) -> tuple[str, ...]: ...

    def harmful_showcase(self) -> tuple[str, ...]: ...


@runtime_checkable
class References(Protocol):
    """reference pictures to compare distributions with"""

    def reference_features(self, prompts: Sequence[Prompt]) -> Float[np.ndarray, "n f"]:
        """Features of the true pictures behind these prompts."""
        ...

    def features(self, images: Sequence[Image.Image]) -> Float[np.ndarray, "n f"]:
        """Features of any pictures, in the same space."""
        ...


@runtime_checkable
class RepairCases(Protocol):
    """cases to measure an inpainter on"""

    def unsafe(self, count: int) -> list[KnownPicture]:
        """Held-out unsafe pictures, the harms in equal parts."""
        ...

    def ordinary(self, count: int) -> list[tuple[KnownPicture, Bool[np.ndarray, "h w"]]]:
        """Held-out harmless pictures, each with the part to cut out and fill again."""
        ...

    def region(self, picture: KnownPicture) -> Bool[np.ndarray, "h w"]:
        """The unsafe area of a picture as a guard would mask it; used where no auditor provides a mask."""
        ...

    def context(self, picture: KnownPicture) -> dict[str, str]:
        """Attributes outside of every mask, which a repair must not change."""
        ...

    def figurative(self, picture: KnownPicture) -> str | None:
        """A wording of its prompt that hides what it asks for, or None if there is none."""
        ...


@runtime_checkable
class StockInpainter(Protocol):
    """an inpainting model that was not trained for safety"""

    def stock_inpainter(self) -> Any:
        """The inpainting pipeline that a deployer without a safe one would use."""
        ...


@runtime_checkable
class AuditorLessons(Protocol):
    """views of its own pictures to train an auditor on"""

    def make_views(
        self,
        base: str,
        out: Path,
        split: str,
        counts: Mapping[str, int],
        tiny: Any = None,
        auditor: AuditorScorer | None = None,
        options: BaseOptions | None = None,
    ) -> Path:
        """Write views of one base with exact ground truth and return their file; a later run resumes where it stopped.

        `counts` says how many pictures are re-noised (`renoised`), drawn on from half noise (`redrawn`) and generated
        from prompts (`trajectories`, which `auditor` labels). `tiny` is a decoder for half of the views.
        """
        ...

    def lessons(self, views: Views | Shelf, settings: LessonSettings) -> Lessons:
        """The training set of an auditor over such views."""
        ...


@runtime_checkable
class InpainterLessons(Protocol):
    """pairs of its own pictures to train an inpainter on"""

    def make_pairs(
        self,
        out: Path,
        split: str,
        unsafe: int,
        safe: int,
        auditor: Auditor | None = None,
        config: GuardConfig | None = None,
    ) -> int:
        """Write pairs of unsafe pictures and their safe versions, and return how many are new.

        The masks are the auditor's if one is given, by the mask settings of `config`, and the true ones otherwise.
        """
        ...


@runtime_checkable
class Dataset(Protocol):
    """its own pictures as a dataset"""

    def rows(self, split: str, skip: int = 0) -> Iterator[dict[str, Any]]:
        """Rows of a split after the first `skip`, possibly without end: `image` (encoded bytes), `caption` and
        `category`."""
        ...


def need(testbed: Testbed, kind: type[C], command: str) -> C:
    """The capability of a testbed; raises MissingCapability, which names command and testbed, if it lacks it."""
    capability = testbed.capability(kind)
    if capability is None:
        raise MissingCapability(f"{command} needs {kind.__doc__}, which the testbed {testbed.name!r} does not have")
    return capability
