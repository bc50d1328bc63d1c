"""Settings of a Kubernetes target and kubeconfigs: each wrong one has its own error."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.errors import TargetError
from paceline.targets.kubernetes.settings import bytes_of, find_context, read_settings
from paceline.targets.kubernetes.ticket import log_lines, parts_in


def kubeconfig(path: Path, *contexts: str, current: str | None = None, **cluster: Any) -> Path:
    entry = {"server": "https://127.0.0.1:1", "certificate-authority": "ca.crt", **cluster}
    path.write_text(
        yaml.safe_dump(
            {
                "clusters": [{"name": "one", "cluster": entry}],
                "users": [{"name": "me", "user": {"token": "t"}}],
                "contexts": [
                    {"name": name, "context": {"cluster": "one", "user": "me", "namespace": f"{name}-lab"}}
                    for name in contexts
                ],
                **({"current-context": current} if current else {}),
            }
        )
    )
    return path


def test_the_current_context_and_its_namespace_are_stored_with_the_target(tmp_path: Path):
    path = kubeconfig(tmp_path / "config", "a", "b", current="b")
    stored, checked = read_settings("k8s", {"kubeconfig": str(path)})

    assert (stored["context"], stored["namespace"], checked.namespace) == ("b", "b-lab", "b-lab")
    path.unlink()
    assert read_settings("k8s", stored)[1] == checked


def test_the_earlier_of_several_kubeconfigs_takes_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = kubeconfig(tmp_path / "first", "a", current="a")
    second = kubeconfig(tmp_path / "second", "b", current="b", server="https://127.0.0.2:1")
    monkeypatch.setenv("KUBECONFIG", f"{first}:{second}")

    assert find_context("t", None, None).name == "a"
    assert find_context("t", None, "b").cluster["server"] == "https://127.0.0.1:1"


def test_paths_in_a_kubeconfig_are_relative_to_that_file(tmp_path: Path):
    found = find_context("t", str(kubeconfig(tmp_path / "config", "a", current="a")), None)

    assert found.cluster["certificate-authority"] == str(tmp_path / "ca.crt")


def test_missing_kubeconfig_context_is_reported_with_the_existing_ones(tmp_path: Path):
    path = kubeconfig(tmp_path / "config", "a", "b")

    with pytest.raises(TargetError, match="no context 'c'; it has a, b"):
        find_context("t", str(path), "c")
    with pytest.raises(TargetError, match="no current context"):
        find_context("t", str(path), None)


def test_missing_kubeconfig_is_reported(tmp_path: Path):
    with pytest.raises(TargetError, match="there is no kubeconfig"):
        find_context("t", str(tmp_path / "none"), None)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"memory_per_worker": "lots"}, "memory_per_worker='lots' is not a quantity"),
        ({"memory_per_worker": "1e3Mi"}, "memory_per_worker='1e3Mi' is not a quantity"),
        ({"memory_per_worker": "500m"}, "memory_per_worker='500m' must be at least 1Mi"),
        ({"memory_per_worker": "1e99"}, "memory_per_worker='1e99' must be at least 1Mi, and less than 1Ei"),
        ({"node_selector": ["gpu"]}, "node_selector='gpu' is not NAME=VALUE"),
        ({"toleration": ["gpu:Never"]}, "toleration='gpu:Never'"),
        ({"namespace": "My Lab"}, "namespace='My Lab'"),
        ({"pod_template": "/does/not/exist"}, "pod_template='/does/not/exist' can't be read"),
        ({"imag": "x"}, "Did you mean image"),
    ],
)
def test_invalid_kubernetes_settings_are_refused(settings: dict[str, Any], text: str):
    with pytest.raises(TargetError, match=text.replace("(", r"\(")):
        read_settings("k8s", {"context": "c", "namespace": "lab", **settings})


def test_a_template_without_a_pod_is_refused(tmp_path: Path):
    path = tmp_path / "pod.yaml"
    path.write_text("kind: Pod\n")

    with pytest.raises(TargetError, match="has no `spec` of a pod"):
        read_settings("k8s", {"context": "c", "namespace": "lab", "pod_template": str(path)})


def test_pod_template_is_stored_in_the_settings_and_its_first_container_is_renamed_to_paceline(tmp_path: Path):
    path = tmp_path / "pod.yaml"
    path.write_text("spec:\n  hostNetwork: true\n  containers: [{name: main}]\n")
    stored, _ = read_settings("k8s", {"context": "c", "namespace": "lab", "pod_template": str(path)})
    path.unlink()

    _, checked = read_settings("k8s", stored)
    assert checked.template["spec"] == {"hostNetwork": True, "containers": [{"name": "paceline"}]}


def test_kubernetes_quantities_are_parsed():
    given = ("4Gi", "2G", "1", "500m", "1e9", "2E", "5.")

    assert [bytes_of(text, "x") for text in given] == [4 << 30, 2e9, 1, 0.5, 1e9, 2e18, 5]


def test_compressed_data_parts_in_a_pod_log_are_decoded_and_truncated_parts_are_skipped():
    data = bytes(range(256)) * 1000
    lines = [*log_lines(0, zlib.compress(data)), "a line of somebody else", *log_lines(1, zlib.compress(b"more"))]

    assert list(parts_in(lines)) == [(0, data), (1, b"more")]
    assert list(parts_in(lines[1:])) == [(1, b"more")]
