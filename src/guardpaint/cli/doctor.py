"""`guardpaint doctor`: lists what is installed and runs a self-test."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import warnings
from typing import Annotated, Any

import typer

from guardpaint.cli.common import JsonOption, TokenOption, dump, given, out
from guardpaint.cli.presets import readiness

PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "safetensors", "tokenizers", "peft", "paperdolls")


def doctor(
    guard: Annotated[
        str | None,
        typer.Option(help="Guard whose weak settings are listed, or preset:NAME. Default: embedded."),
    ] = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check what is installed, list the settings of a guard that open a door, and self-test the fail-closed paths."""
    import torch

    from guardpaint.bases import named_bases
    from guardpaint.store import plugins

    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        found = importlib.util.find_spec(name) is not None
        versions[name] = importlib.metadata.version(name) if found else None
    checks = self_test()
    result = {
        "versions": versions,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "bases": list(named_bases()),
        "testbeds": list(plugins.registered(plugins.TESTBEDS)),
        "guards": list(plugins.registered(plugins.GUARDS)),
        "preset": readiness(guard) if guard is not None and guard.startswith("preset:") else [],
        "weak_settings": weak_of(guard, given(token)),
        "self_test": checks,
        "ok": all(c["ok"] for c in checks),
    }
    if as_json:
        dump(result)
    else:
        print_result(result)
    raise typer.Exit(0 if result["ok"] else 1)


def weak_of(guard: str | None, token: str | None = None) -> list[dict[str, str]]:
    """The weak settings of a guard folder, read without its weights; none if there is no guard to look at."""
    from guardpaint.config import GuardConfig
    from guardpaint.errors import MissingPackage
    from guardpaint.parts.folder import read_settings
    from guardpaint.parts.presets import DOLLS, EMBEDDED, PRESET, policy_of, preset
    from guardpaint.store import plugins
    from guardpaint.store.folders import Access, resolve
    from guardpaint.verify.weak import weak_settings

    chosen = preset(guard) if guard is not None and guard.startswith(PRESET) else None
    if chosen is not None and chosen.name not in EMBEDDED:
        return [w.to_dict() for w in weak_settings(policy_of(chosen), GuardConfig.from_dict(chosen.config))]
    try:
        embedded = EMBEDDED[DOLLS if chosen is None else chosen.name]
        named = guard if chosen is None else None
        folder = named or plugins.load(plugins.GUARDS, embedded, "the embedded guard")()
    except MissingPackage:
        return []
    _, policy, config = read_settings(resolve(folder, access=Access(token=token)))
    return [w.to_dict() for w in weak_settings(policy, config)]


def print_result(result: dict[str, Any]) -> None:
    from rich.table import Table

    from guardpaint.store.plugins import HOW_TO_INSTALL

    table = Table("what", "found")
    for name, version in result["versions"].items():
        missing = f"not installed: {HOW_TO_INSTALL}" if name == "paperdolls" else "MISSING"
        table.add_row(name, version or missing)
    table.add_row("device", str(result["device"]))
    for what in ("bases", "testbeds", "guards"):
        table.add_row(f"{what} by name", ", ".join(result[what]) or "none")
    out.print(table)
    for row in result["preset"]:
        out.print(f"{row['what']}: {'there' if row['there'] else row['how']}", highlight=False, soft_wrap=True)
    for w in result["weak_settings"]:
        out.print(f"WEAK {w['name']} is {w['value']}: {w['why']}", style="yellow", highlight=False, soft_wrap=True)
    for c in result["self_test"]:
        mark, style = ("ok  ", None) if c["ok"] else ("FAIL", "red")
        out.print(f"{mark} {c['check']}", style=style, highlight=False)


def self_test() -> list[dict[str, Any]]:
    """Check on small pipelines that safe images stay untouched, and that unsafe ones and errors are blocked.

    Warnings about the doubles that it uses say nothing about the user's guard.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return checks()


def checks() -> list[dict[str, Any]]:
    import torch

    from guardpaint.guard import GuardPaint
    from guardpaint.testing import small
    from guardpaint.testing.doubles import AlwaysSafe, AlwaysUnsafe, PaintsFlat, Raises

    def run(target: Any) -> Any:
        g = torch.Generator().manual_seed(0)
        return target("a cat", num_inference_steps=3, height=64, width=64, output_type="pt", generator=g)

    checks = []
    for family in small.BASES:
        pipe = small.pipeline(family)
        plain = run(pipe).images
        safe = run(GuardPaint(AlwaysSafe(), PaintsFlat()).attach(pipe))
        unsafe = run(GuardPaint(AlwaysUnsafe(), PaintsFlat()).attach(pipe))
        broken = run(GuardPaint(Raises(), PaintsFlat()).attach(pipe))
        blocked = [r.safety[0].status == "blocked" and not r.images.any() for r in (unsafe, broken)]
        checks += [
            {"check": f"{family}: an untriggered image is bit-identical", "ok": torch.equal(plain, safe.images)},
            {"check": f"{family}: a known-bad image is caught and blocked", "ok": bool(blocked[0])},
            {"check": f"{family}: a broken auditor blocks", "ok": bool(blocked[1])},
        ]
    return checks
