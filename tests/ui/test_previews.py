"""Previews of a run's files: each format, and files that want to run scripts, fill the memory or take for ever."""

from __future__ import annotations

import io
import json
import os
import random
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint import files as checkpoint_files
from paceline.runs.folder import RunFolder
from paceline.ui import files, previews
from paceline.ui.markup import highlighted, render_markdown
from paceline.ui.previews import pickled
from paceline.ui.previews.reader import read_preview
from tests.ui.conftest import HOSTILE, Place
from tests.ui.test_app import PAGE, Elements

SCRIPT = "<script>parent.document.title='owned'</script>"


def shown(data: bytes, name: str, output: int | None = None) -> previews.FilePreview:
    return read_preview(io.BytesIO(data), name, output)


def text_of(found: previews.FilePreview) -> str:
    return json.dumps(found, ensure_ascii=False)


def page_of(place: Place, folder: RunFolder, name: str, data: bytes) -> str:
    """Write a file of the run, and return its page."""
    (folder.outputs / name).write_bytes(data)
    answer = place.client().get(f"/runs/{folder.run_id}/look/outputs/{name}", headers=PAGE)
    assert answer.status_code == 200, answer.text[-500:]
    assert Elements(answer.text).runs == []
    return answer.text


def notebook(*cells: dict[str, Any]) -> bytes:
    return json.dumps({"nbformat": 4, "metadata": {}, "cells": cells}).encode()


def output(**data: Any) -> dict[str, Any]:
    found = {"output_type": "display_data", "data": {key.replace("_", "/"): value for key, value in data.items()}}
    return {"cell_type": "code", "source": ["x = 1\n", "x"], "outputs": [found]}


# --- Previews of file formats


def test_csv_preview_is_a_table_whose_cells_keep_quoted_newlines() -> None:
    (table,) = shown(b'\xef\xbb\xbfa,b\n"1\n2",3\n', "x.CSV")["blocks"]
    assert (table["columns"], table["rows"]) == (["a", "b"], [["1\n2", "3"]])


def test_long_and_wide_csv_is_cut_and_the_page_says_so() -> None:
    found = shown(b"\n".join(b"," * 99 + b"x" for _ in range(1000)), "x.csv")
    (table,) = found["blocks"]
    assert (len(table["rows"]), len(table["columns"])) == (previews.ROWS, previews.COLUMNS)
    assert found["notes"] == ["The page shows the first 200 rows.", "The page shows 60 of 100 columns."]


def test_large_text_shows_its_beginning_and_the_limit() -> None:
    found = shown(b"a line\n" * 100_000, "x.txt")
    assert len(found["blocks"][0]["text"]) == previews.TEXT_BYTES
    assert found["notes"] == ["The page shows the first 262 kB of 700 kB. Download the file for the rest."]


@pytest.mark.parametrize(("name", "mark"), [("x.py", "hl-kn"), ("x.yaml", "hl-nt"), ("Dockerfile", "hl-k")])
def test_preview_of_code_is_coloured_for_the_language_of_its_file_name(name: str, mark: str) -> None:
    code = {"x.py": "import os", "x.yaml": "a: 1", "Dockerfile": "FROM scratch"}[name]
    assert f'class="{mark}"' in shown(code.encode(), name)["blocks"][0]["html"]


def test_json_preview_is_indented() -> None:
    assert '>"a"</span><span class="hl-p">:</span>' in shown(b'{"a":[1]}', "x.json")["blocks"][0]["html"]


def test_notebook_shows_cells_and_outputs() -> None:
    found = shown(
        notebook(
            {"cell_type": "markdown", "source": "# Title"},
            output(image_png="iVBORw0KGgo="),
            output(text_plain=["a", "b"]),
            {
                "cell_type": "code",
                "source": "1/0",
                "outputs": [{"output_type": "error", "traceback": ["\x1b[31mE\x1b[0m"]}],
            },
        ),
        "x.ipynb",
    )
    blocks = found["blocks"]
    assert [block["kind"] for block in blocks] == ["html", "html", "picture", "html", "text", "html", "text"]
    assert "<h1>Title</h1>" in blocks[0]["html"]
    assert (blocks[2]["source"], blocks[4]["text"], blocks[6]["text"]) == (
        "data:image/png;base64,iVBORw0KGgo=",
        "ab",
        "E",
    )


