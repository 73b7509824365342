"""`rankgrad reproduce table2 | ablations | dasalc | strong`: train, compare, write down; as JSON, aligned text and Markdown.

Each command gives a `Table`: plain values, and the runs an HTML report of it shows. `write` keeps the values beside the
trials once it is known where the report is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rankgrad.data.catalogue import CATALOGUE
from rankgrad.files import write_atomically
from rankgrad.reproduce import claims
from rankgrad.reproduce.claims import METRICS, PAPERS_RULE, STUDIES, summary
from rankgrad.reproduce.data import raw_splits
from rankgrad.reproduce.rows import ABLATIONS, ENSEMBLES, INGREDIENTS, STRONG, TABLE2, Row, choose
from rankgrad.reproduce.trials import Outcome, Request, Trial, train_rows
from rankgrad.runs.averaging import mean_of_standardised
from rankgrad.runs.folder import CONVENTION, read_per_document
from rankgrad.runs.run import Run
from rankgrad.runs.text import RULES, as_json, table
from rankgrad.training.config import Config
from rankgrad.training.evaluate import measure
from rankgrad.trees.fit import missing
from rankgrad.trees.settings import TreeConfig


@dataclass(frozen=True)
class Table:
    """A finished table: its values, and what its HTML report is to show, the first row being the baseline."""

    result: dict[str, Any]
    rows: list[Path]  # folders with the runs of a row below them
    runs: list[Path]  # those of them that belong to this table
    report: Path
    title: str


# --- the commands ------------------------------------------------------------------------------------------------------


def make_table2(request: Request, *, quiet: bool = False) -> Table:
    """Every row on every fold with every seed; rows of earlier commands join where these folds and seeds are finished."""
    names, skipped = _available(request.rows, TABLE2)
    outcome = train_rows(request, "table2", names, METRICS, quiet=quiet, joining=TABLE2)
    values, dataset = outcome.values, outcome.experiment.dataset
    best = {metric: claims.against_the_best(values, metric) for metric in METRICS}
    rows = {
        row: {
            "title": TABLE2[row].title,
            "metrics": summary(values[row]),
            "paper": TABLE2[row].paper.get(dataset or ""),
            "seconds": float(np.mean([_line(outcome, t)["seconds"] for t in outcome.trials if t.row == row])),
        }
        for row in values
    }
    result = {
        "table": str(outcome.experiment.out),
        **_facts(outcome),
        "skipped": skipped,
        "failed": outcome.failed,
        "rows": rows,
        "best": {metric: {"row": row, "p": p_values} for metric, (row, p_values) in best.items()},
        "claims": [claims.beats_approx_ndcg(values), claims.best_is_neural_ndcg(values)],
    }
    first = best["ndcg@10"][0]
    return _table(outcome, result, [first, *(row for row in rows if row != first)], "report.html", "Table 2")


def _available(rows: str | None, known: Mapping[str, Row]) -> tuple[list[str], dict[str, str]]:
    """The rows to train, and those left out for want of a package; one that was asked for by name is not left out."""
    names, skipped = choose(rows, known, "row"), {}
    for name in names:
        library = known[name].library
        why = missing(library) if library else None
        if why and rows is not None:
            raise ValueError(f"the row {name} cannot be trained: {why}")
        if why:
            skipped[name] = why
    return [name for name in names if name not in skipped], skipped


def make_ablations(request: Request, *, quiet: bool = False) -> Table:
    """The rows of the studies asked for (`request.rows`), and whether the paper's claims about them hold."""
    studies = {name: STUDIES[name] for name in choose(request.rows, STUDIES, "ablation")}
    wanted = {name for study in studies.values() for name in (study.baseline, *study.others)}
    outcome = train_rows(request, "ablations", [name for name in ABLATIONS if name in wanted], METRICS, quiet=quiet)
    result = {
        "ablations": str(outcome.experiment.out),
        **_facts(outcome),
        "failed": outcome.failed,
        "studies": {name: claims.decide_study(study, outcome.values) for name, study in studies.items()},
    }
    return _table(outcome, result, list(outcome.values), "ablations.html", "Ablations")


