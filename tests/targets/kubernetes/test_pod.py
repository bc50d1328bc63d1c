"""The first process of index 0 keeps the run's files on the volume."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from paceline.runs import states, store
from paceline.targets.kubernetes import pod
from paceline.targets.kubernetes.pod import PodLeader, link_to_volume
from paceline.targets.kubernetes.ticket import PodTicket
from tests.engines.container_lab import free_ports
from tests.helpers import make_run


@pytest.fixture
def leader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PodLeader:
    """The first process of a pod whose run and volume are below `tmp_path`."""
    monkeypatch.setattr(pod, "TOP", str(tmp_path))
    monkeypatch.setattr(pod, "VOLUME", str(tmp_path / "volume"))
    folder, fd = make_run(tmp_path / "workspace" / "w" / "runs", status=states.RUNNING)
    os.close(fd)
    (port,) = free_ports(1)
    texts = {"run_id": folder.run_id, "job": "j", "workspace": "w", "key": secrets.token_hex(32), "library": "l"}
    described = PodTicket(**texts, port=port, node_count=1, gang_wait_s=300.0, silence_s=15.0, volume="shared")
    return PodLeader(described, "", "", {})


def test_renamed_output_of_a_pod_is_also_renamed_on_the_volume_by_the_next_copy(
    leader: PodLeader, tmp_path: Path
) -> None:
    kept = tmp_path / "volume" / "runs" / leader._ticket.run_id
    leader._folder.outputs.mkdir(exist_ok=True)
    (leader._folder.outputs / "old").write_text("1")
    leader._keep()
    assert (kept / "outputs" / "old").read_text() == "1"
    (leader._folder.outputs / "old").rename(leader._folder.outputs / "new")

    leader._keep()

    assert os.listdir(kept / "outputs") == ["new"]
    assert os.listdir(kept.parent) == [kept.name]
    assert store.stored(leader._folder).warnings == ()


def test_files_that_cannot_be_written_to_the_volume_are_reported_as_a_warning(
    leader: PodLeader, tmp_path: Path
) -> None:
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume" / "runs").write_text("not a folder")

    leader._keep()

    (warning,) = store.stored(leader._folder).warnings
    assert warning.startswith("The run's files could not be copied to the volume shared: ")
    assert not leader._is_kept


def test_environments_and_caches_created_in_a_pod_are_stored_on_the_volume(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()

    link_to_volume(str(tmp_path), str(tmp_path / "volume"))

    (tmp_path / "environments" / "key").mkdir()
    (tmp_path / "home" / ".cache" / "pip").mkdir()
    assert (tmp_path / "volume" / "environments" / "key").is_dir()
    assert (tmp_path / "volume" / "home" / ".cache" / "pip").is_dir()
