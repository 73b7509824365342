"""Artefacts that somebody made to do harm, each opened in a process of its own; and no code anywhere that would execute one."""

import ast
from pathlib import Path

import pytest
from reliability.hostile import ARTEFACTS, try_artefact

ROOT = Path(__file__).parents[2]
LARGE = {
    "exported_archive",
    "gzip_text",
    "bzip_text",
    "gzip_table",
    "parquet_rows",
    "arrow_rows",
    "brackets",
}  # to be made


def test_there_are_at_least_twenty():
    assert len(ARTEFACTS) >= 20


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [make for make in ARTEFACTS if make.__name__ not in LARGE], ids=lambda make: make.__name__
)
def test_it_does_no_harm(make):
    assert try_artefact(make) == ""


def called(node):
    """The dotted name of what a call calls."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id if isinstance(node, ast.Name) else "?", *reversed(names)])


FORBIDDEN = {
    *(
        "pickle.load",
        "pickle.loads",
        "pickle.Unpickler",
        "cPickle.loads",
        "dill.load",
        "dill.loads",
        "joblib.load",
        "shelve.open",
    ),
    *(
        "marshal.load",
        "marshal.loads",
        "eval",
        "exec",
        "yaml.load",
        "yaml.unsafe_load",
        "os.system",
        "os.popen",
        "pty.spawn",
    ),
    *("pandas.read_pickle", "pd.read_pickle", "subprocess.getoutput", "subprocess.getstatusoutput"),
}


def wrong(call):
    """Why a call is not to be made, None if it may be."""
    name, given = called(call.func), {keyword.arg: keyword.value for keyword in call.keywords}
    constant = {key: value.value for key, value in given.items() if isinstance(value, ast.Constant)}
    if name in FORBIDDEN:
        return name
    if name == "torch.load" and constant.get("weights_only") is not True:
        return "torch.load without weights_only=True"
    if name.endswith((".load", "load")) and "allow_pickle" in given and constant.get("allow_pickle") is not False:
        return "allow_pickle"
    if "shell" in given and constant.get("shell") is not False:
        return "shell="
    return None


def sources():
    for folder in ("src", "benchmarks", "reproduce", "reliability", "docs"):
        yield from (ROOT / folder).rglob("*.py")


def test_nothing_loads_a_pickle_evaluates_text_or_asks_a_shell():
    found, seen = [], 0
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and (why := wrong(node)):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {why}")
            if isinstance(node, ast.ImportFrom) and node.module in (
                "pickle",
                "marshal",
                "dill",
                "joblib",
                "shelve",
                "yaml",
            ):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: from {node.module}")
        seen += 1
    assert seen > 150 and not found, found


@pytest.mark.parametrize(
    "text",
    [
        "pickle.loads(x)", "eval('1')", "exec(x)", "yaml.load(x)", "os.system('ls')", "torch.load(f)", "np.load(f, allow_pickle=True)",
        "torch.load(f, weights_only=False)", "subprocess.run('ls', shell=True)", "numpy.load(f, allow_pickle=given)",
    ],
)  # fmt: skip
def test_what_is_forbidden_is_seen(text):
    assert wrong(ast.parse(text).body[0].value)
    assert not any(
        wrong(ast.parse(good).body[0].value)
        for good in ("torch.load(f, weights_only=True)", "np.load(f)", "model.eval()")
    )
