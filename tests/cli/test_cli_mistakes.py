"""A mistake is one sentence and code 2, whoever made it."""

import importlib
import re
import shutil
import subprocess
import sys

import pytest
from cli_cases import COMMAND, letor, lists

from cases import without_seal
from rankgrad.cli import main
from rankgrad.errors import InterruptedRunError, OtherProcessError

# a command line, and facts that its one sentence must hold: what is wrong, and the word that helps
MISTAKES = [
    ("trian", "'trian'"),
    ("train", "nothing to train on", "DATA", "--resume"),
    ("train absent", "absent does not exist", "synthetic"),
    ("train synthetic:huge", "'huge'", "tiny, small"),
    ("train {data}/letor --los listnet", "no such option", "--los"),
    ("train {data}/letor more", "extra argument"),
    ("train {data}/letor --epochs", "'--epochs' requires an argument"),
    ("train {data}/letor --epochs many", "'--epochs'", "integer"),
    ("train {data}/letor --epochs 0", "--epochs", "1 or above", "got 0"),
    ("train {data}/letor --loss nural_ndcg", "'nural_ndcg' is not a loss", "did you mean 'neural_ndcg'"),
    ("train {data}/letor --loss listnet@5", "listnet has no cut-off", "write listnet"),
    ("train {data}/letor --loss neural_ndcg@0", "'neural_ndcg@0'", "1 or above"),
    ("train {data}/letor --model forest", "model.kind", "'mlp'", "'forest'"),
    ("train {data}/letor --metric ndgc", "'ndgc' is not a metric", "ndcg"),
    ("train {data}/letor --lr -1", "optimiser.lr", "above 0", "-1"),
    ("train {data}/letor --device tpu", "'tpu' is not a device", "cpu"),
    ("train {data}/letor --precision int8", "train.precision", "'bf16'", "'int8'"),
    ("train {data}/letor --scaling log", "data.scaling", "'symlog'", "'log'"),
    ("train {data}/letor --recipe large", "no recipe 'large'", "paper, small, dasalc"),
    ("train {data}/typo.toml --recipe small", "--recipe small", "typo.toml", "leave one of them out"),
    ("train --resume {runs}/first --recipe small", "--resume", "first/config.toml", "no other setting"),
    ("train {data}/letor --set epochs=3", "--set epochs=3", "SECTION.KEY=VALUE"),
    ("train {data}/letor --set train.epoch=3", "'epoch' in [train]", "did you mean 'epochs'?"),
    ("train {data}/letor --set train.epochs=few", "train.epochs", "int", "'few'"),
    ("train {data}/letor --set train.compile=true", "'compile' in [train]"),
    ("train {data}/letor --loss neural_ndcg --set loss.options.tua=1", "neural_ndcg has no option 'tua'", "tau"),
    ("train {data}/letor --set a.b.c=1", "'a' at the top"),
    ("train {data}/letor --out {data}", "exists already", "--out", "--resume"),
    ("train {data}/letor --out {data}/typo.toml/r", "typo.toml/r: Not a directory"),
    ("train {data}/typo.toml", "typo.toml", "'epoch' in [train]", "did you mean 'epochs'?"),
    ("train {data}/latin.toml", "latin.toml is not text", "TOML"),
    ("train absent.toml", "absent.toml does not exist"),
    ("train {data}/broken.txt", "broken.txt:2:9", "'1:x'"),
    ("train {data}/clicks.txt", "label 2000 of query", "NDCG", "overflows", "map your labels"),
    ("train --resume absent", "absent is not a run", "config.toml"),
    ("train --resume {runs}/first", "first is finished"),
    ("train --resume {runs}/first --epochs 3", "first", "3 epochs", "more"),
    ("train --resume {runs}/first --epochs 9 --lr 0.1", "--resume", "first/config.toml", "--epochs"),
    ("train --resume {runs}/first --set train.epochs=9", "--resume", "first/config.toml", "no other setting"),
    ("train {runs}/first", "first is a run", "--resume"),
    ("export", "'RUN'", "rankgrad export --help"),
    ("export absent", "absent is not a run", "does not exist"),
    ("export {data}/letor", "letor is not a run", "rankgrad train"),
    ("export {data}/broken.txt", "broken.txt is cut short or damaged"),
    ("export {runs}/first --format pmml", "--format", "'onnx'", "'pmml'"),
    ("export {runs}/first --format solr --out {data}/flat.txt", "flat.txt exists already", "--overwrite"),
    ("export {runs}/first --format solr --out absent/x.json", "absent is not a folder"),
    ("export {runs}/first --format solr --out unwritten.json", "scaling 'auto'", "rankgrad distil"),
    ("export {runs}/first --data {data}/letor", "--data is for --format xgboost", "leave it out"),
    ("export {runs}/first --format xgboost --data absent --out unwritten.json", "absent does not exist"),
    ("distil {runs}/first", "RUN is missing before", "first"),
    ("distil {runs}/first {data}/letor --into forest", "'forest'", "mlp:64,32"),
    ("distil {runs}/first {data}/wide.txt --out unwritten", "5 features", "expected 3 features"),
    ("distil {runs}/first {data}/letor --epochs 0", "--epochs", "1 or above"),
    ("distil {runs}/first {data}/letor --out {runs}/second", "second exists already"),
    ("evaluate", "'DATA'", "rankgrad evaluate --help"),
    ("evaluate {runs}/first", "RUN is missing before", "first", "DATA"),
    ("rank {data}/letor", "RUN is missing before", "letor", "DATA"),
    ("evaluate {runs}/first {runs}/first {data}/letor", "first is given twice", "leave one out"),
    ("rank {runs}/first {runs}/second", "second is a run", "DATA"),
    ("rank {runs}/first {runs}/second {runs}/second", "second is a run", "DATA"),
    ("evaluate absent {data}/letor", "absent is not a run"),
    ("evaluate {data} {data}/letor", "is not a run", "model.safetensors", "`rankgrad train`"),
    ("evaluate {runs}/first {data}/clicks.txt --metric ndcg@5", "label 2000 of query 1", "ndcg@5", "such as map"),
    ("train {data}", "one.csv", "or call it train"),
    ("evaluate {runs}/first absent", "absent does not exist"),
    ("evaluate {runs}/first {data}/wide.txt", "wide.txt:1", "3 features"),
    ("evaluate {runs}/first {data}/letor --split dev", "no split 'dev'", "train, vali, test"),
    ("evaluate {runs}/first {data}/letor --metric auc", "'auc' is not a metric"),
    ("rank {runs}/first {data}/letor --format json", "no format 'json'", "scores, trec, csv"),
    ("rank {runs}/first {data}/letor --out {data}/one.csv", "one.csv exists already", "--overwrite"),
    ("rank {runs}/first {data}/letor --out absent/file", "absent is not a folder", "make it first"),
    ("prepare", "'FOLDER'"),
    ("report", "'RUN'"),
    ("report {data}", "is not a run", "report.json"),
    ("report {runs}/first {runs}/first", "first is given twice", "leave one out"),
    ("report {runs}/first --out {data}/one.csv", "one.csv exists already", "--overwrite"),
    ("report {runs}/first --out absent/file", "absent is not a folder", "make it first"),
    ("compare {runs}/first", "'RUN_B'"),
    ("compare {runs}/first {data}", "is not a run", "report.json"),
    ("compare {runs}/first {runs}/second --metric err@2", "'err@2'", "ndcg@5, ndcg@10", "--metric"),
]


