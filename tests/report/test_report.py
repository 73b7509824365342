"""A report says what the runs' files say, escapes every string, needs nothing else, and is readable in a real browser."""

import dataclasses
import html
import html.parser
import itertools
import json
import os
import re
import sys

import numpy as np
import pytest
from browser import Browser, needs_browser

from rankgrad import report
from rankgrad.data.dataset import RankingDataset
from rankgrad.files import load_tensors, save_tensors
from rankgrad.inert import inert
from rankgrad.report.gather import read_entries, short_names
from rankgrad.report.numbers import by_count, contests, headline, metric_table
from rankgrad.runs.elsewhere import keep_scores
from rankgrad.runs.folder import CURVE, make_folder, read_per_query, write_per_document, write_per_query
from rankgrad.runs.run import train_run
from rankgrad.runs.significance import bootstrap_interval, compare, holm
from rankgrad.training.config import Config, Data, Loss, Model, Train, dumps
from rankgrad.training.evaluate import measure, summarise

METRICS = ("ndcg@5", "ndcg@10", "map")
CONFIG = Config(
    data=Data("synthetic:tiny"),
    model=Model(kind="linear"),
    train=Train(epochs=2, batch_size=8, threads=1, device="cpu"),
)
EVIL = "<script>alert(1)</script>\"'&<img src=x onerror=alert(2)> \u202e\U0001f600 é"


def lists(queries=12, seed=0, ids=None):
    """Lists of 3 to 14 documents; every fourth is empty."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 15, queries)
    labels = rng.integers(0, 3, lengths.sum())
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    for query in range(0, queries, 4):
        labels[offsets[query] : offsets[query + 1]] = 0
    ids = list(range(queries)) if ids is None else ids
    return RankingDataset(np.zeros((len(labels), 1)), labels, offsets, ids)


def made(folder, of=None, noise=0, *, metrics=METRICS, split="test", history=True, config=CONFIG, **others):
    """A run folder with everything a report reads, without training: scores are labels and noise."""
    data = lists() if of is None else of
    scores = noisy(data, noise)
    values = measure(scores, data, [*metrics, *CURVE.values()])
    folder.mkdir(parents=True)
    write_per_query(folder, split, data, values, metrics)
    write_per_document(folder, data, scores)
    (folder / "config.toml").write_text(dumps(config), encoding="utf-8")
    if history:
        epochs = [{"epoch": e, "loss": 1 / e, "metric": 0.5 + 0.1 * e, "best": True, "lr": 0.1} for e in (1, 2, 3)]
        (folder / "history.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in epochs))
    facts = {
        "loss": config.loss.name,
        "metrics": {split: summarise({name: values[name] for name in metrics})},
        "convention": "gain 2^y - 1",
        "splits": {split: {"queries": len(data), "documents": len(data.labels), "empty_queries": 3}},
        "data": "somewhere",
        "seed": noise,
        "best_epoch": 2,
        "epochs": 3,
        "seconds": 1.25,
        "commit": "abc",
        "versions": {"rankgrad": "0"},
        "machine": {"device": "cpu"},
        **others,
    }
    (folder / "report.json").write_text(json.dumps(facts))
    return folder


def noisy(data, noise):
    return data.labels + np.random.default_rng(noise).normal(size=len(data.labels))


def aged(folder):
    """The same folder as an older version wrote it: metrics per query and nothing else."""
    (folder / "scores.safetensors").unlink()
    tensors, facts = load_tensors(folder / "queries.safetensors")
    del facts["cutoffs"]
    save_tensors(folder / "queries.safetensors", {name: tensors[name] for name in facts["metrics"]}, facts)
    return folder


class Outline(html.parser.HTMLParser):
    """Elements with their attributes, and the text."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data


def page(*folders, out=None, **options):
    file = out or folders[0].parent / f"report{len(list(folders[0].parent.iterdir()))}.html"
    assert report.write(folders, file, **options) == file.stat().st_size
    return file.read_text(encoding="utf-8")


