"""`rankgrad explain`: a table for a person, an object for a machine, a page, and one sentence for a mistake."""

import json
import re

import pytest


@pytest.mark.slow
def test_a_run_is_explained_to_people_machines_and_in_the_report(run, trained, data, tmp_path):
    code, out, err = run("explain", trained / "first", data / "letor", "--repeats", 2)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    rows = re.findall(r"^(feature \d) +(-?[\d.]+) +\[(-?[\d.]+), (-?[\d.]+)\] +(-?[\d.]+) +\[", out, re.M)
    assert {name for name, *_ in rows} == {"feature 1", "feature 2", "feature 3"}
    assert out.count("difference") == 2 and out.count("remainder") == 2
    code, told, err = run("explain", trained / "first", data / "letor", "--repeats", 2, "--json")
    found = json.loads(told)
    assert (code, err, found["runs"]) == (0, "", [str(trained / "first")])
    assert [one["features"][0] for one in found["features"]] == [name for name, *_ in rows]
    assert f"{found['features'][0]['within']['loss']:.4f}" == rows[0][1]
    kept = json.loads((trained / "first" / "explanation.json").read_text())
    seal = {"identity", "checksum"}  # of the file alone
    assert {key: value for key, value in found.items() if key != "runs"} == {k: kept[k] for k in kept.keys() - seal}
    assert run("report", trained / "first", "--out", tmp_path / "page.html")[0] == 0
    assert "What the ranking rests on" in (tmp_path / "page.html").read_text()
    assert run("explain", trained / "first", data / "letor", "--repeats", 1, "--quiet") == (0, "", "")
    (trained / "first" / "explanation.json").unlink()


@pytest.mark.slow
def test_names_cannot_steer_the_terminal(run, data, tmp_path):
    rows = (data / "one.csv").read_text().replace("label,qid,a,b,c", 'label,qid,"\x1b[31mred","b\tc",' + "x" * 300)
    (tmp_path / "lists.csv").write_text(rows)
    run("train", tmp_path / "lists.csv", "--model", "linear", "--epochs", 1, "--quiet", "--out", tmp_path / "run")
    code, out, err = run("explain", tmp_path / "run", tmp_path / "lists.csv", "--repeats", 1)
    assert (code, err) == (0, "")
    assert "\x1b" not in out and "\\x1b[31mred" in out and "\t" not in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (["RUN"], "RUN is missing"),
        (["RUN", "DATA", "--query", "99"], "no query '99'"),
        (["RUN", "DATA", "--repeats", "0"], "repeats must be"),
        (["RUN", "DATA", "--correlated", "2"], "1 at most"),
        (["RUN", "DATA", "--metric", "auc"], "auc"),
        (["DATA", "DATA"], "is not a run"),
        (["RUN", "FLAT"], "no query has a relevant document"),
    ],
)
def test_a_mistake_is_one_sentence(run, trained, data, arguments, fact):
    places = {"DATA": data / "letor", "RUN": trained / "first", "FLAT": data / "flat.txt"}
    code, out, err = run("explain", *(places.get(argument, argument) for argument in arguments))
    assert (code, out) == (2, "")
    assert fact in err and err.count("\n") == 1
    assert not (trained / "first" / "explanation.json").exists()
