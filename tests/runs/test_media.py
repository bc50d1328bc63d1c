from __future__ import annotations

import math
import os
import stat
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.errors import MetricError
from paceline.runs.media import Audio, Histogram, Html, Image, Table, Video
from paceline.runs.offline import OfflineRun
from paceline.runs.run import Run
from paceline.workspace import Experiment, Workspace
from tests.helpers import run_python

numpy = pytest.importorskip("numpy")


@pytest.fixture
def run() -> Iterator[Run]:
    with Experiment(Workspace("ws"), "digits").start_logging() as run:
        yield run


def kinds(run: Run) -> dict[str, str | None]:
    """The kind of each metric, by name."""
    from paceline.runs.metrics import entries_by_name

    return {name: entries[-1].get("kind") for name, entries in entries_by_name(run.folder.metrics).items()}


def content(run: Run, name: str) -> bytes:
    return Path(run.download_file(run.get_metrics()[name], "copy")).read_bytes()


def test_log_of_a_dict_stores_each_number_and_media_value_at_the_given_step(run: Run) -> None:
    pandas = pytest.importorskip("pandas")
    figure, image = pytest.importorskip("matplotlib.figure"), pytest.importorskip("PIL.Image")
    values = {
        "loss": 0.5,
        "figure": figure.Figure(),
        "pil": image.new("RGB", (3, 2)),
        "picture": numpy.zeros((4, 5, 3), "uint8"),
        "weights": numpy.zeros((4, 5, 3)),
        "frame": pandas.DataFrame({"x": [1, 2]}),
        "rows": [{"x": 1}, {"y": 2}],
        "one": Image(numpy.zeros((4, 5))),
        "beep": Audio(numpy.zeros(8), 8000),
        "page": Html("<b>x</b>"),
        "note": "warm",
        "list": numpy.arange(3),
    }
    run.log(values, step=7)
    assert kinds(run) == {
        **{"loss": None, "figure": "image", "pil": "image", "picture": "image", "weights": "histogram"},
        **{"frame": "table", "rows": "table", "one": "image", "beep": "audio", "page": "html", "note": None},
        "list": "list",
    }
    assert {series.steps[-1] for series in run.metrics().values()} == {7}
    assert run.get_metrics()["rows"] == {"x": [1, None], "y": [None, 2]}
    assert content(run, "page") == b"<b>x</b>"
    assert content(run, "figure").startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("array", "channels", "samples"),
    [
        (numpy.array([0.0, 1.0, -1.0, 2.0]), 1, [0, 32767, -32767, 32767]),
        (numpy.array([[0.0, 1.0, -1.0]] * 2, "float32"), 2, [0, 0, 32767, 32767, -32767, -32767]),
        (numpy.array([[1], [2], [3]], "int16"), 1, [1, 2, 3]),
        (numpy.array([math.nan, math.inf]), 1, [0, 32767]),
    ],
    ids=["mono", "channels first", "int16", "not finite"],
)
def test_audio_array_is_stored_as_a_wav_file(run: Run, array: Any, channels: int, samples: list[int]) -> None:
    run.log("sound", Audio(array, rate=16_000))
    (Path("copy.wav")).write_bytes(content(run, "sound"))
    with wave.open("copy.wav") as file:
        assert (file.getnchannels(), file.getframerate(), file.getsampwidth()) == (channels, 16_000, 2)
        assert numpy.frombuffer(file.readframes(100), "<i2").tolist() == samples


def test_logging_media_does_not_modify_the_logged_arrays(run: Run) -> None:
    arrays = [numpy.array([[math.nan, 2.0], [-2.0, math.inf]]) for _ in range(3)]
    before = arrays[0].copy()
    run.log({"sound": Audio(arrays[0], 8000), "image": Image(arrays[1]), "weights": Histogram(arrays[2])})
    assert kinds(run) == {"sound": "audio", "image": "image", "weights": "histogram"}
    assert all(numpy.array_equal(array, before, equal_nan=True) for array in arrays)


def test_torch_tensors_are_logged_like_arrays(run: Run) -> None:
    torch = pytest.importorskip("torch")
    weights = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    run.log(
        {"weights": weights, "loss": torch.tensor(0.5), "list": torch.arange(3), "image": Image(torch.rand(3, 4, 5))}
    )
    found = run.get_metrics()
    assert (found["loss"], found["list"], sum(found["weights"]["counts"])) == (0.5, [0, 1, 2], 6)
    assert kinds(run)["image"] == "image"


class Eager:
    """A tensor of TensorFlow, as far as a run uses it."""

    def __init__(self, array: Any) -> None:
        self._array, self.shape, self.dtype = array, array.shape, array.dtype

    def numpy(self) -> Any:
        return self._array

    def __array__(self) -> Any:
        return self._array


def test_tensorflow_tensors_are_logged_like_arrays(run: Run) -> None:
    run.log({"loss": Eager(numpy.float32(0.5)), "list": Eager(numpy.arange(2)), "weights": Eager(numpy.ones((2, 2)))})
    found = run.get_metrics()
    assert (found["loss"], found["list"], sum(found["weights"]["counts"])) == (0.5, [0, 1], 4)


