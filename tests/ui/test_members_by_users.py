"""The page's socket, opened by real Unix users, whom the kernel names."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from paceline.errors import UserError
from paceline.system.files import json_lines
from paceline.ui.guard import Token
from paceline.ui.server import _listen_at
from tests.targets.test_shared_by_users import USERS, as_user
from tests.ui.conftest import Place
from tests.ui.test_server import started

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not sys.platform.startswith("linux"), reason="needs root, to be several users"
)

ANN, BOB, VIC, EVE, PROXY = USERS


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that all users may enter: pytest's folders belong to root alone."""
    made = Path(f"/tmp/paceline-test-{os.getpid()}-{time.monotonic_ns()}")
    made.mkdir(mode=0o755)
    (made / "members").write_text(f"{ANN} = admin\n{BOB} = own\n{VIC} = view\nann = admin\n")
    (made / "members").chmod(0o644)
    yield made
    subprocess.run(["rm", "-rf", made], check=True)


def ask(path: Path, address: str, **given: object) -> httpx.Response:
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=str(path)), base_url="http://127.0.0.1:7223", timeout=60
    ) as client:
        return client.post(address, **given) if "data" in given else client.get(address, **given)  # type: ignore[arg-type]


@pytest.mark.promise("kernel-names-members-of-page")
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_server_takes_the_user_of_a_socket_connection_from_the_kernel_and_not_from_headers(
    place: Place, folder: Path, loop: str
) -> None:
    run = place.run(submitted_by=str(BOB))
    path, key = folder / "page" / "socket", Token(place.path).form_key
    # uvicorn uses uvloop if it can import it.
    hidden = folder / "hidden"
    hidden.mkdir()
    if loop == "asyncio":
        (hidden / "uvloop.py").write_text("raise ImportError('hidden')")
    config = place.config(socket=str(path), members=str(folder / "members"), as_json=True)
    process, said = started(config, env={**os.environ, "PYTHONPATH": str(hidden)})
    assert said["pid"] == process.pid
    address = f"/runs/{run.run_id}/archive"

    def by(uid: int, page: int, change: int) -> None:
        def act() -> None:
            forged = {"x-forwarded-user": str(ANN), "authorization": "Bearer x"}
            assert ask(path, "/", headers=forged).status_code == page
            answer = ask(path, address, data={"form_key": key(str(uid))}, headers=forged)
            assert answer.status_code == change, answer.text

        as_user(uid, act)

    try:
        # The end of the standard input ends only a server that ssh has started.
        process.stdin.close()  # type: ignore[union-attr]
        for uid, page, change in ((EVE, 403, 403), (VIC, 200, 403), (BOB, 200, 303), (ANN, 200, 303)):
            by(uid, page, change)
        assert ask(path, "/").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            stream.close()  # type: ignore[union-attr]
    found = [(line["member"], line["on"]) for line in json_lines(place.path / "ui" / "members.jsonl")]
    assert found == [(str(BOB), run.run_id), (str(ANN), run.run_id)]
    assert path.parent.is_dir()
    assert not path.exists()


@pytest.mark.promise("kernel-names-members-of-page")
def test_only_the_proxy_user_may_name_another_user_in_a_header(place: Place, folder: Path) -> None:
    path = folder / "page" / "socket"
    named = {"user_header": "X-Forwarded-User", "proxy_user": str(PROXY)}
    config = place.config(socket=str(path), members=str(folder / "members"), as_json=True, **named)
    process, _ = started(config)

    def act(status: int) -> None:
        answer = ask(path, "/members", headers={"X-Forwarded-User": "ann"})
        assert answer.status_code == status, answer.text

    try:
        as_user(PROXY, lambda: act(200))
        for uid in (ANN, EVE):
            as_user(uid, lambda: act(403))
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_socket_in_a_folder_of_another_user_is_refused(folder: Path) -> None:
    for mode, uid in ((0o777, 0), (0o775, 0), (0o755, EVE)):
        (folder / "page").mkdir(exist_ok=True)
        (folder / "page").chmod(mode)
        os.chown(folder / "page", uid, uid)
        with pytest.raises(UserError, match="others could put a server there"):
            _listen_at(str(folder / "page" / "socket"), for_members=True)
    os.chown(folder / "page", 0, 0)
    with _listen_at(str(folder / "page" / "socket"), for_members=True) as listener:
        assert listener.family == socket.AF_UNIX
        assert (folder / "page" / "socket").stat().st_mode & 0o777 == 0o666