def test_checkpoint_shows_tensors_and_other_values(place: Place) -> None:
    folder = place.run()
    part = checkpoint_files.CheckpointPart(7)
    checkpoint_files.write_file(folder.checkpoints / part.name, {"step": 7}, [])
    client = place.client()
    assert f"look/checkpoints/{part.name}" in client.get(f"/runs/{folder.run_id}/files").text
    text = client.get(f"/runs/{folder.run_id}/look/checkpoints/{part.name}").text
    assert "Values that are no tensors" in text
    assert client.get(f"/runs/{folder.run_id}/file/checkpoints/{part.name}").status_code == 200


def test_safetensors_numpy_and_torch_files_list_their_arrays(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    header = json.dumps({"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 24)
    with open(tmp_path / "x.safetensors", "rb") as file:
        (table,) = read_preview(file, "x.safetensors")["blocks"]
    assert (table["title"], table["rows"]) == ("1 tensors with 6 values", [["w", "F32", "2 × 3", "24 B"]])
    one, several = io.BytesIO(), io.BytesIO()
    numpy.save(one, numpy.zeros((4, 5), "float16"))
    numpy.savez(several, a=numpy.zeros(3))
    assert shown(one.getvalue(), "x.npy")["blocks"][0]["rows"][0] == ["Shape", "4 × 5"]
    assert shown(several.getvalue(), "x.npz")["blocks"][0]["rows"][0][:3] == ["a.npy", "3", "<f8"]


def saved(value: object, protocol: int) -> bytes:
    """Return what torch.save writes."""
    torch, file = pytest.importorskip("torch"), io.BytesIO()
    torch.save(value, file, pickle_protocol=protocol)
    return file.getvalue()


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_preview_of_a_torch_file_lists_tensors_and_values_as_torch_load_returns_them(protocol: int) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(5, 3)).sum().backward()
    optimizer.step()
    shared = torch.zeros(2, 3, dtype=torch.bfloat16)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "weight": torch.nn.Parameter(torch.zeros(7)),
        "tagged": torch.zeros(3),
        "nested": [(shared, shared), {5: torch.tensor(1.0)}],
        "small": torch.zeros(2, dtype=torch.float8_e4m3fn),
        "epoch": 3,
        "note": HOSTILE,
    }
    # torch saves a tensor with an attribute in another format.
    state["tagged"].tag = "x"
    tensors, values, entries = shown(saved(state, protocol), "x.pt")["blocks"]
    expected: list[list[str]] = []

    def add(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            shape = " × ".join(map(str, value.shape)) or "one value"
            expected.append([name, str(value.dtype).partition(".")[2], shape])
        elif isinstance(value, (dict, list, tuple)):
            for key, part in value.items() if isinstance(value, dict) else enumerate(value):
                add(f"{name}.{key}" if name else str(key), part)

    add("", state)
    assert tensors["rows"] == expected
    assert tensors["title"].startswith(f"{len(expected)} tensors")
    assert {("epoch", "3"), ("optimizer.param_groups.0.betas.1", "0.999")} <= {*map(tuple, values["rows"])}
    assert any(row[0].endswith("/data.pkl") for row in entries["rows"])
    whole = shown(saved(model, protocol), "x.pth")["blocks"][0]
    assert ["_modules.0._parameters.weight", "float32", "4 × 3"] in whole["rows"]
    assert shown(saved(shared, protocol), "x.pt")["blocks"][0]["rows"] == [["", "bfloat16", "2 × 3"]]


def test_hostile_pickles_of_torch_files_are_not_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path("owned")
    deep = b"(" * 10_000 + b"t" * 10_000 + b"."
    laughs = b"".join([b"\x80\x04]\x94", *(b"]\x94(h%ch%ce" % (n, n) for n in range(60)), b"."])
    itself = b"\x80\x04]\x94h\x00a."
    pickles = [
        b"cos\nsystem\n(S'touch owned'\ntR.",
        deep,
        laughs,
        itself,
        b"t.",
        b"h\x05.",
        b"}",
        b"",
        b"0.",
        b"\x8a\xff.",
    ]
    drawn = random.Random(1)
    good = zipfile.ZipFile(io.BytesIO(saved({"w": pytest.importorskip("torch").zeros(2)}, 2)))
    data = good.read(next(name for name in good.namelist() if name.endswith("data.pkl")))
    for _ in range(300):
        spoilt = bytearray(data)
        for _ in range(3):
            spoilt[drawn.randrange(len(spoilt))] = drawn.randrange(256)
        pickles.append(bytes(spoilt))
    for one in pickles:
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w") as archive:
            archive.writestr("x/data.pkl", one)
        assert shown(made.getvalue(), "x.pt")["blocks"][-1]["rows"][0][0] == "x/data.pkl"
    assert not here.exists()
    monkeypatch.setattr(pickled, "_MOST_OPCODES", 20)
    assert shown(saved({"w": 1, "x": [2] * 30}, 2), "x.pt")["notes"] == [
        "The tensors can't be listed: its pickle has more than 20 opcodes."
    ]


def test_parquet_shows_schema_and_first_rows() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"a": range(1000), HOSTILE: ["x"] * 1000}), file)
    rows, columns = shown(file.getvalue(), "x.parquet")["blocks"]
    assert (len(rows["rows"]), rows["rows"][1][0], columns["title"]) == (200, "1", "1,000 rows, 2 columns")


