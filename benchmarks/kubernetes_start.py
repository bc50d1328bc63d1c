"""From the shell to the first line, and to the first step of a training, on Kubernetes: paceline against torchrun by hand.

    first line    two pods, each with a worker over Gloo
    training      three pods, DistributedDataParallel over Gloo; the other side is an Indexed Job with torchrun, a Service and
                  a ConfigMap, which one `kubectl apply` creates

The cluster is that of the tests (`make kube`): three nodes on this machine. Pods have this interpreter and its packages by
host paths. Each worker prints the times, and the last worker's counts. A pod runs once its first process has started.

    python benchmarks/kubernetes_start.py [ROUNDS]
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import in_turn, median, program, report, scratch

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.kube import programs
from tests.kube.cluster import EDITOR, Cluster, running

ROUNDS = 7
_LIMIT_S = 180

#: Prints "MARK first TIME STARTED": the time of the first line, and that of the pod's first process.
SCRIPT = """
import os, time
now = time.time()
with open("/proc/1/stat") as file:
    ticks = int(file.read().rpartition(")")[2].split()[19])
with open("/proc/uptime") as file:
    began = now - float(file.read().split()[0]) + ticks / os.sysconf("SC_CLK_TCK")
print("MARK first", repr(now), repr(began), flush=True)
"""
TRAINING = f"""{SCRIPT}
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    optimizer.zero_grad()
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    if step == 0:
        print("MARK step", repr(time.time()), repr(began), flush=True)
dist.destroy_process_group()
"""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of one run: from the shell to the last worker's first line, to its first step, and to the Job; and from the
    start of the last pod to the last first line."""

    first_line: float
    step: float
    job: float
    pods_to_line: float


