"""A wheel holds every weight once: files behind links are left out, and the links are listed in assets/links.json."""

import json
import os
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PACKAGE = "paperdolls"


def links(root: Path) -> dict[str, str]:
    """Every link below a folder with what it points to; links inside a linked folder are not its own."""
    found: dict[str, str] = {}
    for folder, names, files in os.walk(root):
        for name in (*names, *files):
            path = Path(folder) / name
            if path.is_symlink():
                found[path.relative_to(root).as_posix()] = os.readlink(path)
        names[:] = [n for n in names if not (Path(folder) / n).is_symlink()]
    return dict(sorted(found.items()))


class BuildOnce(build_py):
    """Leaves out what is reached through a link."""

    def find_data_files(self, package: str, src_dir: str) -> list[str]:
        root = Path(src_dir)
        kept = []
        for name in super().find_data_files(package, src_dir):
            inside = Path(name).relative_to(root)
            steps = [root.joinpath(*inside.parts[: k + 1]) for k in range(len(inside.parts))]
            if not any(p.is_symlink() for p in steps):
                kept.append(name)
        return kept

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            source = Path(self.get_package_dir(PACKAGE)) / "assets"
            target = Path(self.build_lib) / PACKAGE / "assets" / "links.json"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(json.dumps(links(source), indent=1) + "\n", encoding="utf-8")


setup(
    cmdclass={"build_py": BuildOnce},
    package_data={PACKAGE: ["assets/**/*", "labels/*.csv", "configs/*.yaml", "py.typed"]},
)
