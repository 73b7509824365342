"""Artefacts that somebody made to do harm, each opened in a process of its own; and no code anywhere that would execute one."""

import ast
import json
import shutil
from pathlib import Path

import pytest
import torch
from reliability.damaged import estimator, run
from reliability.hostile import ARTEFACTS, try_artefact

from rankgrad import NeuralRanker
from rankgrad.files import load_tensors, save_tensors, sealed
from rankgrad.report.gather import read_entries
from rankgrad.runs.folder import read_start

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


FORGED = {  # checksums that are right, and facts and tensors that nobody writes
    "queries.safetensors": [
        lambda tensors, facts: facts.pop("split"),
        lambda tensors, facts: facts.update(query_ids=[1]),
        lambda tensors, facts: facts.update(query_ids=None),
        lambda tensors, facts: facts.update(metrics=["absent"]),
        lambda tensors, facts: facts.update(cutoffs=[None] * 23),
        lambda tensors, facts: tensors.update({"ndcg@10": torch.zeros(2, 2)}),
        lambda tensors, facts: tensors.update({"ndcg@10": torch.zeros(4, dtype=torch.bfloat16)}),
        lambda tensors, facts: tensors.update(documents=torch.tensor(1.0)),
        lambda tensors, facts: tensors.update(curve=torch.tensor(1.0)),
    ],
    "scores.safetensors": [
        lambda tensors, facts: tensors.pop("labels"),
        lambda tensors, facts: tensors.update(rows=torch.zeros(3)),
        lambda tensors, facts: tensors.update(texts=torch.zeros(2, dtype=torch.uint8)),
    ],
    "report.json": [
        lambda report: report.update(splits=None),
        lambda report: report.update(machine="x"),
        lambda report: report.update(versions=[]),
        lambda report: report.update(seconds=[]),
        lambda report: report.update(best_epoch={}),
    ],
    "ranker.safetensors": [
        lambda tensors, facts: facts.update(history=[]),
        lambda tensors, facts: facts.pop("best_epoch"),
        lambda tensors, facts: facts.update(feature_names=7),
        lambda tensors, facts: tensors.update({"scaling.low": torch.zeros(136, dtype=torch.bfloat16)}),
    ],
}


@pytest.mark.parametrize(("name", "change"), [(name, change) for name, changes in FORGED.items() for change in changes])
def test_forged_facts_are_refused_in_a_sentence(tmp_path, name, change):
    folder = Path(shutil.copytree(estimator() if name == "ranker.safetensors" else run(), tmp_path / "run"))
    file = folder / name
    if name == "report.json":
        report = json.loads(file.read_text())
        del report["checksum"]
        change(report)
        file.write_bytes(sealed(report))
    else:
        tensors, facts = load_tensors(file)
        change(tensors, facts)
        save_tensors(file, tensors, facts)
    readers = [NeuralRanker.load, read_start] if name == "ranker.safetensors" else [lambda _: read_entries([folder])]
    refused = []
    for read in readers:  # one that does not need what is wrong gives a result
        try:
            read(file)
        except ValueError as error:
            refused.append(str(error))
    assert refused and all(name in sentence for sentence in refused)


FORBIDDEN = """
    pickle.load pickle.loads pickle.Unpickler cPickle.loads _pickle.load _pickle.loads cloudpickle.load cloudpickle.loads
    dill.load dill.loads joblib.load shelve.open marshal.load marshal.loads pandas.read_pickle torch.jit.load torch.hub.load
    eval exec builtins.eval builtins.exec runpy.run_path runpy.run_module
    yaml.load yaml.load_all yaml.unsafe_load yaml.unsafe_load_all yaml.full_load yaml.full_load_all
    os.system os.popen pty.spawn subprocess.getoutput subprocess.getstatusoutput asyncio.create_subprocess_shell
""".split()
PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "yaml"}


def imported(tree):
    """What the names of a file stand for: {"p": "pickle"} after `import pickle as p`."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.asname: name.name for name in node.names if name.asname}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
    return found


def dotted(node, names):
    """The whole name of what an expression names, "?" in it where it is no name."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    first = names.get(node.id, node.id) if isinstance(node, ast.Name) else "?"
    return ".".join([first, *reversed(parts)])


