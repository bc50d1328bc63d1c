from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from paceline.system.below import Below


@dataclass(frozen=True)
class Folder:
    path: Path

    log = Below("logs/log.txt")


def test_a_name_is_a_path_below_the_folder_that_has_it(tmp_path):
    assert Folder(tmp_path).log == tmp_path / "logs" / "log.txt"
    assert Folder(tmp_path / "other").log == tmp_path / "other" / "logs" / "log.txt"


def test_it_is_no_field_of_a_dataclass(tmp_path):
    assert [field.name for field in fields(Folder)] == ["path"]
    assert Folder(tmp_path) == Folder(tmp_path)
