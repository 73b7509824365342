"""`rankgrad evaluate`, `rank`, `compare` and `report`: what is done with finished runs."""

import json
import re
from itertools import pairwise

import numpy as np
import pytest
from cli_cases import csv, letor, lists

from rankgrad.data.dataset import RankingDataset
from rankgrad.runs.run import Run


def test_evaluate_gives_every_metric_under_every_rule_and_says_the_conventions(run, data, trained):
    code, out, err = run("evaluate", trained / "first", data / "letor")
    assert (code, err) == (0, "")
    report = json.loads((trained / "first" / "report.json").read_text())
    for metric, rules in report["metrics"]["test"].items():
        count_1 = re.search(
            rf"^{metric} +count 1  (\S+)  \[(\S+), (\S+)\]\n +count 0  (\S+) .*\n +left out  (\S+) ", out, re.M
        )
        assert [count_1[1], count_1[4], count_1[5]] == [f"{mean:.4f}" for mean in rules.values()]
        assert float(count_1[2]) <= float(count_1[1]) <= float(count_1[3])
    assert "8 queries, 1 of them empty (no relevant document)" in out
    assert "gain 2^y - 1" in out
    assert "trained on" not in out


def test_evaluate_speaks_json_and_takes_metrics_and_splits(run, data, trained):
    code, out, _ = run("evaluate", trained / "first", data / "letor", "--split", "vali", "--metric", "err@3", "--json")
    result = json.loads(out)
    assert code == 0
    assert list(result["metrics"]) == ["err@3"]
    values = Run.open(trained / "first").evaluate(RankingDataset.concatenate([_read(data, "vali")]), ("err@3",))[
        "err@3"
    ]
    assert result["metrics"]["err@3"]["skipped"]["mean"] == pytest.approx(np.nanmean(values))
    assert result["queries"] == 8
    assert not result["trained_on"]


def _read(data, split):
    from rankgrad.data import read_svmlight

    return read_svmlight(data / "letor" / f"{split}.txt")


def test_evaluate_owns_up_to_lists_the_model_has_seen(run, data, trained, tmp_path):
    assert "the model was trained on" in run("evaluate", trained / "first", data / "letor", "--split", "train")[1]
    file = data / "letor" / "train.txt"
    run("train", file, "--epochs", 1, "--model", "linear", "--quiet", "--out", tmp_path / "r")
    assert "the model was trained on" in run("evaluate", tmp_path / "r", file)[1]


def test_json_has_null_where_there_is_no_number(run, trained, tmp_path):
    (tmp_path / "empty.txt").write_text("0 qid:1 1:1 3:2\n0 qid:1 2:1\n")
    code, out, _ = run("evaluate", trained / "first", tmp_path / "empty.txt", "--json")
    rules = json.loads(out, parse_constant=pytest.fail)["metrics"]["ndcg@10"]
    assert code == 0
    assert rules["skipped"] == {"mean": None, "low": None, "high": None}
    assert rules["empty=1"]["mean"] == 1.0


def test_rank_keeps_the_order_of_the_rows_however_queries_are_mixed(run, data, trained, tmp_path):
    rows = list(lists(1, 3))
    mixed = [rows[i] for i in (0, 4, 8, 1, 5, 2, 9, 10, 3, 6, 7, 11)]
    for name, content in (("plain", rows), ("mixed", mixed)):
        (tmp_path / f"{name}.txt").write_text(letor(content))
    plain, scores = (
        [float(line) for line in run("rank", trained / "first", tmp_path / f"{name}.txt")[1].splitlines()]
        for name in ("plain", "mixed")
    )
    assert scores == [plain[rows.index(row)] for row in mixed]
    code, out, _ = run("rank", trained / "first", tmp_path / "mixed.txt", "--format", "trec")
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert [line[0] for line in lines] == ["1"] * 4 + ["2"] * 4 + ["3"] * 4
    assert [line[3] for line in lines] == ["1", "2", "3", "4"] * 3
    assert {(line[1], line[5]) for line in lines} == {("Q0", "first")}
    for query, _, document, _, score, _ in lines:
        assert mixed[int(document) - 1][1] == int(query)
        assert float(score) == scores[int(document) - 1]
    assert all(float(a[4]) >= float(b[4]) for a, b in pairwise(lines) if a[0] == b[0])


