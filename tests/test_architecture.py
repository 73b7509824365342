"""Who may import whom: data flows down, imports point up."""

import ast
import subprocess
import sys
from pathlib import Path

import rankgrad

PACKAGE = Path(rankgrad.__file__).parent

# Rooms from the top of the house down: their modules in order (a module may import those before it), and the rooms above
# that they may use.
ROOMS = {
    "data": (["data"], []),
    "kernels": (["kernels"], []),
    "mathematics": (["arguments", "dcg", "relaxation", "noise", "masked", "sorting", "losses", "metrics"], ["kernels"]),
    "models": (["models"], ["kernels"]),
    "training": (
        [
            *["config", "recipes", "checkpoint", "processes", "numerics", "significance", "capture"],
            *[
                "paths",
                "update",
                "rehearsal",
                "evaluate",
                "queries",
                "records",
                "seeds",
                "train",
                "resolve",
                "splits",
                "run",
                "ensemble",
                "trees",
            ],
        ],
        ["data", "kernels", "mathematics", "models"],
    ),
    "front doors": (
        [
            *["bars", "launch", "results", "console", "machine", "demo", "inputs", "estimator", "report", "reproduce"],
            *["cli", "__main__"],
        ],
        ["data", "kernels", "mathematics", "models", "training"],
    ),
}


def imports_of(path):
    """Top-level modules of ours that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [node.module] if node.module != "rankgrad" else [f"rankgrad.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (name.split(".")[1] for name in names if name.startswith("rankgrad."))


def test_every_module_keeps_to_its_room():
    for path in PACKAGE.rglob("*.py"):
        home = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        used = set(imports_of(path)) - {home, "__version__"}
        if home == "__init__":
            assert not used
            continue
        (modules, rooms) = next(room for room in ROOMS.values() if home in room[0])
        above = {module for room in rooms for module in ROOMS[room][0]}
        allowed = above | set(modules[: modules.index(home)])
        assert used <= allowed, f"{path.name} imports {sorted(used - allowed)}"


def test_importing_rankgrad_does_not_import_torch():
    code = (
        "import sys, rankgrad, rankgrad.cli; dir(rankgrad); sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_public_name_exists_and_no_module_hides_it():
    modules = {path.stem for path in PACKAGE.iterdir()}
    for name in rankgrad.__all__:
        assert getattr(rankgrad, name) is not None
        assert name in dir(rankgrad)
        assert name not in modules, f"the module {name} would hide the function of that name"