def make_dasalc(request: Request, *, quiet: bool = False) -> Table:
    """A recipe with DASALC's ingredients added one by one, and what each gives."""
    outcome = train_rows(request, "dasalc", list(INGREDIENTS), METRICS, quiet=quiet)
    ensembles = {
        name: _ensemble(outcome, row)
        for name, (row, _) in ENSEMBLES.items()
        if request.seeds > 1 and row in outcome.values
    }
    result = {
        "dasalc": str(outcome.experiment.out),
        **_facts(outcome),
        "failed": outcome.failed,
        "rows": claims.compare_ingredients({**outcome.values, **ensembles}, request.recipe, request.seeds),
    }
    return _table(outcome, result, list(outcome.values), "dasalc.html", "The ingredients of DASALC")


def make_strong(request: Request, *, quiet: bool = False) -> Table:
    """The recipe that nobody has to tune beside boosted trees after a search."""
    names, skipped = _available(request.rows, STRONG)
    outcome = train_rows(request, "strong", names, METRICS, quiet=quiet)
    rows = {name: {"title": STRONG[name].title, "metrics": summary(of_row)} for name, of_row in outcome.values.items()}
    trees = [name for name in rows if name != "strong"]
    if "strong" in rows:
        found = claims.differences(outcome.values, [("strong", name) for name in trees])
        for name, (difference, p_value) in zip(trees, found):
            rows[name]["below"] = {"difference": difference, "p": p_value}
        if trees:
            best = max(trees, key=lambda name: _validation(outcome, name))
            together = {**outcome.values, "together": _together(outcome, ("strong", best))}
            ((difference, p_value),) = claims.differences(together, [("strong", "together")])
            rows["together"] = {
                "title": f"strong and {STRONG[best].title.partition(',')[0]} averaged",
                "metrics": summary(together["together"]),
                "below": {"difference": difference, "p": p_value},
            }
    result = {
        "strong": str(outcome.experiment.out),
        **_facts(outcome),
        "recipe": "strong",
        "recipe_words": "sizes, epochs, members and scaling follow the data and the device",
        "selection": "on validation only: each member's epoch and the members kept; of trees the rounds and the five settings averaged",
        "skipped": skipped,
        "failed": outcome.failed,
        "rows": rows,
    }
    return _table(outcome, result, list(outcome.values), "strong.html", "The recipe strong beside boosted trees")


def _ensemble(outcome: Outcome, row: str) -> dict[str, np.ndarray]:
    """Per-query values [1, queries] of the mean of the standardised scores of all seeds, fold by fold."""
    of_folds, trials = [], [trial for trial in outcome.trials if trial.row == row]
    for fold in outcome.experiment.folds:
        test = raw_splits(fold.path, fold.path_fold)["test"]
        runs = [Run.open(trial.folder, outcome.experiment.device) for trial in trials if trial.fold == fold.fold]
        of_folds.append(measure(mean_of_standardised([run.score(test) for run in runs], test.offsets), test, METRICS))
    return {metric: np.concatenate([values[metric] for values in of_folds])[None] for metric in METRICS}


def _validation(outcome: Outcome, row: str) -> float:
    """How good a row is on validation, the mean over its trials."""
    lines = [_line(outcome, trial) for trial in outcome.trials if trial.row == row]
    return float(np.mean([line["vali"]["ndcg@10"][PAPERS_RULE] for line in lines]))


def _together(outcome: Outcome, rows: Sequence[str]) -> dict[str, np.ndarray]:
    """Per-query values [seeds, queries] of rows whose scores are averaged, trial by trial, from the scores the runs kept."""
    folders = {(trial.seed, trial.fold, trial.row): trial.folder for trial in outcome.trials}
    tests = {fold.fold: raw_splits(fold.path, fold.path_fold)["test"] for fold in outcome.experiment.folds}
    of_seeds = []
    for seed in sorted({seed for seed, *_ in folders}):
        of_folds = []
        for fold, test in tests.items():
            kept = [read_per_document(folders[seed, fold, row]) for row in rows]
            scores = mean_of_standardised([each.scores for each in kept if each is not None], test.offsets)
            of_folds.append(measure(scores, test, METRICS))
        of_seeds.append({metric: np.concatenate([values[metric] for values in of_folds]) for metric in METRICS})
    return {metric: np.stack([values[metric] for values in of_seeds]) for metric in METRICS}


