"""Names are data: ids, names of features, runs and levels, and configuration strings steer neither a page, a terminal nor a file.

A try is one hostile name on one surface: it is put in every place of that surface where somebody else's text may stand, and what
comes out is read as its reader would: the page by an HTML parser and a browser, the terminal's text letter by letter, the files by
their formats. All in this process.
"""

import contextlib
import csv
import dataclasses
import importlib.util
import io
import json
import os
import random
import shutil
import sys
import tempfile
import tomllib
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from reliability.promise import Promise, Tally

PIECES = (
    # markup
    "<script>window.pwned=1</script>",
    "</script><script>window.pwned=1</script>",
    "</title><script>window.pwned=1</script>",
    "</style><style>*{display:none}</style>",
    "\"><img src=x onerror='window.pwned=1'>",
    "' onmouseover='window.pwned=1' x='",
    "<svg/onload=window.pwned=1>",
    "<svg><style>@import url(http://127.0.0.1/x)</style></svg>",
    "<a href=javascript:window.pwned=1>x</a>",
    "javascript:window.pwned=1",
    "<iframe srcdoc='<script>parent.pwned=1</script>'>",
    "<base href=//127.0.0.1/>",
    "<meta http-equiv=refresh content='0;url=http://127.0.0.1/'>",
    "<form action=http://127.0.0.1/><button autofocus>",
    "<link rel=stylesheet href=http://127.0.0.1/x>",
    "<math><mtext></p><style><!--</style><img title='--><img src=x onerror=window.pwned=1>'>",
    "<!-- ",
    "--> <b>",
    "]]><![CDATA[",
    "&lt;script&gt;&amp;#60;img&#x3e;",
    "{{ 7 * 7 }}{% raw %}{{ self.__init__.__globals__ }}",
    "expression(alert(1)); background: url(http://127.0.0.1/x)",
    "#000001 #000009 url(#f1-m) $x^2$",
    # what a terminal obeys
    "\x1b[31mred\x1b[0m",
    "\x1b[2J\x1b[H",
    "\x1b]0;title\x07",
    "\x1b]8;;http://127.0.0.1/\x1b\\link\x1b]8;;\x1b\\",
    "\x1b]52;c;cHduZWQ=\x07",
    "\x1bP+q544e\x1b\\",
    "\x1b[6n\x1b[?1049h",
    "\x9b31mC1\x9d0;title\x9c",
    "\x90\x98\x9e\x9f",
    "over\rwritten",
    "back\b\b\b\bspace",
    "bell\a",
    "shift\x0eout\x0f",
    "del\x7fete",
    "\x00nul",
    "[bold red]markup[/bold red]",
    "[link=http://127.0.0.1/]link[/link][/]",
    ":smile: [blink]x",
    # what turns or hides text
    "\u202egnp.exe",
    "\u2066\u2067\u2068x\u2069",
    "\u061c\u200e\u200fmarks",
    "a\u200bzero\ufeffwidth\u00ad",
    "\U000e0041\U000e0042tags",
    "next\u0085line\u2028para\u2029graph",
    "\ud800lone\udfff",
    "\ufffe\uffff",
    "e" + "\u0301" * 200,
    # what a spreadsheet computes
    "=cmd|' /C calc'!A0",
    '=HYPERLINK("http://127.0.0.1/","x")',
    "+1+1",
    "-2+3+cmd|' /C calc'!A0",
    "@SUM(1+1)",
    "\t=1+1",
    "\r=1+1",
    " =1+1",
    '","=1+1","',
    "-1",
    # what ends a line, a field or a path
    "two\nlines",
    "7 Q0 other 1 99 forged",
    "carriage\r\nreturn",
    "tab\tbed",
    "../../../../outside",
    "/absolute",
    "..",
    "~root",
    "C:\\windows\\system32",
    "CON",
    "nul.txt",
    "aux. ",
    "-rf",
    "--help",
    "$(touch outside)`touch outside`;|&",
    "%s%n%x{0}{name}",
    '"]\n[train]\nepochs = 99\n#',
    "\\",
    "'\"",
    " ",
    # what has no end
    "x" * 1_000_000,
    "<b>" * 300_000,
)
# A page's own elements; a name must make no other, and no attribute or address beside the page's.
MARKUP = set("a b base button form iframe img input link math meta object script style svg template video".split())


