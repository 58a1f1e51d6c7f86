"""`guardpaint presets` lists the guards of public parts, and what each downloads, covers and was run of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from guardpaint.cli.common import JsonOption, TokenOption, dump, given, out


def presets(
    save: Annotated[
        tuple[str, Path] | None,
        typer.Option(help="Write the guard of preset NAME into folder DIR, which can then be calibrated."),
    ] = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the presets: guards of public parts that need no training. Use one as --guard preset:NAME.

    "verified" says what was run of it: the real weights, models of the same classes with random weights, or nothing.
    """
    from guardpaint.parts.presets import PRESETS

    if save is not None:
        save_preset(*save, token)
        return
    rows = [described(p) for p in PRESETS.values()]
    if as_json:
        dump(rows)
        return
    for row in rows:
        out.print(f"preset:{row['name']}  {row['about']}", style="bold", highlight=False, soft_wrap=True)
        for category, part in row["covers"].items():
            out.print(f"  {category}: {part}", highlight=False, soft_wrap=True)
        for model in row["models"]:
            size = f"about {model['about_mb']} MB, {model['licence']}"
            name = f"{model['repo']}@{model['revision']}"
            out.print(f"  {model['for']}: {name} ({size})", highlight=False, soft_wrap=True)
        out.print(f"  verified: {row['verified']}", highlight=False)
        for line in (row["note"], *(f"missing: {how}" for how in row["missing"])):
            if line:
                out.print(f"  {line}", style="yellow", highlight=False, soft_wrap=True)


def save_preset(name: str, folder: Path, token: str | None) -> None:
    """Write a preset's guard into a folder. A guard that is there already may be calibrated, so it is not replaced."""
    from guardpaint.errors import BadInput
    from guardpaint.guard import GuardPaint
    from guardpaint.store.manifest import MANIFEST

    if (folder / MANIFEST).exists():
        raise BadInput(f"{folder}: holds a guard already; name another folder, or remove that guard first")
    guard = GuardPaint.from_preset(name, token=given(token))
    guard.save_pretrained(folder)
    typer.echo(f"{folder}: {', '.join(guard.chosen_parts())}; policy {guard.policy.name}")


def described(preset: Any) -> dict[str, Any]:
    """A preset as plain data."""
    return {
        "name": preset.name,
        "about": preset.about,
        "covers": dict(preset.covers),
        "verified": preset.verified,
        "models": [{"for": use, **vars(model)} for use, model in preset.downloads().items()],
        "missing": list(dict.fromkeys(preset.missing())),
        "policy": preset.policy or "default",
        "note": preset.note,
    }


MARKS = ("config.json", "model_index.json", "pytorch_lora_weights.safetensors")
"""A file that shows that a model is in the cache: of a model, a pipeline, an adapter."""


def readiness(name: str) -> list[dict[str, Any]]:
    """What `doctor` says of a preset: each package and model that it needs, and whether it is there."""
    from huggingface_hub import try_to_load_from_cache

    from guardpaint.parts.presets import EMBEDDED, preset
    from guardpaint.store.folders import absent_files

    chosen = preset(name)
    rows: list[dict[str, Any]] = [
        {"what": f"package {module}", "there": how not in chosen.missing(), "how": how}
        for module, how in chosen.packages.items()
    ]
    for use, model in chosen.downloads().items():
        files = (try_to_load_from_cache(model.repo, file, revision=model.revision) for file in MARKS)
        found = next((f for f in files if f), None)
        absent = absent_files(Path(found).parent) if isinstance(found, str) else []
        how = f"would be downloaded: about {model.about_mb} MB, {model.licence}"
        if absent:
            how = f"half downloaded, {', '.join(absent[:3])} not there: fetch it again; {how}"
        there = isinstance(found, str) and not absent
        rows.append({"what": f"{use}: {model.repo}@{model.revision}", "there": there, "how": how})
    if chosen.build is None and chosen.name not in EMBEDDED:
        rows.append({"what": "parts", "there": False, "how": chosen.note})
    return rows
