"""The plan of the house: imports go one way, everything imports, `import guardpaint` is light."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import guardpaint

ROOT = Path(guardpaint.__file__).parent
MODULES = sorted(
    ".".join(("guardpaint", *p.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for p in ROOT.rglob("*.py")
)
LAYERS = [
    {"errors", "types", "seeds", "calibrated", "config", "policy", "checkpoint", "results", "bases", "spread"},
    {
        "draft",
        "audit",
        "repair",
        "verify",
        "reinsert",
        "report",
        "doubles",
        "images",
        "audit_log",
        "report_html",
    },
    {"guard", "release", "request"},
    {"doors", "system"},
    {"tiny", "comfy", "demo", "commands", "rollouts", "cli", "data", "train", "evaluate", "serve", "world"},
]
"""A module imports from its own layer or from those above it in this list, never from below."""


def layer(module: str) -> int:
    top = module.split(".")[1] if "." in module else "__init__"
    return next((i for i, names in enumerate(LAYERS) if top in names), len(LAYERS))


def imports(path: Path) -> set[str]:
    """guardpaint modules a file imports when it is itself imported (not inside functions or TYPE_CHECKING)."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("guardpaint"):
            found.add(node.module)
            found |= {f"{node.module}.{a.name}" for a in node.names if f"{node.module}.{a.name}" in MODULES}
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name.startswith("guardpaint")}
    return {m for m in found if m != "guardpaint"}


@pytest.mark.parametrize("module", MODULES)
def test_every_module_imports(module):
    importlib.import_module(module)


@pytest.mark.parametrize("module", [m for m in MODULES if m != "guardpaint"])
def test_imports_go_one_way(module):
    path = ROOT.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    upward = {m for m in imports(path) if layer(m) > layer(module)}
    assert not upward, f"{module} imports {upward}, which lies below it"


def test_every_module_has_a_layer():
    assert [m for m in MODULES if m != "guardpaint" and layer(m) == len(LAYERS)] == []


def test_import_is_light():
    """No torch, diffusers or transformers until something needs them."""
    code = (
        "import sys, guardpaint, guardpaint.cli; heavy = {'torch', 'diffusers', 'transformers', 'fastapi', 'peft'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_public_names_resolve():
    for name in guardpaint.__all__:
        assert getattr(guardpaint, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = guardpaint.Nonsense


def test_nothing_in_the_package_touches_the_global_rng():
    """Randomness comes from generators; what seeds torch (a model built by seed) does so inside fork_rng."""
    for path in ROOT.rglob("*.py"):
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            if "torch.manual_seed" in line:
                assert "fork_rng" in "".join(lines[max(0, number - 3) : number]), f"{path}:{number + 1}"
            assert "np.random." not in line.replace("np.random.default_rng(", ""), f"{path}:{number + 1}"
