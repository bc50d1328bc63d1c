"""Length-prefixed messages on a byte stream."""

from __future__ import annotations

from paceline.system.frames import FrameBuffer, frame


def test_frames_are_decoded_from_any_chunking_of_the_stream():
    messages = [b"", b"a", b"bc" * 1000]
    stream, buffer, taken = b"".join(map(frame, messages)), FrameBuffer(), []
    for byte in stream:
        buffer.feed(bytes([byte]))
        while (message := buffer.take()) is not None:
            taken.append(message)
    assert taken == messages


def test_incomplete_frame_is_not_returned():
    buffer = FrameBuffer()
    buffer.feed(frame(b"abc")[:-1])
    assert not buffer.has_frame
    assert buffer.take() is None
    buffer.feed(b"c")
    assert buffer.has_frame
    assert buffer.take() == b"abc"
