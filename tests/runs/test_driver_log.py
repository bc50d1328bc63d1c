from __future__ import annotations

import os
import re
import sys

import pytest

from paceline.runs.driver_log import say
from tests.helpers import run_python


def test_each_driver_log_line_begins_with_its_time(capsys):
    say("waiting")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ waiting\n", capsys.readouterr().out)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's /dev/full")
def test_full_disk_does_not_raise_from_the_driver_log():
    code = """
import os, sys
from paceline.runs.driver_log import say
out = os.dup(1)
full = os.open("/dev/full", os.O_WRONLY)
os.dup2(full, 1)
for _ in range(3): say("x" * 10_000)
os.write(out, b"still here")
"""
    assert os.path.exists("/dev/full")
    assert run_python(code) == "still here"
