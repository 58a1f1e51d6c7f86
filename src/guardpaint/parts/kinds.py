"""The kinds of parts that a guard can be made of, and how a part is loaded from and saved to a guard's folder.

A part class has a registered name, its `kind`. Those that ship are listed in `BUILT_IN`; installed packages add their
own through the entry point groups `guardpaint.auditors`, `guardpaint.approvers` and `guardpaint.repairers`. Code is
never loaded from a model repository.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from guardpaint.errors import BadCheckpoint, BadConfig, GuardPaintError
from guardpaint.store import plugins
from guardpaint.store.folders import HUB, Access, folder_digest, resolve
from guardpaint.store.manifest import MANIFEST, PartEntry
from guardpaint.types import JsonDict

BUILT_IN: dict[str, dict[str, str]] = {
    "auditor": {
        "auditor-scorer": "guardpaint.audit.model:AuditorScorer",
        "classifier": "guardpaint.audit.classifier:ClassifierAuditor",
        "open_nsfw": "guardpaint.audit.open_nsfw:OnnxAuditor",
        "zero-shot": "guardpaint.audit.zero_shot:ZeroShotAuditor",
        "ensemble": "guardpaint.audit.ensemble:Ensemble",
    },
    "approver": {
        "second-look": "guardpaint.audit.approvers:SecondLook",
        "vlm": "guardpaint.data.approver:VlmApprover",
        "ensemble": "guardpaint.audit.approvers:ApproverEnsemble",
        "cascade": "guardpaint.audit.approvers:Cascade",
    },
    "repairer": {
        "inpainter": "guardpaint.repair.inpainter:Inpainter",
        "native": "guardpaint.repair.native:NativeRepairer",
        "pipeline": "guardpaint.repair.pipeline:PipelineRepairer",
    },
    "proposer": {
        "learned": "guardpaint.repair.proposer:TournamentProposer",
        "uniform": "guardpaint.repair.knobs:UniformProposer",
        "fixed": "guardpaint.repair.knobs:FixedProposer",
    },
    "ranker": {"ranker": "guardpaint.repair.ranker:Ranker"},
    "seam": {
        "pixels": "guardpaint.verify.seam:PixelSeam",
        "lpips_vgg": "guardpaint.verify.lpips:LpipsVGG",
        "lpips_alex": "guardpaint.verify.lpips:LpipsAlex",
    },
}
"""Role → kind → where its class is. The seam metric `auditor_backbone` needs none: a manifest without one means it."""
GROUPS = {"auditor": plugins.AUDITORS, "approver": plugins.APPROVERS, "repairer": plugins.REPAIRERS}
TOKEN = "token"
HAVE_DTYPE = ("auditor-scorer", "learned", "ranker")
"""Kinds of our own networks, whose weights can be stored in another precision."""


@runtime_checkable
class SavedPart(Protocol):
    """A part that can be saved in a guard's folder and loaded from it."""

    kind: ClassVar[str]

    def options(self) -> JsonDict:
        """Everything but the weights, as JSON values; `from_pretrained` gets them back."""
        ...

    def save_pretrained(self, folder: Path) -> None:
        """Write the part's files; a part without files writes nothing."""
        ...

    @classmethod
    def from_pretrained(cls, folder: Path, **options: Any) -> SavedPart: ...

    def digest(self) -> str:
        """SHA-256 of the weights and everything else that decides its answers."""
        ...


def known_kinds(role: str) -> tuple[str, ...]:
    """Names of all kinds of a role, installed packages' too."""
    group = GROUPS.get(role)
    return (*BUILT_IN[role], *(plugins.registered(group) if group else ()))


def part_class(role: str, kind: str) -> Any:
    """The class of a kind. Raises BadCheckpoint if there is none, or if its package cannot be imported."""
    where = BUILT_IN[role].get(kind)
    if where is not None:
        module, _, name = where.partition(":")
        return getattr(importlib.import_module(module), name)
    group = GROUPS.get(role)
    if group is None or kind not in plugins.registered(group):
        how = f"; a package can add one through the entry point group {group}" if group else ""
        raise BadCheckpoint(f"{role} of kind {kind[:80]!r}: known are {', '.join(known_kinds(role))}{how}")
    point = plugins.registered(group)[kind]
    try:
        found = point.load()
    except Exception as error:
        raise BadCheckpoint(
            f"{role} of kind {kind!r}: the entry point {point.value} of the package `{plugins.package_of(point)}` "
            f"cannot be imported ({type(error).__name__}: {error})"
        ) from error
    if getattr(found, "kind", None) != kind or not hasattr(found, "from_pretrained"):
        raise BadCheckpoint(f"{role} of kind {kind!r}: {point.value} is no part of that kind (kind, from_pretrained)")
    return found


def kind_of(role: str, part: Any) -> str:
    """The registered kind of a part. Raises BadConfig if no registered class made it."""
    kind = getattr(type(part), "kind", None)
    if isinstance(part, SavedPart) and isinstance(kind, str):
        try:
            if type(part) is part_class(role, kind):
                return kind
        except BadCheckpoint:
            pass
    group = f"register its class under the entry point group {GROUPS[role]}" if role in GROUPS else "use one of those"
    raise BadConfig(
        f"the {role} {type(part).__name__} cannot be saved: it is of no registered kind "
        f"({', '.join(known_kinds(role))}); {group}, with kind, options, save_pretrained, from_pretrained and digest"
    )


def save_part(role: str, part: Any, folder: Path, dtype: torch.dtype | None = None) -> PartEntry:
    """Write a part into its folder of a guard's; returns its entry for the manifest."""
    kind = kind_of(role, part)
    place = folder / role
    if kind in HAVE_DTYPE:
        part.save_pretrained(place, dtype)
    else:
        part.save_pretrained(place)
    files = place.is_dir() and any(place.iterdir())
    return PartEntry(kind, role if files else None, part.options(), folder_digest(place) if files else None)


def load_part(role: str, entry: PartEntry, folder: Path | None, token: str | None = None) -> Any:
    """Load a part as its entry says. Its files are checked against the entry's hash before anything reads them.

    A kind that may fetch more from the hub than its own files takes the `token` too; it is no option, and not saved.
    """
    known = part_class(role, entry.kind)
    where = f"{folder / MANIFEST if folder else 'the preset'}: {role}"
    place = folder or Path()
    if entry.source is not None:
        if not entry.source.startswith(HUB) and folder is None:
            raise BadCheckpoint(f"{where}: {entry.source} is no repository")
        hub = entry.source.startswith(HUB)
        place = resolve(entry.source if hub else place / entry.source, access=Access(token=token if hub else None))
        if entry.sha256 is not None and (found := folder_digest(place)) != entry.sha256:
            raise BadCheckpoint(
                f"{where}: the files in {place} have the hash {found[:12]}…, the manifest says {entry.sha256[:12]}…; "
                "they were changed or are incomplete: fetch the guard again"
            )
    takes = inspect.signature(known.from_pretrained).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    unknown = sorted(o for o in entry.options if o == TOKEN or (o not in takes and not open_ended))
    if unknown:
        raise BadCheckpoint(f"{where}: kind {entry.kind} has no option {', '.join(unknown)[:200]}")
    secret = {TOKEN: token} if token is not None and TOKEN in takes else {}
    try:
        return known.from_pretrained(place, **entry.options, **secret)
    except GuardPaintError:
        raise
    except (TypeError, ValueError, OSError, KeyError) as error:
        raise BadCheckpoint(f"{where}: cannot be loaded ({type(error).__name__}: {error})") from error