# --- Hostile files


@pytest.mark.promise("scripts-write-text-page-files")
def test_hostile_text_is_escaped_in_the_preview_of_every_file_format(place: Place) -> None:
    folder, words = place.run(), f"{HOSTILE}{SCRIPT}"
    for name, text in {
        "x.py": f"# {words}",
        "x.md": f"# {words}\n\n[a](javascript:alert(1)) ![b](javascript:alert(1)) <img src=x onerror=alert(1)>",
        "x.csv": f"{words},b\n1,{words}\n",
        "x.json": json.dumps({words: words}),
        "x.yaml": f"{words}: [",
    }.items():
        page = page_of(place, folder, name, text.encode())
        assert SCRIPT not in page
        assert "\u202e" not in page


@pytest.mark.promise("scripts-write-text-page-files")
def test_html_reaches_a_browser_only_in_a_sandbox(place: Place) -> None:
    folder = place.run()
    page = page_of(place, folder, "x.html", SCRIPT.encode())
    assert 'sandbox="" src="../../../../runs' in page
    cells = notebook(output(text_html=f"<table></table>{SCRIPT}"), output(image_svg="x", text_html=["<b>", SCRIPT]))
    assert SCRIPT not in page_of(place, folder, "x.ipynb", cells)
    client = place.client()
    for address in ("x.html", "x.ipynb?output=0", "x.ipynb?output=1"):
        answer = client.get(f"/runs/{folder.run_id}/frame/outputs/{address}")
        policy = answer.headers["content-security-policy"].split("; ")
        assert SCRIPT in answer.text
        assert {"sandbox", "default-src 'none'", "frame-ancestors 'self'"} <= set(policy)
        assert not any("script" in rule or "allow" in rule for rule in policy)
    for name in ("x.py", "x.ipynb", "x.ipynb?output=9"):
        (folder.outputs / "x.py").write_text(SCRIPT)
        assert SCRIPT not in client.get(f"/runs/{folder.run_id}/frame/outputs/{name}").text


def test_svg_output_in_a_notebook_preview_is_shown_as_an_image_only() -> None:
    (_, picture) = shown(notebook(output(**{"image_svg+xml": f"<svg>{SCRIPT}</svg>"})), "x.ipynb")["blocks"]
    assert picture["source"].startswith("data:image/svg+xml;base64,")


def test_only_a_real_pdf_is_sent_to_the_viewer(place: Place) -> None:
    folder = place.run()
    assert "Open in the browser" in page_of(place, folder, "x.pdf", b"%PDF-1.7\n")
    address = f"/runs/{folder.run_id}/frame/outputs/x.pdf"
    answer = place.client().get(address)
    assert (answer.headers["content-type"], answer.headers["x-frame-options"]) == ("application/pdf", "DENY")
    (folder.outputs / "x.pdf").write_text(f"{SCRIPT}%PDF-1.7")
    assert place.client().get(address).status_code == 404


@pytest.mark.parametrize(
    "content",
    [
        b"[]",
        b'{"cells": {"a": 1}}',
        b'{"cells": [1, {"outputs": 3, "source": {}}, {"outputs": [[], {"data": []}]}]}',
        b"{",
    ],
)
def test_preview_of_a_malformed_notebook_is_empty_or_has_a_note(content: bytes) -> None:
    found = shown(content, "x.ipynb")
    assert found["notes"] or found["blocks"] == []


