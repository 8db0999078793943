"""Checks the instructions of a pickle before any of them runs.

The C reader of pickles trusts its input: an index of its memo makes it allocate that many entries, and a state may
be set on any object, classes and functions included. A pickle written here needs neither, so only the instructions are
allowed that the writer uses, and every length must lie within the pickle.

A regular expression reads the instructions, at the speed of C; those whose lengths have four or eight bytes are read
one by one.
"""

from __future__ import annotations

import pickletools
import re
from typing import Final

DEPTH_MAX: Final = 20_000
"""Of tuples and frozen sets within each other. Python computes their hash recursively, without a limit of its own, and
overflows the C stack at several times that depth. What can be written is less deep than Python's recursion limit.
"""

_BYTES_AFTER: Final = {
    # MARK, POP, NONE, NEWTRUE, NEWFALSE, EMPTY_LIST, EMPTY_DICT, EMPTY_TUPLE, EMPTY_SET, TUPLE1 to TUPLE3, TUPLE,
    # APPEND(S), SETITEM(S), ADDITEMS, FROZENSET, MEMOIZE, STACK_GLOBAL, REDUCE, NEWOBJ, NEWOBJ_EX
    0: b"(0N\x88\x89]})\x8f\x85\x86\x87taesu\x90\x91\x94\x93R\x81\x92",
    1: b"Kh\x80",  # BININT1, BINGET, PROTO
    2: b"M",  # BININT2
    4: b"Jj",  # BININT, LONG_BINGET
    8: b"G",  # BINFLOAT
}
_COUNTED: Final = b"\x8cC\x8a"  # SHORT_BINUNICODE, SHORT_BINBYTES, LONG1: a byte is the number of bytes that follow
_LONG: Final = {
    ord("X"): 4,  # BINUNICODE
    ord("B"): 4,  # BINBYTES
    0x8B: 4,  # LONG4
    0x8D: 8,  # BINUNICODE8
    0x8E: 8,  # BINBYTES8
    0x96: 8,  # BYTEARRAY8
}
"""The number of bytes of the length that follows."""
_FRAME: Final = 0x95
"""Its length is the number of bytes to read in one call; the contents are read as if the frame were not there."""
_STOP: Final = ord(".")
_STACK_GLOBAL: Final = b"\x93"
"""STACK_GLOBAL. A pickle without this byte makes numbers, strings, bytes and plain containers, and calls nothing."""


def _any_of(codes: bytes) -> bytes:
    return b"[%s]" % b"".join(re.escape(bytes((code,))) for code in codes)


def _instructions() -> re.Pattern[bytes]:
    """Return what matches as many complete instructions as there are, but for those with long lengths and the last."""
    fixed = [_any_of(codes) + (b".{%d}" % count if count else b"+") for count, codes in _BYTES_AFTER.items()]
    counted = b"|".join(b"%s.{%d}" % (re.escape(bytes((count,))), count) for count in range(256))
    return re.compile(b"(?:%s|%s(?:%s))*+" % (b"|".join(fixed), _any_of(_COUNTED), counted), re.DOTALL)


_INSTRUCTIONS: Final = _instructions()
_PLAIN: Final = frozenset(b"".join((*_BYTES_AFTER.values(), _COUNTED, bytes((_FRAME, _STOP))))) - {_STACK_GLOBAL[0]}
_OTHERS: Final = re.compile(_any_of(bytes(ord(op.code) for op in pickletools.opcodes if ord(op.code) not in _PLAIN)))
"""Any byte that may be an instruction which is not allowed, has a long length, or looks something up. Most numbers have
none.
"""
_NESTS: Final = b"\x85\x86\x87t\x91"


def check_instructions(data: bytes) -> bool:
    """Check that a pickle has only allowed instructions; return whether it may look up a class or a function.

    Raises ValueError naming the position of the first instruction that is not allowed.
    """
    size, at = len(data), 0
    if size <= DEPTH_MAX and _OTHERS.search(data) is None:
        return False
    if data[:3] == b"\x80\x05\x95" and data[11:12] == b"\x8c" and size == 15 + data[12] and data[-2:] == b"\x94.":
        return False  # a short text, as most texts are: this is five times as fast
    while True:
        at = _INSTRUCTIONS.match(data, at).end()  # type: ignore[union-attr]  # it matches nothing at least
        if at >= size:
            raise ValueError(f"the pickle of {size} bytes has no end")
        code = data[at]
        if code == _STOP:
            if at != size - 1:
                raise ValueError(f"the pickle ends at byte {at}, and {size - at - 1} bytes follow")
            break
        width = 8 if code == _FRAME else _LONG.get(code)
        if width is None:
            raise ValueError(f"the pickle has the instruction {code:#04x} at byte {at}, which is never written")
        length = int.from_bytes(data[at + 1 : at + 1 + width], "little")
        if at + 1 + width + length > size:
            raise ValueError(f"the pickle has {size} bytes, and at byte {at} a length of {length}")
        at += 1 + width + (0 if code == _FRAME else length)
    if size > DEPTH_MAX and size - len(data.translate(None, _NESTS)) > DEPTH_MAX:
        _check_depth(data)
    return _STACK_GLOBAL in data


_TAKES: Final = {
    "TUPLE1": 1,
    "TUPLE2": 2,
    "TUPLE3": 3,
    "APPEND": 1,
    "POP": 1,
    "SETITEM": 2,
    "STACK_GLOBAL": 2,
    "REDUCE": 2,
    "NEWOBJ": 2,
    "NEWOBJ_EX": 3,
}
"""How many values an instruction takes off the stack, if any."""
_TAKES_TO_MARK: Final = {"TUPLE", "FROZENSET", "APPENDS", "SETITEMS", "ADDITEMS"}
_PUTS_NOTHING: Final = {"APPEND", "APPENDS", "POP", "SETITEM", "SETITEMS", "ADDITEMS"}
_DEEPENS: Final = {"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET"}


def _check_depth(data: bytes) -> None:
    """Check how deep tuples and frozen sets lie within each other. Raises ValueError; IndexError if the stack is empty."""
    stack: list[int] = []
    marks: list[int] = []
    memo: list[int] = []
    for instruction, argument, _ in pickletools.genops(data):
        name = instruction.name
        if name == "MARK":
            marks.append(len(stack))
        elif name == "MEMOIZE":
            memo.append(stack[-1])
        elif name in {"BINGET", "LONG_BINGET"}:
            stack.append(memo[argument or 0])
        elif name not in {"PROTO", "FRAME", "STOP"}:
            first = marks.pop() if name in _TAKES_TO_MARK else len(stack) - _TAKES.get(name, 0)
            taken = stack[first:]
            del stack[first:]
            if name not in _PUTS_NOTHING:
                depth = max(taken, default=0) + (name in _DEEPENS)
                if depth > DEPTH_MAX:
                    raise ValueError(f"the pickle has tuples within each other, more than {DEPTH_MAX} deep")
                stack.append(depth)
