"""The wheel, installed as a user installs it: its own environment, no checkout in sight."""

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

import rankgrad

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def call(*command, **options):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    call(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", out, ROOT)
    (file,) = out.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """A new environment with the wheel; torch and the like come from the one the tests run in, rankgrad does not."""
    folder = tmp_path_factory.mktemp("environment")
    call(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    call(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    packages = call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # A folder that a .pth file names comes last, and its own .pth files, the editable rankgrad among them, are not read.
    (Path(packages) / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


@pytest.mark.slow
def test_the_wheel_holds_all_that_is_not_python_and_no_tests(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*") if path.is_file()}
    kept = {name for name in sources if "__pycache__" not in name}
    assert {name for name in names if not name.startswith("rankgrad-")} == kept
    assert {"rankgrad/py.typed", "rankgrad/report/page.html.jinja"} <= kept
    assert sum(name.endswith(".cu") for name in kept) >= 4
    assert wheel.name == f"rankgrad-{rankgrad.__version__}-py3-none-any.whl"


@pytest.mark.slow
def test_the_installed_package_trains_ranks_and_reports(environment, tmp_path):
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")} | {"OMP_NUM_THREADS": "1"}
    command = environment / "rankgrad"
    where = call(environment / "python", "-c", "import rankgrad; print(rankgrad.__file__)", cwd=tmp_path, env=env)
    assert Path(where).is_relative_to(environment.parent)
    assert call(command, "--version", cwd=tmp_path, env=env) == f"rankgrad {rankgrad.__version__}\n"
    said = call(command, "synthetic", "--out", "data/", "--size", "tiny", cwd=tmp_path, env=env)
    assert f"{command} train data" in said
    # ListNet: numba compiles the reader of text here as at a user's, and does not take half a minute for the loops of a sort.
    train = "train data/ --model linear --loss listnet --epochs 1 --out run"
    call(command, *train.split(), cwd=tmp_path, env=env)
    call(command, "report", "run", "--out", "page.html", cwd=tmp_path, env=env)
    assert "<svg" in (tmp_path / "page.html").read_text()
    code = (
        "import rankgrad, torch\n"
        "print(rankgrad.load('run', 'cpu').score(torch.zeros(3, 136)).shape)\n"
        "from rankgrad.kernels.neural_ndcg.hopper import launch\n"
        "print(all('__global__' in launch_source.read_text() for launch_source in (launch.SORT[-1], launch.ROUNDS[-1])))\n"
    )
    assert call(environment / "python", "-c", code, cwd=tmp_path, env=env).split("\n")[:2] == ["(3,)", "True"]


def test_the_version_stands_in_one_place():
    assert PROJECT["dynamic"] == ["version"] and "version" not in PROJECT
    assert re.fullmatch(r"\d+\.\d+\.\d+", rankgrad.__version__)
    assert f"## {rankgrad.__version__} " in (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^version: {rankgrad.__version__}$", (ROOT / "CITATION.cff").read_text(), re.M)


def test_every_install_line_names_an_extra_that_exists():
    extras = PROJECT["optional-dependencies"]
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    named = {extra for page in pages for extra in re.findall(r"pip install '?rankgrad\[(\w+)\]", page.read_text())}
    assert named and named <= {*extras}
