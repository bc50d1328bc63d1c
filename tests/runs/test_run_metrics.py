from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

from paceline.errors import MetricError, UserError
from paceline.workspace import Experiment, Workspace

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def run():
    with Experiment(Workspace("ws"), "digits").start_logging() as run:
        yield run


class Plot:
    """As much of matplotlib's figure and pyplot as a run needs."""

    def savefig(self, path, format):
        assert format == "png"
        Path(path).write_bytes(PNG)


def test_log_list_accepts_a_generator(run):
    run.log_list("squares", (number**2 for number in range(4)))
    run.log_list("squares", range(2))
    assert run.get_metrics() == {"squares": [0, 1, 4, 9, 0, 1]}


@pytest.mark.parametrize("value", ["text", b"bytes", {"a": 1}, 5, None])
def test_log_list_refuses_non_lists(run, value):
    with pytest.raises(MetricError, match="log takes a value"):
        run.log_list("m", value)


def test_nested_values_in_lists_rows_and_tables_become_text(run):
    run.log_list("m", [1, [2], None])
    run.log_row("point", x=[1])
    run.log_table("t", {"x": [{"y": 1}]})
    assert run.get_metrics() == {"m": [1, "[2]", None], "point": {"x": "[1]"}, "t": {"x": ["{'y': 1}"]}}


def test_rows_with_one_name_form_a_table(run):
    run.log_row("point", x=1, y=0.5)
    assert run.get_metrics() == {"point": {"x": 1, "y": 0.5}}
    run.log_row("point", x=2, y=float("inf"))
    assert run.get_metrics() == {"point": {"x": [1, 2], "y": [0.5, float("inf")]}}


def test_log_row_without_columns_is_refused(run):
    with pytest.raises(MetricError, match="a row without columns"):
        run.log_row("point")


def test_row_description_is_not_a_column(run):
    run.log_row("point", "where it is", x=1)
    run.log_row("point", description="where it is", x=2)
    assert run.get_metrics() == {"point": {"x": [1, 2]}}


def test_log_table_accepts_columns_of_lists_ranges_and_single_values(run):
    run.log_table("t", {"x": [1, 2], "y": "one", 3: range(2)})
    assert run.get_metrics() == {"t": {"x": [1, 2], "y": "one", "3": [0, 1]}}


@pytest.mark.parametrize("value", [[1], "x", None], ids=repr)
def test_log_table_refuses_non_tables(run, value):
    with pytest.raises(MetricError):
        run.log_table("t", value)


def test_logged_image_is_stored_and_its_metric_is_the_file_name(run, tmp_path):
    (tmp_path / "plot.jpeg").write_bytes(PNG)
    run.log_image("a plot/1", path="plot.jpeg")
    name = run.get_metrics()["a plot/1"]
    assert name.startswith("images/a_plot_1_")
    assert name.endswith(".jpeg")
    assert name in run.get_file_names()
    assert Path(run.download_file(name, "copy")).read_bytes() == PNG


def test_logged_plot_is_stored_as_png(run):
    for _ in range(2):
        run.log_image("plot", plot=Plot())
    names = run.get_metrics()["plot"]
    assert len(set(names)) == 2
    assert all(Path(run.download_file(name, "copy")).read_bytes() == PNG for name in names)


def test_log_of_a_dict_stores_each_metric_at_the_given_step(run):
    # Regression: logging a dict ended the training with a TypeError that named an internal class.
    run.log({"loss": 1.0, "acc": 2.0}, step=1)
    run.log({"loss": 0.5}, step=2)
    assert run.get_metrics() == {"loss": [1.0, 0.5], "acc": 2.0}
    assert run.metrics("loss").steps == (1, 2)
    with pytest.raises(MetricError, match="log got no value"):
        run.log("loss")


def test_lists_tables_and_images_are_logged_with_their_steps(run):
    run.log_list("list", [1], step=1)
    run.log_table("table", {"x": 1}, step=2)
    run.log_image("image", plot=Plot(), step=3)
    assert [run.metrics(name).steps for name in ("list", "table", "image")] == [(1,), (2,), (3,)]


@pytest.mark.parametrize("way", ["path", "plot"])
@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 1), (2, 3, 3), (2, 3, 4), (3, 2, 5), (1, 2, 3)])
@pytest.mark.parametrize("kind", ["uint8", "float32", "bool", "int64"])
def test_array_is_stored_as_an_image(run, shape, kind, way):
    numpy, image = pytest.importorskip("numpy"), pytest.importorskip("PIL.Image")
    array = (numpy.arange(numpy.prod(shape)).reshape(shape) % 2).astype(kind)
    run.log_image("array", **{way: array})
    with image.open(run.download_file(run.get_metrics()["array"], "copy.png")) as found:
        pixels = numpy.asarray(found)
    scaled = array * 255 if kind in ("float32", "bool") else array
    as_rows = scaled.transpose(1, 2, 0) if shape in [(3, 2, 5), (1, 2, 3)] and shape[2] not in (1, 3, 4) else scaled
    assert (pixels.squeeze() == as_rows.squeeze()).all()


def test_pil_image_is_stored_as_an_image(run):
    image = pytest.importorskip("PIL.Image")
    run.log_image("pil", image.new("RGB", (3, 2), (9, 8, 7)))
    with image.open(run.download_file(run.get_metrics()["pil"], "copy.png")) as found:
        assert (found.size, found.getpixel((0, 0))) == ((3, 2), (9, 8, 7))


def test_array_of_a_wrong_image_shape_is_refused(run):
    numpy = pytest.importorskip("numpy")
    with pytest.raises(MetricError, match=r"shape \(2, 5, 7\) is not an image"):
        run.log_image("array", plot=numpy.zeros((2, 5, 7)))


@pytest.mark.parametrize("given", [{}, {"path": "a.png", "plot": Plot()}, {"plot": "a.png"}])
def test_log_image_needs_exactly_one_of_path_and_plot(run, given):
    with pytest.raises(MetricError, match="'plot'"):
        run.log_image("plot", **given)


def test_log_image_refuses_a_missing_image_file(run):
    with pytest.raises(UserError, match=r"nowhere\.png"):
        run.log_image("plot", path="nowhere.png")
    assert run.get_metrics() == {}


@pytest.mark.parametrize("name", ["../../evil", "/etc/x", "a\0b", "ü" * 10])
def test_name_of_a_logged_image_can_not_leave_the_run_folder(run, name):
    run.log_image(name, plot=Plot())
    (kept,) = run.get_file_names()
    assert kept.startswith("images/")
    assert "/" not in kept.removeprefix("images/")


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ([1, None], [1, None]),
        (range(3), [0, 1, 2]),
        ((letter for letter in "ab"), ["a", "b"]),
        (None, None),
        ({"a": 1}, "{'a': 1}"),
        (Decimal("0.5"), "Decimal('0.5')"),
        (b"x", "b'x'"),
        ([[1], 2], ["[1]", 2]),
    ],
    ids=["list", "range", "generator", "None", "dict", "Decimal", "bytes", "nested"],
)
def test_log_accepts_any_value_without_raising(run, value, kept):
    run.log("m", value)
    assert run.get_metrics() == {"m": kept}


def test_arrays_are_logged_as_lists(run):
    numpy = pytest.importorskip("numpy")
    run.log("m", numpy.arange(3))
    assert run.get_metrics() == {"m": [0, 1, 2]}


def test_empty_metric_name_raises_value_error(run):
    with pytest.raises(ValueError, match="metric name"):
        run.log("", None)
