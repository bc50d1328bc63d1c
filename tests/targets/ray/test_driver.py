"""What of the driver needs no Ray."""

from __future__ import annotations

from pathlib import Path

from paceline.targets.ray import driver
from tests.helpers import run_python, write_tree


def test_what_ray_has_no_use_for_here_is_loaded_on_use(tmp_path: Path) -> None:
    write_tree(tmp_path, {"requests/__init__.py": "print('loaded'); x = 7"})
    code = (
        f"import importlib.util, sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        f"spec = importlib.util.spec_from_file_location('driver', {driver.__file__!r})\n"
        "driver = importlib.util.module_from_spec(spec); spec.loader.exec_module(driver)\n"
        "sys.meta_path.insert(0, driver._LoadOnUse())\n"
        "import requests, json\n"
        "print('imported'); print(requests.x)\n"
        "try:\n    import jsonschema_that_is_not_there\n"
        "except ModuleNotFoundError: print('as ever')"
    )
    assert run_python(code).split("\n")[:4] == ["imported", "loaded", "7", "as ever"]
