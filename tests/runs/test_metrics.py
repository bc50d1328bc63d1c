from __future__ import annotations

import io
import json
import math
import os
import tempfile
import threading
import tracemalloc
from itertools import accumulate, combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import MetricError
from paceline.runs import series
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import MetricLog, json_safe, plain_scalar, read, read_by_rank
from tests.helpers import run_python, start_python


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "metrics"


def logged(folder: Path, *values: object, rank: int = 0, name: str = "loss") -> None:
    log = MetricLog(folder / f"rank_{rank}.jsonl")
    for value in values:
        log.scalar(name, value)
    log.close()


def lines(folder: Path, rank: int, *entries: dict) -> None:
    """A rank's log as it is on disk, times included."""
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(entry) + "\n" for entry in entries)
    (folder / f"rank_{rank}.jsonl").write_text(text)


class Boxed:
    """A scalar as numpy and torch have it."""

    def __init__(self, value: object) -> None:
        self.value = value

    def item(self) -> object:
        if isinstance(self.value, list):
            raise ValueError("can only convert an array of size 1 to a Python scalar")
        return self.value


# --- Scalar metrics


def test_metric_logged_once_is_a_scalar_and_logged_repeatedly_a_list(folder):
    logged(folder, 1.5)
    assert read(folder) == {"loss": 1.5}
    logged(folder, 2.5)
    assert read(folder) == {"loss": [1.5, 2.5]}


def test_metric_values_keep_their_order_and_names_the_order_of_first_use(folder):
    log = MetricLog(folder / "rank_0.jsonl")
    for number in range(1000):
        log.scalar("loss" if number % 2 else "acc", number)
    log.close()
    assert read(folder) == {"acc": list(range(0, 1000, 2)), "loss": list(range(1, 1000, 2))}
    assert list(read(folder)) == ["acc", "loss"]


@pytest.mark.parametrize(
    "value", [0, -1, 10**30, 0.1, -0.0, 5e-324, 1.7976931348623157e308, "text ü\n", "", True, False]
)
def test_logged_scalar_is_read_back_with_its_type_and_sign(folder, value):
    logged(folder, value)
    found = read(folder)["loss"]
    assert (found, type(found)) == (value, type(value))
    assert math.copysign(1, found) == math.copysign(1, value) if isinstance(value, float) else True


@settings(max_examples=50)
@given(st.lists(st.floats() | st.integers() | st.text() | st.booleans(), min_size=2, max_size=20))
def test_any_logged_scalar_is_read_back_unchanged(values):
    with tempfile.TemporaryDirectory() as name:
        logged(Path(name), *values)
        found = read(Path(name))["loss"]
    assert [repr(value) for value in found] == [repr(value) for value in values]


@pytest.mark.promise("nan-infinities-stay-they-json")
def test_nan_and_infinity_are_read_back_unchanged(folder):
    logged(folder, float("nan"), float("inf"), float("-inf"))
    nan, infinity, minus = read(folder)["loss"]
    assert math.isnan(nan)
    assert (infinity, minus) == (math.inf, -math.inf)


@pytest.mark.parametrize("value", [1, 0.5, True, "x", float("inf")])
def test_array_scalar_is_logged_as_its_python_value(folder, value):
    logged(folder, Boxed(value))
    found = read(folder)["loss"]
    assert (found, type(found)) == (value, type(value))


def test_numpy_scalars_are_logged(folder):
    numpy = pytest.importorskip("numpy", reason="needs numpy")
    logged(folder, numpy.float64(0.1), numpy.float32(0.5), numpy.int64(3), numpy.bool_(True), numpy.array([7]))
    assert repr(read(folder)["loss"]) == "[0.1, 0.5, 3, True, 7]"


class Celsius(float):
    def __repr__(self) -> str:
        return f"{float(self)} °C"