def words(text):
    """Text without the places where a name may break."""
    return " ".join(re.sub(r"<wbr>", "", text).split())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two runs as training leaves them."""
    folder = tmp_path_factory.mktemp("trained")
    for name in ("neural_ndcg@10", "listnet"):
        list(train_run(folder / name, dataclasses.replace(CONFIG, loss=Loss(name))))
    return [folder / "neural_ndcg@10", folder / "listnet"]


# --- what it says -----------------------------------------------------------------------------------------------------


def test_the_table_has_the_means_of_the_reports_and_the_tests_of_compare(trained, tmp_path):
    text = words(page(*trained, out=tmp_path / "r.html"))
    left = [read_per_query(folder) for folder in trained]
    reports = [json.loads((folder / "report.json").read_text()) for folder in trained]
    for metric in CONFIG.train.metrics:
        table = re.search(rf"<caption><strong>{metric}</strong>.*?</table>", text)[0]
        rows = re.findall(r"<tr><th scope=\"row\">.*?</tr>", table)
        assert len(rows) == 2
        for row, facts, own in zip(rows, reports, left):
            cells = re.findall(r'<td data-head="[^"]*">(.*?)</td>', row)
            for cell, (rule, mean), empty in zip(cells, facts["metrics"]["test"][metric].items(), (1.0, 0.0, np.nan)):
                assert re.sub("<small>.*|</?strong>", "", cell) == f"{mean:.4f}", rule
                counted = np.where(np.isnan(own.metrics[metric]), empty, own.metrics[metric])
                low, high = bootstrap_interval(counted, rounds=2_000)
                assert f"<small>{low:.3f}–{high:.3f}</small>" in cell
        found = compare(left[1].metrics[metric], left[0].metrics[metric])
        difference, p = re.findall(r'<td data-head="[^"]*">(.*?)</td>', rows[1])[-2:]
        assert difference.startswith(f"{found.difference:+.4f}".replace("-", "−"))
        assert p == ("<0.001" if found.p_value < 0.001 else f"{found.p_value:.3f}")
    for name in ("neural_ndcg@10", "listnet", "synthetic:tiny", reports[0]["versions"]["torch"]):
        assert name in text
    assert "10 test queries of synthetic:tiny, 1 without a relevant document" in text


def test_p_values_are_corrected_over_the_runs_of_a_table(tmp_path):
    entries = read_entries([made(tmp_path / f"r{seed}", lists(40), seed) for seed in range(4)])
    values = [entry.per_query.metrics["map"] for entry in entries]
    rows = metric_table(entries, "map")
    assert [row.p for row in rows[1:]] == holm([compare(own, values[0]).p_value for own in values[1:]])
    assert np.isnan(rows[0].p) and rows[0].against is None


def test_the_summary_names_the_best_and_what_is_better_worse_or_open(tmp_path):
    data = lists(60)
    folders = [
        made(tmp_path / name, data, seed) for name, seed in (("middling", 1), ("alike", 2), ("good", 3), ("bad", 4))
    ]
    for folder, shift in ((folders[2], 0.3), (folders[3], -0.3)):
        tensors, facts = load_tensors(folder / "queries.safetensors")
        base = load_tensors(folders[0] / "queries.safetensors")[0]["ndcg@10"]
        save_tensors(folder / "queries.safetensors", tensors | {"ndcg@10": base + shift}, facts)
    text = words(html.unescape(page(*folders)))
    assert "good has the highest ndcg@10" in text
    assert "(p < 0.05 after Holm's correction) better: good; worse: bad; no difference shown: alike." in text


def member(number, loss, kept, validation, *, dropped=False, **others):
    drawn = {"member": number, "loss": loss, "lr": 10.0 ** -(number + 2), "dropout": 0.1 * number, "weight_decay": 0.01}
    found = {"fold": 0, "scale": 0.0, "best_epoch": number + 1, "validation": validation}
    return {**drawn, **found, "kept": kept, "dropped": dropped, **others}


MEMBERS = {
    "members": [
        member(0, "softmax", True, 0.71),
        member(1, "query_rmse", True, 0.72),
        member(2, "softmax", False, 0.65),
        member(3, "query_rmse", False, 0.3, dropped=True),
    ],
    "kept": 2,
    "validation_of_average": 0.7345,
    "validation_of_best": 0.72,
}


def test_what_was_kept_of_members_and_why(tmp_path):
    text = page(made(tmp_path / "run", **MEMBERS))
    said = words(html.unescape(text))
    assert "2 of 4 members were kept, 1 diverged; validation ndcg@10 of the average 0.7345, best member 0.7200." in said
    outline = Outline(text)
    labels = [own["aria-label"] for tag, own in outline.elements if tag == "svg" and "aria-label" in own]
    of_members = [label for label in labels if "3 members" in label]
    assert [label.partition(":")[0].partition(" by ")[2] for label in of_members] == [
        "learning rate", "dropout", "weight decay",
    ]  # fmt: skip
    assert "those kept from 0.001 to 0.01" in of_members[0]
    table = said[said.index(">Members kept<") :]
    table = table[: table.index("</table>")]
    assert re.findall(r"<tr><th scope=.row.><bdi>(\d)</bdi></th><td><bdi>(\w+)</bdi>", table) == [
        ("1", "query_rmse"), ("0", "softmax"),
    ]  # fmt: skip
    key = said[said.index('<ul class="key"') :]
    assert key.index("softmax") < key.index("query_rmse") < key.index("</ul>")


def test_kept_members_are_full_and_others_hollow(tmp_path):
    text = page(made(tmp_path / "run", **MEMBERS))
    figure = text[text.index("by learning rate") :]
    figure = figure[figure.index("<svg") : figure.index("</svg>")]
    points = re.findall(r'<use[^>]* style="([^"]*)"', figure)
    points = [point for point in points if "--c" in point]
    assert ["fill-opacity: 0" in point for point in points] == [False, False, True]
    assert re.findall(r">(0\.0\d*)</text>", figure)[:2] == ["0.0001", "0.0003"]  # plain numbers on the axis


def test_members_of_several_runs_have_figures_of_their_own_and_runs_without_have_none(tmp_path):
    text = page(made(tmp_path / "many", **MEMBERS), made(tmp_path / "one", noise=1))
    said = words(html.unescape(text))
    assert "2 of 4 members of many were kept" in said
    assert "by dropout of many" in said
    assert "of one were kept" not in said
    assert "Members" not in Outline(page(made(tmp_path / "alone"))).text


def test_members_that_say_little_or_nonsense_are_shown_as_far_as_they_go(tmp_path):
    odd = [
        {"member": EVIL, "loss": EVIL, "lr": "x", "validation": None, "kept": True},
        7,
        member(1, "softmax", True, 0.5, lr=0),
    ]
    said = page(made(tmp_path / "run", members=odd))
    assert "<script>alert" not in said
    assert "2 of 2 members were kept" in words(said)
    assert "Members" not in Outline(page(made(tmp_path / "other", members="none"))).text


def test_groups_of_queries_cover_every_query_that_counts_once():
    rng = np.random.default_rng(0)
    for counts in (rng.integers(1, 60, 500), np.full(7, 10), np.array([1, 1, 1, 9]), np.array([3])):
        values = rng.random(len(counts))
        values[: len(counts) // 5] = np.nan
        bins = by_count(counts, [values, values])
        assert sum(found.queries for found in bins) == np.isfinite(values).sum()
        assert 1 <= len(bins) <= 5
        for found, after in itertools.pairwise(bins):
            assert found.high < after.low
        total = sum(found.queries * found.means[1].mean for found in bins)
        assert total == pytest.approx(np.nansum(values))
    assert [found.queries for found in by_count(np.arange(100), [rng.random(100)])] == [20] * 5


def test_the_queries_won_and_lost_most_are_those_of_the_largest_differences(tmp_path):
    folders = [made(tmp_path / f"r{seed}", lists(40), seed) for seed in (0, 1)]
    entries = read_entries(folders)
    first, second = (entry.per_query.metrics["ndcg@10"] for entry in entries)
    (contest,) = contests(entries, "ndcg@10", metric_table(entries, "ndcg@10"))
    order = [query for query in np.argsort(first - second, kind="stable") if np.isfinite(first[query])]
    assert [row.query for row in contest.won] == order[:5]
    assert [row.query for row in contest.lost] == order[::-1][:5]
    row, data = contest.won[0], lists(40)
    assert (row.first, row.other) == (first[row.query], second[row.query])
    assert row.documents == data.lengths[row.query]
    assert row.relevant == (data.labels[data.offsets[row.query] : data.offsets[row.query + 1]] > 0).sum()
    text = words(page(*folders))
    assert f"<bdi>{row.query}</bdi></th><td>{row.other - row.first:+.4f}</td><td>{row.other:.4f}</td>" in text


def test_lists_show_what_moved_up_and_down(tmp_path):
    data = lists(40)
    data = dataclasses.replace(data, rows=np.random.default_rng(3).permutation(len(data.labels)))
    folders = [made(tmp_path / f"r{seed}", data, seed) for seed in (0, 1)]
    entries = read_entries(folders)
    (contest,) = contests(entries, "ndcg@10", metric_table(entries, "ndcg@10"))
    assert [example.query for example in contest.examples] == [*contest.won[:2], *contest.lost[:2]]
    for example in contest.examples:
        documents = range(data.offsets[example.query.query], data.offsets[example.query.query + 1])
        orders = [sorted(documents, key=lambda at: -noisy(data, seed)[at]) for seed in (0, 1)]
        places = [{f"row {data.rows[at] + 1}": place for place, at in enumerate(order, 1)} for order in orders]
        assert [own.after for own in example.documents] == sorted(own.after for own in example.documents)
        assert {own.document for own in example.documents} == {
            name for of in places for name, place in of.items() if place <= 10
        }
        for own in example.documents:
            assert (own.before, own.after) == (places[0][own.document], places[1][own.document])
            (row,) = (at for at in documents if f"row {data.rows[at] + 1}" == own.document)
            assert own.label == data.labels[row]
    text, own = words(page(*folders)), contest.examples[0].documents[0]
    moved = own.before - own.after
    arrow = "=" if not moved else f"{'▲' if moved > 0 else '▼'} {abs(moved)}"
    cells = (f"{own.label:g}", own.before, own.after, arrow)
    assert f"<bdi>{own.document}</bdi></th>" + "".join(f"<td>{cell}</td>" for cell in cells) in text


def test_lists_are_shown_only_where_both_runs_scored_the_same_documents(tmp_path):
    first, second = made(tmp_path / "first"), made(tmp_path / "second", noise=1)
    assert "No lists can be shown for" not in page(first, second)
    labels = lists().labels.copy()
    labels[np.flatnonzero(labels == 2)[0]] = 1
    relabelled = made(tmp_path / "relabelled", dataclasses.replace(lists(), labels=labels), 1)
    entries = read_entries([first, relabelled])
    (contest,) = contests(entries, "ndcg@10", metric_table(entries, "ndcg@10"))
    assert contest.lost and not contest.examples
    (second / "scores.safetensors").unlink()
    assert "No lists can be shown for: second" in page(first, second)
    (first / "scores.safetensors").write_bytes(b"x")
    assert "scores.safetensors is cut short or damaged" in refused(first, second, out=tmp_path / "refused.html")


def test_the_others_are_compared_with_the_baseline(tmp_path):
    data = lists(40)
    folders = [made(tmp_path / "runs" / name, data, seed) for seed, name in enumerate(("a", "b", "c"))]
    keep_scores(tmp_path / "elsewhere" / "x", "lightgbm", noisy(data, 7), data, split="test", metrics=METRICS)
    folders.append(tmp_path / "elsewhere" / "x")
    for meant, name in (("b", "b"), ("lightgbm", "lightgbm"), ("x", "lightgbm"), (str(tmp_path / "runs" / "c"), "c")):
        found = report.summary(folders, meant)
        assert (found["baseline"], [*found["runs"]]) == (
            name,
            [name, *(n for n in ("a", "b", "c", "lightgbm") if n != name)],
        )
        assert "against" not in found["runs"][name]["map"]
    expected = compare(read_per_query(folders[0]).metrics["map"], read_per_query(folders[3]).metrics["map"])
    assert report.summary(folders, "lightgbm")["runs"]["a"]["map"]["against"]["difference"] == expected.difference
    text = words(page(*folders, baseline="lightgbm"))
    assert "Two-sided paired permutation test over queries against <bdi>lightgbm</bdi>" in text
    assert text.index("<bdi>lightgbm</bdi>") < text.index("<bdi>a</bdi>")
    for wrong in ("absent", ""):
        with pytest.raises(ValueError, match=r"none of the runs; expected one of a, b, c, lightgbm; .*--baseline"):
            report.summary(folders, wrong)
    two = [made(tmp_path / f"{n}" / "same", data, n) for n in range(2)]
    with pytest.raises(ValueError, match="same is 2 of the runs; expected one of 0/same, 1/same"):
        report.summary(two, "same")
    assert report.summary(two, "1/same")["baseline"] == "1/same"


def test_scores_from_elsewhere_have_the_name_they_were_given_unless_another_row_has_it(tmp_path):
    data = lists()
    keep_scores(tmp_path / "x", "lightgbm", noisy(data, 7), data, split="test", metrics=METRICS)
    run = made(tmp_path / "runs" / "lightgbm", data)
    assert [entry.name for entry in read_entries([tmp_path / "x", made(tmp_path / "run", data)])] == ["lightgbm", "run"]
    assert [entry.name for entry in read_entries([tmp_path / "x", run])] == ["x", "lightgbm"]


def explanation(names=("bm25", "length", "clicks"), data="/home/ann/lists", query="17", document="230", against="225"):
    """As `rankgrad explain` writes it."""

    def missed(*features, within, across):
        own = [{"features": features, "loss": x, "low": x - 0.01, "high": x + 0.02} for x in (within, across)]
        return {"features": features, "within": own[0], "across": own[1]}

    def example(against):
        amounts = [0.5, -0.25, 0.0625]
        given = [{"feature": n, "amount": a, "value": None, "reference": -3} for n, a in zip(names, amounts)]
        own = {"score": 1.5, "reference": 1.1875, "remainder": 1e-5, "contributions": given}
        return {
            "query": query, "document": document, "against": against, "place": 1, "against_place": 4, "attribution": own,
        }  # fmt: skip

    features = [missed(name, within=0.1 / n, across=-0.05 * n) for n, name in enumerate(names, 1)]
    told = {"data": data, "split": "test", "metric": "ndcg@10", "value": 0.61, "queries": 9, "repeats": 3, "seed": 0}
    groups = [missed(*names, within=0.2, across=0.3)]
    return told | {
        "correlated": 0.8, "features": features, "groups": groups, "examples": [example(""), example(against)], "note": "",
    }  # fmt: skip


def test_an_explanation_is_shown_as_bars_with_numbers(tmp_path):
    folder = made(tmp_path / "run")
    assert "rests on" not in page(folder)
    (folder / "explanation.json").write_text(json.dumps(explanation()))
    text = page(folder)
    said = words(html.unescape(text))
    assert "On the test lists of lists: ndcg@10 is 0.6100 over 9 queries" in said and "/home" not in text
    rows = re.findall(r'<th scope="row"><bdi>(bm25|length|clicks)</bdi></th>(.*?)</tr>', said)
    assert [name for name, _ in rows] == ["bm25", "length", "clicks"] * 3  # by loss, and by size of what they give
    assert '<td data-head="within">0.1000<small>0.090 to 0.120</small></td>' in rows[0][1]
    assert '<td data-head="across">−0.0500<small>−0.060 to −0.030</small></td>' in rows[0][1]
    assert [row.count("<path") for _, row in rows] == [3] * 3 + [2] * 6  # the line of 0, two intervals or a bar
    assert "bm25, length, clicks" in said
    assert "Document 230 against its list's mean" in said and "Why document 230 stands above 225" in said
    assert '<td data-head="gives">−0.2500</td><td data-head="value">missing</td>' in said
    assert "is +0.3125: the sum of what the features give, and a remainder of +1e−05." in said
    other = made(tmp_path / "other", noise=1)
    said = words(html.unescape(page(other, folder)))
    assert "What the ranking of run rests on" in said and "What the ranking of other rests on" not in said


def test_an_explanation_says_what_is_odd(tmp_path):
    folder = made(tmp_path / "run")
    trees = explanation() | {"examples": [], "groups": [], "note": "trees have no gradients"}
    (folder / "explanation.json").write_text(json.dumps(trees))
    assert "trees have no gradients" in page(folder)
    large = explanation([f"f{n}" for n in range(40)])
    large["examples"][0]["attribution"]["remainder"] = 0.3
    large["features"][5]["within"]["low"] = None
    (folder / "explanation.json").write_text(json.dumps(large))
    text = page(folder)
    assert text.count("The remainder is large") == 1
    assert "<summary>25 more</summary>" in text
    assert not re.search(r"\bnan\b", Outline(text).text)
    (folder / "explanation.json").write_text("{}")
    assert "explanation.json is damaged" in refused(folder, out=tmp_path / "refused.html")


def test_no_absolute_path_stands_in_a_page(tmp_path):
    places = [tmp_path / "a" / "lists", tmp_path / "b" / "lists"]
    folders = [made(tmp_path / "runs" / f"r{n}", noise=n, data=str(places[n // 2])) for n in range(4)]
    for chosen in (folders, folders[:1], [tmp_path / "runs"]):
        text = page(*chosen, out=tmp_path / "page.html", overwrite=True)
        assert str(tmp_path) not in text and tmp_path.parts[1] not in Outline(text).text.split("/")
        assert "lists" in text
    text = words(page(*folders, out=tmp_path / "page.html", overwrite=True))
    assert "<td>a/lists</td>" in text and "<td>b/lists</td>" in text
    assert " of lists, " in page(*folders[:2], out=tmp_path / "page.html", overwrite=True)


def test_without_ndcg_among_the_metrics_the_curve_gives_it(tmp_path):
    entries = read_entries([made(tmp_path / "r", metrics=("map",))])
    assert headline(list(entries[0].per_query.metrics)) == "ndcg@10"
    np.testing.assert_allclose(entries[0].per_query.metrics["ndcg@10"], read_per_query(tmp_path / "r").curve[10])
    assert headline(["map", "mrr"]) == "map"


def test_seeds_are_averaged_and_folds_joined_in_any_order(tmp_path):
    folds = [lists(12, seed=5), lists(9, seed=6, ids=[f"q{n}" for n in range(9)])]
    for row in ("a", "b"):
        for fold in (0, 1):
            for seed in (0, 1):
                place = f"{fold}-{seed}" if row == "a" else f"{1 - fold}-{seed}"
                made(tmp_path / row / place, folds[fold], seed + 10 * (row == "b"), data=f"fold {fold}")
    a, b = read_entries([tmp_path / "a", tmp_path / "b"])
    assert a.per_query.query_ids == b.per_query.query_ids
    assert sorted(map(str, a.per_query.query_ids)) == sorted([*map(str, range(12)), *(f"q{n}" for n in range(9))])
    for query, value in zip(a.per_query.query_ids, a.per_query.metrics["map"]):
        fold = int(isinstance(query, str))
        left = [read_per_query(tmp_path / "a" / f"{fold}-{seed}") for seed in (0, 1)]
        assert value == pytest.approx(
            np.mean([of.metrics["map"][of.query_ids.index(query)] for of in left]), nan_ok=True
        )
    text = words(page(tmp_path / "a", tmp_path / "b"))
    assert "21 test queries of several sets of lists" in text and "<dd><bdi>0; 1</bdi></dd>" not in text
    assert "<td>0; 1</td>" in text and "<td>10; 11</td>" in text


def test_runs_are_named_by_the_ends_of_their_paths(tmp_path):
    text = words(page(made(tmp_path / "a" / "seed0"), made(tmp_path / "b" / "seed0", noise=1), out=tmp_path / "r.html"))
    assert "<bdi>a/seed0</bdi>" in text and "<bdi>b/seed0</bdi>" in text
    assert short_names([tmp_path / "a" / "." / "seed0"]) == ["seed0"]


def test_the_same_runs_give_the_same_bytes(tmp_path):
    folders = [made(tmp_path / name, noise=seed) for seed, name in enumerate("ab")]
    assert page(*folders) == page(*folders)


def test_many_runs_have_each_a_colour_dash_or_marker_of_their_own(tmp_path):
    text = page(*(made(tmp_path / f"r{seed:02}", noise=seed) for seed in range(18)))
    assert text.count("<figure") == text.count('role="img"') >= 1 + 1 + 2 + 2 + 17
    assert re.search(r"no difference shown: \d+ runs, see the table", text)
    looks = re.findall(r'<li><svg class="swatch".*?</svg>', text)[:18]
    assert len(set(looks)) == 18


# --- what it is -------------------------------------------------------------------------------------------------------


def test_the_page_needs_nothing_else_and_its_names_are_its_own(trained, tmp_path):
    text = page(*trained, out=tmp_path / "r.html", title="Two & more")
    outline = Outline(text)
    tags = {tag for tag, _ in outline.elements}
    assert not tags & {"script", "img", "iframe", "object", "embed", "audio", "video", "base", "form", "foreignobject"}
    addresses = re.findall(r"""(?:https?:)?//[^\s"'<>]+""", re.sub(r' xmlns(:xlink)?="[^"]*"', "", text))
    assert addresses == []
    assert "@import" not in text and "default-src 'none'" in text
    assert [of["href"] for tag, of in outline.elements if tag == "link"] == ["data:,"]
    ids = [of["id"] for _, of in outline.elements if "id" in of]
    assert len(ids) == len(set(ids))
    used = re.findall(r'(?:href="|url\()#([^")]+)', text) + re.findall(r'aria-labelledby="([^"]+)"', text)
    assert used and set(used) <= set(ids)
    assert not re.search(r"#0000[01]\d\b|NaN|nan\b|Traceback", text)
    assert "<h1><bdi>Two &amp; more</bdi></h1>" in text