def _table(outcome: Outcome, result: dict[str, Any], rows: Sequence[str], report: str, what: str) -> Table:
    out, runs = outcome.experiment.out, [trial.folder for trial in outcome.trials]
    return Table(result, [out / "runs" / row for row in rows], runs, out / report, f"{what}{_on(result)}")


def write(made: Table, report: str) -> dict[str, Any]:
    """Write the values as JSON and as text; them and where the report is, or why there is none."""
    result = {**made.result, "report": report}
    kind, page = _page(result)
    stem = made.report.parent / kind
    write_atomically(stem.with_suffix(".json"), (as_json(result) + "\n").encode())
    if kind == "table2":
        write_atomically(stem.with_suffix(".md"), as_markdown(page).encode())
    else:
        write_atomically(stem.with_suffix(".txt"), f"{as_text(page)}\n".encode())
    return result


# --- what must be known of a table to believe it ----------------------------------------------------------------------


def _line(outcome: Outcome, trial: Trial) -> dict[str, Any]:
    return outcome.results[trial.row, trial.fold, trial.seed]


def _facts(outcome: Outcome) -> dict[str, Any]:
    """Data, recipe, protocol, machine, commits."""
    experiment, trials, request = outcome.experiment, outcome.trials, outcome.experiment.request
    commits = dict.fromkeys(_line(outcome, trial)["commit"] for trial in trials if trial.finished)
    return {
        "title": CATALOGUE[experiment.dataset].title if experiment.dataset else None,
        "dataset": experiment.dataset or request.dataset,
        "data": experiment.source,
        "recipe": request.recipe,
        "recipe_words": _describe_recipe(trials),
        "selection": _describe_selection(trials, request.paper_protocol),
        "paper_protocol": request.paper_protocol,
        "folds": [
            {"fold": of.fold, "counts": of.counts, "differences": list(of.differences), "notes": list(of.notes)}
            for of in experiment.folds
        ],
        "queries": sum(of.counts["test"]["queries"] for of in experiment.folds),
        "seeds": list(range(request.seeds)),
        "device": experiment.device,
        "commits": [commit or "unknown" for commit in commits],
    }


def _describe_recipe(trials: Sequence[Trial]) -> str:
    config = next((trial.config for trial in trials if isinstance(trial.config, Config)), None)
    if config is None:
        return "trees alone"
    model, train = config.model, config.train
    epochs = f"{train.epochs} epoch{'s' * (train.epochs > 1)}"
    stop = f"at most {epochs}, stopped early after {train.patience} without a better one"
    return (
        f"Transformer of width {model.width}, feed-forward {model.feedforward}, {model.layers} layers, batches of "
        f"{train.batch_size} lists, {stop if train.patience else epochs}, {train.precision}"
    )


def _describe_selection(trials: Sequence[Trial], paper_protocol: bool) -> str:
    trees = any(isinstance(trial.config, TreeConfig) for trial in trials)
    if paper_protocol:
        also = "; trees with fixed settings" if trees else ""
        return f"none (--paper-protocol): the last epoch of the full training fold{also}"
    also = ", for trees the best of four settings" if trees else ""
    return f"on validation only: the best epoch by ndcg@10{also}; test is judged once"


# --- as text ----------------------------------------------------------------------------------------------------------

Rows = list[tuple[str, ...]]  # of a table, the header first
TRANSPOSED = (
    "The reference code's transposed loss is its plain one (it computes scale(P)^T): if the paper ran that code, its six "
    "NeuralNDCG rows are three losses run twice, and their gaps are run-to-run noise. Ours is the transposed loss of the "
    "paper's text."
)
MEANS = (
    "in percent; mean and sample deviation (+-) over seeds of the mean over all test queries; as in the paper a query "
    "without a relevant document counts 1"
)
HELD = {True: "HELD here", False: "NOT HELD here", None: "not judged"}