@pytest.mark.parametrize("as_list", [False, True])
def test_histogram_has_counts_and_edges_without_the_values(run: Run, as_list: bool) -> None:
    values = numpy.array([0.0, 0.1, 0.2, 1.0, math.nan, math.inf])
    run.log("h", Histogram([*values] if as_list else values, bins=2), step=3)
    assert run.get_metrics() == {"h": {"counts": [3, 1], "edges": [0.0, 0.5, 1.0], "not_finite": 2}}


@pytest.mark.parametrize("values", [[], [math.nan], [2, 2], numpy.zeros(0), numpy.array([True, False])], ids=repr)
def test_histogram_of_few_values_has_edges_in_order(run: Run, values: Any) -> None:
    run.log("h", Histogram(values))
    edges = run.get_metrics()["h"]["edges"]
    assert edges == sorted(set(edges))
    assert len(edges) == 65


def test_long_table_is_cut_with_a_note(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        run.log("long", [{"x": number} for number in range(10_001)])
    assert len(run.metrics("long").values[0]["x"]) == 10_000
    assert capsys.readouterr().err == "paceline: metric 'long': the first 10,000 of 10,001 rows are kept\n"


def test_long_text_is_cut(run: Run) -> None:
    run.log("text", "x" * (7 << 20))
    assert run.get_metrics()["text"].endswith("xxx ... (cut)")
    assert len(run.get_metrics()["text"]) < 2 << 20


WRONG = [
    (Image("nowhere.png"), "'nowhere.png' is not a file"),
    (Image(numpy.zeros((2, 5, 7))), "is not an image"),
    (Image(5), "a int is not an image"),
    (Audio("x.txt"), "must end with one of .wav"),
    (Audio(numpy.zeros((2, 2, 2))), "is no sound"),
    (Audio(numpy.zeros(2), rate=0), "rate=0 must be a whole number"),
    (Audio([0.1]), "a list is no array"),
    (Video(numpy.zeros((2, 2))), "is no video"),
    (Html(5), "a int is no HTML"),  # type: ignore[arg-type]
    (Histogram(["x"]), "takes an array, a tensor or numbers"),
    (Histogram([1], bins=0), "bins=0 must be"),
    (Histogram(numpy.array(["x"])), "has no numbers"),
    (Table(5), "a int is not a table"),
]


@pytest.mark.parametrize(("value", "why"), WRONG, ids=[why for _, why in WRONG])
def test_unsupported_media_value_prints_a_note_and_other_values_are_logged(
    run: Run, value: Any, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run.log({why: value, "loss": 1.0})
    assert run.get_metrics() == {"loss": 1.0}
    assert why in capsys.readouterr().err


def test_media_file_over_the_size_limit_is_not_logged_and_prints_a_note(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("paceline.runs.media._MOST_BYTES", 1 << 20)
    Path("big.mp4").write_bytes(b"x" * (2 << 20))
    run.log("big", Video("big.mp4"))
    assert "the file has 2 MiB; at most 1 MiB are logged. Make it smaller" in capsys.readouterr().err
    with pytest.raises(MetricError, match="at most 1 MiB"):
        run.log_image("big", path="big.mp4")
    assert run.get_file_names() == []


def test_empty_media_name_is_refused(run: Run) -> None:
    with pytest.raises(MetricError, match="metric name '' is not"):
        run.log("", Html("x"))


ENCODER = """#!/bin/sh
echo "$@" > arguments
for last; do :; done
cat > "$last"
"""


@pytest.mark.parametrize("shape", [(4, 2, 3, 3), (4, 3, 2, 5)])
def test_video_of_an_array_is_encoded_by_ffmpeg(
    run: Run, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("bin").mkdir()
    Path("bin/ffmpeg").write_text(ENCODER)
    Path("bin/ffmpeg").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{Path('bin').absolute()}:{os.environ['PATH']}")
    run.log("video", Video(numpy.ones(shape, "uint8"), fps=5))
    assert "-pix_fmt rgb24 -s" in Path("arguments").read_text()
    assert len(content(run, "video")) == math.prod(shape)


def test_video_from_an_array_without_ffmpeg_prints_a_note(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "nowhere")
    run.log("video", Video(numpy.ones((4, 2, 3, 3), "uint8")))
    assert "needs ffmpeg. Install it, or give a video file." in capsys.readouterr().err


def test_offline_run_prints_the_names_of_logged_media(capsys: pytest.CaptureFixture[str]) -> None:
    OfflineRun().log({"page": Html("x"), "rows": [{"x": 1}]})
    out = capsys.readouterr().out
    assert "Attempted to log html metric page:\nhtml/page_" in out
    assert "Attempted to log table metric rows:\n{'x': [1]}" in out


def test_logging_html_tables_and_histograms_imports_no_numpy_torch_or_pandas() -> None:
    code = """
import sys, paceline
paceline.init()
paceline.log({"page": paceline.Html("x"), "rows": [{"x": 1}], "h": paceline.Histogram([1.0, 2.0])})
print({"numpy", "torch", "pandas", "PIL", "matplotlib"} & set(sys.modules))
"""
    assert run_python(code) == "set()\n"
    assert paceline.Html is Html
