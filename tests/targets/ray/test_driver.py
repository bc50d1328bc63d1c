"""What of the driver needs no Ray."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.targets.ray import driver
from tests.helpers import run_python, write_tree


def test_ray_driver_imports_the_requests_library_only_when_code_first_uses_that_library(tmp_path: Path) -> None:
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


class FakeRay:
    """Nodes as Ray tells of them, and placement groups that are placed or not."""

    def __init__(self, **cpus: float) -> None:
        self.cpus, self.groups, self.removed = cpus, [], 0
        self.util = self

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "NodeID": f"id_{name}",
                "NodeName": name,
                "NodeManagerAddress": name,
                "Alive": True,
                "Resources": {"CPU": 2.0},
            }
            for name in self.cpus
        ]

    def available_resources_per_node(self) -> dict[str, dict[str, float]]:
        return {f"id_{name}": {"CPU": cpus} for name, cpus in self.cpus.items()}

    def placement_group(self, bundles: list[dict[str, float]], **_: Any) -> Any:
        self.groups.append(bundles)
        # A placement group with a lost node never becomes ready.
        return SimpleNamespace(wait=lambda seconds: not any("node:lost" in bundle for bundle in bundles))

    def remove_placement_group(self, group: Any) -> None:
        self.removed += 1


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(driver, "_SETTLE_S", 0.0)
    monkeypatch.setattr(driver, "_PLACE_S", 0.0)

    def place(ray: FakeRay, least: int, avoid: Sequence[str] = ()) -> list[str]:
        monkeypatch.setattr(driver.importlib, "import_module", lambda name: ray)
        request = {"bundles": [{"CPU": 1.0}] * 3, "name": "x", "least": least, "avoid": list(avoid)}
        made = driver.Driver(ray, request, said.append)
        placed = made._place_some()
        made._tell_spare({f"id_{name}" for name in names(placed)})
        return names(placed)

    said: list[dict[str, Any]] = []
    place.said = said  # type: ignore[attr-defined]
    return place


def names(bundles: list[dict[str, float]]) -> list[str]:
    return [name[5:] for bundle in bundles for name in bundle if name.startswith("node:")]


def test_an_elastic_run_gets_a_bundle_on_each_node_that_has_room_now(place: Any) -> None:
    assert place(FakeRay(a=2.0, b=0.0, c=1.0), 1) == ["a", "c"]
    assert place.said == []
    # The run takes three nodes, so the fourth free node is reported as spare. Nodes that the run already has, or that
    # are lost, are not reported.
    assert place(FakeRay(a=2.0, b=2.0, c=2.0, d=2.0), 1) == ["a", "b", "c"]
    assert place.said == [{"is": "spare", "count": 1}]
    assert place(FakeRay(lost=2.0, b=2.0), 1, ["id_lost"]) == ["b"]
