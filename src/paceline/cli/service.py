"""service deploy, list, show, logs, call, update and so on: deployed models."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.cli import service_options
from paceline.cli.common import age, print_fields, print_json, print_list, print_table, warn
from paceline.cli.options import JSON, VerbOption, takes
from paceline.cli.service_options import DEPLOY, UPDATE
from paceline.errors import ServiceError, ServiceFailedError, ServiceNotFoundError
from paceline.runs.visible import visible
from paceline.services import keys as key_file
from paceline.services import log, store, unit_file
from paceline.services.folder import ServiceFolder
from paceline.services.record import AT_REST, HEALTHY, STOPPED, ServiceRecord
from paceline.services.service import Service
from paceline.workspace import Workspace

NAME = VerbOption("name", "Name of the service.", "NAME", complete="services", needed=True)
DATA = VerbOption("data", "Request: a text, @FILE, or - for standard input.", "DATA", default="-")
NO_WAIT = VerbOption("--no-wait", "Return at once.", type=bool)


@takes(*DEPLOY)
def deploy(**given: Any) -> None:
    """Deploy a model as a service, which outlives this terminal. Prints its address."""
    workspace = Workspace.from_config()
    service = Service.deploy(
        workspace,
        given["service"],
        given["model"],
        entry_script=given["entry"],
        source_directory=given["source"],
        environment=service_options.environment(given),
        environment_variables=service_options.variables(given["env"]),
        workers=1 if given["workers"] is None else given["workers"],
        host=given["host"] or "127.0.0.1",
        port=given["port"],
        auth=given["auth"],
        tls=service_options.tls(given),
        target=given["compute"] or "local",
        overwrite=given["overwrite"],
        notify=given["notify"] or (),
        tags=service_options.tags(given["tag"]),
        **service_options.settings(given),
    )
    if not given["no_wait"]:
        service.wait_for_deployment()
    _print(service, as_json=given["as_json"])


@takes(JSON)
def list_services(*, as_json: bool) -> None:
    """List the services of the workspace. Restarts those whose supervisor was killed."""
    workspace = Workspace.from_config(create=False)
    columns: dict[str, Callable[[ServiceRecord], str]] = {
        "NAME": lambda record: record.name,
        "STATE": lambda record: record.state,
        "REVISION": lambda record: str(record.revision or "-"),
        "MODELS": lambda record: ", ".join(_models(workspace, record)),
        "WORKERS": lambda record: "-" if record.workers is None else str(record.workers),
        "TARGET": lambda record: record.target,
        "URI": lambda record: record.scoring_uri or "-",
        "SINCE": lambda record: age(record.since_utc),
    }
    print_list(
        list(store.all_records(workspace.path)),
        columns,
        as_json=as_json,
        to_json=lambda record: _shown(workspace, record),
        none=f"No services in {workspace.path}. `paceline service deploy NAME --model MODEL` makes one.",
    )


@takes(NAME, JSON)
def show(*, name: str, as_json: bool) -> None:
    """Show a service's state, models, and former revisions."""
    workspace = Workspace.from_config(create=False)
    folder = store.folder_of(workspace.path, name)
    record = store.record(folder)
    revisions = store.revisions(folder)
    if as_json:
        # Print only the names of environment variables, because their values may be secrets.
        print_json(
            {
                **_shown(workspace, record),
                "revisions": [{**each.to_json(), "variables": sorted(each.variables)} for each in revisions],
            }
        )
        return
    print_fields(
        [
            ("Service", record.name),
            ("State", f"{record.state} since {record.since_utc}"),
            ("URI", record.scoring_uri or ""),
            ("Where", record.note or ""),
            ("Target", record.target),
            ("Workers", str(record.workers or "")),
            ("Keys", "asked for: paceline service keys " + record.name if record.has_keys else "none"),
            ("Deployed", f"{record.created_utc} by {record.deployed_by}"),
            ("Failure", (record.failure or "").splitlines()),
            ("Restarts", f"{record.restarts}" if record.restarts else ""),
            ("Last end", (record.last_end or "").splitlines()),
            *[(f"Tag {key}", value) for key, value in record.tags.items()],
        ]
    )
    print()
    print_table(
        ("", "REVISION", "MODELS", "SCRIPT", "BY", "MADE", "WHY"),
        [
            [
                "*" if each.number == record.revision else "+" if each.number == record.updating else "",
                str(each.number),
                ", ".join(each.model_names),
                each.entry_script or "-",
                each.created_by,
                age(each.created_utc),
                each.why,
            ]
            for each in revisions
        ],
    )


