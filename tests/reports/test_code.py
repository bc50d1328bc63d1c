"""Two sources compared file by file."""

from __future__ import annotations

from pathlib import Path

from paceline.reports.diff import file_changes


def test_each_changed_file_is_reported_once_with_its_diff(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for top, text in ((a, "lr = 0.1\nseed = 1\n"), (b, "lr = 0.2\nseed = 1\n")):
        (top / "pkg").mkdir(parents=True)
        (top / "pkg" / "train.py").write_text(text)
        (top / "same.py").write_text("x = 1\n")
        (top / "weights.bin").write_bytes(b"\0" + text.encode())
        (top / "link").symlink_to("same.py" if top is a else "pkg")
    (a / "gone.py").write_text("a\nb\n")
    (b / "new.py").write_text("c\n")
    found = {one.name: one for one in file_changes(a, b)}
    assert {name: (one.status, one.plus, one.minus) for name, one in found.items()} == {
        "gone.py": ("removed", 0, 2),
        "link": ("changed", 1, 1),
        "new.py": ("added", 1, 0),
        "pkg/train.py": ("changed", 1, 1),
        "weights.bin": ("changed", 0, 0),
    }
    assert found["pkg/train.py"].text[-4:] == ("@@ -1,2 +1,2 @@", "-lr = 0.1", "+lr = 0.2", " seed = 1")
    assert found["new.py"].text[:2] == ("--- /dev/null", "+++ b/new.py")
    assert [*file_changes(a, a)] == []