@pytest.mark.parametrize("name", ["x.npz", "x.pt", "x.npy", "x.safetensors", "x.parquet", "x.json", "x.bin", "x.csv"])
@pytest.mark.parametrize(
    "content", [b"", b"\0" * 9, b"\x93NUMPY\x01\0\xff\xff{", b"PK\x05\x06" + b"\xff" * 18, b"[" * 99_999]
)
def test_preview_of_a_malformed_file_shows_a_note_or_its_text(place: Place, name: str, content: bytes) -> None:
    path = place.path / name
    path.write_bytes(content)
    with open(path, "rb") as file:
        found = read_preview(file, name)
    assert found["notes"] or found["blocks"]


def test_zip_bomb_is_listed_without_unpacking_it() -> None:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as bomb:
        for number in range(1500):
            bomb.writestr(f"{number}.npy", b"")
        bomb.writestr("0/data.pkl", b"cos\nsystem\n(S'touch owned'\ntR.")
    # The archive claims that its first entry has 4 GiB.
    data = made.getvalue()
    at = data.index(b"PK\x01\x02") + 24
    data = data[:at] + struct.pack("<I", 0xFFFFFFF0) + data[at + 4 :]
    for name in ("x.npz", "x.pt"):
        found = shown(data, name)
        assert len(found["blocks"][0]["rows"]) == 1000
        assert found["notes"] == ["The page shows the first 1,000 of 1,501 entries."]


@pytest.mark.parametrize(("program", "limit_s", "note"), [("sleep", 0.1, "takes longer"), ("false", 9, "needs more")])
def test_preview_over_its_time_or_memory_limit_shows_a_note(
    place: Place, monkeypatch: pytest.MonkeyPatch, program: str, limit_s: float, note: str
) -> None:
    # Replace the reader by a program of the system that takes too long or fails.
    reader = place.path / "reader"
    reader.write_text(f"#!/bin/sh\nexec {program} 60\n")
    reader.chmod(0o755)
    monkeypatch.setattr(previews, "LIMIT_S", limit_s)
    monkeypatch.setattr("sys.executable", str(reader))
    with open(reader, "rb") as file:
        found = previews.preview(file.fileno(), "x.json", lambda: None)
    assert found["blocks"] == []
    assert f"{note}" in found["notes"][0]


def test_parquet_with_a_huge_footer_is_not_read() -> None:
    found = shown(b"PAR1" + (1 << 30).to_bytes(4, "little") + b"PAR1", "x.parquet")
    assert "footer of at most" in found["notes"][0]


def test_preview_of_a_parquet_file_with_many_columns_shows_only_the_first_columns(place: Place) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    folder, file = place.run(), io.BytesIO()
    parquet.write_table(pyarrow.table({f"column {number}": [number] for number in range(20_000)}), file)
    page = page_of(place, folder, "x.parquet", file.getvalue())
    assert "60 of 20,000 columns" in page
    assert "column 20000" not in page


