"""Draws the Mermaid diagrams of the pages as SVG, without a browser: the forge draws them by itself, Sphinx does not.

Both kinds become a ladder: a column for each participant or state, and below them a line for each message or transition,
from where it comes to where it goes. What this module does not know is a ValueError that names the line.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape

CHARACTER = 6.7
"""The width of a character in pixels, about, in the font of `STYLE`."""
LINE = 15
LABEL_WIDTH_MIN = 30
"""In characters: an arrow between neighbours is shorter than what is said of it."""
MARGIN = 12

STYLE = """
.ladder { font: 12px var(--font-stack--monospace, monospace); max-width: 100%; height: auto; }
.ladder text { fill: var(--color-foreground-primary, #111); text-anchor: middle; }
.ladder .label { paint-order: stroke; stroke: var(--color-background-primary, #fff); stroke-width: 4px; }
.ladder .start { text-anchor: start; }
.ladder rect { fill: var(--color-background-secondary, #f4f4f4); stroke: var(--color-foreground-border, #999); }
.ladder .frame { fill: none; stroke-dasharray: 5 3; }
.ladder .life { stroke: var(--color-foreground-border, #bbb); }
.ladder .arrow { stroke: var(--color-brand-primary, #c2410c); fill: none; stroke-width: 1.4; }
.ladder .answer { stroke-dasharray: 4 3; }
.ladder .dot, .ladder .head { fill: var(--color-brand-primary, #c2410c); stroke: none; }
"""


@dataclass(frozen=True)
class Arrow:
    """`sources`: the columns that it leaves, several if they have the same event and the same next state."""

    sources: tuple[int, ...]
    target: int
    text: str
    is_answer: bool = False


@dataclass(frozen=True)
class Note:
    first: int
    last: int
    text: str


@dataclass(frozen=True)
class Frame:
    """What is repeated: the rows from `first` to before `end`."""

    text: str
    first: int
    end: int


@dataclass
class Ladder:
    names: list[str] = field(default_factory=list)
    rows: list[Arrow | Note] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)


def svg(diagram: str) -> str:
    """The diagram as an `<svg>` element. Raises ValueError if it is of another kind, or a line is not understood."""
    kind, *lines = [line.strip() for line in diagram.strip().splitlines() if line.strip()]
    if kind == "stateDiagram-v2":
        return drawn(states(lines))
    if kind == "sequenceDiagram":
        return drawn(sequence(lines))
    raise ValueError(f"{kind!r} is neither stateDiagram-v2 nor sequenceDiagram")


def states(lines: list[str]) -> Ladder:
    """States in the order in which they occur. `[*]` marks the first and the last ones."""
    ladder = Ladder()
    column: dict[str, int] = {}
    sources: dict[tuple[str, str], list[int]] = {}
    marks: dict[str, str] = {}
    for line in lines:
        found = re.fullmatch(r"(\S+) --> ([^\s:]+)(?:: (.+))?", line)
        if found is None:
            raise ValueError(f"no transition: {line!r}")
        before, after, text = found[1], found[2], found[3] or ""
        if before == "[*]":
            marks[after] = "● "
        elif after == "[*]":
            marks[before] = "◉ "
        for name in (before, after):
            if name != "[*]":
                column.setdefault(name, len(column))
        if "[*]" not in (before, after):
            sources.setdefault((after, text), []).append(column[before])
    ladder.names = [marks.get(name, "") + name.replace("_", " ") for name in column]
    ladder.rows = [Arrow(tuple(found), column[after], text) for (after, text), found in sources.items()]
    return ladder


def sequence(lines: list[str]) -> Ladder:
    ladder = Ladder()
    column: dict[str, int] = {}
    begun: list[tuple[str, int]] = []
    for line in lines:
        if found := re.fullmatch(r"participant (\w+) as (.+)", line):
            column[found[1]] = len(column)
            ladder.names.append(found[2])
        elif found := re.fullmatch(r"(\w+)(-?->>)(\w+): (.+)", line):
            is_answer = found[2] == "-->>"
            ladder.rows.append(Arrow((column[found[1]],), column[found[3]], found[4], is_answer))
        elif found := re.fullmatch(r"Note over (\w+),(\w+): (.+)", line):
            first, last = sorted((column[found[1]], column[found[2]]))
            ladder.rows.append(Note(first, last, found[3]))
        elif found := re.fullmatch(r"loop (.+)", line):
            begun.append((found[1], len(ladder.rows)))
        elif line == "end" and begun:
            ladder.frames.append(Frame(*begun.pop(), len(ladder.rows)))
        else:
            raise ValueError(f"not understood: {line!r}")
    return ladder


def drawn(ladder: Ladder) -> str:
    headers = [name.split(" ") if len(name) > LABEL_WIDTH_MIN // 2 else [name] for name in ladder.names]
    widest = max(len(line) for lines in headers for line in lines)
    pitch = max(widest * CHARACTER + 2 * MARGIN, 730 / len(headers))
    width = pitch * len(headers)
    header_height = LINE * max(map(len, headers)) + MARGIN
    at = [pitch * (n + 0.5) for n in range(len(headers))]
    begins = {frame.first: frame for frame in ladder.frames}
    ends = {frame.end for frame in ladder.frames}
    tops: dict[int, float] = {}
    body: list[str] = []
    y: float = header_height + MARGIN
    for number, row in enumerate(ladder.rows):
        y += MARGIN if number in ends else 0
        if number in begins:
            tops[number] = y
            body.append(_text(4 + MARGIN, y + LINE, begins[number].text, "label start"))
            y += LINE + MARGIN / 2
        parts, y = _note(row, at, pitch, y) if isinstance(row, Note) else _arrow(row, at, width, y)
        body += parts
        for frame in ladder.frames:
            if frame.end == number + 1:
                size = f'width="{width - 8:.0f}" height="{y - tops[frame.first]:.0f}"'
                body.append(f'<rect class="frame" x="4" y="{tops[frame.first]:.0f}" {size} rx="4"/>')
    y += MARGIN
    head: list[str] = []
    for x, lines in zip(at, headers, strict=True):
        head.append(f'<line class="life" x1="{x:.0f}" y1="{header_height}" x2="{x:.0f}" y2="{y:.0f}"/>')
        head.append(
            f'<rect x="{x - pitch / 2 + 4:.0f}" y="1" width="{pitch - 8:.0f}" height="{header_height - 1}" rx="4"/>'
        )
        first = (header_height - LINE * len(lines)) / 2 + LINE - 3
        head += [_text(x, first + LINE * n, line) for n, line in enumerate(lines)]
    opened = (
        f'<svg class="ladder" viewBox="0 0 {width:.0f} {y:.0f}" width="{width:.0f}" xmlns="http://www.w3.org/2000/svg">'
    )
    return "\n".join([opened, f"<style>{STYLE}</style>", *head, *body, "</svg>"])


def _arrow(arrow: Arrow, at: list[float], width: float, y: float) -> tuple[list[str], float]:
    """Its elements, and where the next row begins."""
    ends = [at[n] for n in (*arrow.sources, arrow.target)]
    left, right = min(ends), max(ends)
    lines = textwrap.wrap(arrow.text, max(LABEL_WIDTH_MIN, int((right - left) / CHARACTER))) or [""]
    half = max(map(len, lines)) * CHARACTER / 2 + 2
    middle = min(max((left + right) / 2, half), width - half)
    parts = [_text(middle, y + LINE * (n + 1) - 3, line, "label") for n, line in enumerate(lines)]
    y += LINE * len(lines) + 5
    shape = "arrow answer" if arrow.is_answer else "arrow"
    x = at[arrow.target]
    if left == right:
        parts.append(f'<path class="{shape}" d="M{x:.0f} {y - 4:.0f} h18 v10 h-14"/>')
        return [*parts, _head(x, y + 6, points_left=True)], y + LINE
    for side in {min(arrow.sources), max(arrow.sources)}:
        if side != arrow.target:
            parts.append(f'<line class="{shape}" x1="{at[side]:.0f}" y1="{y:.0f}" x2="{x:.0f}" y2="{y:.0f}"/>')
    parts += [f'<circle class="dot" cx="{at[n]:.0f}" cy="{y:.0f}" r="3"/>' for n in arrow.sources]
    parts += [_head(x, y, points_left=True)] if right > x else []
    parts += [_head(x, y, points_left=False)] if left < x else []
    return parts, y + LINE / 2


def _note(note: Note, at: list[float], pitch: float, y: float) -> tuple[list[str], float]:
    left, right = at[note.first] - pitch / 2 + 4, at[note.last] + pitch / 2 - 4
    box = f'<rect x="{left:.0f}" y="{y + 4:.0f}" width="{right - left:.0f}" height="{LINE + 6}" rx="4"/>'
    return [box, _text((left + right) / 2, y + LINE + 3, note.text)], y + LINE + MARGIN + 4


def _head(x: float, y: float, *, points_left: bool) -> str:
    back = x + 9 if points_left else x - 9
    return f'<polygon class="head" points="{x:.0f},{y:.0f} {back:.0f},{y - 4:.0f} {back:.0f},{y + 4:.0f}"/>'


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.0f}" y="{y:.0f}">{escape(text)}</text>'


def diagrams_of(page: str) -> Iterator[str]:
    """The Mermaid diagrams of a page in Markdown."""
    yield from re.findall(r"^```mermaid\n(.*?)^```", page, re.M | re.S)
