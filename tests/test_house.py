"""The plan of the house: imports go one way, the product knows nothing of the toy world, `import guardpaint` is light."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import guardpaint

ROOT = Path(guardpaint.__file__).parent
REPOSITORY = ROOT.parents[1]
MODULES = sorted(
    ".".join(("guardpaint", *p.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for p in ROOT.rglob("*.py")
    if p.name != "__main__.py"
)
ORDER = (
    "errors",
    "types",
    "store",
    "policy",
    "config",
    "draft",
    "audit",
    "repair",
    "verify",
    "reinsert",
    "loop",
    "doors",
    "parts",
    "guard",
    "testing",
    "bases",
    "data",
    "testbed",
    "train",
    "evaluate",
    "serve",
    "recipe",
    "cli",
)
"""A module imports from its own room or from rooms before it, inside functions too; no two rooms share a place."""
INSIDE_OUT = {
    ("types", "draft"): "type names of the base model that a Draft carries",
    ("doors", "guard"): "the ComfyUI door is given a whole guard",
    ("parts", "guard"): "what is uploaded is a whole guard",
    ("audit", "parts"): "a part that is made of parts saves and opens them by their kinds",
}
"""The only imports that go the other way, and why; each is for type checking, or of one file."""


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else "guardpaint"


def imports(path: Path) -> set[str]:
    """Modules of both packages that a file imports anywhere, inside functions and TYPE_CHECKING too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            name = node.module or ""
            found.add(name)
            found |= {f"{name}.{a.name}" for a in node.names if f"{name}.{a.name}" in MODULES}
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
    return {m for m in found if m.split(".")[0] in ("guardpaint", "paperdolls")}


def path_of(module: str) -> Path:
    path = ROOT.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@pytest.mark.parametrize("module", MODULES)
def test_every_module_imports(module):
    importlib.import_module(module)


@pytest.mark.parametrize("module", [m for m in MODULES if m != "guardpaint"])
def test_imports_go_one_way(module):
    own = room(module)
    wrong = {
        other
        for other in imports(path_of(module))
        if other.startswith("guardpaint.")
        and ORDER.index(room(other)) > ORDER.index(own)
        and (own, room(other)) not in INSIDE_OUT
    }
    assert not wrong, f"{module} imports {sorted(wrong)}, which come after it in the plan"


def test_the_exceptions_are_still_needed():
    used = {(room(m), room(o)) for m in MODULES if m != "guardpaint" for o in imports(path_of(m)) if "." in o}
    assert set(INSIDE_OUT) <= used


def test_every_module_has_a_room():
    assert {room(m) for m in MODULES if m != "guardpaint"} == set(ORDER)


def test_there_are_no_cycles_between_modules():
    """Modules of one room may import each other, but not in a circle (type checking aside)."""
    graph = {m: {o for o in runtime_imports(path_of(m)) if o in MODULES and o != m} for m in MODULES}
    state: dict[str, int] = {}

    def visit(module: str, path: tuple[str, ...]) -> None:
        if state.get(module) == 2:
            return
        assert state.get(module) != 1, f"a circle: {' → '.join((*path, module))}"
        state[module] = 1
        for other in sorted(graph[module]):
            visit(other, (*path, module))
        state[module] = 2

    for module in MODULES:
        visit(module, ())


def runtime_imports(path: Path) -> set[str]:
    """What a file imports when it runs; a package that imports its own parts lazily does not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {id(n) for node in ast.walk(tree) if is_type_checking(node) for n in ast.walk(node)}
    found = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            parts = {f"{node.module}.{a.name}" for a in node.names} & set(MODULES)
            found |= parts or {node.module}
    return {m for m in found if m != "guardpaint"}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@pytest.mark.parametrize("module", MODULES)
def test_the_product_never_imports_the_toy_world(module):
    assert not {m for m in imports(path_of(module)) if m.startswith("paperdolls")}


def test_the_top_level_is_small():
    assert len(list(ROOT.glob("*.py"))) <= 8


def test_files_are_short():
    long = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in ROOT.rglob("*.py")}
    assert not {name: n for name, n in long.items() if n > 500}


def test_import_is_light():
    """No torch, diffusers or transformers until something needs them."""
    code = (
        "import sys, guardpaint, guardpaint.cli; heavy = {'torch', 'diffusers', 'transformers', 'fastapi', 'peft'}; "
        "guardpaint.cli.main.__globals__['add_plugins'](); "
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_public_names_resolve():
    for name in guardpaint.__all__:
        assert getattr(guardpaint, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = guardpaint.Nonsense


def test_nothing_touches_the_global_rng():
    """Randomness comes from generators; what seeds torch (a model built by seed) does so inside fork_rng."""
    for path in (*ROOT.rglob("*.py"), *(REPOSITORY / "packages").rglob("src/**/*.py")):
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines):
            if "torch.manual_seed" in line:
                assert "fork_rng" in "".join(lines[max(0, number - 3) : number]), f"{path}:{number + 1}"
            assert "np.random." not in line.replace("np.random.default_rng(", ""), f"{path}:{number + 1}"
