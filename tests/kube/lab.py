"""A workspace whose compute target is the cluster, and checks of the remains of its runs there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import paceline as pl
from paceline.runs.remote_status import engine
from paceline.targets import configured
from paceline.targets.configured import Configured
from tests.engines import lab as engines
from tests.engines.lab import Lab
from tests.helpers import wait_until
from tests.kube.cluster import EDITOR, Access

TWO = {"node_count": 2, "distributed_backend": "gloo"}
#: This script counts steps up to its first argument and continues from the last checkpoint. An attempt whose number is
#: below the second argument never ends by itself, so a fault must end it.
COUNTS = """
    import os, signal, sys, time
    rank, attempt = os.environ["PACELINE_RANK"], os.environ["PACELINE_ATTEMPT"]
    path = os.path.join(os.environ["PACELINE_CHECKPOINT_DIR"], f"step_{rank}")
    step = int(open(path).read()) if os.path.exists(path) else 0
    print(f"attempt {attempt} goes on from {step}", flush=True)
    def save():
        with open(path + ".new", "w") as file:
            file.write(str(step))
        os.replace(path + ".new", path)
    def leave(number, frame):
        save()
        print(f"attempt {attempt} was told to end", flush=True)
        sys.exit(75)
    signal.signal(signal.SIGTERM, leave)
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    while step < int(sys.argv[1]) or int(attempt) < first:
        time.sleep(0.1)
        step += 1
        if step % 5 == 0:
            save()
"""


class KubeLab(Lab):
    """Scripts that run on the cluster as the compute target `k8s`."""

    def __init__(self, folder: Path, access: Access) -> None:
        super().__init__(folder)
        self.access = access
        self.runs: list[pl.Run] = []
        self.add()

    def add(self, user: str = EDITOR, **settings: Any) -> None:
        """Set the target up for a user, with further settings."""
        given: dict[str, Any] = {
            "kubeconfig": str(self.access.kubeconfig(user)),
            "namespace": self.access.namespace,
            "image": self.access.image,
            "cpus_per_worker": 0.25,
            "memory_per_worker": "512Mi",
        }
        if self.access.pod_template is not None:
            given |= {"pod_template": str(self.access.pod_template), "python": self.access.python}
        described = Configured(name="k8s", kind="kubernetes", settings={**given, **settings})
        configured.add(self.workspace_dir, described, replace=True)

    def submit(self, script: str, files: Mapping[str, str] | None = None, **values: Any) -> pl.Run:
        run = super().submit(script, files, compute_target="k8s", **values)
        self.runs.append(run)
        return run

    def close(self) -> None:
        """End all runs. Fail if an object of theirs stays in the namespace."""
        living = [run for run in self.runs if not run.record().is_terminal]
        for run in living:
            run.cancel()
        for run in living:
            wait_for_end(run)
        noted = [engine(run.folder) for run in self.runs]
        names = [name for one in noted for name in (str(one.get("job_id")), *(one.get("secrets") or ()))]

        def left() -> list[str]:
            for run in self.runs:
                run.record()  # reading the record fetches the run's remaining files and removes its objects
            found = self.access.names("jobs,pods,services,secrets")
            return [one for one in found if any(name in one for name in names)]

        wait_until(lambda: not left(), f"nothing of {names} is left in the namespace", 240)


def wait_for_end(run: pl.Run) -> str:
    """Return the state in which the run ends: pods and their replacements take their time on a busy machine."""
    return engines.wait_for_end(run, 500)


def pods_of(lab: KubeLab, run: pl.Run) -> dict[int, str]:
    """Return the index and name of each pod of a run that lives and is not ended by Kubernetes."""
    path = (
        "jsonpath={range .items[?(@.status.phase=='Running')]}{.metadata.name} "
        "{.metadata.annotations.batch\\.kubernetes\\.io/job-completion-index} [{.metadata.deletionTimestamp}]{'\\n'}{end}"
    )
    label = f"--selector=batch.kubernetes.io/job-name={engine(run.folder)['job_id']}"
    lines = lab.access.kubectl("get", "pods", label, f"--output={path}").splitlines()
    return {int(index): name for name, index, ends in map(str.split, lines) if ends == "[]"}


def node_of(lab: KubeLab, pod: str) -> str:
    """Return the node of a pod."""
    return lab.access.kubectl("get", "pod", pod, "--output=jsonpath={.spec.nodeName}")


def wait_for_attempt(run: pl.Run, number: int, ranks: int = 2, timeout_s: float = 300) -> None:
    """Return once all ranks of an attempt have printed something."""

    def has_begun() -> bool:
        record = run.record()
        logs = [run.folder.rank_log(number, rank) for rank in range(ranks)]
        begun = all(log.exists() and log.stat().st_size for log in logs)
        # A short attempt may end before this check. Then its output must already be complete.
        assert begun or not record.is_terminal, f"{record.failure}\n{run.folder.driver_log.read_text()}"
        return begun

    try:
        wait_until(has_begun, f"attempt {number} of {run.id} has begun", timeout_s)
    except AssertionError as error:
        record = run.record()
        raise AssertionError(f"{error}: {record.status}, waits for {record.waiting_for}, {record.attempts}") from error
