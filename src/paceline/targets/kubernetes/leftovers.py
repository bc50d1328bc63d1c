"""Remove Secrets that no run or service needs, Jobs of ended runs, and services without a folder."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import RunNotFoundError
from paceline.remote.link.copies import LeftBehind
from paceline.runs import read
from paceline.runs.folder import RunFolder
from paceline.targets.kubernetes import manifests, many
from paceline.targets.kubernetes.api import ApiRefusedError
from paceline.targets.kubernetes.objects import WORKSPACE_LABEL, KubeObject, sendable

if TYPE_CHECKING:
    from paceline.targets.kubernetes.api import Cluster

#: Kinds of objects that use Secrets of Paceline.
USING_KINDS = ("jobs", "deployments")
#: File in a service's folder while its objects are in a cluster.
SERVICE_FILE = "cluster.json"


def clear(cluster: Cluster, workspace: str, runs_dir: Path, *, dry_run: bool) -> Iterator[LeftBehind]:
    """Remove and yield unused Secrets, Jobs of ended runs and Deployments of lost services.

    A Secret is unused if no Job or Deployment uses it. The Secrets may be of any workspace in the namespace, the other
    objects only of this workspace. A Job stays if its run is not in `runs_dir`. A Deployment stays if the workspace has
    its service. With `dry_run`, yield the objects without removing them.
    """
    where, over = f"namespace {cluster.namespace}", set()
    for job in _objects(cluster, "jobs", f"{WORKSPACE_LABEL}={workspace}"):
        name, about = job["metadata"]["name"], job["metadata"].get("annotations", {})
        run_id, count = about.get(manifests.RUN_ANNOTATION, ""), int(about.get(manifests.COUNT_ANNOTATION, 0))
        first = RunFolder(runs_dir / run_id)
        found = LeftBehind(host=where, run_id=run_id, path=f"job/{name}")
        try:
            # Keep a live run's objects. After the run's end, the first status query fetches its files and removes its objects.
            runs = many.runs_of(first, {"index": 0, "count": count}) if count else [first]
            if not all(read.record(run).is_terminal for run in runs):
                continue
        except (RunNotFoundError, PermissionError):
            yield replace(found, stays=f"its run is not in {runs_dir}", is_foreign=True)
            continue
        if not dry_run:
            cluster.delete("jobs", name)
        over.add(name)
        yield found
    try:
        secrets = _objects(cluster, "secrets", manifests.KIND_LABEL)
        services = _objects(cluster, "deployments", f"{WORKSPACE_LABEL}={workspace}")
    except ApiRefusedError as error:
        if error.code != 403:
            raise
        why = "this user may not list secrets and deployments in the namespace. The role `edit` has this right"
        yield LeftBehind(host=where, run_id="", path="each Secret of Paceline's library and of sources", stays=why)
        return
    for name in [service["metadata"]["name"] for service in services]:
        if (runs_dir.parent / "services" / name / SERVICE_FILE).exists():
            continue
        if not dry_run:
            cluster.delete("deployments", name)
        over.add(name)
        yield LeftBehind(host=where, run_id="", path=f"deployment/{name}")
    names = {secret["metadata"]["name"] for secret in secrets}
    for name in remove_unused(cluster, names, but=over, kinds=USING_KINDS, dry_run=dry_run):
        yield LeftBehind(host=where, run_id="", path=f"secret/{name}")


def remove_unused(
    cluster: Cluster,
    names: Collection[str],
    *,
    but: Collection[str],
    kinds: Collection[str] = ("jobs",),
    dry_run: bool = False,
) -> list[str]:
    """Delete the Secrets `names`, except Secrets that objects of `kinds` use. Return their names.

    A submission may find a Secret just before this function deletes it, and then create a Job that uses it. So this
    function lists the Jobs again after the deletion, and restores each deleted Secret that a Job uses. The submission
    also checks its Secrets after it has created the Job. With `dry_run`, delete nothing.

    but: Names of objects that do not count, because they are removed too.
    """
    # Delete the Secret of the source's first part first: a submission that finds it assumes that all parts' Secrets exist.
    unused = sorted({*names} - _used(cluster, but, kinds)) if names else []
    gone: dict[str, KubeObject] = {}
    for name in () if dry_run else unused:
        if (found := cluster.get("secrets", name)) is not None:
            cluster.delete("secrets", name)
            gone[name] = found
    for name in gone.keys() & (_used(cluster, but, kinds) if gone else set()):
        cluster.ensure("secrets", sendable(gone[name]))
    return unused


def _used(cluster: Cluster, but: Collection[str], kinds: Collection[str]) -> set[str]:
    """Return the names of Secrets that objects of `kinds`, apart from `but`, use."""
    found = [one["metadata"] for kind in kinds for one in _objects(cluster, kind, manifests.MANAGED_SELECTOR)]
    others = [about.get("annotations", {}) for about in found if about["name"] not in but]
    return {name for about in others for name in about.get(manifests.SECRETS_ANNOTATION, "").split(",")}


def _objects(cluster: Cluster, kind: str, selector: str) -> list[KubeObject]:
    return cluster.items(kind, only_metadata=True, labelSelector=selector)