def test_float_subclass_is_logged_as_a_number(folder):
    logged(folder, Celsius(36.5))
    assert read(folder) == {"loss": 36.5}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1, 2], "Use log_list"),
        ((1,), "Use log_list"),
        (range(3), "Use log_list"),
        ((number for number in [1]), "Use log_list"),
        ({1}, "Use log_list"),
        ({"a": 1}, "Use log_list"),
        (b"1", "bytes"),
        (Boxed([1, 2]), "Use log_list"),
        (Boxed(None), "not a scalar"),
        (Boxed(1j), "not a scalar"),
        (1j, "complex"),
        (object(), "object"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_logging_a_non_scalar_value_raises_an_error_with_its_type_or_a_hint_at_log_list(folder, value, said):
    with pytest.raises(MetricError, match=said) as refused:
        MetricLog(folder / "rank_0.jsonl").scalar("loss", value)
    assert "'loss'" in str(refused.value)
    assert read(folder) == {}


@pytest.mark.parametrize("name", ["", None, 5, ["loss"]], ids=repr)
def test_empty_or_non_string_metric_name_is_refused(folder, name):
    log = MetricLog(folder / "rank_0.jsonl")
    with pytest.raises(MetricError, match="metric name"):
        log.scalar(name, 1)
    with pytest.raises(MetricError, match="metric name"):
        log.other("list", name, [1])


@pytest.mark.parametrize("name", ["train/loss", "größe", 'a"b', "a\nb", "kind", "x" * 1000, "\ud800"], ids=ascii)
def test_values_logged_under_any_metric_name_are_read_back_under_that_name(folder, name):
    logged(folder, 1, 2, name=name)
    assert read(folder) == {name: [1, 2]}


def test_reading_a_long_metric_uses_little_memory(folder):
    """`paceline show` of 1,000,000 values took 391 MiB, ten times what the values take."""
    count = 20_000
    lines(folder, 0, *({"name": "loss", "value": at * 0.5, "step": at, "time": at + 0.5} for at in range(count)))
    tracemalloc.start()
    try:
        found = read(folder)
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert found == {"loss": [at * 0.5 for at in range(count)]}
    assert kept < 60 * count
    # `read` returns the same values for one log as for several.
    mixed = [
        *({"name": "a", "value": 1}, {"name": "image", "kind": "image", "value": "x.png"}, {"name": "a", "value": 2}),
        *({"name": "row", "kind": "row", "value": {"x": 1}}, {"name": "b", "value": None}, {"name": "b"}, [], {"x": 1}),
        *({"name": "both", "value": 1}, {"name": "both", "kind": "list", "value": [2, 3]}),
    ]
    for entries in (mixed, mixed[:-2]):
        lines(folder, 0, *entries)
        (folder / "rank_1.jsonl").unlink(missing_ok=True)
        alone = read(folder)
        lines(folder, 1)
        assert read(folder) == alone


def test_metric_log_remembers_at_most_10000_names_and_still_writes_further_metrics(folder):
    log = MetricLog(folder / "rank_0.jsonl")
    for number in range(10_050):
        log.scalar(f"m{number}", number)
    log.close()
    assert len(log._names) <= 10_000
    found = read(folder)
    assert (len(found), found["m10049"]) == (10_050, 10_049)


def test_metric_line_stores_the_step(folder):
    log = MetricLog(folder / "rank_0.jsonl")
    log.scalar("loss", 1, step=7)
    log.close()
    last = json.loads((folder / "rank_0.jsonl").read_text().splitlines()[-1])
    assert (last["name"], last["value"], last["step"]) == ("loss", 1, 7)


# --- Images, rows and other kinds of metrics


def others(folder: Path, kind: str, *values: object) -> object:
    log = MetricLog(folder / "rank_0.jsonl")
    for value in values:
        log.other(kind, "m", value)
    log.close()
    return read(folder)["m"]


@pytest.mark.parametrize(
    ("kind", "values", "found"),
    [
        ("list", [[1, 2]], [1, 2]),
        ("list", [[1, 2], [3]], [1, 2, 3]),
        ("list", [[]], []),
        ("row", [{"x": 1, "y": 2}], {"x": 1, "y": 2}),
        ("row", [{"x": 1, "y": 2}, {"x": 3, "y": 4}], {"x": [1, 3], "y": [2, 4]}),
        ("row", [{"x": 1}, {"x": 2, "y": 3}], {"x": [1, 2], "y": [None, 3]}),
        ("table", [{"x": [1, 2], "y": [3, 4]}], {"x": [1, 2], "y": [3, 4]}),
        ("table", [{"x": [1]}, {"x": [2, 3]}], {"x": [1, 2, 3]}),
        ("table", [{"x": 1}, {"x": 2}], {"x": [1, 2]}),
        ("image", ["images/a.png"], "images/a.png"),
        ("image", ["images/a.png", "images/b.png"], ["images/a.png", "images/b.png"]),
        ("confusion_matrix", [{"a": 1}], {"a": 1}),
        ("residuals", [{"a": 1}, {"a": 2}], [{"a": 1}, {"a": 2}]),
    ],
)
def test_list_row_table_and_image_metrics_are_read_in_the_format_of_the_azure_sdk(folder, kind, values, found):
    assert others(folder, kind, *values) == found


def test_metric_logged_as_different_kinds_keeps_only_the_last_kind(folder):
    log = MetricLog(folder / "rank_0.jsonl")
    log.other("list", "m", [1, 2])
    log.other("row", "m", {"x": 1})
    log.close()
    assert read(folder) == {"m": {"x": 1}}


# --- Metrics of several ranks


def test_values_of_several_ranks_are_merged_by_time(folder):
    lines(folder, 0, *({"name": "loss", "value": value, "time": value} for value in (1.0, 4.0, 5.0)))
    lines(folder, 1, *({"name": "loss", "value": value, "time": value} for value in (2.0, 3.0, 6.0)))
    assert read(folder) == {"loss": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]}