def wrong(node, names):
    """Why an expression or import is not to be there, None if it may be."""
    if (
        isinstance(node, (ast.Name, ast.Attribute)) and dotted(node, names) in FORBIDDEN
    ):  # called here, or by another name
        return dotted(node, names)
    if isinstance(node, ast.ImportFrom) and node.module in PICKLES:
        return f"from {node.module}"
    if not isinstance(node, ast.Call):
        return None
    name, given = dotted(node.func, names), {keyword.arg: keyword.value for keyword in node.keywords}
    constant = {key: value.value for key, value in given.items() if isinstance(value, ast.Constant)}
    if name == "torch.load" and constant.get("weights_only") is not True:
        return "torch.load without weights_only=True"
    hidden = "allow_pickle" in given and constant.get("allow_pickle") is not False and not name.endswith(".save")
    if hidden or (name == "numpy.load" and len(node.args) > 2):  # the third is allow_pickle
        return "allow_pickle"
    if "shell" in given and constant.get("shell") is not False:
        return "shell="
    if name.rpartition(".")[2] in ("__import__", "import_module", "getattr") and node.args:
        first = node.args[0].value if isinstance(node.args[0], ast.Constant) else dotted(node.args[0], names)
        return f"{name} of {first}" if first in PICKLES else None
    return None


def found_in(text):
    """Line and reason of everything in a file that is forbidden."""
    tree = ast.parse(text)
    names = imported(tree)
    return [(node.lineno, why) for node in ast.walk(tree) if (why := wrong(node, names))]


def sources():
    for folder in ("src", "benchmarks", "reproduce", "reliability", "docs"):
        yield from (ROOT / folder).rglob("*.py")


def test_nothing_loads_a_pickle_evaluates_text_or_asks_a_shell():
    files = list(sources())
    found = [
        f"{path.relative_to(ROOT)}:{line}: {why}"
        for path in files
        for line, why in found_in(path.read_text(encoding="utf-8"))
    ]
    assert len(files) > 150 and not found, found


@pytest.mark.parametrize(
    "text",
    [
        "import pickle; pickle.loads(x)", "import pickle as p; p.load(f)", "from pickle import load; load(f)", "from pickle import *",
        "import pickle; load = pickle.load", "import pickle; getattr(pickle, name)(f)", "__import__('pickle').loads(x)",
        "import importlib; importlib.import_module('marshal')", "from joblib import load as read; read(f)", "import joblib; joblib.load(f)",
        "import marshal as m; m.loads(x)", "import shelve; shelve.open(f)", "import yaml; yaml.load(x)", "from yaml import load",
        "eval('1')", "exec(x)", "list(map(eval, texts))", "import builtins; builtins.exec(x)", "from builtins import eval as e; e(x)",
        "import os; os.system('ls')", "from os import system; system('ls')", "import os as o; o.popen('ls')",
        "import subprocess; subprocess.run('ls', shell=True)", "from subprocess import Popen as P; P('ls', shell=given)",
        "from subprocess import getoutput; getoutput('ls')",
        "import torch; torch.load(f)", "import torch; torch.load(f, weights_only=False)", "from torch import load; load(f)",
        "import torch as t; t.load(f, weights_only=given)",
        "import numpy as np; np.load(f, allow_pickle=True)", "import numpy; numpy.load(f, allow_pickle=given)",
        "from numpy import load; load(f, None, True)", "from numpy.lib import format; format.read_array(f, allow_pickle=True)",
        "import pandas as pd; pd.read_pickle(f)", "from pandas import read_pickle; read_pickle(f)",
    ],
)  # fmt: skip
def test_what_is_forbidden_is_seen(text):
    assert found_in(text)


@pytest.mark.parametrize(
    "text",
    [
        "import torch; torch.load(f, weights_only=True)", "import numpy as np; np.load(f)", "import numpy; numpy.load(f, 'r')",
        "model.eval()", "from safetensors.torch import load; load(x)", "import subprocess; subprocess.run(['ls'], shell=False)",
        "import re; re.compile(x)", "getattr(model, name)", "from rankgrad import load; load(path)",
    ],
)  # fmt: skip
def test_what_is_not_forbidden_is_let_through(text):
    assert not found_in(text)
