"""The environment and the data of a run, in words."""

from __future__ import annotations

from typing import Any

from paceline.job.job import Job
from paceline.system.names import some


def environment_text(job: Job | None, built: dict[str, Any] | None) -> str:
    """Return the environment that the script ran in, such as "image lab/torch:2" or "1f0c3a (layered): einops==0.8.1"; "" for
    that of the submitting interpreter.
    """
    if job is None:
        return ""
    environment = job.environment
    parts = [f"image {environment.docker_image}"] if environment.docker_image else []
    if built:
        packages = [*built.get("conda", ()), *built.get("pip", ())]
        kind = "layered" if built.get("is_layered") else "whole"
        parts.append(f"{built['key'][:12]} ({kind}): {some(packages, 6) or 'nothing to add'}")
    elif environment.python:
        parts.append(environment.python)
    return "; ".join(parts)


def data_texts(data: dict[str, Any]) -> list[str]:
    """A line for each input and output: "train = lab:mnist/train, 12 files, 45.2 MB"."""
    lines = []
    for found in (*data.get("inputs", ()), *data.get("outputs", ())):
        places = [
            f"{source['datastore']}:{source['path']}" if source.get("datastore") else source["path"]
            for source in found["sources"]
        ]
        text = f"{found['name']} {'->' if found.get('mode') == 'upload' else '='} {found.get('dataset') or ', '.join(places)}"
        if "files" in found:
            text += f", {found['files']} files, {found['bytes'] / 1e6:.1f} MB"
        if found.get("partition"):
            text += f" on node {found.get('node_rank', 0)}, a part for each {found['partition']}"
        lines.append(text)
    return lines
