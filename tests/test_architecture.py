"""What importing the package costs, and that its public names exist."""

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
