"""What the type checker must refuse, and that it is asked about every match.

mypy reads this file with the other tests (`make check`). Where it refused a line no longer, the comment that lets the
line pass would be unused, which mypy reports as an error.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pyarrow as pa
import pytest

from midstream.engine.checkpoint.barrier_handler import BarrierInstruction, Block, CaptureComplete, Resume, TakeSnapshot
from midstream.engine.core.elements import Batch, Element, Watermark
from midstream.engine.core.errors import InvariantError, assert_never
from midstream.engine.exchange.result_partition import ResultPartition

SOURCE = Path(__file__).parent.parent / "src" / "midstream"
FILES = sorted(SOURCE.rglob("*.py"))


def refused(partition: ResultPartition, batch: Batch, element: Element, kind: pa.DataType) -> None:
    """Never called: only its types count."""
    partition.emit(42)  # type: ignore[arg-type]  # a number is no batch
    partition.emit(element)  # type: ignore[arg-type]  # it may be an event
    partition.broadcast(batch)  # type: ignore[arg-type]  # a batch is no event
    batch.rows()  # type: ignore[attr-defined]  # there is none
    kind.scale  # type: ignore[attr-defined]  # noqa: B018 - only decimals have one
    Watermark("now")  # type: ignore[arg-type]  # microseconds are a number


def one_case_is_left_over(instruction: BarrierInstruction) -> None:
    """As when an instruction is added, or an arm is deleted."""
    match instruction:
        case Block() | Resume() | TakeSnapshot() | CaptureComplete():
            pass
        case _:
            assert_never(instruction)  # type: ignore[arg-type]  # AbortCheckpoint


def test_what_no_case_handles_is_a_broken_invariant() -> None:
    with pytest.raises(InvariantError, match=r"no case handles Block\(channel=3\), a Block"):
        one_case_is_not_handled(Block(3))


def one_case_is_not_handled(instruction: BarrierInstruction) -> None:
    match instruction:
        case Resume():
            pass
        case _:
            assert_never(instruction)  # type: ignore[arg-type]  # four of them


def silent_matches(source: str) -> list[int]:
    """The lines of matches whose last case swallows the rest, or that have none for it, without a word."""
    lines = source.splitlines()
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Match):
            continue
        last = node.cases[-1]
        is_rest = isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None and last.guard is None
        first = last.body[0]
        called = first.value.func if isinstance(first, ast.Expr) and isinstance(first.value, ast.Call) else None
        is_loud = isinstance(first, ast.Raise) or (isinstance(called, ast.Name) and called.id == "assert_never")
        is_explained = "  # " in lines[last.pattern.lineno - 1]
        if not is_rest or not (is_loud or is_explained):
            found.append(node.lineno)
    return found


def test_a_match_ends_in_assert_never_or_says_why_the_rest_needs_nothing() -> None:
    silent = [f"{file}:{line}" for file in FILES for line in silent_matches(file.read_text(encoding="utf-8"))]
    assert silent == [], "end these matches with `case _: assert_never(…)`, or say why they need no more"


@pytest.mark.parametrize(
    ("rest", "is_silent"),
    [
        ("", True),
        ("    case _ if x: raise E\n", True),
        ("    case _:\n        pass\n", True),
        ("    case _:  # the others wait\n        pass\n", False),
        ("    case _:\n        assert_never(x)\n", False),
        ("    case _:\n        raise E\n", False),
        ("    case A():\n        raise E\n", True),
    ],
)
def test_a_silent_match_is_seen(rest: str, is_silent: bool) -> None:
    assert silent_matches(f"match x:\n    case B():\n        pass\n{rest}") == ([1] if is_silent else [])
