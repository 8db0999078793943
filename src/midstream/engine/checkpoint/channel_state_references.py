"""References to channel state: which batches and key groups of stored segments are still to be consumed.

The consumers of a keyed edge share stored segments: each has the rows of its own key groups, and they may have consumed
different numbers of batches. So a reference has pieces, which are ranges of key groups with the number of batches
consumed. References of several consumers to the same batches can be merged again, whatever was consumed in between:
however often a job is rescaled, a consumer has one reference to a segment and reads it once.

    a channel is stored, 3 batches          key groups 0..7, skip 0
    4 consumers share it                    0..1 skip 0 | 2..3 skip 0 | 4..5 skip 0 | 6..7 skip 0
    the first takes 1, the third all        0..1 skip 1 | 2..3 skip 0 |             | 6..7 skip 0
    one consumer                            0..7 skip 0, ahead: 0..1 skip 1, 4..5 skip 3

References that can be merged have the same `number`: they were split from one reference. They share their last batches,
since batches are always consumed from the front. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from operator import attrgetter, itemgetter
from typing import TypeAlias

import msgspec

from midstream.engine.core.errors import InvariantError
from midstream.engine.protocol.messages import ChannelState, Segment

Piece: TypeAlias = tuple[int, int, int]
"""The first key group, one past the last, and how many of the first batches have been consumed for them."""


def pieces_of(state: ChannelState, whole: tuple[int, int]) -> list[Piece]:
    """Return the pieces by key group, without gaps between the first and the last.

    `whole`: the key groups of a state that does not name any.
    """
    first, end = state.key_groups or whole
    if not state.ahead:
        return [(first, end, state.skip)]
    pieces = []
    for piece in state.ahead:
        if first < piece[0]:
            pieces.append((first, piece[0], state.skip))
        pieces.append(piece)
        first = piece[1]
    if first < end:
        pieces.append((first, end, state.skip))
    return pieces


def merge_shares(states: Sequence[ChannelState], whole: Sequence[tuple[int, int]]) -> tuple[ChannelState, list[Piece]]:
    """Merge what was split from one reference: return the state with the most batches, and the pieces of all, in terms
    of its batches.
    """
    longest = max(states, key=batches_of)
    total = batches_of(longest)
    pieces = []
    for state, own in zip(states, whole, strict=True):
        missing = total - batches_of(state)
        pieces += [(first, end, missing + skip) for first, end, skip in pieces_of(state, own)]
    pieces.sort(key=itemgetter(0))
    for (_, end, _), (first, _, _) in pairwise(pieces):
        if first < end:
            raise InvariantError(
                f"edge {longest.edge}: two consumers have key group {first} of channel state {longest.number}"
            )
    return longest, pieces


def left_of(
    state: ChannelState, pieces: Sequence[Piece]
) -> tuple[tuple[Segment, ...], int, tuple[int, int], tuple[Piece, ...]] | None:
    """Return segments, skip, key groups and `ahead` of the rest of these pieces of `state`; None if nothing remains."""
    total = batches_of(state)
    left: list[Piece] = []
    for piece in pieces:
        first, end, skip = piece
        if skip >= total:
            continue
        if left and left[-1][1] == first and left[-1][2] == skip:
            left[-1] = left[-1][0], end, skip
        else:
            left.append(piece)
    if not left:
        return None
    least = min(skip for _, _, skip in left) if len(left) > 1 else left[0][2]
    index = consumed = 0
    while consumed + state.segments[index].batches <= least:
        consumed += state.segments[index].batches
        index += 1
    ahead = []
    low = at = left[0][0]
    for first, end, skip in left:
        if at < first:
            ahead.append((at, first, total - consumed))
        if skip > least:
            ahead.append((first, end, skip - consumed))
        at = end
    return state.segments[index:], least - consumed, (low, at), tuple(ahead)


def without_first(state: ChannelState, segments: int, batches: int) -> ChannelState:
    """Return what remains after `segments` whole segments and `batches` of the next one have been taken."""
    consumed = sum(segment.batches for segment in state.segments[:segments])
    ahead = tuple((first, end, skip - consumed) for first, end, skip in state.ahead if skip - consumed > batches)
    return msgspec.structs.replace(state, segments=state.segments[segments:], skip=batches, ahead=ahead)


def batches_of(state: ChannelState) -> int:
    """Count the batches, including those consumed."""
    return sum(segment.batches for segment in state.segments)


def left_bytes(states: Iterable[ChannelState]) -> int:
    """Estimate the bytes left, including rows of other key groups; a partly consumed segment is estimated by its
    batches.
    """
    size = 0
    for state in states:
        skip = state.skip
        for segment in state.segments:
            consumed = min(skip, segment.batches)
            skip -= consumed
            size += segment.length * (segment.batches - consumed) // segment.batches
    return size


class InFlight:
    """The total of what the states of a checkpoint hold. What consumers share counts once, for the one with most of it
    left.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.files: set[str] = set()
        self._shared: dict[tuple[int, int], int] = {}
        """The counted references, by edge and number."""

    def add(self, states: Iterable[ChannelState]) -> None:
        for state in states:
            self.files.update([segment.file for segment in state.segments if segment.file])
            size = left_bytes((state,))
            if state.number is not None:
                counted = self._shared.get((state.edge, state.number), 0)
                self._shared[state.edge, state.number] = max(counted, size)
                size = max(0, size - counted)
            self.bytes += size


def each_once(states: Iterable[ChannelState]) -> list[ChannelState]:
    """Return the states of one edge to count: of those that consumers share, only the one with most of it left."""
    found = [state for state in states if state.number is None]
    found += (max(sharers, key=_batches_left) for sharers in sharing(s for s in states if s.number is not None))
    return found


def segments_left(state: ChannelState) -> tuple[Segment, ...]:
    """Return the segments that are not wholly consumed."""
    ends = list(accumulate(segment.batches for segment in state.segments))
    return tuple(segment for segment, end in zip(state.segments, ends, strict=True) if end > state.skip)


def _batches_left(state: ChannelState) -> int:
    return batches_of(state) - state.skip


def sharing(states: Iterable[ChannelState]) -> Iterator[list[ChannelState]]:
    """Yield the states split from one reference together, in the order of their numbers; each has a number."""
    together: list[ChannelState] = []
    for state in sorted(states, key=attrgetter("number")):
        if together and state.number != together[0].number:
            yield together
            together = []
        together.append(state)
    if together:
        yield together