def test_tables_to_be_ranked_need_no_labels(run, data, trained, tmp_path):
    rows = list(lists(1, 3))
    (tmp_path / "known.csv").write_text(csv(rows))
    header, *known_lines = csv(rows).splitlines()
    new = "".join(f"{','.join(line.split(',')[1:])}\n" for line in csv(rows).splitlines())
    (tmp_path / "new.csv").write_text(new)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "test.csv").write_text(new)
    run("train", data / "one.csv", "--epochs", 1, "--model", "linear", "--quiet", "--out", tmp_path / "named")
    for folder in (trained / "first", tmp_path / "named"):
        known = run("rank", folder, tmp_path / "known.csv")
        assert known[0] == 0 and known[1].count("\n") == 12
        assert run("rank", folder, tmp_path / "new.csv") == run("rank", folder, tmp_path / "folder") == known
        assert "no column 'label'" in run("evaluate", folder, tmp_path / "new.csv")[2]
        for unknown in ("?", "", "-1", "none"):
            text = "\n".join([header, *(f"{unknown},{line.partition(',')[2]}" for line in known_lines)])
            (tmp_path / "unknown.csv").write_text(f"{text}\n")
            assert run("rank", folder, tmp_path / "unknown.csv") == known
        (tmp_path / "late.csv").write_text("\n".join([header, *known_lines, "?,9,1,2,3\n"]))
        assert run("rank", folder, tmp_path / "late.csv")[1].startswith(known[1])
    (tmp_path / "semicolons.csv").write_text(new.replace(",", ";"))
    err = run("rank", trained / "first", tmp_path / "semicolons.csv")[2]
    assert "no column 'qid'" in err and "separator" in err and "'qid;a;b;c'" in err


def test_rank_writes_a_file_and_replaces_one_only_when_told(run, data, trained, tmp_path):
    file = tmp_path / "scores.txt"
    base = "rank", trained / "first", data / "letor", "--out", file
    assert run(*base) == (0, "", "")
    assert file.read_text() == run("rank", trained / "first", data / "letor", "--out", "-")[1]
    before = file.read_text()
    assert run(*base, "--split", "vali")[0] == 2
    assert file.read_text() == before
    assert run(*base, "--split", "vali", "--overwrite") == (0, "", "")
    assert file.read_text() != before


def test_a_query_id_with_a_space_cannot_be_written_as_trec(run, trained, tmp_path):
    (tmp_path / "names.csv").write_text("label,qid,a,b,c\n1,red shoes,1,2,3\n0,red shoes,2,2,3\n")
    code, out, err = run("rank", trained / "first", tmp_path / "names.csv", "--format", "trec")
    assert (code, out) == (2, "")
    assert "'red shoes'" in err and "TREC" in err and "--format scores" in err


def test_several_runs_are_judged_and_rank_as_one(run, data, trained, tmp_path):
    from rankgrad.runs.averaging import mean_of_standardised
    from rankgrad.training.evaluate import measure

    both = trained / "first", trained / "second"
    test = _read(data, "test")
    together = mean_of_standardised([Run.open(folder).score(test) for folder in both], test.offsets).astype(np.float32)
    code, out, err = run("rank", *both, data / "letor")
    assert (code, err) == (0, "")
    assert [float(line) for line in out.splitlines()] == pytest.approx(together.tolist(), rel=1e-8)
    lines = run("rank", *both, data / "letor", "--format", "trec")[1].splitlines()
    assert {line.split()[5] for line in lines} == {"ensemble-of-2"}
    expected = measure(together, test, ["ndcg@10"])["ndcg@10"]
    result = json.loads(run("evaluate", *both, data / "letor", "--json")[1])
    assert result["metrics"]["ndcg@10"]["skipped"]["mean"] == pytest.approx(np.nanmean(expected))
    assert result["runs"] == [str(folder) for folder in both] and "run" not in result
    assert not result["trained_on"]
    code, out, _ = run("evaluate", *both, data / "letor", "--split", "train", "--metric", "map")
    assert "2 runs together: mean of scores standardised within each list\n" in out
    assert "the model was trained on" in out
    other = tmp_path / "other"  # trained on a file: one of the two has seen the folder
    run("train", data / "letor" / "train.txt", "--model", "linear", "--epochs", 1, "--quiet", "--out", other)
    out = run("evaluate", other, both[0], data / "letor", "--split", "train", "--json")[1]
    assert json.loads(out)["trained_on"]
    alone = run("evaluate", both[0], data / "letor", "--json")[1]
    assert json.loads(alone)["run"] == str(both[0])