def test_it_is_small_however_many_queries_there_are(tmp_path):
    data = lists(2_000)
    folders = [made(tmp_path / f"r{seed}", data, seed) for seed in range(3)]
    assert len(page(*folders).encode()) < 300_000


def test_every_string_is_escaped(tmp_path):
    config = dataclasses.replace(
        CONFIG, loss=Loss(EVIL, {"tau": EVIL}), train=dataclasses.replace(CONFIG.train, metric=f"$x^2$ {EVIL}")
    )
    evil = EVIL.replace("/", "\u2044")
    data = lists(ids=[f"{EVIL}{n}" for n in range(12)])
    others = dict.fromkeys(("data", "seed", "commit", "convention", "best_epoch", "epochs"), EVIL)
    others |= {"versions": {EVIL: EVIL}, "machine": {EVIL: EVIL}, "splits": {EVIL: {}}}
    folders = [made(tmp_path / f"{evil}{n}", data, n, config=config, **others) for n in range(2)]
    for chosen in (folders, folders[:1]):
        text = page(*chosen, out=tmp_path / "r.html", overwrite=True, title=EVIL)
        outline = Outline(text)
        assert not {tag for tag, _ in outline.elements} & {"script", "img", "b"}
        assert not any(name.startswith("on") for _, of in outline.elements for name in of)
        assert outline.text.count("alert(1)") > 10
        assert inert(EVIL) in words(outline.text)
        assert re.search(r"<text[^>]*>validation \$x\^2\$ [^<]*</text>", text)  # no formula is made of a name