def hostile(times: int, seed: int) -> list[str]:
    """So many names: every piece, then mixtures of two to four short ones."""
    mixed, short = random.Random(seed), [piece for piece in PIECES if len(piece) < 1_000]
    more = ("".join(mixed.choices(short, k=mixed.randint(2, 4))) for _ in range(max(0, times - len(PIECES))))
    return [*PIECES[:times], *more] if times >= len(PIECES) else random.Random(seed).sample(PIECES, times)


def steering(text: str) -> str:
    """What in a text would steer a terminal or turn other text, "" if nothing: control and format characters but line feeds."""
    kinds = {letter: unicodedata.category(letter) for letter in set(text) - {"\n", "\u200c", "\u200d"}}
    found = sorted(letter for letter, kind in kinds.items() if kind in ("Cc", "Cf", "Cs", "Zl", "Zp"))
    return "".join(found).encode("unicode_escape").decode()


def called(*arguments: Any) -> tuple[int, str, str]:
    """The command in this process: exit code, stdout, stderr."""
    from rankgrad.cli import main

    out, err, before, given = io.StringIO(), io.StringIO(), warnings.showwarning, sys.argv
    sys.argv = ["rankgrad", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("always")
            main()
    except SystemExit as end:
        return int(end.code or 0), out.getvalue(), err.getvalue()
    finally:
        sys.argv, warnings.showwarning = given, before
    raise AssertionError("the command did not exit")


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """An empty folder to work in, inside another one: what climbs out of it is seen."""
    here, outside = Path.cwd(), Path(tempfile.mkdtemp(prefix="names-"))
    inside = outside / "a" / "b" / "c" / "d" / "e"
    inside.mkdir(parents=True)
    os.chdir(inside)
    try:
        yield inside
    finally:
        os.chdir(here)
        shutil.rmtree(outside, ignore_errors=True)


def as_folder(name: str) -> str:
    """A name as a file system can have it."""
    text = name.replace("/", "\u2044").replace("\0", "\u2400").encode("utf-8", "surrogatepass")[:200]
    text = text.decode("utf-8", "ignore")
    return text if text.strip(". ") else f"x{text}"


def storable(name: str) -> str:
    """A name as a table can hold it: its texts are valid Unicode, and ids have no NUL."""
    return name.encode("utf-8", "backslashreplace").decode().replace("\0", "\u2400")


# --- the page ---------------------------------------------------------------------------------------------------------


class Outline(HTMLParser):
    """What a page is made of: its elements, the names of their attributes, and its addresses."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.attributes: set[tuple[str, str]] = set()
        self.addresses: set[str] = set()
        self.counts: dict[str, int] = {}
        self.text: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.counts[tag] = self.counts.get(tag, 0) + 1
        for name, value in attrs:
            self.attributes.add((tag, name))
            if name in ("href", "src", "action", "style", "content", "http-equiv", "xlink:href"):
                self.addresses.add(f"{tag} {name} {value}")

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def handle_comment(self, data: str) -> None:
        self.elements.add(f"comment {data[:20]}")


def write_run(folder: Path, name: str, seed: int) -> Path:
    """A run's folder in which every text is the name: ids of queries and documents, features, levels, configuration, facts."""
    from rankgrad.data.dataset import RankingDataset
    from rankgrad.explain.attribution import Attribution, Contribution
    from rankgrad.explain.explanation import Explained, Explanation, Missed
    from rankgrad.explain.importance import Importance
    from rankgrad.runs.folder import (
        CURVE,
        EXPLANATION,
        REPORT,
        identity_of,
        make_folder,
        write_per_document,
        write_per_query,
        write_sealed,
    )
    from rankgrad.training.config import Config, Data, Loss, Model, Train
    from rankgrad.training.evaluate import measure, summarise

    rng, queries, size = np.random.default_rng(7), 4, 4
    labels = rng.integers(0, 2, queries * size)
    labels[::size] = 1
    id_of = name.replace("\0", "\u2400")
    data = RankingDataset(
        rng.normal(size=(queries * size, 2)),
        labels,
        size * np.arange(queries + 1),
        np.array([f"{id_of}{number}" for number in range(queries)], object),
        document_ids=np.array([f"{id_of}{number}" for number in range(queries * size)], object),
    )
    noise = np.random.default_rng(seed).normal(size=len(labels))
    config = Config(
        data=Data(storable(name), qid=storable(name)),
        model=Model(kind=storable(name)),
        loss=Loss(storable(name), {storable(name): storable(name)}),
        train=Train(metric=storable(name)),
    )
    make_folder(folder, config)
    identity, metrics = identity_of(folder), ("ndcg@10", "map")
    values = measure(labels + noise, data, [*metrics, *CURVE.values()])
    write_per_query(folder, "test", data, values, metrics, identity)
    write_per_document(folder, data, labels + noise, identity)
    epochs = [{"epoch": e, "loss": 1 / e, "metric": 0.5 + 0.1 * e, "best": True, "lr": 0.1} for e in (1, 2)]
    (folder / "history.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in epochs))
    member = {"member": name, "loss": name, "lr": 0.1, "dropout": 0.1, "weight_decay": 0.1, "best_epoch": name}
    facts: dict[str, Any] = dict.fromkeys(
        ("name", "loss", "data", "seed", "commit", "convention", "best_epoch", "epochs", "processes"), name
    )
    facts |= {"metrics": {"test": summarise({of: values[of] for of in metrics})}, "splits": {name: {}}}
    facts |= {
        "versions": {name: name},
        "machine": {name: name},
        "members": [{**member, "validation": 0.5, "kept": True}],
    }
    write_sealed(folder, REPORT, facts)
    missed = tuple(
        Missed(of, *2 * (Importance(of, 0.1, 0.0, 0.2),)) for of in ((name,), (name, f"{name}2", name, name, name))
    )
    given = tuple(Contribution(f"{name}{number}", 0.1 * number, name, name) for number in range(20))
    why = Explained(name, name, name, 1, 2, Attribution(1.0, 0.5, given, 0.3))
    found = Explanation(name, name, name, 0.5, 3, 1, 0, 0.8, missed * 10, missed[1:], (why,), name)
    write_sealed(folder, EXPLANATION, dataclasses.asdict(found))
    return folder


def write_page(name: str, runs: int) -> str:
    """The page of runs whose every text is a name."""
    from rankgrad import report

    with workplace() as here, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # glyphs that a typeface lacks
        folders = [write_run(here / f"{as_folder(name)}{number}", name, number) for number in range(runs)]
        report.write(folders, here / "page.html", title=name)
        return (here / "page.html").read_text(encoding="utf-8")


PLAIN: dict[int, tuple[str, Outline]] = {}  # the page of a harmless name, by the number of runs


def plain_page(runs: int) -> tuple[str, Outline]:
    if runs not in PLAIN:
        page = write_page("name", runs)
        PLAIN[runs] = page, Outline(page)
    return PLAIN[runs]


def wrong_in_page(page: str, runs: int) -> str:
    """What a name has made of a page, beside one of the same runs with a harmless name."""
    plain, usual = plain_page(runs)
    found = Outline(page)
    more = {tag: n for tag, n in found.counts.items() if tag in MARKUP and n != usual.counts.get(tag, 0)}
    odd = sorted(found.elements - usual.elements) or sorted(found.attributes - usual.attributes) or more
    if odd:
        return f"the name made {str(odd)[:200]}"
    if addresses := {of for of in found.addresses - usual.addresses if not _is_drawn(of)}:
        return f"the name made the address {sorted(addresses)[0][:200]}"
    if "default-src 'none'" not in page.partition("<title>")[0]:
        return "there is no policy before the first name"
    if control := steering("".join(found.text)):
        return f"the page shows {control}"
    return "" if len(page) < 40 * len(plain) else f"the page has {len(page):,} characters"


def _is_drawn(address: str) -> bool:
    """Styles of curves and ids of marks differ with the numbers that are drawn."""
    kind = address.split(" ", 2)
    return (kind[1] == "style" and "url(" not in kind[2].replace("url(#", "")) or kind[2].startswith("#")


def try_pages(times: int, seed: int) -> Tally:
    counted = Tally()
    for at, name in enumerate(hostile(times, seed)):
        runs = 1 + at % 2  # alone it has its hardest queries, beside another those won and lost
        counted.add(_said(name, wrong_in_page(write_page(name, runs), runs)))
    return counted


def try_browser(times: int, seed: int) -> Tally:
    """Pages in Chromium, with the policy and, as other programs may take it away, without."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "report"))
    from browser import CHROMIUM, Browser

    counted = Tally()
    if CHROMIUM is None:
        counted.note = "no browser was found: not tried"
        return counted
    with workplace() as here:
        browser = Browser(str(here / "profile"))
        try:
            for name in hostile(times, seed):
                page = write_page(name, 2)
                for policy in (True, False):
                    file = here / "page.html"
                    file.write_text(page if policy else page.replace('http-equiv="Content-Security-Policy"', ""))
                    browser.open(file.as_uri(), 1200)
                    asked = [of for of in browser.requests() if of not in (file.as_uri(), "data:,")]
                    drawn = browser.ask(
                        "[...document.querySelectorAll('main svg[role=img]')].every(s => s.clientWidth > 99)"
                    )
                    wrong = (
                        (browser.ask("'pwned' in window") and "a script of the name ran")
                        or (asked and f"the page asked for {asked[0]}")
                        or (not drawn and "a figure is not seen")
                        or (
                            policy
                            and browser.complaints()
                            and f"the browser complains: {str(browser.complaints()[0])[:200]}"
                        )
                    )
                    counted.add(_said(name, wrong or ""))
        finally:
            browser.close()
    return counted


# --- the terminal -----------------------------------------------------------------------------------------------------


def write_tables(folder: Path, names: Sequence[str], seed: int = 0) -> Path:
    """Parquet files whose features, query ids, document ids and levels are the names."""
    import pyarrow
    from pyarrow import parquet

    folder.mkdir(parents=True)
    given = list(dict.fromkeys(map(storable, names)))
    rng, size = np.random.default_rng(seed), 4
    for split, first in (("train", 0), ("vali", 1000), ("test", 2000)):
        queries = [of if first == 2000 and number == 0 else f"{of}{first + number}" for number, of in enumerate(given)]
        queries += [f"q{first + number}" for number in range(max(0, 6 - len(given)))]
        rows = size * len(queries)
        columns: dict[str, Any] = {
            "label": rng.integers(0, 3, rows),
            "qid": [query for query in queries for _ in range(size)],
            "document": [f"{given[row % len(given)]}{row}" for row in range(rows)],
            "kind": [given[(row // 2) % len(given)] for row in range(rows)],
            **{of: rng.normal(size=rows).astype(np.float32) for of in given if of not in ("label", "qid", "document")},
        }
        parquet.write_table(pyarrow.table(columns), folder / f"{split}.parquet")
    return folder


TRAINED = ("--set", "data.document=document", "--set", "data.categorical=['kind']", "--model", "linear", "--epochs", 1)


def commands(names: Sequence[str]) -> Iterator[tuple[str, tuple[int, str, str]]]:
    """Every command that shows names, on data and runs called by them: which it was, and what came of it."""
    data, runs = write_tables(Path("data") / as_folder(names[0]), names), Path("runs")
    first, second = (runs / f"{as_folder(of)}{at}" for at, of in enumerate((names[-1], names[0])))
    yield "train", called("train", data, *TRAINED, "--out", first)
    yield "train --json", called("train", data, *TRAINED, "--seed", 1, "--out", second, "--json")
    yield "explain", called("explain", first, data, "--repeats", 1)
    yield "compare", called("compare", first, second)
    yield "train --init", called("train", data, "--init", first, "--epochs", 1, "--out", runs / "third")
    yield "evaluate", called("evaluate", first, data)
    yield "evaluate two", called("evaluate", first, second, data)
    yield "evaluate --json", called("evaluate", first, data, "--json")
    yield "report", called("report", first, second, "--out", f"{as_folder(names[0])}.html")
    yield "explain --query", called("explain", first, data, "--repeats", 1, "--query", storable(names[0]))
    yield "explain --json", called("explain", first, data, "--repeats", 1, "--json")
    yield "rank csv", called("rank", first, data, "--format", "csv")
    yield "rank trec", called("rank", first, data, "--format", "trec")
    yield "prepare", called("prepare", data, "--out", f"{as_folder(names[0])}.prepared", *TRAINED[:4])
    yield "info", called("info")


def wrong_in_text(code: int, out: str, err: str, expected: Sequence[int] = (0, 2), *, whole: bool = False) -> str:
    """What is wrong with the output of a command; `whole`: stdout is for machines, and holds names of any length."""
    if code not in expected:
        return f"exit code {code}: {err[-200:]!r}"
    for what, text in (("stdout", out), ("stderr", err)):
        if control := steering(text):
            return f"{what} holds {control}"
        if max(map(len, text.split("\n"))) > 10_000 and not (whole and what == "stdout"):
            return f"{what} has a line of {max(map(len, text.split(chr(10)))):,} characters"
    return ""


def try_terminal(times: int, seed: int) -> Tally:
    """Names by the half dozen, so that all of them are in the data of every command."""
    counted, names = Tally(), hostile(times, seed)
    for at in range(0, len(names), 6):
        with workplace():
            for command, found in commands(names[at : at + 6]):
                wrong = wrong_in_text(*found, whole=command.endswith("--json") or command.startswith("rank"))
                if command not in ("rank trec", "train --init") and found[0]:
                    wrong = wrong or f"refused: {found[2][:200]!r}"
                for name in names[at : at + 6]:
                    counted.add(_said(name, wrong and f"{command}: {wrong}"))
    return counted


def mistakes(name: str) -> list[tuple[Any, ...]]:
    """Commands in which a name is a mistake, of the user's or of a file's."""
    text = name.replace("\0", "\u2400")[:100_000].encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")
    (Path("bad.toml")).write_text(f"[train]\n{json.dumps(storable(name))} = 3\n", encoding="utf-8")
    (Path("bad.csv")).write_bytes(b"label,qid,a\n1,1,2\n0,1," + name.encode("utf-8", "surrogatepass")[:5_000] + b"\n")
    (Path("bad.txt")).write_bytes(b"1 qid:1 1:0.5\n0 qid:1 1:" + name.encode("utf-8", "surrogatepass")[:5_000] + b"\n")
    return [
        ("train", text),
        ("train", "bad.toml"),
        ("train", "bad.csv"),
        ("train", "bad.txt"),
        ("train", "synthetic:tiny", f"--loss={text}"),
        ("train", "synthetic:tiny", f"--metric={text}"),
        ("train", "synthetic:tiny", f"--model={text}"),
        ("train", "synthetic:tiny", f"--set={text}"),
        ("train", "synthetic:tiny", f"--set=train.{text}=1"),
        ("train", "synthetic:tiny", f"--recipe={text}"),
        ("train", "synthetic:tiny", f"--epochs={text}"),
        ("train", f"--resume={text}"),
        ("evaluate", text, "synthetic:tiny"),
        ("evaluate", f"--scores={text}", "synthetic:tiny"),
        ("rank", text, "bad.txt", f"--format={text}"),
        ("compare", text, text),
        ("report", text),
        ("export", text),
        ("prepare", text, f"--dataset={text}"),
        (text,),
        (f"--{text}",),
    ]


def try_mistakes(times: int, seed: int) -> Tally:
    """A sentence on one line, whatever the name is."""
    counted = Tally()
    for name in hostile(times, seed):
        with workplace():
            for arguments in mistakes(name):
                code, out, err = called(*arguments)
                wrong = wrong_in_text(code, out, err, expected=(0, 2))
                if not wrong and code == 2 and (err.count("\n") != 1 or out):
                    wrong = f"{err.count(chr(10))} lines instead of one: {err[:200]!r}"
                counted.add(_said(name, wrong and f"{str(arguments)[:60]}: {wrong}"))
    return counted


def try_bars(times: int, seed: int) -> Tally:
    """A terminal, made of a pseudo-terminal, beside which a run with hostile names trains and is explained: bars obey no name."""
    import pty

    counted = Tally()
    for name in hostile(times, seed):
        with workplace() as here:
            data = write_tables(here / "data" / as_folder(name), [name, "b", "c"])
            parent, child = pty.fork()
            if not parent:
                os.environ["TERM"] = "xterm"
                code = 1
                with contextlib.suppress(BaseException):
                    code = _on_terminal(data, here / as_folder(name))
                os._exit(code)
            shown = bytearray()
            with contextlib.suppress(OSError):  # the other end is closed
                while part := os.read(child, 1 << 16):
                    shown += part
            os.close(child)
            code = os.waitstatus_to_exitcode(os.waitpid(parent, 0)[1])
            text = shown.decode("utf-8", "replace")
            own = name if steering(name) else ""
            wrong = ("the name itself was written" if own and storable(own)[:50] in text else "") or (
                f"exit code {code}: {text[-200:]!r}" if code else "" if "epoch" in text else f"no bar: {text[-200:]!r}"
            )
            for bad in ("\x1b]", "\x1bP", "\x9b", "\x9d", "\x90", "\u202e"):
                wrong = wrong or (f"{bad!r} was written" if bad in text else "")
            counted.add(_said(name, wrong))
    return counted


def _on_terminal(data: Path, run: Path) -> int:
    """In the child: train and explain with bars."""
    import torch

    from rankgrad.cli import main

    torch.set_num_threads(1)
    for arguments in (("train", data, *TRAINED, "--out", run), ("explain", run, data, "--repeats", 1)):
        sys.argv = ["rankgrad", *map(str, arguments)]
        try:
            main()
        except SystemExit as end:
            if end.code:
                return int(end.code)
    return 0


# --- files ------------------------------------------------------------------------------------------------------------


def _lists(name: str) -> Any:
    from rankgrad.data.dataset import RankingDataset

    own = name.replace("\0", "\u2400")
    return RankingDataset(
        np.zeros((4, 1)),
        [1, 0, 2, 0],
        [0, 2, 4],
        np.array([own, "other"], object),
        document_ids=np.array([own, f"{own}2", "3", own], object),
    )


def try_csv(times: int, seed: int) -> Tally:
    """No cell is a formula, no row two lines, and the scores are found again by the names in the file, or it is refused."""
    from rankgrad.cli.render import as_csv
    from rankgrad.runs.elsewhere import read_scores

    csv.field_size_limit(10_000_000)
    counted, scores = Tally(), np.array([0.5, -1.5, 2.0, -0.25])
    for name in hostile(times, seed):
        lists = _lists(name)
        text = "".join(as_csv(lists, scores, "tag"))
        lines, rows = text.split("\n"), list(csv.reader(io.StringIO(text)))
        cells = [cell for row in rows[1:] for cell in (row[0], row[1])]
        formula = [
            cell for cell in cells if cell.lstrip(" ")[:1] in {*"=+-@\t\r"} and cell.strip() and not _number(cell)
        ]
        wrong = (
            (steering(text) and f"the file holds {steering(text)}")
            or (len(lines) != 6 and f"{len(lines) - 1} lines instead of 5")
            or (any(len(row) != 5 for row in rows) and "a row has not five cells")
            or (formula and f"the cell {formula[0][:60]!r} is a formula")
            or ""
        )
        if not wrong:
            with workplace() as here:
                (here / "scores.csv").write_text(text, encoding="utf-8")
                try:
                    again = read_scores(here / "scores.csv", lists)
                    wrong = "" if np.array_equal(again, scores) else f"read again the scores are {again}"
                except ValueError as error:  # CSV's reader trims ids, and takes no line of a megabyte
                    odd = name != name.strip() or len(name) > 100_000
                    wrong = "" if odd and "scores.csv" in str(error) else f"read again: {str(error)[:200]}"
        counted.add(_said(name, wrong))
    return counted


def _number(cell: str) -> bool:
    try:
        return float(cell) is not None
    except ValueError:
        return False


def try_trec(times: int, seed: int) -> Tally:
    """Six words on a line for each document, the name among them as it is; or a refusal."""
    from rankgrad.cli.render import as_trec

    counted = Tally()
    for name in hostile(times, seed):
        lists = _lists(name)
        own = str(lists.query_ids[0])
        try:
            text = "".join(as_trec(lists, np.array([2.0, 1.0, 2.0, 1.0]), name))
        except ValueError as error:
            single = len(own.split()) == 1 and own == own.strip() and not steering(own)
            counted.add(
                _said(
                    name,
                    "refused though it is one word"
                    if single and own.isprintable()
                    else ""
                    if "TREC" in str(error)
                    else str(error),
                )
            )
            continue
        words = [line.split() for line in text.splitlines()]
        whole = len(words) == 4 and all(len(line) == 6 for line in words) and words[0][0] == own == words[0][2]
        counted.add(_said(name, "" if whole and not steering(text) else f"the lines are {words!r:.200}"))
    return counted


def try_kept(times: int, seed: int) -> Tally:
    """What files hold, read again, is the name: configuration, report, history, explanation, per query and per document."""
    from rankgrad.explain.explanation import read_explanation
    from rankgrad.runs.folder import read_per_query
    from rankgrad.training.config import loads

    counted = Tally()
    for name in hostile(times, seed):
        with workplace() as here:
            folder, text = write_run(here / as_folder(name), name, 0), storable(name)
            written = (folder / "config.toml").read_text(encoding="utf-8")
            table, config = tomllib.loads(written), loads(written, "config.toml")
            report = json.loads((folder / "report.json").read_text())
            explained = read_explanation(folder)
            same = {
                "config.toml": table["loss"]["options"] == {text: text} and config.data.path == text,
                "another key of config.toml": config.train.epochs == 100,
                "report.json": report["name"] == name and report["versions"] == {name: name},
                "explanation.json": explained is not None and explained.features[0].features == (name,),
                "queries": read_per_query(folder).query_ids[1] == f"{name}1".replace("\0", "\u2400"),
            }
            for what, whole in same.items():
                counted.add(_said(name, "" if whole else f"{what} does not hold it"))
    return counted


def everything(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")}


def try_paths(times: int, seed: int) -> Tally:
    """What a name makes is inside the folder that output goes to, or it is refused."""
    counted = Tally()
    for name in hostile(times, seed):
        text = name.replace("\0", "\u2400")
        with workplace() as here:
            outside = here.parents[3]
            Path("lists.txt").write_text("1 qid:1 1:0.5\n0 qid:1 1:0.25\n1 qid:2 1:0.5\n0 qid:2 1:0.75\n")
            Path("scores.txt").write_text("1\n2\n3\n4\n")
            before = everything(outside)
            for arguments in (
                ("evaluate", "--scores", "scores.txt", "lists.txt", f"--name={text}"),
                ("train", "lists.txt", f"--loss={text}", "--epochs", 1, "--quiet"),
                ("prepare", "lists.txt", f"--dataset={text}"),
                ("synthetic", f"--out=made/{as_folder(name)}", f"--size={text}"),
            ):
                code, out, err = called(*arguments)
                made = everything(outside) - before
                allowed = {str(here / of) for of in ("runs", "made", "prepared")}
                escaped = [
                    path for path in made if not any(path == of or path.startswith(f"{of}{os.sep}") for of in allowed)
                ]
                wrong = f"{escaped[0]} was made" if escaped else wrong_in_text(code, out, err)
                counted.add(_said(name, wrong and f"{arguments[0]}: {wrong}"))
                before |= made
    return counted


def try_exports(times: int, seed: int) -> Tally:
    """Features called by all the names at once, in what other programs read: ONNX, torch, Solr, XGBoost, LightGBM, TensorBoard."""
    board = importlib.util.find_spec("tensorboard") is not None
    import rankgrad
    from rankgrad.export import export_ranker
    from rankgrad.export.onnx import read_onnx
    from rankgrad.export.program import read_program

    names = list(dict.fromkeys(map(storable, hostile(times, seed))))
    counted = Tally()
    with workplace() as here:
        data = write_tables(here / "data", names)
        plain = ("--model", "linear", "--epochs", 1, "--set", "data.document=document", "--quiet")
        run = here / "run"
        settings = (
            "--set",
            "data.ignore=['kind']",
            "--set",
            "data.scaling=standard",
            "--set",
            f"train.tensorboard={str(board).lower()}",
        )
        first = called("train", data, *plain, *settings, "--out", run)
        ranker = rankgrad.load(run) if not first[0] else None
        own = list(ranker.names or ()) if ranker else []
        found: dict[str, Sequence[str]] = {"the run": own}
        if ranker is not None:
            for form, read in (("onnx", read_onnx), ("torch", read_program)):
                export_ranker(ranker, here / f"file.{form}", form)
                found[form] = read(here / f"file.{form}")["feature_names"]
            export_ranker(ranker, here / "solr.json", "solr")
            found["solr"] = [of["name"] for of in json.loads((here / "solr.json").read_text())["features"]]
        if ranker is not None and board:
            from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

            events = EventAccumulator(str(run / "tensorboard"))
            events.Reload()
            tags = set(events.Tags()["scalars"])
            found["TensorBoard"] = names if tags == {"loss", "ndcg@10"} else sorted(tags)
        for kind in ("lightgbm", "xgboost"):
            trees = here / kind
            options = (
                "--set",
                "data.document=document",
                "--set",
                "data.categorical=['kind']",
                "--quiet",
                "--model",
                kind,
            )
            code, _, err = called("train", data, *options, "--epochs", 2, "--out", trees)
            found[kind] = [err[:200]]
            if not code:
                found[kind] = json.loads((trees / "trees.json").read_text())["feature_names"]
                code, out, err = called("evaluate", trees, data)
                counted.add(wrong_in_text(code, out, err, expected=(0,)))
        for what, held in found.items():
            for name in names:
                counted.add(_said(name, "" if name in held else f"{what} has {str(list(held))[:100]} instead"))
    return counted


def _said(name: str, wrong: str) -> str:
    """A failure with the name that made it."""
    return f"{name.encode('unicode_escape')[:60].decode()}: {wrong}" if wrong else ""


def _promise(surface: str, words: str, times: int, attempt: Callable[[int, int], Tally]) -> Promise:
    return Promise(f"names-{surface}", f"Hostile names are inert {words}", times, attempt)


ALL = len(PIECES)
PROMISES = [
    _promise(
        "page", "in the report's page, with explanations: no element, attribute or address of theirs", ALL, try_pages
    ),
    _promise("browser", "in a browser, with the page's policy and without it", 30, try_browser),
    _promise("terminal", "in what every command prints, to a pipe too", ALL + 20, try_terminal),
    _promise("mistakes", "in errors and warnings, which stay one line", ALL, try_mistakes),
    _promise("bars", "beside progress bars on a terminal", 12, try_bars),
    _promise("csv", "in CSV: no formula, one line a row, read again as they were", 10 * ALL, try_csv),
    _promise("trec", "in TREC runs: six words a line, or refused", 10 * ALL, try_trec),
    _promise("kept", "in a run's own files, and read again as they were", ALL, try_kept),
    _promise("paths", "in paths: nothing is made outside the output folder", ALL, try_paths),
    _promise("exports", "in ONNX, torch, Solr, XGBoost and LightGBM files", ALL, try_exports),
]