def test_runs_that_cannot_rank_together_are_refused(run, data, trained, tmp_path):
    train = "train", "--model", "linear", "--epochs", 1, "--quiet", "--out"
    run(*train, tmp_path / "wide", data / "wide.txt")
    code, out, err = run("rank", trained / "first", tmp_path / "wide", data / "letor")
    assert (code, out) == (2, "")
    assert "different features (3 and 5 of them)" in err
    run(*train, tmp_path / "fold2", data / "letor", "--fold", 2)
    code, out, err = run("evaluate", trained / "first", tmp_path / "fold2", data / "letor")
    assert (code, out) == (2, "")
    assert "first is of fold 1" in err and "fold2 of fold 2" in err
    assert run("evaluate", trained / "first", tmp_path / "fold2", data / "letor" / "test.txt")[0] == 0


def test_compare_pairs_the_queries_and_leaves_out_empty_ones(run, trained):
    from rankgrad.runs.folder import read_per_query
    from rankgrad.runs.significance import compare

    code, out, err = run("compare", trained / "first", trained / "second")
    assert (code, err) == (0, "")
    assert "ndcg@10 on the test split, 7 queries (1 empty one left out)" in out
    a, b = (read_per_query(trained / name).metrics["map"] for name in ("first", "second"))
    expected = compare(a, b)
    found = json.loads(run("compare", trained / "first", trained / "second", "--metric", "MAP", "--json")[1])
    for key in ("mean_a", "difference", "low", "high", "p_value", "wins", "ties", "losses", "queries"):
        assert found[key] == getattr(expected, key)
    assert found["empty_queries"] == 1


def test_compare_refuses_runs_judged_on_other_queries(run, data, trained, tmp_path):
    run("train", data / "one.csv", "--epochs", 1, "--model", "linear", "--quiet", "--out", tmp_path / "r")
    code, out, err = run("compare", trained / "first", tmp_path / "r")
    assert (code, out) == (2, "")
    assert "8 test queries" in err and "5 vali queries" in err