def test_values_with_equal_times_keep_their_order(folder):
    lines(folder, 0, *({"name": "loss", "value": value, "time": 1.0} for value in range(50)))
    lines(folder, 1, {"name": "loss", "value": 99, "time": 0.5})
    assert read(folder) == {"loss": [99, *range(50)]}


def test_metrics_of_each_rank_are_read_separately(folder):
    for rank in (0, 1, 10):
        logged(folder, rank, rank + 0.5, rank=rank)
    assert read_by_rank(folder) == {0: {"loss": [0, 0.5]}, 1: {"loss": [1, 1.5]}, 10: {"loss": [10, 10.5]}}
    assert read(folder, rank=10) == {"loss": [10, 10.5]}
    assert read(folder, rank=5) == {}


def test_reading_one_metric_name_returns_only_that_metric(folder):
    logged(folder, 1, name="loss")
    logged(folder, 2, name="acc", rank=1)
    assert read(folder, name="acc") == {"acc": 2}
    assert read(folder, name="none") == {}
    assert read_by_rank(folder, name="acc") == {0: {}, 1: {"acc": 2}}


def test_a_run_that_logged_nothing_has_no_metrics(folder):
    assert (read(folder), read_by_rank(folder)) == ({}, {})
    MetricLog(folder / "rank_0.jsonl").close()
    assert read(folder) == {}


def test_foreign_files_in_the_metrics_folder_are_ignored(folder):
    logged(folder, 1)
    for name in ("rank_x.jsonl", "rank_.jsonl", "rank_1.2.3.jsonl", "other.jsonl", "rank_1.txt"):
        (folder / name).write_text('{"name": "loss", "value": 2}\n')
    assert read(folder) == {"loss": 1}


# --- Writers that are slow, killed or restarted


def test_torn_last_metric_line_is_skipped_and_the_next_writer_starts_a_new_line(folder):
    logged(folder, 1, 2)
    with open(folder / "rank_0.jsonl", "ab") as file:
        file.write(b'{"name":"loss","value":3.14')
    assert read(folder) == {"loss": [1, 2]}
    logged(folder, 4)
    assert read(folder) == {"loss": [1, 2, 4]}


