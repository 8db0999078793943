"""How Sphinx builds the site (`make docs`): from the repository's pages where they lie, and from the docstrings."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments.lexers.special import TextLexer

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
sys.path.insert(0, str(Path(__file__).parent))
import state_machines
from diagrams import svg

project = "midstream"
release = version_of(project)
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/site/index"
include_patterns = ["*.md", "docs/**", "benchmarks/**", "examples/**"]
exclude_patterns = [".*", "out", "state", "src", "tests"]  # not to be looked through

myst_heading_anchors = 4  # the same as on a forge, so links work on both
default_role = "code"  # the docstrings are in Markdown
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
maximum_signature_line_length = 100

html_theme = "furo"
html_title = f"{project} {release}"
html_copy_source = False

_BELOW = {"docs/decisions/README": "0*", "benchmarks/README": "peers/*/README"}
"""Pages that have others below them in the navigation."""
_NAMES = r"`\w+`(?:, `\w+`)*"
_PARAMETER = re.compile(rf"(?:^|(?<=[.;] ))(?={_NAMES}: )")
_RESULT = re.compile(r"(?<=[.;] )(?=(?:Returns?|Raises?) )")


def setup(app: Any) -> None:
    app.add_lexer("mermaid", TextLexer)  # for output that is not HTML; it keeps them as text
    app.connect("source-read", _add_pages_below)
    app.connect("source-read", _add_tables)
    app.connect("doctree-resolved", _draw_diagrams)
    app.connect("autodoc-process-docstring", _as_restructured_text)


def _add_pages_below(app: Any, name: str, source: list[str]) -> None:
    if name in _BELOW:
        source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n\n{_BELOW[name]}\n```\n"


def _add_tables(app: Any, name: str, source: list[str]) -> None:
    if name == "docs/internals/state-machines":
        source[0] = state_machines.page()


def _draw_diagrams(app: Any, doctree: Any, name: str) -> None:
    """A forge draws Mermaid; here `diagrams.py` does, so that the site needs neither a script nor a network."""
    if app.builder.format != "html":
        return
    for block in list(doctree.findall(nodes.literal_block)):
        if block.get("language") == "mermaid":
            block.replace_self(nodes.raw("", svg(block.astext()), format="html"))


def _as_restructured_text(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Parameters become a list; what is indented is an example, and becomes code."""
    made: list[str] = []
    was_example = False
    for paragraph in "\n".join(lines).split("\n\n"):
        is_example = paragraph.startswith("    ")
        if is_example and not was_example:
            made += [f".. code-block:: {'pycon' if paragraph.startswith('    >>>') else 'python'}", ""]
        made += [*(paragraph.split("\n") if is_example else _with_parameters(paragraph)), ""]
        was_example = is_example
    lines[:] = made


def _with_parameters(paragraph: str) -> Iterator[str]:
    """Lines of a paragraph, where each parameter that begins a sentence is an item of a list."""
    if not _PARAMETER.search(" ".join(paragraph.split("\n"))):
        yield from paragraph.split("\n")
        return
    for sentences in _PARAMETER.split(" ".join(paragraph.split("\n"))):
        described, *results = _RESULT.split(sentences, maxsplit=1)
        yield from (f"- {described}" if re.match(_NAMES + ": ", described) else described, "", *results, "")
