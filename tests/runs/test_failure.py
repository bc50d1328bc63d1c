from __future__ import annotations

import json
import signal

import pytest

from paceline.runs.failure import CAUSES, FailureReport, last_words, logs_command, signal_name, signal_words

FULL = FailureReport(
    cause="exception",
    message="Rank 1 on node n failed first: ValueError: bad batch",
    exit_code=3,
    attempt=2,
    rank=1,
    node="n",
    signal="SIGSEGV",
    exception="ValueError: bad batch",
    traceback="Traceback\n  File\nValueError: bad batch\n",
    last_lines=("one", "two"),
    victims=((0, "lost its connection"), (2, "was ended")),
    see="paceline logs x --rank 1",
)


@pytest.mark.parametrize("report", [FULL, FailureReport(cause="disk", message="full")])
def test_failure_report_is_equal_after_conversion_to_json_and_back(report):
    assert FailureReport.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_failure_report_text_has_message_traceback_lost_ranks_and_next_command():
    assert str(FULL) == (
        "Rank 1 on node n failed first: ValueError: bad batch\n"
        "\n"
        "    Traceback\n"
        "      File\n"
        "    ValueError: bad batch\n"
        "\n"
        "rank 0 lost its connection\n"
        "rank 2 was ended\n"
        "\n"
        "More: paceline logs x --rank 1"
    )


def test_failure_report_without_a_traceback_shows_the_last_log_lines():
    report = FailureReport(cause="killed", message="killed by SIGKILL.", last_lines=("step 1", "step 2"))
    assert str(report) == "killed by SIGKILL.\n\nIts last lines:\n    step 1\n    step 2"


def test_a_long_traceback_shows_its_end():
    report = FailureReport(cause="exception", message="m", traceback="\n".join(map(str, range(100))))
    shown = str(report).splitlines()[2:]
    assert [line.strip() for line in shown] == [str(number) for number in range(80, 100)]


def test_report_with_many_lost_ranks_names_eight_and_counts_further_ones():
    report = FailureReport(cause="exception", message="m", victims=tuple((rank, "was lost") for rank in range(1, 100)))
    assert str(report).splitlines()[-2:] == ["rank 8 was lost", "and 91 ranks more"]


@pytest.mark.parametrize(
    ("number", "name"), [(9, "SIGKILL"), (11, "SIGSEGV"), (15, "SIGTERM"), (42, "signal 42"), (200, "signal 200")]
)
def test_signal_number_is_shown_by_its_name_or_as_a_number_if_unnamed(number, name):
    assert signal_name(number) == name


def test_signal_number_without_a_name_has_no_explanation_and_raises_no_error():
    # Regression: the report raised an error for a real-time signal, because Python has no name for this signal.
    words = {number: signal_words(number) for number in range(1, 130)}
    assert {number for number, text in words.items() if text} <= {number.value for number in signal.Signals}


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGKILL, "killed from outside"), (signal.SIGSEGV, "segmentation fault"), (signal.SIGBUS, "/dev/shm")],
)
def test_failure_text_of_a_signal_explains_its_usual_cause(number, words):
    assert words in signal_words(number)


def test_logs_command_for_a_run_has_the_run_id_and_the_rank_if_one_is_given():
    assert logs_command("digits_1_2") == "paceline logs digits_1_2"
    assert logs_command("digits_1_2", 0) == "paceline logs digits_1_2 --rank 0"


def test_each_failure_cause_has_a_text_that_no_other_cause_has():
    assert len(set(CAUSES.values())) == len(CAUSES)


@pytest.mark.promise("traceback-end-program-s-log")
@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], ""),
        (["loss 0.5", "", "  train.py: error: no data  ", ""], "train.py: error: no data"),
        # tyro, typer and rich print an error in a box, so the last line is the bottom of the box.
        (
            [
                "usage: train.py",
                "╭─ Required options ─────────────╮",
                "│ The following are required: --lr │",
                "│ ──────────────────────────────── │",
                "│ For full helptext, see --help    │",
                "╰────────────────────────────────╯",
            ],
            "Required options: The following are required: --lr",
        ),
        (["┌──────┐", "│ lost │", "└──────┘", ""], "lost"),
        (["╰──╯"], ""),
        (["- not a box -"], "- not a box -"),
    ],
)
def test_last_lines_of_a_traceback_are_shown_without_box_characters(lines, words):
    assert last_words(lines) == words
