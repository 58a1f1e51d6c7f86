"""The folder of the embedded models.

In a checkout `assets/` holds every weight once, with links to it wherever it is shared. A wheel cannot hold links. It
carries each file once and a list of the links (`links.json`); the folders are assembled from it in the user's cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

PACKAGED = Path(__file__).parent / "assets"
LINKS = "links.json"


def cache_folder() -> Path:
    """The folder for assembled models: GUARDPAINT_CACHE if it is set, otherwise `guardpaint` in the user's cache."""
    own = os.environ.get("GUARDPAINT_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "guardpaint"


def assembled(packaged: Path = PACKAGED) -> Path:
    """The folder with all assets and their links: `packaged` itself in a checkout, for a wheel one in the cache."""
    if not (packaged / LINKS).exists():
        return packaged
    text = (packaged / LINKS).read_text(encoding="utf-8")
    key = hashlib.sha256(f"{packaged.resolve()}\n{text}".encode()).hexdigest()[:16]
    target = cache_folder() / f"paperdolls-{key}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=target.parent, prefix="assembling-"))
    for file in sorted(p for p in packaged.rglob("*") if p.is_file() and p.name != LINKS):
        place(file.resolve(), work / file.relative_to(packaged))
    for link, destination in json.loads(text).items():
        path = work / link
        path.parent.mkdir(parents=True, exist_ok=True)
        absolute = os.path.normpath(path.parent / destination)
        path.symlink_to(destination, target_is_directory=Path(absolute).is_dir())
    try:
        work.rename(target)
    except OSError:  # another process was faster
        shutil.rmtree(work, ignore_errors=True)
    return target


def place(file: Path, at: Path) -> None:
    """Link to an installed file, or copy it where links cannot be made."""
    at.parent.mkdir(parents=True, exist_ok=True)
    try:
        at.symlink_to(file)
    except OSError:
        shutil.copy(file, at)


ASSETS = assembled()
