"""The reference is built from the docstrings without a warning, and has everything public and every configuration key."""

import dataclasses
import html
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rankgrad
from rankgrad.training.config import Config

FUNCTIONS = {**rankgrad.LOSSES, **rankgrad.METRICS}
FUNCTIONS |= {name: getattr(rankgrad, name) for name in ("neural_sort", "soft_sort", "ot_sort", "sinkhorn")}
FUNCTIONS |= {
    name: getattr(rankgrad, name)
    for name in ("pad_lists", "unpad_lists", "load", "read_svmlight", "read_table", "feature_importances")
}
DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.slow
def test_the_reference_is_whole_and_builds_without_warnings(tmp_path):
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-d",
        tmp_path / "cache",
        DOCS,
        tmp_path / "out",
    ]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = {page.stem: html.unescape(page.read_text()) for page in (tmp_path / "out" / "api").glob("*.html")}
    described = {name.split(".")[-1] for page in pages.values() for name in re.findall(r'id="(rankgrad[\w.]+)"', page)}
    assert {*rankgrad.__all__} - {"LOSSES", "LOSS_TABLE", "METRICS"} <= described
    keys = set(re.findall(r">([a-z_]+\.[a-z_.]+)<", pages["configuration"]))
    for section in dataclasses.fields(Config):
        for key in dataclasses.fields(section.default_factory):
            assert any(found.startswith(f"{section.name}.{key.name}") for found in keys), key.name
    without_meaning = re.findall(
        r"<span[^>]*>([a-z_.]+)</span></code></p></td>(?:\s*<td>.*?</td>){2}\s*<td></td>", pages["configuration"]
    )
    assert not without_meaning


@pytest.mark.parametrize("name", FUNCTIONS)
def test_help_explains_every_parameter_once_in_the_order_of_the_signature(name):
    explained = re.findall(r"^- ((?:`\w+`(?:, )?)+):", inspect.getdoc(FUNCTIONS[name]), re.M)
    assert re.findall(r"\w+", " ".join(explained)) == [*inspect.signature(FUNCTIONS[name]).parameters]


@pytest.mark.parametrize("name", rankgrad.LOSSES)
def test_help_says_what_a_value_of_a_loss_is_made_of(name):
    assert re.search(r"^Size: .*(pairs|documents|per list)", inspect.getdoc(rankgrad.LOSSES[name]), re.M)
