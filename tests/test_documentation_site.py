"""The site builds without a warning from a clean copy of its sources, and its reference has all that is public."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import midstream
from machine import limit_s
from midstream import testing

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "docs" / "site"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    pytest.importorskip("sphinx", reason="no Sphinx here; make setup installs it")
    words = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "-c",
        SITE,
        "-d",
        out / "doctrees",
        "-b",
        "html",
        ROOT,
        out / "html",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=limit_s(300), check=False)
    assert done.returncode == 0, done.stderr
    return out / "html"


def test_all_that_is_public_is_in_the_reference():
    listed = re.findall(r"^\.\. auto\w+:: (\w+)(?:\(\))?$", (SITE / "reference.rst").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted([*midstream.__all__, *testing.__all__])


@pytest.mark.systems
def test_parameters_are_lists_and_examples_are_code(site):
    text = (site / "docs" / "site" / "reference.html").read_text()
    assert re.search(r"<li><p><code [^>]*>(<span [^>]*>)?predicates(</span>)?</code>: boolean polars expressions", text)
    environment = text[text.index('id="midstream.Environment"') :].split('id="midstream.Environment.')[0]
    assert '<div class="highlight-python' in environment


@pytest.mark.systems
def test_diagrams_are_drawn(site):
    for page in ("state-machines", "recovery"):
        text = (site / "docs" / "internals" / f"{page}.html").read_text()
        assert '<svg class="ladder"' in text and "highlight-mermaid" not in text, page


def test_decisions_are_listed_in_order_with_their_titles():
    pages = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
    listed = [f"- [{page.read_text().partition(chr(10))[0][2:]}]({page.name})" for page in pages]
    index = (ROOT / "docs" / "decisions" / "README.md").read_text().splitlines()
    assert [line for line in index if line.startswith("- ")] == listed
