"""Environments on top of images: listed, held, pruned."""

from __future__ import annotations

import json
import os

import pytest

from paceline.containers import all_layers, hold_layer, kept_layers, key_of, prune_layers
from paceline.errors import EnvironmentBuildError


@pytest.fixture
def images(tmp_path):
    """A folder with two complete ones, the second used last, and what a killed installation has left."""
    folder = tmp_path / "images"
    for number, key in enumerate(("a" * 20, "b" * 20)):
        prefix = folder / key / "0123"
        prefix.mkdir(parents=True)
        made = {"prefix": str(prefix), "python": "", "bin_dir": "", "packages": [f"x=={number}"]}
        (folder / f"{key}.json").write_text(json.dumps(made))
        (folder / f"{key}.lock").touch()
        os.utime(folder / f"{key}.lock", (1000 + number, 1000 + number))
    (folder / ("c" * 20) / "4567").mkdir(parents=True)
    return folder


def test_those_that_are_complete_are_listed_the_last_used_first(images):
    found = all_layers(images)
    assert [(kept.key, kept.layer.packages, kept.used_at) for kept in found] == [
        ("b" * 20, ("x==1",), 1001.0),
        ("a" * 20, ("x==0",), 1000.0),
    ]
    assert [key_of(kept.layer) for kept in found] == ["b" * 20, "a" * 20]


def test_nothing_is_listed_where_there_is_nothing(tmp_path):
    assert all_layers(tmp_path / "images") == []
    assert prune_layers(tmp_path / "images") == []


def test_one_that_is_held_stays_and_counts_as_used(images):
    with hold_layer(images, "a" * 20):
        assert [kept.key for kept in prune_layers(images)] == ["b" * 20]
        assert [kept.key for kept in all_layers(images)] == ["a" * 20]
        assert all_layers(images)[0].used_at > 1e9
    assert not (images / ("b" * 20)).exists()
    assert prune_layers(images, unused_for_s=3600) == []
    assert [kept.key for kept in prune_layers(images)] == ["a" * 20]
    assert not (images / ("c" * 20)).exists(), "what a killed installation has left is gone too"


def test_a_dry_run_removes_nothing(images):
    assert len(prune_layers(images, dry_run=True)) == 2
    assert len(all_layers(images)) == 2


def test_one_that_is_not_there_any_more_can_not_be_held(images):
    """Story: a run went on with an environment that had been pruned between its build and the hold."""
    prune_layers(images, only=["a" * 20])
    with (
        pytest.raises(EnvironmentBuildError, match=f"environment {'a' * 20} has just been pruned"),
        hold_layer(images, "a" * 20),
    ):
        pass
    assert not (images / ("a" * 20)).exists()


def test_one_that_was_used_since_it_was_listed_stays(images, monkeypatch):
    def use_first(path):
        if path.stem == "a" * 20:
            with hold_layer(images, path.stem):
                pass
        return locks_take(path)

    locks_take = kept_layers.locks.take
    monkeypatch.setattr(kept_layers.locks, "take", use_first)
    assert prune_layers(images, unused_for_s=3600, only=["a" * 20]) == []
    assert len(all_layers(images)) == 2
