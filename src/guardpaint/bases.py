"""Loads base models and guards by name: of installed packages, small random ones, folders, and `hub:owner/name`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from guardpaint.draft.call_settings import CallSettings, call_settings
from guardpaint.draft.families import family_of
from guardpaint.draft.options import LoadOptions
from guardpaint.errors import BadCheckpoint, BadConfig, BadInput
from guardpaint.store import plugins
from guardpaint.store.checkpoint import fingerprint, short_hash
from guardpaint.store.folders import HUB, Access, base_name

if TYPE_CHECKING:
    from PIL import Image

    from guardpaint.guard import GuardPaint

SMALL = "tiny-"
"""Prefix of the small random-initialised bases: tiny-sd, tiny-sdxl, tiny-sd3, tiny-flux."""


@runtime_checkable
class NamedBase(Protocol):
    """A base that a package registers under `guardpaint.bases`."""

    inpaints: bool
    """Whether it is an inpainting model and not a text-to-image base."""

    def load(self) -> Any:
        """The diffusers pipeline."""
        ...

    def call(self) -> dict[str, Any]:
        """The call arguments that the base was trained for: steps, guidance, size."""
        ...


@dataclass(frozen=True)
class BaseOptions:
    """How base models are opened and called. What is None is left to the machine, the base and its pipeline."""

    load: LoadOptions = field(default_factory=LoadOptions)
    steps: int | None = None
    guidance: float | None = None
    size: int | None = None
    """Height and width in pixels."""

    def __post_init__(self) -> None:
        for name, value, least in (("steps", self.steps, 1), ("guidance", self.guidance, 0), ("size", self.size, 8)):
            if value is not None and not least <= value < float("inf"):
                raise BadConfig(f"{name}={value}: must be a number of at least {least}")

    def over(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Call arguments of a base with those in their place that these options name."""
        named = {"num_inference_steps": self.steps, "guidance_scale": self.guidance}
        named |= {"height": self.size, "width": self.size}
        return {**call, **{k: v for k, v in named.items() if v is not None}}


@dataclass(frozen=True)
class Base:
    """A pipeline and the call arguments that it was trained for, or that options name."""

    name: str
    pipe: Any
    call: Mapping[str, Any]

    @property
    def family(self) -> str:
        return family_of(self.pipe).name

    @cached_property
    def settings(self) -> CallSettings:
        """Steps, guidance and size of its pictures: from `call`, or what the pipeline does by itself."""
        return call_settings(self.pipe, self.call)

    @property
    def guidance(self) -> float:
        return self.settings.guidance

    @property
    def two_branches(self) -> bool:
        """Whether it runs classifier-free guidance, with an unconditional branch beside the conditional one."""
        return self.family != "flux" and self.guidance > 1.0

    def draw(self, prompts: Sequence[str], seeds: Sequence[int], pipe: Any = None, **more: Any) -> list[Image.Image]:
        """Draw one batch with a seed per picture. `more` are further call arguments; embeddings replace the prompts."""
        import torch

        generators = [torch.Generator().manual_seed(s) for s in seeds]
        text = {} if "prompt_embeds" in more else {"prompt": list(prompts)}
        return list((pipe or self.pipe)(generator=generators, **{**self.call, **text, **more}).images)

    def digest(self) -> str:
        """A short hash of everything that its pictures depend on: weights, call arguments, scheduler."""
        from torch import nn

        modules = {k: v for k, v in self.pipe.components.items() if isinstance(v, nn.Module)}
        if any(p.is_meta for module in modules.values() for p in module.parameters()):
            raise BadInput(f"base {self.name!r}: sequential offload hides its weights from the hash; use offload=model")
        parts = {k: fingerprint(v) for k, v in modules.items()}
        plan = {k: v for k, v in self.pipe.scheduler.config.items() if not k.startswith("_")}  # "_…" has no fixed order
        return short_hash(parts, dict(self.call), plan)


def named_bases() -> tuple[str, ...]:
    """Names that installed packages register, text-to-image and inpainting alike."""
    return tuple(plugins.registered(plugins.BASES))


def known_names() -> str:
    """All names that are neither a folder nor on the hub, for error messages."""
    from guardpaint.testing import small

    return ", ".join((*named_bases(), *(f"{SMALL}{family}" for family in small.BASES)))


