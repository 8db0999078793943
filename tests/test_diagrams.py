"""The site's drawings of the Mermaid diagrams in the pages."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs" / "site"))

from diagrams import diagrams_of, svg

ROOT = Path(__file__).resolve().parents[1]
DIAGRAMS = [
    pytest.param(diagram, id=f"{page.stem}-{number}")
    for page in sorted(ROOT.glob("docs/**/*.md"))
    for number, diagram in enumerate(diagrams_of(page.read_text(encoding="utf-8")), 1)
]


def texts(drawing: str) -> list[str]:
    elements = ElementTree.fromstring(drawing).iter("{http://www.w3.org/2000/svg}text")
    return [element.text or "" for element in elements]


@pytest.mark.parametrize("diagram", DIAGRAMS)
def test_every_diagram_of_the_pages_is_drawn_with_all_its_words(diagram):
    shown = set(" ".join(texts(svg(diagram))).split())
    for line in diagram.splitlines()[1:]:
        said = re.sub(r"^\s*(?:(?:participant|Note over) \S+ (?:as )?|loop |[^:]*: )", "", line)
        assert line.strip() == "end" or "[*]" in line or set(said.split()) <= shown, line


def test_transitions_with_the_same_event_and_next_state_share_an_arrow():
    drawing = svg(
        "stateDiagram-v2\n    [*] --> A\n    A --> B: GO\n    A --> C: END\n    B --> C: END\n    C --> [*]\n"
    )
    assert texts(drawing) == ["● A", "B", "◉ C", "GO", "END"]
    assert drawing.count('class="head"') == 2
    assert drawing.count('class="dot"') == 3


def test_an_arrow_between_its_sources_comes_from_both_sides():
    drawing = svg("stateDiagram-v2\n    A --> B: X\n    C --> B: X\n    B --> C: Y\n")
    assert drawing.count('class="head"') == 3


def test_messages_notes_and_loops_are_drawn_in_order():
    drawing = svg(
        "sequenceDiagram\n    participant A as one\n    participant B as the other\n    loop until done\n"
        "        A->>B: ask <this>\n        B-->>A: answer\n    end\n    Note over A,B: later\n    A->>A: think\n"
    )
    assert texts(drawing) == ["one", "the other", "until done", "ask <this>", "answer", "later", "think"]
    assert drawing.count('class="frame"') == 1
    assert drawing.count('class="arrow answer"') == 1


@pytest.mark.parametrize(
    ("diagram", "why"),
    [
        ("flowchart LR\n    A --> B\n", "'flowchart LR' is neither"),
        ("stateDiagram-v2\n    A => B\n", "no transition: 'A => B'"),
        ("sequenceDiagram\n    alt else\n", "not understood: 'alt else'"),
    ],
)
def test_what_cannot_be_drawn_is_named(diagram, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        svg(diagram)
