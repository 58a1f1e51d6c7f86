"""Puts a guard on the hub: its folder as `save_pretrained` writes it, with a model card."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import yaml

from guardpaint.errors import BadConfig, GuardPaintError
from guardpaint.store.checkpoint import write_atomic
from guardpaint.store.manifest import Manifest, read_manifest
from guardpaint.verify.weak import weak_settings

if TYPE_CHECKING:
    from guardpaint.guard import GuardPaint

TAGS = ("guardpaint", "safety", "text-to-image", "diffusers", "content-moderation")


@runtime_checkable
class Hub(Protocol):
    """What is used of `huggingface_hub.HfApi`."""

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> Any: ...

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str, revision: str | None) -> Any: ...


def push(
    guard: GuardPaint,
    repo: str,
    about: Mapping[str, Any],
    hub: Hub,
    *,
    private: bool,
    revision: str | None,
) -> str:
    """Save a guard into a temporary folder, write its card, and upload both; returns the name to load it by.

    `about` has `license` and, if they are known, `metrics`: a number by name.
    """
    if not about.get("license"):
        raise BadConfig("license: name the licence of the weights, such as apache-2.0; it is written into the card")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "guard"
        guard.save_pretrained(folder)
        text = card(guard, read_manifest(folder), repo, about)
        write_atomic(folder / "README.md", text.encode())
        try:
            hub.create_repo(repo, private=private, exist_ok=True)
            hub.upload_folder(
                repo_id=repo, folder_path=str(folder), commit_message=f"GuardPaint guard {repo}", revision=revision
            )
        except Exception as error:
            raise GuardPaintError(f"{repo}: not uploaded ({type(error).__name__}: {error})") from error
    return f"hub:{repo}" + (f"@{revision}" if revision else "")


def card(guard: GuardPaint, manifest: Manifest, repo: str, about: Mapping[str, Any]) -> str:
    """The model card: front matter, the policy, the parts, and what is weak about the guard."""
    metrics = dict(about.get("metrics", {}))
    front = {
        "license": about["license"],
        "library_name": "guardpaint",
        "tags": list(TAGS),
        "policy": {"name": guard.policy.name, "categories": list(guard.policy.names), "sha256": guard.policy.digest()},
        **({"metrics": [{"name": name, "value": value} for name, value in metrics.items()]} if metrics else {}),
    }
    harms = "\n".join(
        f"| {c.name} | {c.definition or '–'} | {'; '.join(c.exemptions) or '–'} |" for c in guard.policy.categories[1:]
    )
    parts = "\n".join(
        f"| {role} | {entry.kind} | {entry.source or '–'} | {(entry.sha256 or '–')[:12]} |"
        for role, entry in manifest.parts.items()
    )
    weak = "\n".join(f"- {w}" for w in weak_settings(guard.policy, guard.config)) or "None."
    uncovered = ", ".join(guard.parts.uncovered)
    return f"""---
{yaml.safe_dump(front, sort_keys=False, allow_unicode=True).strip()}
---

# {repo}

A GuardPaint guard: it audits a picture while it is being made, repairs unsafe regions, and blocks what is left.

```python
from guardpaint import GuardPaint

guard = GuardPaint.from_pretrained("hub:{repo}")
pipe = guard.attach(pipe)
```

## What the policy `{guard.policy.name}` covers

| category | definition | exempt |
|---|---|---|
{harms}

{f"No part of this guard can tell: {uncovered}." if uncovered else "Every category is covered by a part."}

## Parts

| role | kind | source | sha256 |
|---|---|---|---|
{parts}

## Weak settings

{weak}
"""