def test_report_says_where_it_wrote_and_how_much(run, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run("report", trained / "first", trained / "second")
    assert (code, err) == (0, "")
    assert re.fullmatch(r"report.html, \d+ KB: open it in a browser\n", out)
    page = (tmp_path / "report.html").read_text()
    assert "<title>2 runs compared" in page
    assert run("report", trained / "first")[0] == 2
    assert (tmp_path / "report.html").read_text() == page
    assert run("report", trained / "first", "--overwrite")[0] == 0
    assert "<title>first " in (tmp_path / "report.html").read_text()


def test_report_tells_a_machine_what_evaluate_and_compare_would(run, trained, data, tmp_path):
    code, out, err = run("report", trained / "first", trained / "second", "--out", tmp_path / "r.html", "--json")
    told = json.loads(out)
    assert (code, err, told["report"]) == (0, "", str(tmp_path / "r.html"))
    assert told["bytes"] == (tmp_path / "r.html").stat().st_size
    judged = json.loads(run("evaluate", trained / "first", data / "letor", "--json")[1])
    assert told["runs"]["first"] == judged["metrics"]
    assert (told["queries"], told["interval"]) == (judged["queries"], judged["interval"])
    compared = json.loads(run("compare", trained / "second", trained / "first", "--json")[1])
    against = told["runs"]["second"]["ndcg@10"].pop("against")
    assert told["runs"]["second"]["ndcg@10"].keys() == judged["metrics"]["ndcg@10"].keys()
    assert against.pop("p_corrected") == compared["p_value"]  # the only one
    assert against.items() <= compared.items()


def test_rank_writes_the_ids_of_documents(run, trained, tmp_path):
    rows = list(lists(1, 3))
    names = [f"d{n % 5}" for n in range(len(rows))]
    lines = letor(rows).splitlines()
    (tmp_path / "named.txt").write_text("".join(f"{a} #docid = {b} inc = 1\n" for a, b in zip(lines, names)))
    (tmp_path / "plain.txt").write_text(letor(rows))
    plain = run("rank", trained / "first", tmp_path / "plain.txt", "--format", "trec")[1].splitlines()
    named = run("rank", trained / "first", tmp_path / "named.txt", "--format", "trec")[1].splitlines()
    for row, own in zip(plain, named, strict=True):
        document = row.split()[2]
        assert own.split() == [*row.split()[:2], names[int(document) - 1], *row.split()[3:]]
    out = run("rank", trained / "first", tmp_path / "named.txt", "--format", "csv")[1]
    table = [line.split(",") for line in out.splitlines()]
    assert table[0] == ["qid", "document", "rank", "score", "row"]
    expected = [[a.split()[0], b.split()[2], a.split()[3], a.split()[4], a.split()[2]] for a, b in zip(plain, named)]
    assert table[1:] == expected


def test_rank_writes_the_ids_of_a_column(run, data, tmp_path):
    header, *lines = csv(lists(1, 24)).splitlines()
    new = [f'{line},"doc {n}, ""é"""' for n, line in enumerate(lines)]
    for name, content in (("train", [f"{header},url", *new]), ("without", [header, *lines])):
        (tmp_path / f"{name}.csv").write_text("\n".join(content) + "\n")
    train = "train", tmp_path / "train.csv", "--epochs", 1, "--model", "linear", "--quiet"
    assert run(*train, "--set", "data.document=url", "--out", tmp_path / "known")[0] == 0
    assert run(*train, "--set", 'data.ignore=["u*"]', "--out", tmp_path / "unknown")[0] == 0
    ranked = run("rank", tmp_path / "known", tmp_path / "train.csv", "--format", "csv")
    assert ranked[0] == 0
    assert '"doc 0, ""é"""' in ranked[1]
    rank_unknown = "rank", tmp_path / "unknown", tmp_path / "train.csv", "--format", "csv"
    assert run(*rank_unknown, "--document", "url")[1] == ranked[1]  # the same model by the same columns
    assert run(*rank_unknown)[1] != ranked[1]
    assert run("rank", tmp_path / "known", tmp_path / "without.csv", "--format", "csv")[0] == 0
    code, _, err = run("rank", tmp_path / "known", tmp_path / "without.csv", "--document", "link")
    assert code == 2 and "'link'" in err and "without.csv" in err
    code, out, err = run("rank", tmp_path / "known", tmp_path / "train.csv", "--format", "trec")
    assert (code, out) == (2, "") and "doc 0" in err and "--format csv" in err
    assert run("evaluate", tmp_path / "known", tmp_path / "without.csv")[0] == 0


def test_what_rank_wrote_can_be_evaluated(run, trained, data, tmp_path):
    text = (data / "letor" / "test.txt").read_text().splitlines()
    (tmp_path / "named.txt").write_text("".join(f"{line} #docid = d{n}\n" for n, line in enumerate(text)))
    found = []
    for number, form in enumerate(("scores", "trec", "csv")):
        file = tmp_path / f"ranking-{number}.{'csv' if form == 'csv' else 'txt'}"
        assert run("rank", trained / "first", tmp_path / "named.txt", "--format", form, "--out", file)[0] == 0
        out = run("evaluate", "--scores", file, tmp_path / "named.txt", "--out", tmp_path / f"kept-{number}")
        assert out[0] == 0, out
        found.append(out[1].split("\nwritten")[0])
    assert found[0].splitlines()[:5] == found[1].splitlines()[:5] == found[2].splitlines()[:5]


@pytest.mark.filterwarnings("default")
def test_a_column_that_looks_like_an_id_is_warned_about(run, tmp_path):
    header, *lines = csv(lists(1, 24)).splitlines()
    content = "\n".join([f"{header},docid", *(f"{line},{n}" for n, line in enumerate(lines))])
    (tmp_path / "train.csv").write_text(content + "\n")
    train = "train", tmp_path / "train.csv", "--epochs", 1, "--model", "linear", "--quiet"
    code, _, err = run(*train, "--out", tmp_path / "with")
    assert code == 0 and "warning" in err and "'docid'" in err and "data.ignore" in err
    assert run(*train, "--set", 'data.ignore=["docid"]', "--out", tmp_path / "without") == (0, "", "")