def test_preview_does_not_load_python_modules_from_the_working_directory(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = place.run()
    (place.path / "csv.py").write_text("raise SystemExit('owned')")
    monkeypatch.chdir(place.path)
    assert "<td>1</td>" in page_of(place, folder, "x.csv", b"a\n1\n")


def test_markdown_images_beside_the_file_are_shown_and_others_linked() -> None:
    (block,) = shown(b"![a](../p.png) ![b](https://example.org/x.png) ![c](../../../../state.json)", "outputs/a/x.md")[
        "blocks"
    ]
    assert '<img class="whole" src="../../../file/outputs/p.png" alt="a">' in block["html"]
    assert block["html"].count("<img") == 1
    assert 'href="https://example.org/x.png"' in block["html"]


def test_markdown_of_a_note_has_no_html_scripts_or_images() -> None:
    html = str(render_markdown(f"{HOSTILE} [x](javascript:1) ![y](z.png) <img src=x onerror=y> [ok](https://a.b)"))
    assert Elements(html).runs == []
    assert "<img" not in html
    assert 'href="javascript' not in html
    assert 'rel="noreferrer noopener nofollow"' in html


def test_file_names_with_quotes_and_newlines_are_escaped(place: Place) -> None:
    folder = place.run()
    name = "a\n'\"><script>x.csv"
    (folder.outputs / name).write_text("a\n1\n")
    client = place.client()
    for path in ("files", "look/outputs/a%0A'%22%3E%3Cscript%3Ex.csv"):
        page = client.get(f"/runs/{folder.run_id}/{path}", headers=PAGE)
        assert page.status_code == 200
        assert Elements(page.text).runs == []
    assert highlighted("x", "a\n'\"><script>") == ""


# --- File tree, ranges and archives


def test_file_tree_opens_only_folders_that_fit_into_the_row_limit(place: Place) -> None:
    folder = place.run()
    for name in ("small/a", "small/deep/b", *(f"large/{number}" for number in range(3000))):
        (folder.outputs / name).parent.mkdir(parents=True, exist_ok=True)
        (folder.outputs / name).write_text("xy")
    found = files.tree(files.files_of(folder))
    rows = [(row["label"], row["depth"], row["files"], row["size"]) for row in found["rows"]]
    assert rows == [
        ("outputs", 0, 3002, 6004),
        ("large", 1, 3000, 6000),
        ("small", 1, 2, 4),
        ("a", 2, 0, 2),
        ("deep", 2, 1, 2),
        ("b", 3, 0, 2),
    ]
    client = place.client()
    inside = client.get(f"/runs/{folder.run_id}/folder/outputs/large").text
    assert "1,000 more files are not shown" in inside
    assert client.get(f"/runs/{folder.run_id}/files?find=LARGE/299").text.count("/look/outputs/large/299") == 11
    assert client.get(f"/runs/{folder.run_id}/folder/..%2f").status_code == 404


@pytest.mark.parametrize(
    ("asked", "status", "body"),
    [
        ({}, 200, b"0123456789"),
        ({"range": "bytes=2-4"}, 206, b"234"),
        ({"range": "bytes=8-"}, 206, b"89"),
        ({"range": "bytes=-3"}, 206, b"789"),
        ({"range": "bytes=5-99"}, 206, b"56789"),
        ({"range": "bytes=10-"}, 416, None),
        ({"range": "bytes=5-2"}, 416, None),
        ({"range": "bytes=1-2,5-6"}, 200, b"0123456789"),
        ({"range": "lines=1-2"}, 200, b"0123456789"),
        ({"range": f"bytes={'9' * 5000}-"}, 200, b"0123456789"),
        ({"range": "bytes=2-4", "if-range": '"an older file"'}, 200, b"0123456789"),
    ],
)
def test_media_file_request_with_a_byte_range_returns_that_range(
    place: Place, asked: dict[str, str], status: int, body: bytes | None
) -> None:
    folder = place.run()
    (folder.outputs / "x.wav").write_bytes(b"0123456789")
    answer = place.client().get(f"/runs/{folder.run_id}/file/outputs/x.wav", headers=asked)
    assert answer.status_code == status
    assert body is None or (answer.content, answer.headers["content-type"]) == (body, "audio/wav")


def test_folder_is_sent_as_a_zip_archive_without_links_that_lead_out(place: Place) -> None:
    folder = place.run()
    (folder.outputs / "a").mkdir()
    (folder.outputs / "a" / "x.txt").write_text("inside")
    (folder.outputs / "a" / "out").symlink_to("/etc/passwd")
    client = place.client()
    answer = client.get(f"/runs/{folder.run_id}/zip/outputs/a")
    with zipfile.ZipFile(io.BytesIO(answer.content)) as made:
        assert {name: made.read(name) for name in made.namelist()} == {"outputs/a/x.txt": b"inside"}
    assert client.get(f"/runs/{folder.run_id}/zip/nothing").status_code == 404


def test_file_that_shrinks_during_a_download_is_sent_up_to_its_new_end(place: Place) -> None:
    folder = place.run()
    (folder.outputs / "x.txt").write_text("0123456789")
    file, _ = files.opened(folder, "outputs/x.txt")
    os.truncate(folder.outputs / "x.txt", 4)
    assert b"".join(files._chunks(file, 10)) == b"0123"
    (folder.outputs / "gone.txt").write_text("x")
    made = files._zipped(folder, ["outputs/gone.txt", "outputs/x.txt"])
    (folder.outputs / "gone.txt").unlink()
    with zipfile.ZipFile(io.BytesIO(b"".join(made))) as archive:
        assert archive.namelist() == ["outputs/x.txt"]
