from __future__ import annotations

import os
import subprocess
import sys

import pytest

from paceline.compat.horovod.common import basics, util


def test_horovod_version_check_compares_2_9_and_2_10_as_numbers():
    assert util.is_version_greater_equal_than("2.13.0+cpu", "2.9.0")
    assert not util.is_version_greater_equal_than("2.9", "2.10.0")
    with pytest.raises(ValueError, match="three numbers"):
        util.is_version_greater_equal_than("2.13.0", "2.9")


def test_environment_variables_changed_by_util_env_are_restored_when_its_with_block_ends(monkeypatch):
    monkeypatch.setenv("KEPT", "before")
    with util.env(KEPT=None, NEW="1"):
        assert ("KEPT" in os.environ, os.environ["NEW"]) == (False, "1")
    assert (os.environ["KEPT"], "NEW" in os.environ) == ("before", False)


def test_horovod_checks_such_as_gloo_built_return_true_only_if_the_needed_package_is_installed(monkeypatch):
    assert util.gloo_built() is True  # True if torch is installed, even if the script has not loaded torch
    monkeypatch.setitem(sys.modules, "torch", None)
    assert util.gloo_built() is False
    assert not util.extension_available("mxnet")
    with pytest.raises(ImportError, match=r"horovod\.mxnet can't be used"):
        util.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", __file__)


def test_horovod_basics_class_has_the_lifecycle_functions():
    made = basics.HorovodBasics("horovod", "mpi_lib_v2")
    assert basics.HorovodBasics.rank is made.rank is basics.rank
    assert {"init", "size", "nccl_built", "stop_timeline"} <= set(dir(made))
    assert not hasattr(made, "find_spec")


def test_list_is_split_into_nearly_equal_parts():
    assert util.split_list([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]
    assert util.split_list([1], 2) == [[1], []]


def test_a_cached_function_is_called_once():
    calls = []
    cached = util._cache(lambda value: calls.append(value) or value)
    assert (cached(1), cached(1), calls) == (1, 1, [1])


@pytest.mark.promise("autotuning-accepted-one-line-says")
def test_autotune_is_accepted_with_a_note_that_it_has_no_effect():
    program = "from paceline.compat.horovod.common import basics; basics.init(); print(basics.size())"
    environ = {"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": "a.csv", "HOROVOD_CONTROLLER": "gloo"}
    environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout == "1\n"
    assert [line for line in done.stderr.splitlines() if "AUTOTUNE" in line] == [
        "HOROVOD_AUTOTUNE=1: nothing is tuned. HOROVOD_FUSION_THRESHOLD and HOROVOD_CYCLE_TIME set what autotuning would "
        "choose; their defaults fit the machine."
    ]