class Sides:
    """Both ways to run a script on the cluster."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        self._jobs = _JobWatch(cluster)
        self._number = 0
        assert cluster.pod_template is not None
        given = {
            "kubeconfig": cluster.kubeconfig(EDITOR),
            "namespace": cluster.namespace,
            "image": cluster.image,
            "python": cluster.python,
            "cpus-per-worker": 1,
            "memory-per-worker": "1Gi",
            "pod-template": cluster.pod_template,
        }
        options = [f"--{name}={value}" for name, value in given.items()]
        subprocess.run([program("paceline"), "compute", "add", "k8s", "--kind=kubernetes", *options], check=True)

    def ours(self, script: str, pods: int) -> Times:
        """Run a script by `paceline run`."""
        source = self._folder / "source"
        source.mkdir(exist_ok=True)
        (source / "train.py").write_text(script)
        words = ["run", str(source / "train.py"), "--compute=k8s", "-j", f"{pods}x1", "--backend=gloo"]
        began = time.time()
        done = subprocess.run(
            [program("paceline"), *words], capture_output=True, text=True, check=False, timeout=_LIMIT_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return _times(began, done.stdout, self._jobs.created_at(began), pods)

    def torchrun(self, script: str, pods: int) -> Times:
        """Run a script by torchrun in an Indexed Job."""
        self._number += 1
        name = f"by-hand-{self._number}"
        manifest = self._folder / f"{name}.json"
        manifest.write_text(
            json.dumps({"apiVersion": "v1", "kind": "List", "items": self._by_hand(name, script, pods)})
        )
        access = [f"--kubeconfig={self._cluster.kubeconfig(EDITOR)}", f"--namespace={self._cluster.namespace}"]
        began = time.time()
        subprocess.run(
            [*programs.kubectl(), *access, "apply", f"--filename={manifest}"], check=True, capture_output=True
        )
        kubectl = self._cluster.kubectl
        kubectl("wait", "--for=condition=Complete", f"job/{name}", f"--timeout={_LIMIT_S}s", timeout=_LIMIT_S + 10)
        printed = kubectl("logs", f"--selector=job-name={name}", "--tail=-1")
        created = self._jobs.created_at(began)
        kubectl("delete", "job,service,configmap", name, "--cascade=foreground")
        return _times(began, printed, created, pods)

    def _by_hand(self, name: str, script: str, pods: int) -> list[dict[str, Any]]:
        assert self._cluster.pod_template is not None
        spec = json.loads(self._cluster.pod_template.read_text())["spec"]
        main = spec["containers"][0]
        words = [self._cluster.python, "-m", "torch.distributed.run", f"--nnodes={pods}", "--nproc-per-node=1"]
        words += ["--node-rank=$(JOB_COMPLETION_INDEX)", f"--master-addr={name}-0.{name}", "--master-port=29500"]
        main["volumeMounts"].append({"name": "script", "mountPath": "/script"})
        amounts = {"cpu": "1", "memory": "1Gi"}
        main |= {"image": self._cluster.image, "command": [*words, "/script/train.py"]}
        main |= {
            "resources": {"requests": amounts, "limits": amounts},
            "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
        }
        spec["volumes"].append({"name": "script", "configMap": {"name": name}})
        spec |= {"restartPolicy": "Never", "subdomain": name}
        size = {"completionMode": "Indexed", "completions": pods, "parallelism": pods}
        service = {"clusterIP": "None", "selector": {"job-name": name}, "publishNotReadyAddresses": True}
        about = {"metadata": {"name": name}}
        return [
            {"apiVersion": "v1", "kind": "ConfigMap", **about, "data": {"train.py": script}},
            {"apiVersion": "v1", "kind": "Service", **about, "spec": service},
            {"apiVersion": "batch/v1", "kind": "Job", **about, "spec": {**size, "template": {"spec": spec}}},
        ]

    def close(self) -> None:
        self._jobs.close()


class _JobWatch:
    """The times at which Jobs appear in the namespace."""

    def __init__(self, cluster: Cluster) -> None:
        access = [f"--kubeconfig={cluster.kubeconfig(EDITOR)}", f"--namespace={cluster.namespace}"]
        words = ["get", "jobs", "--watch-only", "--output=name"]
        self._process = subprocess.Popen([*programs.kubectl(), *access, *words], stdout=subprocess.PIPE, text=True)
        self._times: list[float] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        names = set()
        for name in self._process.stdout:
            if name not in names:
                names.add(name)
                self._times.append(time.time())

    def created_at(self, began: float) -> float:
        """Return the time of the first Job since `began`."""
        return min(when for when in self._times if when >= began)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def _times(began: float, printed: str, job: float, pods: int) -> Times:
    marks: dict[str, list[tuple[float, float]]] = {"first": [], "step": []}
    for kind, when, pod in re.findall(r"MARK (first|step) ([\d.]+) ([\d.]+)", printed):
        marks[kind].append((float(when), float(pod)))
    assert len(marks["first"]) == pods, printed
    first = max(when for when, _ in marks["first"])
    step = max((when for when, _ in marks["step"]), default=first)
    started = max(pod for _, pod in marks["first"])
    return Times(first_line=first - began, step=step - began, job=job - began, pods_to_line=first - started)


@contextlib.contextmanager
def sides() -> Iterator[Sides]:
    with scratch() as folder, running() as cluster:
        found = Sides(cluster, folder)
        try:
            yield found
        finally:
            found.close()


def main() -> None:
    if lack := programs.missing():
        print(f"skipped kubernetes: this machine lacks {lack}")
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    #: Processes that wanted a core in the last minute, before the cluster: others' work makes both sides slower.
    load = round(os.getloadavg()[0], 1)
    with sides() as both:
        measured: dict[str, list[Times]] = {"ours": [], "torchrun": []}

        def one(side: str, script: str, pods: int) -> float:
            times = both.ours(script, pods) if side == "ours" else both.torchrun(script, pods)
            measured[side].append(times)
            return times.step

        lines = in_turn(rounds, lambda: one("ours", SCRIPT, 2), lambda: one("torchrun", SCRIPT, 2))
        figures = {"ours_s": median(lines[0]), "torchrun_s": median(lines[1])}
        report(
            "kubernetes_first_line",
            "shell to first line in 2 pods of Kubernetes, paceline run",
            "at most 1.8 s",
            figures["ours_s"] <= 1.8,
            **figures,
            ratio=figures["ours_s"] / figures["torchrun_s"],
            rounds=rounds,
            load_before=load,
        )
        for found in measured.values():
            found.clear()
        steps = in_turn(rounds, lambda: one("ours", TRAINING, 3), lambda: one("torchrun", TRAINING, 3))
    figures = {"ours_s": median(steps[0]), "torchrun_s": median(steps[1])}
    ratio = figures["ours_s"] / figures["torchrun_s"]
    report(
        "kubernetes_training",
        "shell to the first step of 3 pods' training on Kubernetes, paceline run against torchrun in an Indexed Job",
        "at most 0.8 of torchrun's time",
        ratio <= 0.8,
        **figures,
        ratio=ratio,
        rounds=rounds,
        load_before=load,
    )
    # The first round does not count.
    ours, theirs = measured["ours"][1:], measured["torchrun"][1:]
    for name, measure, target, attribute in (
        ("pods_to_line", "3 running pods of Kubernetes to the training's first line", 1.0, "pods_to_line"),
        ("job_created", "shell to the Job of Kubernetes, paceline run", 0.5, "job"),
    ):
        figure, other = (median([getattr(times, attribute) for times in side]) for side in (ours, theirs))
        report(
            f"kubernetes_{name}",
            measure,
            f"at most {target:g} s",
            figure <= target,
            ours_s=figure,
            torchrun_s=other,
            rounds=rounds,
            load_before=load,
        )


if __name__ == "__main__":
    main()