@pytest.mark.parametrize(("line", "facts"), [(line, facts) for line, *facts in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_a_mistake_is_one_sentence_and_code_2(run, data, trained, tmp_path, monkeypatch, line, facts):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*(word.format(data=data, runs=trained) for word in line.split()))
    assert (code, out) == (2, ""), err
    assert err.startswith("rankgrad: ") and err.count("\n") == 1
    assert [fact for fact in facts if fact not in err] == []
    assert not list(tmp_path.glob("runs/*"))


def test_a_configuration_may_lie_beside_the_lists_it_is_for(run, data, trained, tmp_path, monkeypatch):
    shutil.copytree(data / "letor", tmp_path / "lists")
    (tmp_path / "lists" / "config.toml").write_text(
        '[data]\npath = "lists"\n[train]\nepochs = 1\n[model]\nkind = "linear"\n'
    )
    monkeypatch.chdir(tmp_path)
    assert run("train", "lists/config.toml", "--out", "first", "--quiet") == (0, "", "")
    assert run("train", "lists", "--out", "second", "--model", "linear", "--epochs", "1", "--quiet") == (0, "", "")
    code, scores, _ = run("rank", "first", "lists")
    assert code == 0 and scores == run("rank", "first", data / "letor")[1] != ""


@pytest.mark.parametrize("name", ["model.safetensors", "queries.safetensors"])
def test_a_damaged_file_of_a_run_is_named_and_it_is_said_what_to_do(run, data, trained, tmp_path, name):
    shutil.copytree(trained / "first", tmp_path / "torn")
    (tmp_path / "torn" / name).write_bytes(b"x")
    line = ("compare", tmp_path / "torn", trained / "first")
    code, _, err = run(*line) if name[0] == "q" else run("evaluate", tmp_path / "torn", data / "letor")
    assert code == 2 and re.search(
        rf"{name} is cut short or damaged.*put a copy of it back.*train the run again\n$", err
    )


def test_a_run_whose_configuration_is_torn_or_gone_is_said_to_be(run, data, trained, tmp_path):
    shutil.copytree(trained / "first", tmp_path / "torn")
    shutil.copy(data / "latin.toml", tmp_path / "torn" / "config.toml")
    code, out, err = run("evaluate", tmp_path / "torn", data / "letor")
    assert (code, out) == (2, "") and f"{tmp_path}/torn/config.toml is not text" in err and "TOML" in err
    (tmp_path / "torn" / "config.toml").unlink()
    assert "torn is not a run: it has no config.toml" in run("evaluate", tmp_path / "torn", data / "letor")[2]


def test_data_that_are_too_large_to_prepare_are_not_a_matter_of_batches(run, data, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr(importlib.import_module("rankgrad.data.prepare"), "prepare", fail)
    code, _, err = run("prepare", data / "letor", "--out", tmp_path / "prepared")
    assert code == 2 and "there is not enough memory; end other programs" in err


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (MemoryError(), 2, "rankgrad: there is not enough memory; lower --batch-size or --list-size"),
        (OSError(28, "No space left on device", "there"), 2, "rankgrad: there: No space left on device\n"),
        (KeyboardInterrupt(), 130, "rankgrad: interrupted\n"),
        (ImportError("reading tables needs pyarrow; pip install it"), 2, "rankgrad: reading tables needs pyarrow"),
        (ValueError("two\nlines"), 2, "rankgrad: two lines\n"),
        (RuntimeError("Symlink loop from 'x'"), 2, "rankgrad: Symlink loop from 'x'; expected a file or folder"),
        (InterruptedRunError("stopped; go on with: ..."), 130, "rankgrad: stopped; go on with: ...\n"),
    ],
)
def test_what_goes_wrong_below_is_one_sentence_too(run, trained, monkeypatch, error, code, sentence):
    def fail(*_):
        raise error

    monkeypatch.setattr("rankgrad.runs.compare.compare_runs", fail)
    found, out, err = run("compare", trained / "first", trained / "second")
    assert (found, out) == (code, "")
    assert err.startswith(sentence)


