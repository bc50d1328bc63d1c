from __future__ import annotations

import os

import pytest

from paceline.observe.node.gpus import GPUS_VARIABLE, devices
from tests.helpers import write_program


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Replaces nvidia-smi by a program: call it with the program's code."""

    def make(script: str) -> None:
        program = write_program(tmp_path / "bin/nvidia-smi", f"#!/bin/sh\n{script}\n")
        monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")

    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    return make


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("0,1", ("0", "1")),
        (" 0 , 3 ", ("0", "3")),
        ("", ()),
        ("-1", ()),
        ("GPU-5a", ("GPU-5a",)),
        ("MIG-1/2/3,1", ("MIG-1/2/3", "1")),
    ],
)
@pytest.mark.parametrize("name", [GPUS_VARIABLE, "CUDA_VISIBLE_DEVICES"])
def test_paceline_gpus_or_cuda_visible_devices_selects_the_gpus_of_a_node(monkeypatch, nvidia_smi, name, value, found):
    nvidia_smi("seq 0 7")
    monkeypatch.setenv(name, value)
    assert devices() == found


def test_variable_paceline_gpus_overrides_cuda_visible_devices(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.setenv(GPUS_VARIABLE, "5")
    assert devices() == ("5",)


def test_gpu_indices_come_from_nvidia_smi(nvidia_smi, tmp_path):
    nvidia_smi(f'echo "$@" > {tmp_path}/asked; seq 0 3')
    assert devices() == ("0", "1", "2", "3")
    assert (tmp_path / "asked").read_text().split() == ["--query-gpu=index,mig.mode.current", "--format=csv,noheader"]


@pytest.mark.parametrize(
    "script",
    [
        "echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'; exit 9",
        "echo 'No devices were found'",
        "seq 0 3; exit 1",
        "exit 0",
    ],
)
def test_gpu_list_is_empty_if_nvidia_smi_fails_or_lists_no_gpu(nvidia_smi, script):
    nvidia_smi(script)
    assert devices() == ()


def test_missing_nvidia_smi_returns_no_gpus(nvidia_smi):
    assert devices() == ()


def test_unrunnable_nvidia_smi_returns_no_gpus(tmp_path, monkeypatch):
    write_program(tmp_path / "bin/nvidia-smi", "not a program")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}/nowhere")
    assert devices() == ()


def test_gpu_in_mig_mode_is_listed_as_its_slices(nvidia_smi):
    listed = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaa)
  MIG 3g.20gb     Device  0: (UUID: MIG-1111)
  MIG 3g.20gb     Device  1: (UUID: MIG-2222)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-bbbb)"""
    nvidia_smi(f"[ \"$1\" = -L ] && echo '{listed}' || printf '0, Enabled\\n1, Disabled\\n'")
    assert devices() == ("MIG-1111", "MIG-2222", "1")