@pytest.mark.parametrize(
    "garbage", [b"\0" * 100, b"\xff\xfe\n", b"[1, 2]\n", b"5\n", b"null\n", b'{"no": "name"}\n', b'"x"\n', b"\n\n\n"]
)
def test_invalid_lines_in_a_metric_file_are_skipped_and_other_values_read(folder, garbage):
    logged(folder, 1)
    with open(folder / "rank_0.jsonl", "ab") as file:
        file.write(garbage)
    logged(folder, 2)
    assert read(folder) == {"loss": [1, 2]}


def test_torn_line_in_a_metric_file_loses_no_other_line(folder):
    folder.mkdir()
    text = [f'{{"name":"loss","value":{number},"time":{number}}}\n' for number in range(50_000)]
    text[25_000] = '{"name":"loss","va\n'
    (folder / "rank_0.jsonl").write_text("".join(text))
    found = read(folder)["loss"]
    assert len(found) == 49_999
    assert found[24_999:25_001] == [24_999, 25_001]


WRITER = """
import sys
from pathlib import Path
from paceline.runs.metrics import MetricLog
log = MetricLog(Path(sys.argv[1]))
number = 0
while True:
    log.scalar("loss", number)
    number += 1
    print(number, flush=True)
"""


@pytest.mark.promise("value-logged-survives-worker-s")
def test_value_whose_log_call_returned_survives_sigkill(folder):
    for count in (1, 50, 1000):
        path = folder / f"{count}/rank_0.jsonl"
        with start_python(WRITER, path) as process:
            for _ in range(count):
                returned = int(process.stdout.readline())
            process.kill()
            returned = max([returned, *map(int, process.stdout.read().split("\n")[:-1])])
        found = read(path.parent)["loss"]
        found = found if isinstance(found, list) else [found]
        # The last value may be in the file although its `log` call has not returned.
        assert found == list(range(len(found)))
        assert returned <= len(found) <= returned + 1