def test_a_path_that_is_no_text_and_ids_of_any_kind_are_shown(tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    ids = ["\ud800", "", "x" * 5_000, "a\x00b", "\u05d0", " ", "日本語", *map(str, range(5))]
    text = page(made(folder, lists(ids=ids)), out=tmp_path / "r.html")
    assert "caf?" in text and "日本語" in text
    assert "x" * 120 + "…" in text and "x" * 121 not in text


@pytest.mark.parametrize("labels", [[0, 0, 0], [1, 0, 2], [1]], ids=["all empty", "one query", "one document"])
@pytest.mark.parametrize("runs", [1, 2])
def test_degenerate_runs_give_a_report_all_the_same(tmp_path, labels, runs):
    data = RankingDataset(np.zeros((len(labels), 1)), labels, [0, len(labels)], ["only"])
    text = page(*(made(tmp_path / f"r{n}", data, n) for n in range(runs)))
    assert "1 test query" in text
    assert ("No query has a relevant document" in text) == (labels == [0, 0, 0])
    assert not re.search(r"\bnan\b", Outline(text).text)


def test_an_older_run_gives_a_report_that_says_what_is_missing(tmp_path):
    old = aged(made(tmp_path / "old", history=False))
    text = words(html.unescape(page(old)))
    for what in ("no NDCG by cut-off", "no list lengths"):
        assert f"There is {what} for: old (written by an older rankgrad" in text
    assert "No training history was kept by: old." in text
    new = made(tmp_path / "new", noise=1)
    text = words(html.unescape(page(new, old)))
    assert "There is no NDCG by cut-off for: old" in text
    assert "no list lengths" not in text  # the new run knows them
    assert words(html.unescape(page(old, new))).count("There is no") == 1


def test_a_run_of_another_version_is_shown(tmp_path):
    folder = made(tmp_path / "r")
    with (folder / "config.toml").open("a", encoding="utf-8") as file:
        file.write("\n[later]\nunknown = 1\n")
    assert "<dt>model</dt><dd><bdi>linear</bdi></dd>" in words(page(folder))


def test_what_a_folder_does_not_say_is_not_made_up(tmp_path):
    folder = made(tmp_path / "r")
    (folder / "report.json").write_text("{}")
    (folder / "config.toml").unlink()
    other = made(tmp_path / "s", noise=1)
    assert "<td>not recorded</td>" in page(folder, other)


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(*folders, out):
    with pytest.raises(ValueError, match=r"; ") as error:  # what was wrong; what was expected
        report.write(folders, out)
    assert not out.exists()
    return str(error.value)


def test_runs_that_cannot_be_compared_are_refused(tmp_path):
    out, first = tmp_path / "r.html", made(tmp_path / "first")
    assert "nothing to report" in refused(out=out)
    assert "first is given twice" in refused(first, tmp_path / "." / "first", out=out)
    other = made(tmp_path / "other", lists(13))
    assert "12 test queries and" in refused(first, other, out=out)
    vali = made(tmp_path / "vali", split="vali")
    assert "12 vali queries" in refused(first, vali, out=out)
    labels = lists().labels.copy()
    labels[0] = 1  # the first query, which was empty
    relabelled = made(tmp_path / "relabelled", dataclasses.replace(lists(), labels=labels))
    assert "relabelled do not agree which queries" in refused(first, relabelled, out=out)
    mrr = aged(made(tmp_path / "mrr", metrics=("mrr",)))
    assert "train.metrics" in refused(first, mrr, out=out)
    made(tmp_path / "mixed" / "a")
    made(tmp_path / "mixed" / "b", split="vali")
    assert "b on its vali split" in refused(tmp_path / "mixed", out=out)
    for number, loss in enumerate(("listnet", "rmse")):
        made(tmp_path / "kinds" / loss, noise=number, config=dataclasses.replace(CONFIG, loss=Loss(loss)))
    message = refused(tmp_path / "kinds", out=out)
    assert "loss (listnet; rmse)" in message and "kinds/*" in message


def test_of_a_folder_only_the_runs_that_were_named_are_taken(tmp_path):
    for number in range(2):
        made(tmp_path / "row" / f"seed{number}", noise=number)
    (tmp_path / "row" / "unfinished").mkdir()
    (tmp_path / "row" / "unfinished" / "config.toml").touch()
    (entry,) = read_entries([tmp_path / "row"], [tmp_path / "row" / "seed1"])
    alone = read_per_query(tmp_path / "row" / "seed1")
    assert len(entry.trainings) == 1
    assert np.array_equal(entry.per_query.metrics["ndcg@10"], alone.metrics["ndcg@10"], equal_nan=True)


def test_what_is_no_finished_run_is_refused(tmp_path):
    out = tmp_path / "r.html"
    assert "absent is not a run: it has no report.json" in refused(tmp_path / "absent", out=out)
    make_folder(tmp_path / "begun", CONFIG)
    assert "begun has not finished: it has no report.json" in refused(tmp_path / "begun", out=out)
    made(tmp_path / "group" / "a")
    make_folder(tmp_path / "group" / "b", CONFIG)
    assert "b has not finished" in refused(tmp_path / "group", out=out)
    for name, content, fact in (
        ("report.json", "{", "report.json is damaged"),
        ("report.json", "[]", "report.json is damaged"),
        ("history.jsonl", "{}\n", "history.jsonl is damaged"),
        ("history.jsonl", '{"epoch": 1', "history.jsonl is damaged"),
        ("config.toml", "[", "config.toml is not TOML"),
        ("queries.safetensors", "x", "queries.safetensors is cut short or damaged"),
    ):
        folder = made(tmp_path / f"{name}{content!r}".replace("/", ""))
        (folder / name).write_text(content)
        assert fact in refused(folder, out=out)


def test_a_file_is_replaced_only_on_request(tmp_path):
    folder, out = made(tmp_path / "r"), tmp_path / "r.html"
    out.write_text("mine")
    with pytest.raises(ValueError, match=r"r\.html exists.*--out.*--overwrite"):
        report.write([folder], out)
    assert out.read_text() == "mine"
    report.write([folder], out, overwrite=True)
    assert out.read_text().startswith("<!DOCTYPE html>")
    with pytest.raises(ValueError, match=r"nowhere is not a folder.*r\.html"):
        report.write([folder], tmp_path / "nowhere" / "r.html")


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib"])
def test_without_the_extra_one_sentence_has_the_install_line(tmp_path, monkeypatch, missing):
    for name in [name for name in sys.modules if name.startswith("rankgrad.report.") or name.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r"matplotlib and jinja2.*pip install 'rankgrad\[report\]'"):
        report.write([made(tmp_path / "r")], tmp_path / "r.html")


def test_a_matplotlibrc_changes_nothing(tmp_path):
    import matplotlib

    folder = made(tmp_path / "r")
    plain = page(folder)
    with matplotlib.rc_context({"font.size": 30, "axes.linewidth": 9, "lines.marker": "x"}):
        assert page(folder) == plain
        assert matplotlib.rcParams["font.size"] == 30


# --- in a browser -----------------------------------------------------------------------------------------------------

# Elements that stick out of the window, other than what scrolls in a box of its own.
STICKING_OUT = """[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll') || e.matches('.scroll'))
    .filter(e => { const r = e.getBoundingClientRect(); return r.width && (r.right > innerWidth + 0.5 || r.left < -0.5) })
    .map(e => e.tagName + '.' + e.className.toString())"""
COLOURS = """(() => { const s = getComputedStyle(document.documentElement); return Object.fromEntries(
    ['card', 'ground', 'ink', 'muted', ...Array.from({length: 8}, (_, n) => 'c' + n)]
    .map(n => [n, s.getPropertyValue('--' + n).trim()])) })()"""
FIGURE_TEXT = "getComputedStyle(document.querySelector('figure > svg text')).fill"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def pages(trained, tmp_path_factory):
    """Ordinary runs, one run, and runs whose names and ids are as bad as they get."""
    folder = tmp_path_factory.mktemp("pages")
    bad = [f"{EVIL}{n} " + "long" * 200 for n in range(12)]
    long = "a_very_long_name_without_a_space_" * 6
    config = dataclasses.replace(CONFIG, loss=Loss("neural_ndcg@10", {"gain": "x" * 300}))
    evil = [made(folder / f"{long}{n}", lists(ids=bad), n, config=config, data="/" + "d" * 400) for n in range(3)]
    report.write(trained, folder / "two.html")
    report.write(trained[:1], folder / "one.html")
    report.write([made(folder / "many", **MEMBERS), made(folder / "other", noise=1)], folder / "members.html")
    (evil[0] / "explanation.json").write_text(
        json.dumps(explanation([f"{EVIL}{long}", "日本語" * 99, "x" * 999], EVIL, bad[0], bad[1], bad[2]))
    )
    report.write(evil, folder / "evil.html", title=EVIL + "t" * 300)
    explained = made(folder / "explained")
    (explained / "explanation.json").write_text(json.dumps(explanation([f"feature {n}" for n in range(40)])))
    report.write([explained], folder / "explained.html")
    return folder


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", ["two", "one", "members", "explained", "evil"])
def test_a_browser_shows_it_whole_and_without_complaint(browser, pages, name, width, dark):
    browser.open((pages / f"{name}.html").as_uri(), width, dark=dark)
    browser.ask("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.ask("[innerWidth, document.documentElement.scrollWidth]") == [width, width]
    assert browser.ask(STICKING_OUT) == []
    assert browser.complaints() == []
    assert browser.requests() == [(pages / f"{name}.html").as_uri()]


@needs_browser
@pytest.mark.parametrize("name", ["two", "evil"])
def test_on_a_phone_difference_and_p_are_seen_without_scrolling(browser, pages, name):
    browser.open((pages / f"{name}.html").as_uri(), 390)
    cells = """[...document.querySelectorAll('.metrics td[data-head=difference], .metrics td[data-head=p]')].map(e => {
        const r = e.getBoundingClientRect(), s = e.closest('.scroll');
        return [e.dataset.head, r.left, r.right, r.width * r.height > 0, s.scrollWidth - s.clientWidth] })"""
    found = browser.ask(cells)
    assert {head for head, *_ in found} == {"difference", "p"}
    for _, left, right, seen, scrolls in found:
        assert 0 <= left < right <= 390 and seen and scrolls == 0
    names = "[...document.querySelectorAll('.metrics td[data-head]')].map(e => getComputedStyle(e, '::before').content)"
    assert {'"difference"', '"p"', '"empty left out"'} <= set(browser.ask(names))


@needs_browser
def test_on_paper_nothing_is_cut_off(browser, pages):
    browser.open((pages / "two.html").as_uri(), 690, dark=True, media="print")  # A4 between its margins
    assert browser.ask("document.documentElement.scrollWidth") == 690
    tables = "[...document.querySelectorAll('table')].filter(t => t.getBoundingClientRect().right > innerWidth).length"
    assert browser.ask(tables) == 0
    assert browser.ask("getComputedStyle(document.documentElement).getPropertyValue('--ink').trim()") == "#1a2027"
    assert browser.pdf().startswith(b"%PDF")


def contrast(a, b):
    """Of two colours #rrggbb, as WCAG 2 has it."""

    def luminance(colour):
        parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@needs_browser
def test_colours_follow_the_scheme_and_are_told_from_their_ground(browser, pages):
    seen = []
    for dark in (False, True):
        browser.open((pages / "two.html").as_uri(), 1280, dark=dark)
        colours = browser.ask(COLOURS)
        for ground in ("card", "ground"):
            for name, least in {"ink": 7, "muted": 4.5, **{f"c{n}": 4.5 for n in range(8)}}.items():
                assert contrast(colours[name], colours[ground]) >= least, (dark, name, ground)
        channels = [int(part) for part in re.findall(r"\d+", browser.ask(FIGURE_TEXT))]
        assert "#{:02x}{:02x}{:02x}".format(*channels) == colours["ink"]
        seen.append(colours["ink"])
    assert seen[0] != seen[1]


@needs_browser
def test_a_screen_reader_finds_headings_tables_and_descriptions(browser, pages):
    browser.open((pages / "two.html").as_uri(), 1280)
    tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    roles = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in tree if not node["ignored"]]
    pictures = [name for role, name in roles if role in ("image", "img")]
    assert len(pictures) == browser.ask("document.querySelectorAll('figure').length")
    assert all(len(name) > 20 for name in pictures)
    assert {"columnheader", "rowheader", "heading", "table"} <= {role for role, _ in roles}
    levels = browser.ask("[...document.querySelectorAll('h1,h2,h3')].map(h => +h.tagName[1])")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert browser.ask("document.querySelectorAll('th:not([scope])').length") == 0