def load_base(name: str, options: BaseOptions | None = None) -> Base:
    """A base by name, ready to draw, opened and called as the options say.

    A base from a folder or the hub goes to the GPU if there is one; those that packages bring stay where they are.
    """
    from guardpaint.draft.loading import adapted, open_folder, pipeline_folder

    options = options or BaseOptions()
    if name.startswith(SMALL) or name in named_bases():
        options.load.check_installed(name)
        pipe, call = installed_base(name)
        return Base(name, adapted(pipe, options.load), options.over(call))
    where = base_name(name)
    try:
        folder = pipeline_folder(where, options.load)
    except BadCheckpoint as error:
        if where.startswith(HUB):
            raise BadInput(f"base {error}") from error
        hint = "" if named_bases() else f"; named bases such as mini-sd come with {plugins.HOW_TO_INSTALL}"
        raise BadInput(f"base {name!r}: not one of {known_names()}, and {error}{hint}") from error
    try:
        return Base(name, open_folder(folder, options.load), options.over({}))
    except BadCheckpoint as error:
        raise BadInput(f"base {name!r} cannot be loaded: {error}") from error


def installed_base(name: str) -> tuple[Any, dict[str, Any]]:
    """Pipeline and call arguments of a small random base or one that a package registers."""
    if name.startswith(SMALL):
        from guardpaint.testing import small

        return small.pipeline(name.removeprefix(SMALL)), {"height": small.PIXELS, "width": small.PIXELS}
    named: NamedBase = plugins.load(plugins.BASES, name, f"base {name!r}")
    return named.load(), named.call()


def load_inpainter(name: str) -> Any:
    """An inpainting pipeline by registered name, from a directory or the hub, in fp32.

    Weights that are stored in half precision are read too, also those of a folder that has nothing but a variant.
    """
    from guardpaint.draft.intact import only_variant
    from guardpaint.draft.loading import open_folder, pipeline_folder
    from guardpaint.draft.options import FP32

    if name in named_bases():
        pipe = plugins.load(plugins.BASES, name, f"inpainter {name!r}").load()
    else:
        folder = pipeline_folder(name, FP32)
        pipe = open_folder(folder, replace(FP32, variant=only_variant(folder)))
    unet = pipe.components.get("unet")
    if unet is None:
        raise BadConfig(
            f"{name}: a {type(pipe).__name__} has no UNet; a pipeline with an inpainting UNet is needed here"
        )
    if unet.config.in_channels != 2 * pipe.vae.config.latent_channels + 1:
        raise BadConfig(f"{name}: its UNet takes {unet.config.in_channels} channels; an inpainting UNet is needed")
    return pipe


UNTRAINED = "the guard `tiny` is random-initialised: its verdicts mean nothing"
EMBEDDED_ONLY = (
    "the embedded guard only knows the world it was trained in; give one trained on real pictures with --guard"
)


def load_guard(
    name: str | None,
    policy: Path | None,
    warn: Callable[[str], None],
    base: str | None = None,
    seam: str | None = None,
    access: Access | None = None,
    **config: Any,
) -> GuardPaint:
    """A guard from a folder or the hub, the embedded one (no name), or a random-initialised one (`tiny`).

    The embedded guard is refused on a base that it was not trained for. `seam` names another seam metric for it.
    `access` holds the hub's token, and a revision of the guard if the name does not have one.
    """
    from guardpaint.guard import GuardPaint
    from guardpaint.parts.presets import DOLLS, EMBEDDED, PRESET
    from guardpaint.policy import Policy
    from guardpaint.verify.seam import open_seam

    access = access or Access()
    if access.revision is not None and (name in (None, "tiny")):
        raise BadConfig(f"guard {name or DOLLS}: comes with a package; leave out revision={access.revision!r}")
    embedded = DOLLS if name is None else name.removeprefix(PRESET) if name.startswith(PRESET) else ""
    if embedded in EMBEDDED and access.revision is None:  # a guard of an installed package
        name = None
    if name == "tiny":
        from guardpaint.testing import small

        warn(UNTRAINED)
        guard = small.guard(**config)
        if seam is not None:
            guard.parts = replace(guard.parts, seam=open_seam(seam, guard.parts.auditor))
        return guard if policy is None else guard.configured(policy=Policy.load(policy))
    if name is not None:
        revision, token = access.revision, access.token
        return GuardPaint.from_pretrained(name, policy=policy, seam=seam, revision=revision, token=token, **config)
    if base is None:
        warn(EMBEDDED_ONLY)
    elif base not in named_bases() and not base.startswith(SMALL):
        raise BadInput(f"base {base!r}: not one of {known_names()}; any other needs --guard, {EMBEDDED_ONLY}")
    return GuardPaint.from_preset(embedded, policy=policy, seam=seam, **config)
