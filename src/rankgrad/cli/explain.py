"""`rankgrad explain`: what a ranking rests on."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from rankgrad.cli.options import (
    DataSource,
    Json,
    Networks,
    Quiet,
    RunFolders,
    Split,
    examples,
    expect_runs_and_data,
    show,
)

if TYPE_CHECKING:
    from rankgrad.explain.explanation import Explained, Explanation, Missed

SHOWN = 10  # features, or groups of them
EXAMPLES = examples(
    "rankgrad explain runs/first data/",
    "rankgrad explain runs/first data/ --query 17 --document 230 --above 225",
    "rankgrad explain runs/first data/ --metric map --repeats 10 --queries 200",
)


def explain(
    runs: RunFolders,
    data: DataSource,
    split: Split = "test",
    metric: Annotated[str | None, typer.Option(help="Whose loss is looked at. [that of the run's validation]")] = None,
    queries: Annotated[int, typer.Option(help="At most so many, of those with a relevant document.")] = 1_000,
    repeats: Annotated[int, typer.Option(help="How many times a feature is permuted.")] = 3,
    correlated: Annotated[
        float, typer.Option(help="Features correlated by so much within lists are permuted together too.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(help="Of the permutations.")] = 0,
    query: Annotated[
        str | None, typer.Option(metavar="ID", help="Explain scores of this query. [ranked worst]")
    ] = None,
    document: Annotated[
        str | None, typer.Option(metavar="ID", help="Which document: its id, or its row from 1. [ranked first]")
    ] = None,
    above: Annotated[
        str | None, typer.Option(metavar="ID", help="Why it stands above this one. [the best of the others]")
    ] = None,
    model: Networks = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Which features a run needs, and why it ranks as it does.

    Importances: what the metric loses, with a 95 % interval over queries, where the values of a feature, or of correlated
    ones together, are dealt out anew among the documents of each list (within), and among all documents (across).

    Attributions, of networks: what each feature gives to the score of a document above that of its list's mean, and above
    that of another document. They sum to the difference of the scores, but for a remainder, which is given.

    A single run keeps what was found in its folder, where `rankgrad report` shows it.
    """
    import dataclasses

    from rich.progress import Progress

    from rankgrad.explain.explanation import Explanation, explain_runs
    from rankgrad.training.network import import_network
    from rankgrad.training.progress import make_bar

    expect_runs_and_data(runs, data, "explain them on")
    events = explain_runs(
        runs,
        data,
        split=split,
        metric=metric,
        queries=queries,
        repeats=repeats,
        seed=seed,
        correlated=correlated,
        query=query,
        document=document,
        above=above,
        networks=[import_network(name) for name in model or ()],
    )
    found: Explanation | None = None
    with make_bar(*Progress.get_default_columns(), quiet=quiet, transient=True) as bar:
        task = bar.add_task("permuting", total=None)
        for event in events:
            if isinstance(event, Explanation):
                found = event
            else:
                bar.update(task, completed=event.done, total=event.of)
    assert found is not None
    result = {"runs": [str(run) for run in runs], **dataclasses.asdict(found)}
    text = describe(found)
    show(result, lambda _: text, as_json=as_json, quiet=quiet)


def describe(found: "Explanation") -> str:
    """What `explain_runs` found: the features and groups that are missed most, and why documents have their scores."""
    from rankgrad.runs.significance import LEVEL
    from rankgrad.runs.text import table

    rule = f"{LEVEL:.0%} interval"
    rows = [["feature", "within", rule, "across", rule]]
    rows += [[_named(one.features), *_format_missed(one)] for one in found.features[:SHOWN]]
    lines = [table(rows), *_more(found.features)]
    if found.groups:
        rows = [[f"correlated by {found.correlated:g}", "within", rule, "across", rule]]
        rows += [[_named(one.features), *_format_missed(one)] for one in found.groups[:SHOWN]]
        lines += ["", table(rows), *_more(found.groups)]
    lines += [
        f"loss of {found.metric} ({found.value:.4f} as it is) by permuting within lists, and across them",
        f"{found.queries:,} {'query' if found.queries == 1 else 'queries'} with a relevant document, permuted {found.repeats} times; seed {found.seed}",
    ]
    for example in found.examples:
        lines += ["", _describe_example(example)]
    return "\n".join([*lines, *([found.note] if found.note else [])])


def _describe_example(example: "Explained") -> str:
    from rankgrad.inert import inert
    from rankgrad.runs.text import table

    own = example.attribution
    beside = (
        f"document {inert(example.against, 30)} (place {example.against_place})"
        if example.against
        else "its list's mean"
    )
    largest = sorted(own.contributions, key=lambda one: -abs(one.amount))[:SHOWN]
    head = ("feature", "gives", "value", "other's value" if example.against else "list's mean")
    rows = [(inert(one.feature, 30), f"{one.amount:+.4f}", _value(one.value), _value(one.reference)) for one in largest]
    rest = sum(one.amount for one in own.contributions) - sum(one.amount for one in largest)
    return (
        f"query {inert(example.query, 30)}: document {inert(example.document, 30)} (place {example.place})\nagainst {beside}\n"
        f"{table([head, *rows])}\n"
        f"{len(own.contributions) - len(largest)} other features give {rest:+.4f}, all of them {own.score - own.reference - own.remainder:+.4f}\n"
        f"scores {own.score:.4f} and {own.reference:.4f}, difference {own.score - own.reference:+.4f}, remainder {own.remainder:+.2g}"
    )


def _value(value: float | str) -> str:
    from rankgrad.inert import inert

    return inert(value, 16) if isinstance(value, str) else "missing" if value != value else f"{value:.5g}"


def _named(features: Sequence[str]) -> str:
    from rankgrad.inert import inert

    more = f" and {len(features) - 1} more" if len(features) > 1 else ""
    return f"{inert(features[0], 24 - len(more))}{more}"


def _format_missed(one: "Missed") -> list[str]:
    return [text for of in (one.within, one.across) for text in (f"{of.loss:.4f}", f"[{of.low:.4f}, {of.high:.4f}]")]


def _more(missed: Sequence["Missed"]) -> list[str]:
    return [f"and {len(missed) - SHOWN} more, which are missed less"] if len(missed) > SHOWN else []