def test_values_logged_by_several_threads_are_all_stored(folder):
    log = MetricLog(folder / "rank_0.jsonl")
    threads = [
        threading.Thread(target=lambda name=name: [log.scalar(name, number) for number in range(500)])
        for name in "abcdefgh"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    assert read(folder) == {name: list(range(500)) for name in "abcdefgh"}


def test_values_of_several_processes_of_one_rank_are_kept(folder):
    code = """
import os, sys
from pathlib import Path
from paceline.runs.metrics import MetricLog
log = MetricLog(Path(sys.argv[1]))
log.scalar("parent", 0)
for name in "abcd":
    if os.fork() == 0:
        for number in range(500): log.scalar(name, number)
        os._exit(0)
for name in "abcd": os.wait()
log.scalar("parent", 1)
"""
    run_python(code, folder / "rank_0.jsonl")
    assert read(folder) == {"parent": [0, 1], **{name: list(range(500)) for name in "abcd"}}


def test_metrics_read_during_concurrent_writing_are_a_prefix_of_the_logged_values(folder):
    with start_python(WRITER, folder / "rank_0.jsonl") as process:
        try:
            while int(process.stdout.readline()) < 10:
                pass
            for _ in range(20):
                found = read(folder)["loss"]
                assert found == list(range(len(found)))
        finally:
            process.kill()


class Growing(io.FileIO):
    """A file whose reader is as quick as its writer: the reader finds its end after each piece, and then there is more."""

    def __init__(self, path, *pieces: bytes) -> None:
        super().__init__(path)
        self._ends = [*accumulate(map(len, pieces))]

    def readinto(self, buffer) -> int:
        left = self._ends[0] - self.tell()
        if not left:
            del self._ends[: len(self._ends) > 1]
            return 0
        return super().readinto(memoryview(buffer)[:left])


def test_line_completed_during_reading_is_not_lost(folder, monkeypatch):
    # Regression: a reader took the two halves of an unfinished line for two invalid lines and skipped both. So a value
    # was missing until the run ended.
    text = b"".join(b'{"name":"loss","value":%d,"time":%d}\n' % (number, number) for number in range(4))
    folder.mkdir()
    path = folder / "rank_0.jsonl"
    path.write_bytes(text)
    for first, second in combinations(range(1, len(text), 3), 2):
        file = io.BufferedReader(Growing(path, text[:first], text[first:second], text[second:]))
        monkeypatch.setattr("paceline.runs.metric_reader.open", lambda *_, file=file: file, raising=False)
        found = read(folder).get("loss", [])
        found = found if isinstance(found, list) else [found]
        assert found == list(range(len(found))), (first, second)


@pytest.mark.parametrize("size", [20, 1000], ids=["the first line", "a value"])
def test_metric_logged_on_a_full_disk_raises_and_later_values_stay_readable(folder, size):
    # Regression: a full disk cut a line short. When space was free again, the next value was appended to this half
    # line, and was lost without an error. Here a limit on the file's size stands for the full disk.
    code = """
import resource, sys
from pathlib import Path
from paceline.runs.metrics import MetricLog, read
path = Path(sys.argv[1])
log = MetricLog(path)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
kept, errors = [], 0
for number in range(30):
    if number == 25:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    try:
        log.scalar("loss", number)
        kept.append(number)
    except OSError: errors += 1
print(errors > 5, len(kept) >= 5, read(path.parent)["loss"] == kept)
"""
    assert run_python(code, folder / "rank_0.jsonl", size) == "True True True\n"


def test_metric_log_file_is_created_with_the_first_value(folder):
    log = MetricLog(folder / "rank_0.jsonl")
    assert not folder.exists()
    log.scalar("loss", 1)
    assert (folder / "rank_0.jsonl").exists()
    log.close()
    log.close()


def test_metric_log_descriptor_is_not_inherited_by_child_programs(folder):
    log = MetricLog(folder / "rank_0.jsonl")
    log.scalar("loss", 1)
    assert not os.get_inheritable(log._fd)
    log.close()


# --- Metrics of several attempts


def log_of(folder: Path, attempt: int, rank: int = 0) -> MetricLog:
    return MetricLog(folder / RunFolder(folder).metric_log(rank, attempt).name, attempt=attempt)


def attempt_of(folder: Path, attempt: int, *steps: int | None, name: str = "loss", rank: int = 0) -> None:
    """What an attempt logged under these steps: values that tell attempt and step apart, `attempt` + step / 1000."""
    log = log_of(folder, attempt, rank)
    for step in steps:
        log.scalar(name, attempt + (step or 0) / 1000, step=step)
    log.close()


def test_each_attempt_writes_metrics_to_a_separate_file_with_a_header_line(folder):
    # Regression: a worker of the previous attempt, on a disconnected node, kept writing into the metric file of the
    # next attempt.
    for attempt in (1, 2):
        attempt_of(folder, attempt, 0)
    assert sorted(path.name for path in folder.iterdir()) == ["rank_0.2.jsonl", "rank_0.jsonl"]
    for attempt, name in ((1, "rank_0.jsonl"), (2, "rank_0.2.jsonl")):
        start = json.loads((folder / name).read_text().strip().splitlines()[0])
        assert (start["attempt"], start["pid"]) == (attempt, os.getpid())


def test_later_attempt_replaces_metric_values_from_its_first_step_onwards(folder):
    attempt_of(folder, 1, 0, 1, 2, 3, 4)
    attempt_of(folder, 2, 3, 4, 5)
    assert read(folder) == {"loss": [1.0, 1.001, 1.002, 2.003, 2.004, 2.005]}


def test_first_step_of_a_later_attempt_supersedes_all_higher_steps_of_earlier_attempts(folder):
    attempt_of(folder, 1, 0, 10, 20, 30, 40)
    attempt_of(folder, 2, 15)
    assert read(folder) == {"loss": [1.0, 1.01, 2.015]}


def test_attempt_resumed_from_an_older_checkpoint_supersedes_several_attempts(folder):
    attempt_of(folder, 1, 0, 1, 2, 3, 4, 5)
    attempt_of(folder, 2, 4, 5, 6, 7)
    attempt_of(folder, 3, 2, 3)
    assert read(folder) == {"loss": [1.0, 1.001, 3.002, 3.003]}


def test_metric_values_of_a_short_middle_attempt_supersede_only_the_steps_that_it_logged(folder):
    attempt_of(folder, 1, 0, 1, 2, 3)
    attempt_of(folder, 2, 0)  # this attempt found no checkpoint, and soon failed
    attempt_of(folder, 3, 3, 4)
    assert read(folder) == {"loss": [2.0, 1.001, 1.002, 3.003, 3.004]}
    attempt_of(folder, 4, 9, name="accuracy")
    attempt_of(folder, 1, 0, 1, rank=1)
    assert read(folder, name="loss", rank=0) == {"loss": [2.0, 1.001, 1.002, 3.003, 3.004]}
    # The values of several ranks are merged by attempt and time, and each rank's values keep their order.
    assert [value for value in read(folder)["loss"] if value != 1.0][-4:] == [1.001, 1.002, 3.003, 3.004]


def test_later_attempt_supersedes_steps_of_each_metric_name_separately(folder):
    for attempt, batches, epochs in ((1, (0, 1, 100, 101), (0, 1)), (2, (100, 101, 200), (1, 2))):
        attempt_of(folder, attempt, *batches, name="loss")
        attempt_of(folder, attempt, *epochs, name="accuracy")
    attempt_of(folder, 1, 0, 1, name="only before")
    assert read(folder) == {
        "loss": [1.0, 1.001, 2.1, 2.101, 2.2],
        "accuracy": [1.0, 2.001, 2.002],
        "only before": [1.0, 1.001],
    }
    assert read(folder, name="accuracy") == {"accuracy": [1.0, 2.001, 2.002]}


def test_metric_values_without_a_step_are_kept_from_all_attempts(folder):
    attempt_of(folder, 1, None, 5, 6)
    attempt_of(folder, 2, 5, None)
    assert read(folder) == {"loss": [1.0, 2.005, 2.0]}
    for attempt in (1, 2):
        log = log_of(folder, attempt)
        log.other("list", "m", [attempt])
        log.close()
    assert read(folder, name="m") == {"m": [1, 2]}


def test_metric_logged_by_each_attempt_at_the_same_step_is_read_as_a_scalar(folder):
    for attempt in (1, 2):
        attempt_of(folder, attempt, 0)
    assert read(folder) == {"loss": 2.0}


def test_metrics_of_attempts_are_ordered_by_attempt_and_not_by_time(folder):
    lines(folder, 0, {"name": "loss", "value": 1, "time": 100.0})
    lines(folder, 1, {"name": "loss", "value": 2, "time": 101.0})
    for rank, value in ((0, 3), (1, 4)):
        entry = {"name": "loss", "value": value, "time": 10.0 + rank}
        (folder / f"rank_{rank}.2.jsonl").write_text(json.dumps(entry) + "\n")
    assert read(folder) == {"loss": [1, 2, 3, 4]}


def test_partial_line_of_a_killed_attempt_loses_no_value_of_the_next(folder):
    attempt_of(folder, 1, 0, 1)
    with open(folder / "rank_0.jsonl", "ab") as file:
        file.write(b'{"name":"loss","value":3.14')
    attempt_of(folder, 2, 1, 2)
    assert read(folder) == {"loss": [1.0, 2.001, 2.002]}


def test_later_attempt_replaces_steps_of_an_earlier_attempt_in_the_same_metric_file(folder):
    lines(
        folder,
        0,
        {"attempt": 1, "pid": 1, "time": 0},
        *({"name": "loss", "value": f"1.{step}", "step": step} for step in range(4)),
        {"attempt": 2, "pid": 2, "time": 1},
        *({"name": "loss", "value": f"2.{step}", "step": step} for step in range(2, 5)),
    )
    assert read(folder) == {"loss": ["1.0", "1.1", "2.2", "2.3", "2.4"]}


@st.composite
def interruptions(draw):
    """A training of some steps, in attempts: (first step, number of lines that were written, bytes of a torn one) each."""
    steps = draw(st.integers(1, 12))
    attempts, reached = [], 0
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, reached))  # an attempt may resume from any earlier checkpoint
        written = draw(st.integers(0, 2 * (steps - start)))
        attempts.append((start, written, draw(st.integers(0, 30))))
        reached = max(reached, start + written // 2)
    # The last attempt runs to the end, and has at least one step left.
    return steps, [*attempts, (draw(st.integers(0, min(reached, steps - 1))), None, 0)]


@pytest.mark.promise("metrics-several-attempts-one-series")
@settings(max_examples=150)
@given(interruptions(), st.integers(1, 3))
def test_series_of_killed_and_resumed_attempts_equals_an_uninterrupted_run(story, every):
    steps, attempts = story
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, (start, written, torn) in enumerate(attempts, 1):
            log, left = log_of(folder, number), written
            for step in range(start, steps):
                for metric in ("loss", "accuracy"):
                    if left == 0:
                        break
                    left = None if left is None else left - 1
                    if metric == "loss" or step % every == 0:
                        log.scalar(metric, step / 10, step=step)
            log.close()
            if torn and (path := log._path).exists():
                with open(path, "ab") as file:
                    file.write(b'{"name":"loss","value":99,"step":0}'[:torn])
        whole = MetricLog(folder / "whole" / "rank_0.jsonl")
        # A checkpoint is written after its metrics, so no value before the last attempt's first step was lost.
        for step in range(steps):
            whole.scalar("loss", step / 10, step=step)
            if step % every == 0:
                whole.scalar("accuracy", step / 10, step=step)
        whole.close()
        assert read(folder) == read(folder / "whole")


# --- NaN and infinity in JSON


def test_nan_and_infinity_become_text_in_json():
    value = {"a": float("nan"), 5: [math.inf, (-math.inf, 1.5)], "b": "NaN", "c": None, "d": True}
    safe = json_safe(value)
    assert safe == {"a": "NaN", "5": ["Infinity", ["-Infinity", 1.5]], "b": "NaN", "c": None, "d": True}
    json.dumps(safe, allow_nan=False)


def test_logged_bool_stays_a_bool():
    assert plain_scalar("m", True) is True


@pytest.mark.parametrize("rank_count", [1, 2])
@pytest.mark.parametrize(
    "line",
    [
        '{"name":["a"],"value":1}',
        '{"name":"loss"}',
        '{"name":"loss","kind":"row"}',
        '{"name":"loss","kind":"row","value":3}\n{"name":"loss","kind":"row","value":4}',
        '{"name":"loss","kind":"table","value":3}\n{"name":"loss","kind":"table","value":4}',
        '{"name":"loss","kind":"list","value":3}',
        '{"name":"loss","kind":["row"],"value":3}',
        '{"name":"loss","value":3,"time":"late"}',
        '{"name":"loss","value":3,"step":{}}',
        '{"name":"loss","value":3,"attempt":"a"}',
        '["loss"]',
        "[" * 100_000,
    ],
)
def test_log_line_of_an_unexpected_form_is_skipped(folder: Path, line: str, rank_count: int) -> None:
    for rank in range(rank_count):
        logged(folder, 1.5, rank=rank)
        with open(folder / f"rank_{rank}.jsonl", "a") as file:
            file.write(f"{line}\n")
    values = [1.5] * rank_count
    assert read(folder) == {"loss": values if rank_count > 1 else 1.5}
    assert list(series.read(folder)["loss"].values) == values
