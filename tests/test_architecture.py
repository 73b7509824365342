"""Who may import whom: data flows down, imports point up."""

import ast
import subprocess
import sys
from pathlib import Path

import rankgrad

PACKAGE = Path(rankgrad.__file__).parent

# module (or folder) -> the modules of ours it may import; a folder's files may import each other
FLOORS = {
    "data": set(),
    "arguments": set(),
    "dcg": set(),
    "relaxation": set(),
    "masked": {"arguments"},
    "sorting": {"arguments", "masked", "relaxation"},
    "losses": {"arguments", "masked", "dcg", "sorting"},
    "metrics": {"arguments", "masked", "dcg"},
    "cli": {"data", "losses", "metrics"},
    "__main__": {"cli"},
    "__init__": set(),
}


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [node.module] if node.module != "rankgrad" else [f"rankgrad.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (name.split(".")[1] for name in names if name.startswith("rankgrad."))


def test_every_module_keeps_to_its_floor():
    for path in PACKAGE.rglob("*.py"):
        home = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        allowed = FLOORS[home] | {home} | ({"__version__"} if home == "cli" else set())
        assert set(imports_of(path)) <= allowed, f"{path.name} imports {set(imports_of(path)) - allowed}"


def test_importing_rankgrad_does_not_import_torch():
    code = "import sys, rankgrad; dir(rankgrad); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_public_name_exists():
    for name in rankgrad.__all__:
        assert getattr(rankgrad, name) is not None
        assert name in dir(rankgrad)