@takes(
    NAME,
    VerbOption("-f --follow", "Follow the log until the service ends.", type=bool),
    VerbOption("-n --tail", "The last N lines.", "N", int, least=0, default=200),
    JSON,
)
def logs(*, name: str, follow: bool, tail: int, as_json: bool) -> None:
    """Print the log of a service's supervisor and servers."""
    folder = store.folder_of(Workspace.from_config(create=False).path, name)
    text = log.last_lines(folder, tail)
    if as_json:
        if follow:
            raise ServiceError("--follow and --json: JSON is one value. Leave one of them out.")
        print_json({"name": name, "lines": text.splitlines()})
        return

    def is_over() -> bool:
        try:
            return store.record(folder).state in AT_REST
        except ServiceNotFoundError:
            return True

    sys.stdout.write(visible(text, lines=True))
    if follow:
        for more in log.follow(folder, is_over):
            sys.stdout.write(visible(more, lines=True))
            sys.stdout.flush()


@takes(NAME, DATA, VerbOption("--timeout", "Time to wait for the answer.", "SECONDS", float, default=60.0), JSON)
def call(*, name: str, data: str, timeout: float, as_json: bool) -> None:
    """Send a request with the service's key, and print the answer."""
    answer = Service(Workspace.from_config(create=False), name).run(_body(data), timeout_s=timeout)
    # Without --json, print a text answer unchanged.
    print(json.dumps(answer) if as_json or not isinstance(answer, str) else visible(answer, lines=True))


@takes(*UPDATE)
def update(**given: Any) -> None:
    """Update a service's model, script or environment without downtime. A failed update changes nothing."""
    service = Service(Workspace.from_config(create=False), given["service"])
    service.update(
        given["model"] or None,
        entry_script=given["entry"],
        source_directory=given["source"],
        environment=service_options.environment(given),
        environment_variables=service_options.variables(given["env"]) if given["env"] else None,
        workers=given["workers"],
        wait=not given["no_wait"],
        **service_options.settings(given),
    )
    _print(service, as_json=given["as_json"])


@takes(NAME, NO_WAIT, JSON)
def reload(*, name: str, no_wait: bool, as_json: bool) -> None:
    """Reload a service's script and its files, for the same models."""
    service = Service(Workspace.from_config(create=False), name)
    service.reload(wait=not no_wait)
    _print(service, as_json=as_json)


@takes(NAME, VerbOption("workers", "Model processes.", "WORKERS", int, needed=True), NO_WAIT, JSON)
def scale(*, name: str, workers: int, no_wait: bool, as_json: bool) -> None:
    """Change the number of a service's model processes."""
    service = Service(Workspace.from_config(create=False), name)
    service.scale(workers, wait=not no_wait)
    _print(service, as_json=as_json)


@takes(NAME, VerbOption("--to", "Revision; default: the last one before the present.", "N", int), NO_WAIT, JSON)
def rollback(*, name: str, to: int | None, no_wait: bool, as_json: bool) -> None:
    """Go back to a former revision of a service."""
    service = Service(Workspace.from_config(create=False), name)
    service.rollback(to, wait=not no_wait)
    _print(service, as_json=as_json)


@takes(NAME, VerbOption("--regenerate", "Replace this key; the other stays valid.", "primary|secondary"), JSON)
def keys(*, name: str, regenerate: str | None, as_json: bool) -> None:
    """Show a service's two keys. A request needs one of them: `Authorization: Bearer KEY`."""
    folder = store.folder_of(Workspace.from_config(create=False).path, name)
    if regenerate is not None:
        with store.editing(folder):
            key_file.change(folder, regenerate)
    primary, secondary = key_file.read(folder)
    if as_json:
        print_json({"primary": primary, "secondary": secondary})
    else:
        print_fields([("primary", primary), ("secondary", secondary)])


@takes(NAME, NO_WAIT, JSON)
def stop(*, name: str, no_wait: bool, as_json: bool) -> None:
    """Stop a service after its current requests. `start` restarts it at the same port."""
    service = Service(Workspace.from_config(create=False), name)
    service.stop(wait=not no_wait)
    _print(service, as_json=as_json)


