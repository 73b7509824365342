"""`rankgrad evaluate --scores`: the numbers of another program, beside our runs."""

import json
import re

import pytest


@pytest.fixture
def scored(run, trained, data, tmp_path, monkeypatch):
    """Scores of the first run as a file, in a folder to work in."""
    monkeypatch.chdir(tmp_path)
    run("rank", trained / "first", data / "letor", "--out", "predictions.txt")
    run("rank", trained / "first", data / "letor", "--format", "trec", "--out", "first.run")
    return tmp_path


@pytest.mark.slow
def test_scores_of_a_run_through_a_file_are_the_run(run, trained, data, scored):
    own = json.loads(run("evaluate", trained / "first", data / "letor", "--json")[1])
    for file, name in (("predictions.txt", "lightgbm"), ("first.run", "first")):
        code, out, err = run("evaluate", "--scores", file, data / "letor", "--name", name, "--json")
        assert (code, err) == (0, "")
        found = json.loads(out)
        assert found["metrics"] == own["metrics"]
        assert (found["name"], found["folder"], found["trained_on"]) == (name, f"runs/{name}", False)
    compared = json.loads(run("compare", "runs/lightgbm", trained / "first", "--json")[1])
    assert (compared["difference"], compared["ties"]) == (0, compared["queries"])
    assert run("report", trained / "first", "runs/lightgbm")[0] == 0
    for command in ("evaluate", "rank"):
        code, out, err = run(command, "runs/lightgbm", data / "letor")
        assert (code, out) == (2, "") and "no model" in err


@pytest.mark.slow
def test_the_name_comes_from_the_file_and_tables_may_name_their_columns(run, data, scored):
    rows = (data / "one.csv").read_text().splitlines()
    (scored / "mine.csv").write_text("\n".join([rows[0].replace("qid", "query").replace("label", "grade"), *rows[1:]]))
    (scored / "xgb.txt").write_text("".join(f"{n % 7}\n" for n in range(len(rows) - 1)))
    code, out, err = run(
        "evaluate", "--scores", "xgb.txt", "mine.csv", "--set", "data.qid=query", "--set", "data.label=grade"
    )
    assert (code, err) == (0, "")
    assert out.endswith("kept as xgb in runs/xgb\n")
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (["--scores", "short.txt", "DATA"], "31 scores"),
        (["--scores", "absent.txt", "DATA"], "absent.txt does not exist"),
        (["--scores", "predictions.txt", "DATA", "--name", "../escape"], "'../escape' cannot name"),
        (["--scores", "predictions.txt", "DATA", "--name", "\x1b[31m"], r"'\x1b[31m' cannot name"),
        (["--scores", "predictions.txt", "DATA", "--name", ".."], "cannot name"),
        (["--scores", "predictions.txt", "RUN"], "is a run"),
        (["--scores", "predictions.txt", "RUN", "DATA"], "expected one of them"),
        (["--scores", "predictions.txt", "DATA", "--set", "train.epochs=3"], "key of [data]"),
        (["--scores", "predictions.txt", "DATA", "--split", "vali"], "32 documents"),
        (["--scores", "predictions.txt", "DATA", "--metric", "ndgc@10"], "ndgc"),
        (["RUN", "DATA", "--name", "x"], "expected --scores"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(run, trained, data, scored, arguments, fact):
    lines = (scored / "predictions.txt").read_text().splitlines()
    (scored / "short.txt").write_text("\n".join(lines[:-1]))
    if "vali" in arguments:
        (scored / "predictions.txt").write_text("\n".join(lines[:-3]))
    places = {"DATA": data / "letor", "RUN": trained / "first"}
    code, out, err = run("evaluate", *(places.get(argument, argument) for argument in arguments))
    assert (code, out) == (2, "")
    assert fact in err and err.count("\n") == 1 and "\x1b" not in err
    assert not (scored / "runs").exists()


@pytest.mark.slow
def test_documents_are_called_by_their_ids_in_every_file_and_on_the_page(run, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for split in ("train", "vali", "test"):
        lines = (data / "letor" / f"{split}.txt").read_text().splitlines()
        (tmp_path / "lists").mkdir(exist_ok=True)
        named = [f"{line} #docid = GX{at:03}-{split}" for at, line in enumerate(lines)]
        (tmp_path / "lists" / f"{split}.txt").write_text("\n".join(named) + "\n")
    for seed in (0, 1):
        arguments = ("--model", "mlp", "--epochs", 1, "--seed", seed, "--quiet", "--out", f"runs/{seed}")
        assert run("train", "lists", *arguments)[0] == 0
    for form, file in (("trec", "s.run"), ("csv", "s.csv")):
        assert run("rank", "runs/0", "lists", "--format", form, "--out", file)[0] == 0
        assert "GX003-test" in (tmp_path / file).read_text()
        assert run("evaluate", "--scores", file, "lists", "--name", form)[0] == 0
        assert json.loads(run("compare", f"runs/{form}", "runs/0", "--json")[1])["difference"] == 0
    assert run("report", "runs/0", "runs/1")[0] == 0
    assert re.search(r"GX<wbr>?0\d\d-|GX0\d\d-", (tmp_path / "report.html").read_text())
    found = json.loads(run("explain", "runs/0", "lists", "--repeats", 1, "--document", "GX003-test", "--json")[1])
    assert [one["document"] for one in found["examples"]] == ["GX003-test"] * 2
