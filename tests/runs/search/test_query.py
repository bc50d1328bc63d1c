"""The query language of runs."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import QueryError
from paceline.runs import states
from paceline.runs.search.facts import RunFacts
from paceline.runs.search.fields import quoted, sorted_runs
from paceline.runs.search.params import PackedMapping
from paceline.runs.search.query import LONGEST, parse, predicate
from paceline.runs.search.summaries import MetricSummaries

NOW = dt.datetime(2026, 11, 28, 12).timestamp()
DAY = 86400.0


def facts(
    run_id: str = "digits_1700000000_00000001", metrics: Mapping[str, tuple[float, ...]] | None = None, **values: object
) -> RunFacts:
    packed: dict[str, object] = {name: PackedMapping(values.pop(name)) for name in ("tags", "params") if name in values}  # type: ignore[arg-type]
    numbers = {name: [value[-1], min(value), max(value), len(value)] for name, value in (metrics or {}).items()}
    return RunFacts(
        run_id=run_id, metrics=MetricSummaries.of(numbers), **{"status": states.COMPLETED, **values, **packed}
    )  # type: ignore[arg-type]


RUN = facts(
    "digits_1700000000_00000001",
    {"acc": (0.5, 0.95, 0.9), "val loss": (0.5, 0.25), "x.best": (3.0,)},
    name="brave-otter-12",
    experiment="digits",
    user="ann",
    status=states.FAILED,
    created=NOW - 2 * DAY,
    started=NOW - 2 * DAY,
    ended=NOW - 2 * DAY + 5400,
    size="2×4",
    script="train.py",
    arguments="--lr 5e-4",
    tags={"team": "vision", "bare": None, "epoch": "12"},
    params={"lr": 5e-4, "opt": "adam", "amp": "true"},
)


@pytest.mark.parametrize(
    "query",
    [
        "",
        'metrics.acc > 0.89 and params.lr < 1e-3 and tags.team = "vision" and state = failed and created > -7d',
        "otter state=FAILED",
        "vision ann digits_17",
        "metrics.acc.best >= .95 metrics.acc.min=0.5 metrics.acc.count = 3",
        'metrics."val loss" = 0.25 and metrics.`val loss`.max = 0.5 and metrics."x.best" = 3',
        "state in (failed, canceled) and not state = live",
        "state != completed and state not in (queued, live)",
        "tags.team ~ VIS and tags.bare and tags.bare = '' and not tags.none and tags.epoch >= 12.0",
        "params.opt = adam and params.lr = 0.0005 and params.lr = 5e-4",
        "duration > 1h and duration <= 1h30m",
        "created = 2026-11-26 and created < 2026-11-27 and created <= 2026-11-26 and created >= 2026-11-26",
        "created < yesterday and created < -1d and created > 2026-11-26T11:59 and created < now",
        "size = 2x4 and script = train.py and arguments ~ LR and archived = no",
        "(false or otter) and (params.none != 5) and params.none !~ a",
        "not (queued or not failed) or otter",
        "status = failed AND metric.acc > 0 AND param.lr < 1",
    ],
)
def test_each_listed_query_matches_the_example_run_and_its_negation_does_not(query: str) -> None:
    assert predicate(query, NOW)(RUN)
    assert not predicate(f"not ({query})" if query else "not otter", NOW)(RUN)
    assert str(parse(str(parse(query)))) == str(parse(query))


@pytest.mark.parametrize(
    "query",
    [
        "resnet",
        "metrics.acc > 0.95",
        "metrics.none < 1",
        "params.opt > 5",
        "params.lr = adam",
        "tags.none ~ a",
        "created > 2026-11-26 or created > -1d or created = today",
        "metrics.acc = nan",
        "archived = true",
        "ended > now or started in (today, yesterday)",
    ],
)
def test_each_listed_query_for_other_values_does_not_match_the_example_run(query: str) -> None:
    assert not predicate(query, NOW)(RUN)


def test_query_for_nan_matches_nan() -> None:
    assert predicate("metrics.loss = nan")(facts(metrics={"loss": (1.0, math.nan)}))


@pytest.mark.parametrize(
    ("query", "at", "problem", "expected"),
    [
        ("state = faild", 8, "'faild' is not a state. Did you mean 'Failed'?", "live, NotStarted"),
        ("metrics.acc > high", 14, "metrics.acc is a number, and 'high' is not", "a number such as 0.9"),
        ("metrics.acc >", 13, "'>' lacks a value", "a value to compare metrics.acc with"),
        ("team = vision", 0, "there is no field 'team'", "a field such as state"),
        ("parms.lr < 1", 0, "there is no field 'parms.lr'. Did you mean 'params.lr'?", "a field such as state"),
        ("stat = failed", 0, "there is no field 'stat'. Did you mean 'state'?", "a field such as state"),
        ("(a or b", 7, "a parenthesis is not closed", ")"),
        ("a)", 1, "')' does not fit here", "and, or, or the end"),
        ("a and", 5, "the query ends here", "a field, a word or a parenthesis"),
        ('tags.a = "x', 9, "a quote is not closed", '" at the end'),
        ("created > soon", 10, "created is a time, and 'soon' is not", "a time ago (-7d"),
        ("duration > soon", 11, "'soon' is not a duration", "a duration such as 90s"),
        ("name < b", 7, "name has no order for <", "one of =, !=, ~, in"),
        ("created ~ 2026", 10, "~ searches in texts, and created is not a text", "one of ="),
        ("params.lr < big", 12, "< compares numbers, and 'big' is not a number", "a number"),
        ("state in (failed, odd)", 18, "'odd' is not a state", "live"),
        ("state in failed", 9, "in needs its values in parentheses", "(state in (a, b))"),
        ("state in (failed", 16, "the list of values is not closed", ", or )"),
        ("metrics. > 3", 8, "metrics. lacks a name", "the name of a metric's last value"),
        ('metrics."a".median > 3', 0, "'median' is no statistic of a metric", "last, best, min, max, count"),
        ("archived = 5", 11, "archived is not '5'", "true or false"),
        ("a ! b", 2, "'!' has no meaning here", "an operator such as !="),
        ("'a' = 5", 0, "'a' is a text and not a field", "a field such as state"),
        ("(" * 60, 50, "more than 50 parentheses or nots are nested", "a flatter query"),
        ("a" * 20_000, LONGEST, "the query has 20000 characters", "a shorter query"),
    ],
)
def test_invalid_query_raises_an_error_with_position_and_expected_word(
    query: str, at: int, problem: str, expected: str
) -> None:
    with pytest.raises(QueryError) as caught:
        parse(query, NOW)
    assert caught.value.at == at
    assert caught.value.problem.startswith(problem)
    assert caught.value.expected.startswith(expected)
    assert caught.value.pointed(query).splitlines()[-1].endswith("^")


def test_caret_in_a_query_error_points_at_the_invalid_position() -> None:
    query = "\x1b[31m" + "a " * 100 + "team = vision and b"
    with pytest.raises(QueryError) as caught:
        parse(query)
    shown, caret = caught.value.pointed(query).splitlines()[-2:]
    assert "\x1b" not in shown
    assert shown[caret.index("^") :].startswith("team = vision")


WORDS = "state metrics.acc metrics. params.lr = != < ~ ! ( ) and or not in , created -7d 0.9 failed ' \" \\ é duration nan 9e999"
PARTS = st.sampled_from([*WORDS.split(" "), 'tags."a b"', '"x y"', " ", "9" * 400, "2026-11-11", "name"])


@given(st.lists(PARTS | st.text(max_size=6), max_size=25).map(" ".join) | st.text(max_size=200))
@settings(max_examples=400, deadline=None)
def test_any_text_parses_as_a_query_or_raises_a_query_error(text: str) -> None:
    try:
        node = parse(text, NOW)
    except QueryError as error:
        wrong_at = error.at
    else:
        wrong_at = None
    if wrong_at is not None:
        assert 0 <= wrong_at <= len(text)
        return
    again = parse(str(node), NOW)
    assert str(again) == str(node)
    assert again.test(NOW)(RUN) == node.test(NOW)(RUN)


NAMES = st.text(min_size=1, max_size=8)


@given(NAMES, NAMES)
@settings(deadline=None)
def test_quoted_names_and_values_in_a_query_match_for_any_characters(name: str, value: str) -> None:
    run = facts(tags={name: value}, params={name: value}, metrics={name: (1.0, 5.0, 2.0)})
    for query in (
        f"tags.{quoted(name)} ~ {quoted(value)}",
        f"params.{quoted(name)} = {quoted(value)}",
        f"metrics.{quoted(name)}.max = 5",
    ):
        assert predicate(query)(run), query
        assert predicate(str(parse(query)))(run), query


def test_sorting_by_a_best_metric_puts_the_best_run_first_and_runs_without_the_metric_last() -> None:
    runs = [
        facts(str(number), metrics=metrics)
        for number, metrics in enumerate(
            [{"acc": (0.5,), "loss": (3.0,)}, {}, {"acc": (0.9,), "loss": (1.0,)}, {"acc": (math.nan,)}]
        )
    ]
    assert [run.run_id for run in sorted_runs(runs, "metrics.acc.best")][:2] == ["2", "0"]
    assert [run.run_id for run in sorted_runs(runs, "-metrics.acc.best")][:2] == ["0", "2"]
    assert [run.run_id for run in sorted_runs(runs, "metrics.loss.best")] == ["2", "0", "1", "3"]
    assert [run.run_id for run in sorted_runs(runs, "-metrics.loss")] == ["0", "2", "1", "3"]
    assert [run.run_id for run in sorted_runs(runs, "-id")] == ["3", "2", "1", "0"]
    with pytest.raises(QueryError, match="character 2 of the query: there is no field 'speed'"):
        sorted_runs(runs, "-speed")