@takes(NAME, NO_WAIT, JSON)
def start(*, name: str, no_wait: bool, as_json: bool) -> None:
    """Start a service that was stopped or has failed."""
    service = Service(Workspace.from_config(create=False), name)
    service.start(wait=not no_wait)
    _print(service, as_json=as_json)


@takes(NAME, JSON)
def delete(*, name: str, as_json: bool) -> None:
    """Stop a service and remove it. Registered models stay."""
    Service(Workspace.from_config(create=False), name).delete()
    if as_json:
        print_json({"name": name, "deleted": True})
    else:
        print(f"{name} is deleted")


@takes(NAME, JSON)
def unit(*, name: str, as_json: bool) -> None:
    """Print a systemd user unit that restarts a service after a reboot."""
    folder = store.folder_of(Workspace.from_config(create=False).path, name)
    text, path = unit_file.text(folder), unit_file.path(folder)
    if as_json:
        print_json({"path": str(path), "text": text})
        return
    sys.stdout.write(text)
    warn("\n".join(unit_file.instructions(folder)))


@takes(
    NAME,
    DATA,
    VerbOption("--clients", "Numbers of clients at a time.", "N,N,...", default="1,8,32"),
    VerbOption("--seconds", "Seconds for each number of clients.", type=float, least=0.1, default=5.0),
    VerbOption("--picture", "Draw the result (PNG, SVG or PDF).", "FILE", Path),
    JSON,
)
def bench(*, name: str, data: str, clients: str, seconds: float, picture: Path | None, as_json: bool) -> None:
    """Measure a service's requests per second and its latency."""
    from paceline.serving import api as serving

    folder = store.folder_of(Workspace.from_config(create=False).path, name)
    record = store.record(folder)
    if record.state != HEALTHY or record.scoring_uri is None:
        raise ServiceFailedError(f"service {name!r} is {record.state}: there is nothing to measure.")
    try:
        counts = [int(each) for each in clients.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise ServiceError(f"--clients {clients}: give numbers of 1 or more, such as 1,8,32.")
    key = {"authorization": f"Bearer {key_file.read(folder)[0]}"} if record.has_keys else {}
    found = serving.bench(
        record.scoring_uri, _body(data), clients=counts, seconds=seconds, headers=key, cafile=record.tls_cert
    )
    if picture is not None:
        serving.picture(found, picture, f"{name}, revision {record.revision}, {record.workers} workers")
    if as_json:
        print_json([each.to_json() for each in found])
    else:
        header, *rows = serving.table(found)
        print_table(header, rows)


def _body(data: str) -> bytes:
    if data == "-":
        return sys.stdin.buffer.read()
    if not data.startswith("@"):
        if 0 < len(data) < 256 and Path(data).is_file():
            raise ServiceError(
                f"DATA {data!r} is the name of a file. Write @{data} to send the file's content, or - to send this "
                "text from standard input."
            )
        return data.encode()
    try:
        return Path(data[1:]).read_bytes()
    except OSError as error:
        raise ServiceError(f"{data[1:]!r} can't be read: {error.strerror}.") from error


def _print(service: Service, *, as_json: bool) -> None:
    record = service.record()
    if as_json:
        print_json(_shown(service.workspace, record))
        return
    if record.state == STOPPED:
        print(f"{record.name} is stopped")
        return
    print(record.scoring_uri or record.state)
    revision = "" if record.revision is None else f", revision {record.revision}"
    warn(f"{record.name} is {record.state}{revision}. `paceline service logs -f {record.name}` follows it.")
    if record.note:
        warn(record.note)


def _shown(workspace: Workspace, record: ServiceRecord) -> dict[str, Any]:
    return {**record.to_json(), "models": _models(workspace, record)}


def _models(workspace: Workspace, record: ServiceRecord) -> list[str]:
    folder = ServiceFolder(store.services_dir(workspace.path) / record.name)
    try:
        return store.revision(folder, record.revision or store.desired(folder).revision).model_names
    except ServiceError:
        return []


verbs = {
    "deploy": deploy,
    "list": list_services,
    "show": show,
    "logs": logs,
    "call": call,
    "update": update,
    "reload": reload,
    "scale": scale,
    "rollback": rollback,
    "keys": keys,
    "stop": stop,
    "start": start,
    "delete": delete,
    "unit": unit,
    "bench": bench,
}
