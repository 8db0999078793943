"""Frames are cut out of any delivery of bytes, and lengths are checked before memory is taken."""

from __future__ import annotations

import random

import pytest

from midstream.engine.protocol.framing import LENGTH, FrameDecoder, ProtocolViolation, frame


def stream_of(*bodies: bytes) -> bytes:
    return b"".join(b"".join(frame(0x20, body)) for body in bodies)


def feed(decoder: FrameDecoder, data: bytes, step: int) -> list[bytes]:
    """What comes out when `data` arrives `step` bytes at a time."""
    frames: list[bytes] = []
    position = 0
    while position < len(data):
        space = decoder.space()
        count = min(step, len(space), len(data) - position)
        space[:count] = data[position : position + count]
        position += count
        decoder.received(count)
        while (got := decoder.next_frame()) is not None:
            frames.append(bytes(got))
    return frames


def feed_lent(decoders: list[FrameDecoder], data: list[bytes], dice: random.Random) -> list[list[bytes]]:
    """What comes out of each when parts of `data` arrive in turns."""
    frames: list[list[bytes]] = [[] for _ in decoders]
    position = [0] * len(decoders)
    while open_ := [i for i, each in enumerate(data) if position[i] < len(each)]:
        i = dice.choice(open_)
        space = decoders[i].space()
        count = min(dice.choice([1, 2, 3, 7, 64, 1000]), len(space), len(data[i]) - position[i])
        space[:count] = data[i][position[i] : position[i] + count]
        position[i] += count
        decoders[i].received(count)
        while (got := decoders[i].next_frame()) is not None:
            frames[i].append(bytes(got))
        if dice.random() < 0.3:
            decoders[i].space()  # and nothing comes
        decoders[i].keep()
    return frames


@pytest.mark.parametrize("seed", range(20))
def test_connections_that_receive_into_one_buffer_in_turns_get_their_own_frames(seed: int) -> None:
    dice = random.Random(seed)
    lent = bytearray(256)
    decoders, bodies = [], []
    for _ in range(4):
        decoder = FrameDecoder(frame_bytes_max=100, buffer_bytes=64)
        decoder.allow(frame_bytes_max=4096, lent=lent)
        decoders.append(decoder)
        bodies.append([dice.randbytes(dice.choice([0, 1, 5, 63, 250, 251, 252, 500, 3000])) for _ in range(40)])
    got = feed_lent(decoders, [stream_of(*each) for each in bodies], dice)
    assert got == [[b"\x20" + body for body in each] for each in bodies]
    for decoder in decoders:
        decoder.space()
        assert decoder.buffer_bytes == 0 and decoder.waiting_bytes == 0


def test_a_decoder_with_a_lent_buffer_has_only_the_part_of_a_frame_that_waits() -> None:
    lent = bytearray(512 * 2**10)
    decoders = [FrameDecoder(frame_bytes_max=100, buffer_bytes=64) for _ in range(1000)]
    for decoder in decoders:
        decoder.allow(frame_bytes_max=2**20, lent=lent)
        data = stream_of(b"a" * 1000, b"b" * 2000)[:-1]
        decoder.space()[: len(data)] = data
        decoder.received(len(data))
        assert decoder.next_frame() is not None and decoder.next_frame() is None
        decoder.keep()
    assert {decoder.buffer_bytes for decoder in decoders} == {4 + 1 + 2000 - 1}


@pytest.mark.parametrize("step", [1, 2, 3, 7, 64, 1000, 10**6])
def test_frames_come_out_whole_however_the_bytes_arrive(step: int) -> None:
    dice = random.Random(step)
    bodies = [dice.randbytes(dice.choice([0, 1, 5, 63, 64, 65, 500, 3000])) for _ in range(60)]
    decoder = FrameDecoder(frame_bytes_max=4096, buffer_bytes=64)
    assert feed(decoder, stream_of(*bodies), step) == [b"\x20" + body for body in bodies]
    assert decoder.waiting_bytes == 0


def test_many_frames_in_one_delivery_are_views_of_the_one_buffer() -> None:
    decoder = FrameDecoder(frame_bytes_max=100, buffer_bytes=1000)
    data = stream_of(b"one", b"two", b"three")
    decoder.space()[: len(data)] = data
    decoder.received(len(data))
    frames = []
    while (got := decoder.next_frame()) is not None:
        frames.append(got)
    assert [bytes(got[1:]) for got in frames] == [b"one", b"two", b"three"]
    assert len({id(got.obj) for got in frames}) == 1, "frames must not be copied"


def test_a_huge_length_is_refused_before_memory_is_taken() -> None:
    decoder = FrameDecoder(frame_bytes_max=4096, buffer_bytes=64)
    with pytest.raises(ProtocolViolation, match=r"4294967295 bytes, where 1 to 4096"):
        feed(decoder, LENGTH.pack(2**32 - 1) + b"x", 100)
    assert decoder.buffer_bytes == 64


def test_a_frame_of_length_zero_is_refused() -> None:
    with pytest.raises(ProtocolViolation, match="a frame of 0 bytes"):
        feed(FrameDecoder(4096, 64), LENGTH.pack(0), 4)


def test_a_truncated_frame_waits_and_is_never_handed_out() -> None:
    decoder = FrameDecoder(4096, 64)
    assert feed(decoder, stream_of(b"x" * 1000)[:-1], 100) == []
    assert decoder.waiting_bytes == 4 + 1000


def test_limits_can_be_raised_while_a_frame_is_waiting() -> None:
    decoder = FrameDecoder(frame_bytes_max=100, buffer_bytes=64)
    data = stream_of(b"first", b"x" * 5000)
    assert feed(decoder, data[:12], 12) == [b"\x20first"]
    decoder.allow(frame_bytes_max=10_000, buffer_bytes=1024)
    assert feed(decoder, data[12:], 333) == [b"\x20" + b"x" * 5000]


def test_the_buffer_grows_only_as_far_as_the_longest_frame() -> None:
    decoder = FrameDecoder(frame_bytes_max=10**6, buffer_bytes=64)
    feed(decoder, stream_of(*[b"x" * 9000] * 50), 777)
    assert decoder.buffer_bytes == 9005
