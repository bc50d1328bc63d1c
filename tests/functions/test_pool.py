from __future__ import annotations

import os
import signal
import time

import pytest

from paceline.functions import pool
from paceline.functions.pool import call_all, read_lines


def behave(x: object) -> object:
    if x == "raise":
        raise ValueError("bad lr")
    if x == "exit":
        raise SystemExit(3)
    if x == "vanish":
        os._exit(0)
    if x == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def lines(tmp_path, values, function=behave, **options):
    """Return the lines of these calls and the error of the run."""
    given = [{"args": [value], "kwargs": {}} for value in values]
    error = None
    try:
        call_all(function, given, tmp_path / "results", **({"at_once": 3, "pickled": False, "limit": 10_000} | options))
    except RuntimeError as found:
        error = str(found)
    return read_lines(tmp_path / "results"), error


def test_result_of_each_mapped_call_is_one_line_of_the_results_file(tmp_path):
    found, error = lines(tmp_path, range(20))
    assert error is None
    assert {number: line["value"] for number, line in found.items()} == {n: n for n in range(20)}


@pytest.mark.promise("failed-call-spares-others")
def test_failed_calls_of_a_map_do_not_affect_other_calls(tmp_path):
    found, error = lines(tmp_path, ["raise", "exit", "vanish", "die", "fine"])
    assert error == "4 of 5 calls failed. Call 0: ValueError: bad lr"
    texts = [found[n]["error"]["exception"] for n in range(4)]
    assert texts[0] == "ValueError: bad lr"
    assert "called sys.exit(3)" in texts[1]
    assert texts[2] == "the process of call 2 ended with exit code 0"
    assert "the process of call 3 was ended by SIGKILL" in texts[3]
    assert found[4] == {"call": 4, "value": "fine"}
    # The traceback begins in the user's function.
    assert found[0]["error"]["traceback"].splitlines()[1].endswith("in behave")


def test_restarted_map_repeats_only_calls_that_failed_in_the_previous_attempt(tmp_path):
    lines(tmp_path, ["raise", "fine"])
    made = tmp_path / "made"

    def note(x):
        made.open("a").write(f"{x} ")
        return x

    found, error = lines(tmp_path, ["raise", "fine"], note)
    assert error is None
    assert made.read_text() == "raise "
    assert found[0]["value"] == "raise"


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_result_of_a_call_replaces_errors_of_the_call_in_any_file(tmp_path, order):
    made = ['{"call": 5, "error": {"exception": "old", "traceback": ""}}\n', '{"call": 5, "value": 42}\n']
    for name, at in zip(("0.jsonl", "3.jsonl"), order, strict=True):
        (tmp_path / name).write_text(made[at])
    assert read_lines(tmp_path) == {5: {"call": 5, "value": 42}}


def test_map_that_fails_again_reports_the_error_of_its_last_attempt(tmp_path):
    def fail(x):
        raise ValueError(f"{x} in attempt {attempt}")

    attempt = 1
    lines(tmp_path, ["a", "b", "c"], fail)
    # The two calls of this attempt succeed, so one call is left for the first slot of the last attempt.
    lines(tmp_path, ["a", "b"])
    attempt = 3
    found, error = lines(tmp_path, ["a", "b", "c"], fail)
    assert error == "1 of 3 calls failed. Call 2: ValueError: c in attempt 3"
    assert found[2]["error"]["exception"] == "ValueError: c in attempt 3"


def test_call_whose_process_is_killed_after_its_result_has_not_failed(tmp_path, monkeypatch):
    append, parent = pool.append_line, os.getpid()

    def append_and_die(*line):
        append(*line)
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(pool, "append_line", append_and_die)
    found, error = lines(tmp_path, [7])
    assert error is None
    assert found == {0: {"call": 0, "value": 7}}


def test_large_result_of_a_call_gets_its_own_file_and_one_above_max_result_fails(tmp_path):
    found, error = lines(tmp_path, ["a" * 5000, "a" * 20_000, (1, 2)])
    assert found[0] == {"call": 0, "file": "0.json"}
    assert "max_result allows 10,000" in found[1]["error"]["exception"]
    assert found[2] == {"call": 2, "file": "2.safetensors"}
    assert error is not None
    assert error.startswith("1 of 3 calls failed")


def test_number_of_concurrent_calls_never_exceeds_the_limit(tmp_path):
    (tmp_path / "live").mkdir()

    def count(x):
        mine = tmp_path / "live" / str(x)
        mine.touch()
        # The first two calls wait for each other, which shows that two calls run at the same time.
        deadline = time.monotonic() + 60
        while (there := len(list((tmp_path / "live").iterdir()))) < 2 and x < 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.05)
        mine.unlink()
        return there

    found, _ = lines(tmp_path, range(12), count, at_once=2)
    assert max(line["value"] for line in found.values()) == 2


def test_concurrent_calls_have_their_own_gpus_and_no_rank_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.setenv("RANK", "0")

    def tell(x):
        return [os.environ["CUDA_VISIBLE_DEVICES"], os.environ.get("RANK")]

    found, _ = lines(tmp_path, range(8), tell, at_once=2)
    assert {line["value"][0] for line in found.values()} <= {"4", "7"}
    assert {line["value"][1] for line in found.values()} == {None}


def test_invalid_lines_of_a_results_file_are_skipped(tmp_path):
    (tmp_path / "0.jsonl").write_text(
        '7\n{"call": "x", "value": 1}\n{"call": 1}\n{"call": 2, "value": 3}\n{"call": 4, "va'
    )
    assert pool.read_lines(tmp_path) == {2: {"call": 2, "value": 3}}
