from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.remote.wire import Frames, WireError, frame

SOME: list[tuple[dict[str, Any], bytes]] = [
    ({"op": "ping"}, b""),
    ({"name": "new\nline \udcff größe", "bytes": 3}, b"\0\xff\n"),
    ({"op": "x", "n": 1}, b""),
]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_wire_frames_are_decoded_whole_from_any_chunking_of_the_byte_stream(sizes):
    text = b"".join(
        frame({name: value for name, value in header.items() if name != "bytes"}, data) for header, data in SOME
    )
    frames, found = Frames(), []
    while text:
        size = sizes[len(text) % len(sizes)]
        found += frames.feed(text[:size])
        text = text[size:]
    assert found == SOME
    assert not frames.is_torn


def test_incomplete_frame_is_reported_as_torn_until_its_last_byte_arrives():
    frames = Frames()
    assert list(frames.feed(frame({"op": "x"}, b"abc")[:-1])) == []
    assert frames.is_torn
    assert list(frames.feed(b"c")) == [({"op": "x", "bytes": 3}, b"abc")]


@pytest.mark.parametrize(
    "junk", [b"Last login: today\n", b"\0\0\0\x02{]", b"\0\0\0\x02[]", b"\0\0\0\x0c" + b'{"bytes":-1}']
)
def test_bytes_that_are_no_valid_frame_raise_a_wire_error(junk):
    with pytest.raises(WireError):
        list(Frames().feed(junk))
