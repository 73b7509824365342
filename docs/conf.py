"""Sphinx: the guides as they are, and the reference from the docstrings. `make docs` writes build/docs, warnings are errors."""

import dataclasses
import inspect
import re

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList

import rankgrad
from rankgrad.training import config

project = "rankgrad"
author = "the rankgrad contributors"
copyright = author  # noqa: A001 - Sphinx's name for it
version = release = rankgrad.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
exclude_patterns = ["README.md"]  # the same list of pages, for those who read the folder
default_role = "code"
myst_heading_anchors = 3
autodoc_typehints_format = "short"
add_module_names = False  # everything on these pages is imported from rankgrad or from the page's module
smartquotes = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True  # 2.0**100, not its digits
maximum_signature_line_length = 80

html_theme = "furo"
html_title = f"rankgrad {release}"
html_show_sourcelink = False
pygments_style = "friendly"


def without_links_outside(_app, _page, source):
    """Pages also link to files beside the folder docs, which the site does not have: there the text stays alone."""
    source[0] = re.sub(r"\[([^\]]+)\]\(\.\./[^)]+\)", r"\1", source[0])


def as_rst(_app, _what, _name, _object, _options, lines):
    """Our docstrings are plain text: code in backquotes, formulas as they read, tables by spaces. RST reads stars and bars."""
    out = []
    blank, literal, doctest = True, False, False
    for line in lines:
        indented = line.startswith("    ")
        doctest = line.lstrip().startswith(">>>") or (doctest and not blank)
        if indented and blank and not (literal or doctest or _in_list(out)):
            out += [".. code-block:: text", ""]
            literal = True
        elif line and not indented:
            literal = False
        out.append(line if literal or doctest else _escaped(line))
        blank = not line
    lines[:] = out


def _in_list(lines):
    """Whether the paragraph above belongs to a list, whose paragraphs are indented."""
    above = next((line for line in reversed(lines) if line and not line.startswith(" ")), "")
    return above.startswith("- ")


def _escaped(line):
    parts = re.split(r"(`[^`]+`)", line)
    return "".join(
        f"``{part[1:-1]}``" if number % 2 else re.sub(r"([*|@\\]|_(?!\w)|(?<=\w):(?=\w))", r"\\\1", part)
        for number, part in enumerate(parts)
    )


class ConfigurationKeys(Directive):
    """A table for each section of a configuration, from the fields of its dataclass and the comments beside them."""

    def run(self):
        """Nodes for all sections."""
        rows = []
        for section in dataclasses.fields(config.Config):
            rows += self._section(section.name, section.default_factory)
        node = nodes.section(document=self.state.document)
        self.state.nested_parse(StringList(rows, "configuration"), self.content_offset, node, match_titles=True)
        return node.children

    def _section(self, name, kind):
        keys = dataclasses.fields(kind)
        comments = dict(re.findall(r"^    (\w+): [^#\n]*(?:#\s*(.*))?$", inspect.getsource(kind), re.M))
        rows = [f"[{name}]", "-" * (len(name) + 2), "", _escaped(inspect.cleandoc(kind.__doc__)), ""]
        rows += [".. list-table::", "   :header-rows: 1", "   :widths: 30 15 20 55", ""]
        rows += ["   * - key", "     - type", "     - default", "     - meaning"]
        nested = []
        for key in keys:
            default = key.default if key.default is not dataclasses.MISSING else key.default_factory()
            if dataclasses.is_dataclass(default):
                nested += self._section(f"{name}.{key.name}", type(default))
                continue
            shown = "none" if default is None else config._toml(default) if not isinstance(default, dict) else "{}"
            rows += [f"   * - ``{name}.{key.name}``", f"     - {key.type}", f"     - ``{shown}``"]
            rows += [f"     - {_escaped(comments.get(key.name, ''))}"]
        return [*rows, "", *nested]


def setup(app):
    """Called by Sphinx."""
    app.connect("source-read", without_links_outside)
    app.connect("autodoc-process-docstring", as_rst)
    app.add_directive("configuration-keys", ConfigurationKeys)
