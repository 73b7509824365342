"""What importing the package costs, and that its public names exist."""

import re
import subprocess
import sys
from pathlib import Path

import rankgrad

PACKAGE = Path(rankgrad.__file__).parent


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


def test_every_loss_can_be_imported_from_the_top():
    from rankgrad.losses import LOSSES

    assert {name: getattr(rankgrad, name, None) for name in LOSSES} == LOSSES


def test_no_page_of_the_documentation_imports_a_private_name():
    root = PACKAGE.parents[1]
    for page in [root / "README.md", *(root / "docs").glob("*.md")]:
        for module, names in re.findall(r"^>>> from (rankgrad[\w.]*) import (.*)$", page.read_text(), re.M):
            assert not re.search(r"\b_", f"{module} {names}".replace(".", " ")), f"{page.name}: {module} {names}"