class Page(NamedTuple):
    """A result in words: facts, tables with the lines above each, notes."""

    title: str
    facts: list[str]
    tables: list[tuple[list[str], Rows]]
    notes: list[str]


def describe(result: Mapping[str, Any]) -> str:
    """A result as aligned text without escape codes."""
    return as_text(_page(result)[1])


def as_text(page: Page) -> str:
    """A page with aligned columns."""
    tables = [line for above, rows in page.tables for line in ("", *above, table(rows))]
    return "\n".join([page.title, *page.facts, *tables, "", *page.notes])


def as_markdown(page: Page) -> str:
    """A page in Markdown."""
    tables = [line for above, rows in page.tables for line in (*above, _pipes(rows), "")]
    facts, notes = ([f"- {line}" for line in lines] for lines in (page.facts, page.notes))
    return "\n".join([f"# {page.title}", "", *facts, "", *tables, *notes, ""])


def _pipes(rows: Rows) -> str:
    header, *lines = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    rule = ["---", *(["---:"] * (len(header) - 1))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *lines))


def _page(result: Mapping[str, Any]) -> tuple[str, Page]:
    """The command that made a result, and the result in words."""
    pages: dict[str, tuple[str, Callable[[Mapping[str, Any]], Page]]] = {
        "table": ("table2", _table2_page),
        "ablations": ("ablations", _ablations_page),
        "dasalc": ("dasalc", _dasalc_page),
        "strong": ("strong", _strong_page),
    }
    kind, page = next(pages[key] for key in pages if key in result)
    return kind, page(result)


def _table2_page(result: Mapping[str, Any]) -> Page:
    ranked = {name: result["rows"][name] for name in TABLE2 if name in result["rows"]}
    papers = any(row["paper"] for row in ranked.values())
    header, lines = ["trained with"], []
    for metric in METRICS:
        header += [metric.upper(), "+-", *(["paper", "differs"] if papers else []), "p"]
    for name, row in ranked.items():
        cells = [row["title"]]
        for number, metric in enumerate(METRICS):
            ours, best = row["metrics"][metric][PAPERS_RULE], result["best"][metric]
            cells += [_percent(ours["mean"]), _percent(ours["deviation"])]
            if papers:
                published = row["paper"][number] if row["paper"] else None
                cells += (
                    ["", ""] if published is None else [f"{published:.2f}", f"{100 * ours['mean'] - published:+.2f}"]
                )
            cells.append("best" if best["row"] == name else _short_p(best["p"].get(name)))
        lines.append(tuple(cells))
    rules = [("empty queries", *(f"{metric} {words}" for metric in METRICS for words in RULES.values()))]
    for row in ranked.values():
        means = (row["metrics"][metric][rule]["mean"] for metric in METRICS for rule in RULES)
        rules.append((row["title"], *map(_percent, means)))
    notes = [
        f"{MEANS} in the first table",
        CONVENTION,
        "p: the best row against each other, paired permutation test over queries of values averaged over seeds, "
        "Holm-corrected",
        TRANSPOSED,
    ]
    if papers and any(fold["differences"] for fold in result["folds"]):
        notes.append("these are not the published lists: the differences to the paper's numbers mean nothing")
    notes += [f'the paper\'s claim "{c["claim"]}": {HELD[c["held"]]}: {c["because"]}' for c in result["claims"]]
    notes += [f"skipped: {TABLE2[name].title}: {why}" for name, why in result["skipped"].items()]
    notes += [f"failed: {sentence}" for sentence in result["failed"]]
    notes.append(f"the table is in {result['table']}; report: {result['report']}")
    title = f"Table 2 of arXiv 2102.07831{_on(result)}"
    return Page(title, _fact_lines(result), [([], [tuple(header), *lines]), ([], rules)], notes)


def _ablations_page(result: Mapping[str, Any]) -> Page:
    tables = []
    for study in result["studies"].values():
        rows = [("", *_header(), "differs", "p")]
        rows += [(row["title"], *_numbers(row), *_difference(row)) for row in study["rows"].values()]
        tables.append(([f'"{study["claim"]}": {HELD[study["held"]]}', study["because"]], rows))
    notes = [
        *_notes(result, "the first row of its table, Holm-corrected within the table"),
        f"the runs are in {result['ablations']}; report: {result['report']}",
    ]
    return Page(f"Ablations of arXiv 2102.07831{_on(result)}", _fact_lines(result), tables, notes)


