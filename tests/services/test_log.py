from __future__ import annotations

import os
from pathlib import Path

from paceline.services import log
from paceline.services.folder import ServiceFolder


def test_service_log_over_its_limit_is_rotated_and_still_shown(tmp_path: Path) -> None:
    folder = ServiceFolder(tmp_path / "services" / "digits")
    folder.logs.mkdir(parents=True)
    assert log.last_lines(folder, 5) == ""
    # Open the log as a server does.
    fd = os.open(folder.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, b"one\ntwo\n")
    log.shorten(folder, most_bytes=100)
    assert log.last_lines(folder, 1) == "two\n"
    log.shorten(folder, most_bytes=4)
    os.write(fd, b"three\n")
    os.close(fd)
    assert folder.log.read_bytes() == b"three\n"
    assert log.last_lines(folder, 2) == "two\nthree\n"
    assert log.last_lines(folder, 9) == "one\ntwo\nthree\n"
    assert log.last_lines(folder, 0) == ""


def test_following_a_service_log_survives_its_rotation(tmp_path: Path) -> None:
    folder = ServiceFolder(tmp_path / "services" / "digits")
    folder.logs.mkdir(parents=True)
    folder.log.write_text("before\n")
    texts = iter(["before\nfirst\n", "second\n", None])

    def is_over() -> bool:
        text = next(texts)
        if text is not None:
            folder.log.write_text(text)
        return text is None

    assert list(log.follow(folder, is_over)) == ["first\n", "second\n"]
