"""How far a transfer is, told seldom and rightly."""

from __future__ import annotations

import io
import threading

from paceline.data.transfer.progress import Meter, size_text, terminal_bar


def test_transfer_progress_is_reported_rarely_and_at_the_end():
    told: list[tuple[int, int, int, int]] = []
    meter = Meter(lambda *figures: told.append(figures), 80_000, 8)

    def work() -> None:
        for _ in range(10_000):
            meter.add(1)
        meter.add(0, files=1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    meter.finish()
    assert told[-1] == (80_000, 80_000, 8, 8)
    assert len(told) < 100


def test_progress_bar_is_drawn_only_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert terminal_bar("downloading", io.StringIO()) is None
    stream = Terminal()
    draw = terminal_bar("downloading", stream)
    assert draw is not None
    draw(500_000, 1_000_000, 1, 2)
    draw(0, 0, 2, 2)
    assert "downloading ============............ 500 kB of 1.0 MB, 1 of 2 files" in stream.getvalue()
    assert stream.getvalue().endswith("\n")


def test_byte_counts_are_formatted_with_decimal_units():
    assert [size_text(size) for size in (0, 999, 1000, 123_456, 2 * 10**9, 10**13)] == [
        "0 B", "999 B", "1.0 kB", "123 kB", "2.0 GB", "10.0 TB",
    ]  # fmt: skip
