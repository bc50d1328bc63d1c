from __future__ import annotations

import pytest

from paceline.testing.sim.events import EventsError, read_events


def events(text: str):
    return read_events(text.encode(), "train.py")


def test_events_of_a_simulated_script_are_read_without_running_the_script():
    first, last = events(
        "raise SystemExit('run')\n"
        "EVENTS = [{'at': 1, 'every': 2, 'line': 'step {n}'}, {'at': 9, 'exit': 3, 'error': 'E: x', 'ranks': [1]}]\n",
    )
    assert (first.action, first.what, first.at_s, first.every_s, first.ranks) == ("line", "step {n}", 1.0, 2.0, None)
    assert (last.action, last.value, last.error, last.ranks) == ("exit", 3.0, "E: x", frozenset({1}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print('hello')", "'train.py' has no list EVENTS"),
        ("EVENTS = [", "can't be read"),
        ("EVENTS = 3", "type int"),
        ("EVENTS = make()", "not made of plain values"),
        ("EVENTS = [1]", "event 0 of 'train.py' is 1"),
        ("EVENTS = [{'at': 0}]", "event 0 of 'train.py' has 0 of line, metric, stack, exit"),
        ("EVENTS = [{'line': 'x', 'exit': 0}]", "has 2 of line"),
        ("EVENTS = [{'line': 'x', 'att': 0}]", "no key 'att'"),
        ("EVENTS = [{'line': 'x', 'at': -1}]", "at=-1 must be a number"),
        ("EVENTS = [{'line': 'x', 'every': 'day'}]", "every='day' must be a number"),
        ("EVENTS = [{'line': 3}]", "line=3 must be of type str"),
        ("EVENTS = [{'line': 'step {step}'}]", "line='step {step}' may name"),
        ("EVENTS = [{'line': 'loss {'}]", "line='loss {' may name"),
        ("EVENTS = [{'exit': 256}]", "exit=256 must be 0 to 255"),
        ("EVENTS = [{'line': 'x', 'ranks': 3}]", "ranks=3 must be a list"),
    ],
)
def test_invalid_events_of_a_simulated_script_are_refused_with_the_reason(text, message):
    with pytest.raises(EventsError) as error:
        events(text)
    assert message in str(error.value)
