"""Where the embedded models are.

In a checkout `assets/` holds every weight once and links to it wherever it is shared. A wheel cannot hold links: it
carries each file once and a list of the links (`links.json`), and the folders are assembled in the user's cache.
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
    """The user's cache for assembled models; GUARDPAINT_CACHE overrides it."""
    own = os.environ.get("GUARDPAINT_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "guardpaint"


def assembled(packaged: Path = PACKAGED) -> Path:
    """The assets with all their links: the folder itself, or a folder of links in the cache."""
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
    for link, aim in json.loads(text).items():
        path = work / link
        path.parent.mkdir(parents=True, exist_ok=True)
        aimed = os.path.normpath(path.parent / aim)
        path.symlink_to(aim, target_is_directory=Path(aimed).is_dir())
    try:
        work.rename(target)
    except OSError:  # another process was faster
        shutil.rmtree(work, ignore_errors=True)
    return target


def place(file: Path, at: Path) -> None:
    """A link to an installed file, or a copy where links cannot be made."""
    at.parent.mkdir(parents=True, exist_ok=True)
    try:
        at.symlink_to(file)
    except OSError:
        shutil.copy(file, at)


ASSETS = assembled()
