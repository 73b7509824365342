"""The table as text and as Markdown: what table2.json holds, for people. Pure functions of it. Imports results and the rows."""

from collections.abc import Mapping, Sequence
from typing import Any

from rankgrad.reproduce.claims import METRICS, PAPERS_RULE
from rankgrad.reproduce.rows import ROWS
from rankgrad.runs.compare import RULES, table

TRANSPOSED = (
    "The reference code's transposed loss is its plain one (it computes scale(P)^T): if the paper ran that code, its six "
    "NeuralNDCG rows are three losses run twice, and their gaps are run-to-run noise. Ours is the transposed loss of the "
    "paper's text."
)


def as_text(result: Mapping[str, Any]) -> str:
    """All of it, aligned, without escape codes."""
    parts = [_title(result), *facts(result), "", table(_main(result)), "", table(_rules(result)), "", *_tail(result)]
    return "\n".join(parts)


def as_markdown(result: Mapping[str, Any]) -> str:
    """All of it, for a page."""
    parts = [
        f"# {_title(result)}",
        "",
        *(f"- {fact}" for fact in facts(result)),
        "",
        _pipes(_main(result)),
        "",
        _pipes(_rules(result)),
        "",
    ]
    return "\n".join([*parts, *(f"- {line}" for line in _tail(result)), ""])


def _title(result: Mapping[str, Any]) -> str:
    return f"Table 2 of arXiv 2102.07831 on {result['title'] or result['data']}"


def facts(result: Mapping[str, Any]) -> list[str]:
    """What must be known of a result to believe it: recipe, selection, data, commit, machine."""
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


def _main(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Ours under the paper's rule for empty queries, in percent, the paper's, the difference, and the p-values."""
    papers = any(row["paper"] for row in result["rows"].values())
    header = ["trained with"]
    for metric in METRICS:
        header += [metric.upper(), "+-", *(["paper", "differs"] if papers else []), "p"]
    lines = [tuple(header)]
    for name, row in _ranked(result):
        cells = [ROWS[name].title]
        for number, metric in enumerate(METRICS):
            ours = row["metrics"][metric][PAPERS_RULE]
            cells += [percent(ours["mean"]), percent(ours["deviation"])]
            if papers:
                published = row["paper"][number] if row["paper"] else None
                gap = None if published is None else 100 * ours["mean"] - published
                cells += ["" if published is None else f"{published:.2f}", "" if gap is None else f"{gap:+.2f}"]
            p_value = result["best"][metric]["p"].get(name)
            cells.append("best" if result["best"][metric]["row"] == name else short_p(p_value))
        lines.append(tuple(cells))
    return lines


def _rules(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The same means under all three rules for empty queries."""
    lines = [("empty queries", *(f"{metric} {words}" for metric in METRICS for words in RULES.values()))]
    for name, row in _ranked(result):
        means = (row["metrics"][metric][rule]["mean"] for metric in METRICS for rule in RULES)
        lines.append((ROWS[name].title, *map(percent, means)))
    return lines


def _tail(result: Mapping[str, Any]) -> list[str]:
    lines = [
        "in percent; mean and sample deviation (+-) over seeds of the mean over all test queries; as in the paper a query "
        "without a relevant document counts 1 in the first table",
        "gain 2^y - 1, discount 1 / log2(rank + 1), ties in input order",
        "p: the best row against each other, paired permutation test over queries of values averaged over seeds, "
        "Holm-corrected",
        TRANSPOSED,
    ]
    if any(row["paper"] for row in result["rows"].values()) and any(fold["differences"] for fold in result["folds"]):
        lines.append("these are not the published lists: the differences to the paper's numbers mean nothing")
    for claim in result["claims"]:
        verdict = {True: "HELD here", False: "NOT HELD here", None: "not judged"}[claim["held"]]
        lines.append(f'the paper\'s claim "{claim["claim"]}": {verdict}: {claim["because"]}')
    lines += [f"skipped: {ROWS[name].title}: {why}" for name, why in result["skipped"].items()]
    lines += [f"failed: {sentence}" for sentence in result["failed"]]
    return [*lines, f"the table is in {result['table']}; report: {result['report']}"]


def _ranked(result: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """In the order of the paper's table, which is that of ROWS."""
    return [(name, result["rows"][name]) for name in ROWS if name in result["rows"]]


def percent(value: float | None) -> str:
    """A share in percent, two decimals; nothing where there is none."""
    return "" if value is None else f"{100 * value:.2f}"


def short_p(value: float | None) -> str:
    """A p-value in five characters at most; nothing where there is none."""
    if value is None:
        return ""
    return "<.001" if value < 0.001 else f"{value:.3f}".lstrip("0") if value < 1 else "1"


def _pipes(rows: Sequence[Sequence[str]]) -> str:
    header, *lines = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    rule = ["---", *(["---:"] * (len(header) - 1))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *lines))
