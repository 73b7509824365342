"""Table 1 and the figures of the paper: numbers from plain loops, files written whole and never over others."""

import json
import math
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch

from rankgrad.reproduce import paper


def neural_sort_loops(s, tau):
    """P[i][j] = softmax_j((r_i s_j - b_j) / tau), from the definition."""
    n = len(s)
    b = [sum(abs(x - z) for z in s) for x in s]
    rows = []
    for i in range(1, n + 1):
        logits = [((n + 1 - 2 * i) * s[j] - b[j]) / tau for j in range(n)]
        weights = [math.exp(x - max(logits)) for x in logits]
        rows.append([w / sum(weights) for w in weights])
    return rows


def test_table_1_is_the_definition_and_finds_the_misprints():
    found = paper.sort_labels()
    for row in found["rows"]:
        expected = [
            sum(p * y for p, y in zip(of_rank, paper.LABELS)) for of_rank in neural_sort_loops(paper.SCORES, row["tau"])
        ]
        assert row["entries"] == pytest.approx(expected, abs=1e-12)
        assert row["sum"] == pytest.approx(sum(expected), abs=1e-12)
    assert [round(row["sum"], 4) for row in found["rows"]] == [14.0, 13.9997, 13.7781]
    text = paper.describe_table1(found)
    assert "tau 0.01: 14.00004339 is the sum of rounded entries; unrounded 14.0000" in text
    assert "tau 0.1: 13.9998 is the sum of rounded entries; unrounded 13.9997" in text
    assert "tau 1: 10.388 is a misprint; the paper's own entries sum to 13.7781" in text
    assert '"N_k^-1 is the maxDCG": its inverse is meant' in text
    assert text.endswith("entries agree to the digits printed: yes")
    found["rows"][2]["entries"][0] += 1e-3
    assert paper.describe_table1(found).endswith("printed: no")


def relaxed_ndcg_loops(scores, labels, tau, rounds):
    P = neural_sort_loops(scores, tau)
    n = len(scores)
    for _ in range(rounds):
        sums = [sum(P[i][j] for i in range(n)) for j in range(n)]
        P = [[P[i][j] / sums[j] for j in range(n)] for i in range(n)]
        P = [[p / sum(row) for p in row] for row in P]
    gains = [2**y - 1 for y in labels]
    dcg = sum(sum(p * g for p, g in zip(P[i], gains)) / math.log2(i + 2) for i in range(n))
    return dcg / sum(g / math.log2(i + 2) for i, g in enumerate(sorted(gains, reverse=True)))


@pytest.mark.parametrize("place", [0, 200, 301, 333, 900])
def test_curves_are_the_definition(place):
    one, two = paper.figure1(), paper.figure2()
    x = one.x[place].item()
    assert x == pytest.approx(-2 + 0.01 * place)
    for rounds, values in zip((0, 30), one.relaxed.values(), strict=True):
        expected = relaxed_ndcg_loops([4, 1, 0, 0, x], [2, 1, 0, 0, 0], 1.0, rounds)
        assert values[place].item() == pytest.approx(expected, abs=1e-6)  # sinkhorn stops within 1e-6
    for tau, values in zip((0.01, 0.1, 1.0, 10.0), two.relaxed.values(), strict=True):
        expected = relaxed_ndcg_loops([1, 2, 3, 4, x], [1, 2, 3, 4, 5], tau, 30)
        assert values[place].item() == pytest.approx(expected, abs=1e-6)


def test_sinkhorn_takes_the_bump_away():
    found = paper.measure_figure(paper.figure1())
    assert [(jump["x"], round(jump["before"], 4), round(jump["after"], 4)) for jump in found["jumps"]] == [
        (1.0, 1.0, 0.9639), (4.0, 0.9639, 0.659),
    ]  # fmt: skip
    bare, scaled = found["relaxed"].values()
    assert (round(bare["bump"], 5), bare["bump_from"]) == (0.02846, pytest.approx(0.0, abs=1e-12))
    assert round(scaled["bump"], 5) == 0.00003
    assert scaled["mean_distance"] < bare["mean_distance"]


def test_cold_curves_come_close_to_ndcg_and_are_steep():
    found = paper.measure_figure(paper.figure2())
    assert [jump["x"] for jump in found["jumps"]] == [1.0, 2.0, 3.0, 4.0]
    rows = list(found["relaxed"].values())
    distances, slopes = ([row[key] for row in rows] for key in ("mean_distance", "steepest"))
    assert distances == sorted(distances) and distances[0] < 0.001
    assert slopes == sorted(slopes, reverse=True)


def test_the_wrong_way_is_the_largest_fall_of_a_rising_curve():
    size, start, end = paper._wrong_way(torch.tensor([0.0, 2.0, 1.5, 3.0, 1.0, 1.25, 4.0]))
    assert (size, start, end) == (2.0, 3, 4)
    assert paper._wrong_way(torch.tensor([0.0, 1.0, 1.0]))[0] == 0.0


@pytest.mark.parametrize("name", ["figure1", "figure2"])
def test_figures_are_drawn_the_same_again_and_replace_nothing_unasked(call, monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(name)
    assert (code, err) == (0, "")
    assert out.endswith(f"drawn to {name}.svg\n") and max(map(len, out.splitlines())) <= 80
    file = tmp_path / f"{name}.svg"
    first = file.read_bytes()
    assert len(first) < 60_000
    text = " ".join(element.text or "" for element in ElementTree.fromstring(first).iter())
    assert "NDCG" in text and "NeuralNDCG, " in text
    code, out, err = call(name)
    assert (code, out) == (2, "")
    assert f"{name}.svg exists already" in err and "--overwrite" in err and err.count("\n") == 1
    file.write_text("old")
    assert call(name, "--overwrite")[0] == 0
    assert file.read_bytes() == first
    for kind, start in (("png", b"\x89PNG"), ("pdf", b"%PDF")):
        code, out, _ = call(name, "--out", f"f.{kind}", "--json")
        assert code == 0 and json.loads(out)["figure"] == f"f.{kind}"
        assert (tmp_path / f"f.{kind}").read_bytes().startswith(start)


def test_what_cannot_be_drawn_is_one_sentence(call, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    err = call("figure1", "--out", "f.jpg")[2]
    assert "f.jpg" in err and ".svg, .pdf, .png" in err
    assert "absent is not a folder" in call("figure1", "--out", "absent/f.svg")[2]
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = call("figure1")
    assert (code, out) == (2, "")
    assert "matplotlib" in err and "pip install 'rankgrad[report]'" in err
    assert not list(tmp_path.iterdir())


def test_table1_speaks_json(call):
    code, out, _ = call("table1", "--json")
    assert code == 0 and [row["tau"] for row in json.loads(out)["rows"]] == [0.01, 0.1, 1.0]
    code, out, _ = call("table1")
    assert code == 0 and max(map(len, out.splitlines())) <= 80
