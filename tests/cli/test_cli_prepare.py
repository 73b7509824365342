"""`rankgrad prepare`, and what importing the command costs."""

import json
import subprocess
import sys

import pytest

from rankgrad.data.dataset import RankingDataset


@pytest.fixture
def folder(tmp_path):
    for split, queries in (("train", (1, 2)), ("vali", (3,)), ("test", (4,))):
        (tmp_path / f"{split}.txt").write_text("".join(f"1 qid:{q} 1:0.5 2:{q}\n0 qid:{q} 1:1\n" for q in queries))
    return tmp_path


def test_prepare_writes_memory_mapped_data_and_prints_the_summary(run, folder):
    code, out, err = run("prepare", folder)
    assert (code, err) == (0, "")
    assert "not in the catalogue" in out
    assert (folder / "prepared" / "summary.txt").read_text() in out
    assert len(RankingDataset.open(folder / "prepared" / "train")) == 2


def test_prepare_prints_json_or_nothing(run, folder):
    code, out, _ = run("prepare", folder, "--json", "--out", folder / "elsewhere")
    assert code == 0
    assert json.loads(out)["splits"]["test"]["documents"] == 2
    assert run("prepare", folder, "--quiet", "--overwrite", "--out", folder / "elsewhere") == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["{}/absent"], ["absent does not exist"]),
        (["{}", "--dataset", "web3k"], ["no dataset 'web3k'"]),
        (["{}", "--fold", "9"], ["no fold 9", "1 to 5"]),
        (["{}", "--dataset", "mq2008", "--out", "{}/train.txt/x"], ["train.txt is a file"]),
        (["{}", "--out", "{}"], ["exists and is not empty"]),
    ],
)
def test_a_mistake_is_one_sentence_and_code_2(run, folder, arguments, facts):
    code, out, err = run("prepare", *(argument.format(folder) for argument in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("rankgrad: ") and err.count("\n") == 1
    assert [fact for fact in facts if fact not in err] == []


def test_the_command_line_starts_without_torch_numba_or_the_readers():
    code = "import sys, rankgrad.cli; print(sorted({'torch', 'numba', 'numpy', 'pyarrow', 'rankgrad.data'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_python_m_rankgrad_is_the_command_and_prepare_a_subcommand():
    result = subprocess.run([sys.executable, "-m", "rankgrad", "--help"], capture_output=True, text=True, check=True)
    assert "prepare" in result.stdout


def test_prepare_takes_tables_and_what_their_columns_are_called(run, tmp_path):
    lines = ["query,label,url,a", *(f"{n // 3},{n % 2},u{n},{n / 7}" for n in range(30))]
    (tmp_path / "mine.csv").write_text("\n".join(lines) + "\n")
    named = "--set", "data.qid=query", "--set", "data.document=url"
    code, out, _ = run("prepare", tmp_path / "mine.csv", "--out", tmp_path / "out", *named)
    assert code == 0 and "train" in out and "queries        8" in out
    assert (tmp_path / "out" / "train" / "document_ids.npy").is_file()
    code, _, err = run("prepare", tmp_path / "mine.csv", "--out", tmp_path / "again")
    assert code == 2 and "no column 'qid'" in err and not (tmp_path / "again").exists()
    code, _, err = run("prepare", tmp_path / "mine.csv", "--set", "train.epochs=3")
    assert code == 2 and "data.KEY=VALUE" in err