def test_of_several_processes_the_first_speaks_and_one_that_failed_says_which_it_is(run, trained, monkeypatch):
    failure = {}

    def fail(*_):
        raise failure["is"]

    monkeypatch.setattr("rankgrad.runs.compare.compare_runs", fail)
    line = "compare", trained / "first", trained / "second"
    monkeypatch.setenv("RANK", "1")
    for failure["is"], code, sentence in (
        (OtherProcessError(), 2, ""),
        (InterruptedRunError("stopped"), 130, "rankgrad (process 1): stopped\n"),  # the others raise OtherProcessError
        (KeyboardInterrupt(), 130, ""),
        (ValueError("no such file here"), 2, "rankgrad (process 1): no such file here\n"),
    ):
        assert run(*line) == (code, "", sentence)
    try:
        raise InterruptedRunError("another process ended") from RuntimeError("Connection closed by peer")
    except InterruptedRunError as error:
        failure["is"] = error
    assert run(*line) == (130, "", "rankgrad (process 1): another process ended\n")


def test_where_the_first_process_cannot_begin_the_others_leave_in_silence(monkeypatch):
    from rankgrad.training import distributed

    sent = []
    monkeypatch.setattr(distributed, "broadcast_bytes", lambda content: sent.append(content) or b"")
    with pytest.raises(ValueError, match="no"):
        distributed.from_first(lambda: (_ for _ in ()).throw(ValueError("no")), bytes, bytes)
    assert sent == [b""]
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    with pytest.raises(OtherProcessError):
        distributed.from_first(lambda: pytest.fail("only the first process makes the run"), bytes, bytes)


@pytest.mark.filterwarnings("default")
def test_a_key_that_is_gone_is_ignored_in_a_run_with_one_warning(run, data, trained, tmp_path):
    shutil.copytree(trained / "first", tmp_path / "old")
    config = tmp_path / "old" / "config.toml"
    config.write_text(without_seal(config).replace("[train]", '[train]\ncompile = "auto"'))
    code, out, err = run("rank", tmp_path / "old", data / "letor")
    assert (code, out) == (0, run("rank", trained / "first", data / "letor")[1])
    assert err.startswith(f"rankgrad: warning: {config}: train.compile") and err.count("\n") == 1
    code, out, err = run("train", config, "--out", tmp_path / "new")  # in a configuration to begin with it is a mistake
    assert (code, out) == (2, "") and "'compile' in [train]" in err


def test_a_defect_keeps_its_traceback(trained, monkeypatch):
    def fail(*_):
        raise RuntimeError("ours")

    monkeypatch.setattr("rankgrad.runs.compare.compare_runs", fail)
    monkeypatch.setattr(sys, "argv", ["rankgrad", "compare", str(trained / "first"), str(trained / "second")])
    with pytest.raises(RuntimeError, match="ours"):
        main()


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_error(trained, tmp_path):
    (tmp_path / "long.txt").write_text(letor(lists(1, 3_000)))
    command = [*COMMAND, "rank", str(trained / "first"), str(tmp_path / "long.txt"), "--format", "trec"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(60) == 1
    process.stderr.close()