def _dasalc_page(result: Mapping[str, Any]) -> Page:
    rows = [("", *_header(), "step", "p", "in all", "p")]
    for row in result["rows"].values():
        beside = (text for part in ("step", "whole") for text in _difference(row.get(part, {})))
        rows.append((row["title"], *_numbers(row), *beside))
    notes = [
        *_notes(result, "the row before (step) and the first (in all), Holm-corrected within the column"),
        "an ensemble is the mean of scores standardised within each list",
        f"the runs are in {result['dasalc']}; report: {result['report']}",
    ]
    title = f"The ingredients of DASALC (Qin et al. 2021), added one by one,{_on(result)}"
    return Page(title, _fact_lines(result), [([], rows)], notes)


def _strong_page(result: Mapping[str, Any]) -> Page:
    rows = [("", *_header(), "strong -", "p")]
    rows += [(row["title"], *_numbers(row), *_difference(row.get("below", {}))) for row in result["rows"].values()]
    notes = [
        *_notes(result, "the recipe strong, Holm-corrected"),
        *(
            ["averaged with the trees that are best on validation: the mean of scores standardised within each list"]
            * ("together" in result["rows"])
        ),
        *(f"skipped: {STRONG[name].title}: {why}" for name, why in result["skipped"].items()),
        f"the runs are in {result['strong']}; report: {result['report']}",
    ]
    return Page(f"The recipe strong beside boosted trees{_on(result)}", _fact_lines(result), [([], rows)], notes)


def _on(result: Mapping[str, Any]) -> str:
    return f" on {result['title'] or result['data']}"


def _fact_lines(result: Mapping[str, Any]) -> list[str]:
    differs = [f"fold {fold['fold']}: {line}" for fold in result["folds"] for line in fold["differences"]]
    if result["title"] is None:
        checked = (
            "the lists are not in the catalogue: there are no published counts and no numbers of the paper for them"
        )
    elif differs:
        checked = f"these are NOT the published lists; the counts differ: {'; '.join(differs)}"
    else:
        checked = "the counts agree with the published ones"
    notes = dict.fromkeys(note for fold in result["folds"] for note in fold["notes"])
    return [
        f"recipe {result['recipe']}: {result['recipe_words']}",
        f"model selection: {result['selection']}",
        f"data: {result['data']}, {_numbered('fold', [fold['fold'] for fold in result['folds']])}, "
        f"{result['queries']:,} test queries; {_numbered('seed', result['seeds'])}",
        checked,
        *notes,
        f"commit {', '.join(result['commits'])}; {result['device']}",
    ]


def _numbered(what: str, numbers: Sequence[int]) -> str:
    return f"{what}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _notes(result: Mapping[str, Any], beside: str) -> list[str]:
    return [
        MEANS,
        CONVENTION,
        f"differences and p by {claims.DECISIVE}: paired permutation test over queries of values averaged over seeds, against {beside}",
        *(f"failed: {sentence}" for sentence in result["failed"]),
    ]


def _header() -> list[str]:
    return [text for metric in METRICS for text in (metric.upper(), "+-")]


def _numbers(row: Mapping[str, Any]) -> list[str]:
    ours = [row["metrics"][metric][PAPERS_RULE] for metric in METRICS]
    return [_percent(of_metric[key]) for of_metric in ours for key in ("mean", "deviation")]


def _difference(row: Mapping[str, Any]) -> tuple[str, str]:
    """A difference in percent and its p-value; nothing for the row that others are compared with."""
    return (f"{100 * row['difference']:+.2f}", _short_p(row["p"])) if "p" in row else ("", "")


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f}"


def _short_p(value: float | None) -> str:
    """A p-value in five characters at most; nothing where there is none."""
    if value is None:
        return ""
    return "<.001" if value < 0.001 else f"{value:.3f}".lstrip("0") if value < 1 else "1"
