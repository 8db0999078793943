"""What the pages refer to exists: pages, headings, files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "midstream"
LABORATORY = ROOT / "lab" / "midstream_lab"
DECISIONS = ROOT / "docs" / "decisions"
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
    ROOT / "examples" / "README.md",
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"(?<![\w./-])(?:docs|tests|src|lab|benchmarks|examples|tools)/[\w./-]*\w")
MODULE = re.compile(r"`([\w/]+\.py)`")
EXAMPLES = {"visits.py", "shop.py", "test_shop.py"}
"""Files that a reader of docs/guide/upgrades.md and docs/tutorial.md makes."""


def anchor(heading: str) -> str:
    """As the sites that show Markdown make it of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {anchor(heading) for heading in re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)}


def broken(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    for link in LINK.findall(text):
        if "://" in link:
            continue
        path, _, heading = link.partition("#")
        target = (page.parent / path) if path else page
        if not target.exists() or (heading and heading not in anchors(target)):
            yield link
    yield from (path for path in FILE.findall(text) if not (ROOT / path).exists())
    for name in MODULE.findall(text):
        known = (
            (ROOT / name).exists()
            or (page.parent / name).exists()
            or any(SOURCE.rglob(name))
            or any(LABORATORY.rglob(name))
        )
        if not known and name not in EXAMPLES:
            yield name


def test_what_the_pages_refer_to_exists():
    assert [f"{page.relative_to(ROOT)}: {link}" for page in PAGES for link in broken(page)] == []


def test_a_link_to_nothing_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Here\n[a](#here) [b](#there) [c](gone.md) see tests/gone.py and `gone/gone.py`\n")
    assert list(broken(page)) == ["#there", "gone.md", "tests/gone.py", "gone/gone.py"]


def test_every_decision_has_a_number_of_its_own():
    numbers = [page.name[:3] for page in sorted(DECISIONS.glob("0*.md"))]
    assert numbers == [f"{number:03}" for number in range(1, len(numbers) + 1)]


def test_every_decision_says_whether_it_stands_and_since_when():
    status = re.compile(
        r"# \d{3}: .+\n\n(Accepted|Superseded by \[\d{3}\]\([\w.-]+\)), 20\d\d-\d\d-\d\d\.( Extends| Extended|\n)"
    )
    pages = sorted(DECISIONS.glob("0*.md"))
    assert [page.name for page in pages if not status.match(page.read_text(encoding="utf-8"))] == []


def test_every_page_is_in_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"(docs/{page.name})" not in readme] == []
