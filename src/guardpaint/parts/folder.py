"""What a guard's folder holds besides its parts: settings, tiny decoders and their readouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from guardpaint.config import GuardConfig
from guardpaint.draft.early_exit import EarlyExits
from guardpaint.draft.families import FAMILIES
from guardpaint.draft.readouts import CARD, Readouts
from guardpaint.errors import BadCheckpoint, BadConfig, BadInput
from guardpaint.parts.presets import PRESET
from guardpaint.policy import Policy
from guardpaint.store.folders import HUB
from guardpaint.store.manifest import MANIFEST, Manifest, read_manifest


def own_folder(guard: Path) -> None:
    """Raise BadInput unless a guard lies in a folder on this machine, into which new settings can be written."""
    if (guard / MANIFEST).is_file():
        return
    name = str(guard)
    if name.startswith(PRESET):
        short = name.removeprefix(PRESET)
        way = f"a preset is no folder; run `guardpaint presets --save {short} DIR` first, then name DIR"
    elif name.startswith(HUB):
        way = "a hub repository is no folder; save it with GuardPaint.from_pretrained(…).save_pretrained(DIR) first"
    else:
        way = f"no guard's folder (it has no {MANIFEST})"
    raise BadInput(f"{name}: the settings are written into the guard's folder, and this is {way}")


def read_settings(
    directory: Path, policy: Policy | str | Path | None = None, **changes: Any
) -> tuple[Manifest, Policy, GuardConfig]:
    """The manifest, policy and configuration of a guard folder, checked before any weights are read."""
    manifest = read_manifest(directory)
    unknown = sorted(set(manifest.decoders) - {f.name for f in FAMILIES})
    if unknown:
        raise BadCheckpoint(
            f"{directory / MANIFEST}: decoders for {', '.join(unknown)[:200]}; the families are "
            f"{', '.join(f.name for f in FAMILIES)}"
        )
    if not isinstance(policy, Policy):
        policy = Policy.load(policy or directory / "policy.yaml")
    return manifest, policy, GuardConfig.from_dict({**manifest.config, **changes})


def early_exits(decoders: Mapping[str, Any], readouts: Mapping[str, Readouts]) -> dict[str, EarlyExits]:
    """The exits of each decoder; raises BadConfig if readouts belong to another decoder."""
    exits = {name: EarlyExits(decoder, readouts.get(name)) for name, decoder in decoders.items()}
    wrong = sorted(n for n, r in readouts.items() if n not in exits or exits[n].decoder != r.decoder)
    if wrong:
        raise BadConfig(
            f"readouts for {', '.join(wrong)}: fitted for another decoder; fit them with `guardpaint train readouts`"
        )
    return exits


def load_readouts(folder: Path, decoders: Iterable[str], identities: Mapping[str, str]) -> dict[str, Readouts]:
    """The readouts that lie beside the decoders; raises BadCheckpoint if they are not those of the manifest."""
    found = {name: Readouts.load(folder / name) for name in decoders if (folder / name / CARD).exists()}
    wrong = sorted(n for n in {*found, *identities} if n not in found or found[n].identity != identities.get(n))
    if wrong:
        raise BadCheckpoint(
            f"{folder}: the readouts for {', '.join(wrong)} are not those that {MANIFEST} names; "
            "fit them again with `guardpaint train readouts --guard`"
        )
    return found
