"""Texts of somebody else's (ids, names of features, folders, levels) as they may be shown: they are data and steer nothing.

A control character moves a terminal's cursor, sets its title or makes a link; a bidirectional override turns the text around it;
a cell that begins with = is a formula to a spreadsheet. Imports nothing of rankgrad.
"""

import unicodedata
from collections.abc import Mapping
from typing import Any

SENTENCE = 2_000  # characters of a sentence that are printed, however long a name in it is
VALUE = 4_096  # of one value: a path is never longer
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what begins a formula in Excel, LibreOffice and Google Sheets
WIDE = ("\uff1d", "\uff0b", "\uff0d", "\uff20")  # the same signs as East Asian keyboards write them
JOINERS = "\u200c\u200d"  # Persian, Hindi and many emoji are written with them


def inert(text: str, most: int | None = None) -> str:
    r"""A text as a terminal may show it: control characters written out, cut where it is longer than `most`.

    >>> print(inert("\x1b[31mred"), inert("a_long_name", most=6))
    \x1b[31mred a_lon…
    """
    if most is not None:
        text = text[: most + 1]  # no more is shown
    if not text.isprintable():
        text = "".join(letter if _is_visible(letter) else repr(letter)[1:-1] for letter in text)
    return text if most is None or len(text) <= most else f"{text[: most - 1]}…"


def inert_line(sentence: str) -> str:
    r"""A sentence with names in it as one line, cut in its middle: its end says what to do.

    >>> print(inert_line("there is no\nfile '\x9b1m'; check the path"))
    there is no file '\x9b1m'; check the path
    """
    shown = inert(" ".join(sentence.split()))
    if len(shown) > SENTENCE:
        shown = f"{shown[: SENTENCE // 2]} … {shown[-SENTENCE // 2 :]}"
    return shown


def inert_values(value: Any) -> Any:
    r"""The same values with every text in them inert, keys too.

    >>> inert_values({"run": ["a\nb", 1]})
    {'run': ['a\\nb', 1]}
    """
    if isinstance(value, str):
        return inert(value, VALUE)
    if isinstance(value, Mapping):
        return {inert_values(key): inert_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [inert_values(item) for item in value]
    return value


def inert_cell(value: Any) -> Any:
    r"""A cell of a table that a spreadsheet may open: an apostrophe before what would be a formula. Numbers stay as they are.

    >>> inert_cell("=1+1"), inert_cell("@a"), inert_cell("-1"), inert_cell(-1), inert_cell("a\nb")
    ("'=1+1", "'@a", '-1', -1, 'a\\nb')
    """
    if not isinstance(value, str):
        return value
    shown = inert(value)
    return f"'{shown}" if value.lstrip(" ").startswith(FORMULA + WIDE) and not _is_number(value) else shown


def _is_visible(letter: str) -> bool:
    return letter.isprintable() or letter in JOINERS or unicodedata.category(letter) == "Zs"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text.isascii() and text == text.strip() and "_" not in text
