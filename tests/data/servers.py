"""Real servers on loopback: S3 (moto's), SFTP (OpenSSH's sshd), HTTP with ranges; and a proxy that breaks answers."""

from __future__ import annotations

import contextlib
import getpass
import http.client
import http.server
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from tests.helpers import free_port, wait_until

KEY, SECRET = "AKIATESTTESTTEST", "planted/Secret+of=the tests"

_MOTO = """
import logging, sys, time
logging.getLogger("werkzeug").setLevel(logging.ERROR)
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=int(sys.argv[1]), verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


#: Maximum number of objects in a listing's response, unless the client asks for another number. Amazon's limit is 1000.
OBJECTS_OF_AN_ANSWER = 50


class S3:
    """moto's S3 server in a process of its own."""

    kind = "s3"

    def __init__(self, port: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _MOTO, str(port)],
            env={**os.environ, "MOTO_S3_DEFAULT_MAX_KEYS": str(OBJECTS_OF_AN_ANSWER)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        """End it as a broken machine would."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def call(self, method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
        """The answer to a plain request; moto checks no signature."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=180)
        try:
            date = "20300101/us-east-1/s3/aws4_request"
            sign = f"AWS4-HMAC-SHA256 Credential={KEY}/{date}, SignedHeaders=host, Signature=0"
            connection.request(method, path, body=body, headers={"Authorization": sign, **headers})
            answer = connection.getresponse()
            content = answer.read()
            assert answer.status < 300, f"{method} {path}: {answer.status} {content!r}"
            return content
        finally:
            connection.close()

    def bucket(self, name: str, files: dict[str, bytes] | None = None) -> str:
        """A new bucket with these objects; its name."""
        self.call("PUT", f"/{name}")
        for key, content in (files or {}).items():
            self.put(name, key, content)
        return name

    def put(self, bucket: str, key: str, content: bytes) -> None:
        self.call("PUT", f"/{bucket}/{quote(key, safe='/')}", content)

    def get(self, bucket: str, key: str) -> bytes:
        return self.call("GET", f"/{bucket}/{quote(key, safe='/')}")

    def remove(self, bucket: str, key: str) -> None:
        self.call("DELETE", f"/{bucket}/{quote(key, safe='/')}")

    def check_keys(self, on: bool) -> None:
        """Refuse keys that it does not know, or none."""
        self.call("POST", "/moto-api/reset-auth", b"0" if on else b"inf")


def program(name: str) -> str | None:
    """The path of a program that `make proof` installs beside the interpreter, or that is on the PATH."""
    return shutil.which(name, path=f"{sys.prefix}/bin:{os.environ.get('PATH', '')}")


class Gcs:
    """fake-gcs-server, which has the protocol of Google Cloud Storage and checks no credentials."""

    kind = "gcs"

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._start(
            [
                "fake-gcs-server",
                *("-scheme", "http", "-host", "127.0.0.1", "-port", str(self.port), "-backend", "memory"),
            ]
        )

    def _start(self, command: list[str]) -> None:
        self.process = subprocess.Popen(
            [str(program(command[0])), *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        KINDS[self.port] = self.kind
        wait_until(self._answers, f"{command[0]} answers")

    def _answers(self) -> bool:
        assert self.process.poll() is None, f"it has ended with {self.process.returncode}"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=30):
            return True
        return False

    def kill(self) -> None:
        """End it as a broken machine would."""
        self.process.kill()
        self.process.wait()

    def bucket(self, name: str, files: dict[str, bytes] | None = None) -> str:
        """A new bucket with these objects; its name."""
        self._call("POST", "/storage/v1/b?project=lab", json.dumps({"name": name}).encode())
        for key, content in (files or {}).items():
            self.put(name, key, content)
        return name

    def put(self, bucket: str, key: str, content: bytes) -> None:
        self._call("POST", f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={quote(key, safe='')}", content)

    def get(self, bucket: str, key: str) -> bytes:
        return self._call("GET", f"/storage/v1/b/{bucket}/o/{quote(key, safe='')}?alt=media")

    def remove(self, bucket: str, key: str) -> None:
        self._call("DELETE", f"/storage/v1/b/{bucket}/o/{quote(key, safe='')}")

    def _call(self, method: str, path: str, body: bytes = b"") -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=180)
        try:
            connection.request(method, path, body=body)
            answer = connection.getresponse()
            content = answer.read()
            assert answer.status < 300, f"{method} {path}: {answer.status} {content!r}"
            return content
        finally:
            connection.close()


class Azure(Gcs):
    """Azurite, Microsoft's emulator of Azure Blob Storage, which checks signatures. Its files lie in `folder`."""

    kind = "azure"

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        options = (
            "--blobPort",
            str(self.port),
            "--location",
            str(folder),
            "--silent",
            "--skipApiVersionCheck",
            "--disableTelemetry",
        )
        self._start(["azurite-blob", *options])

    def bucket(self, name: str, files: dict[str, bytes] | None = None) -> str:
        self._client().create_container(name)
        for key, content in (files or {}).items():
            self.put(name, key, content)
        return name

    def put(self, bucket: str, key: str, content: bytes) -> None:
        # Tools for Azure mark a folder by a property, and not by a slash.
        marks = {"hdi_isfolder": "true"} if key.endswith("/") else None
        self._client().get_blob_client(bucket, key.rstrip("/")).upload_blob(content, overwrite=True, metadata=marks)

    def get(self, bucket: str, key: str) -> bytes:
        return bytes(self._client().get_blob_client(bucket, key).download_blob().readall())

    def remove(self, bucket: str, key: str) -> None:
        self._client().get_blob_client(bucket, key).delete_blob()

    def _client(self) -> Any:
        from azure.storage.blob import BlobServiceClient

        return BlobServiceClient.from_connection_string(connection_string(self.url))


#: Port on this machine -> kind of store that listens on it. Ports that are not listed serve S3.
KINDS: dict[int, str] = {}
#: The account of every Azurite, which its documentation publishes.
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def connection_string(url: str, key: str = ACCOUNT_KEY) -> str:
    """The text by which clients of Azure find the server at `url`."""
    return f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={key};BlobEndpoint={url}/{ACCOUNT};"


@dataclass
class Answer:
    """What a server has said, before the proxy passes it on: change it."""

    method: str
    path: str
    request_headers: dict[str, str]
    status: int
    headers: dict[str, str]
    body: bytes
    #: Number of body bytes after which the server breaks the connection.
    cut_after: int | None = None
    delay_s: float = 0.0

    @property
    def is_listing(self) -> bool:
        """Whether the client has asked for the names in a bucket."""
        return self.method == "GET" and re.search(r"list-type=2|comp=list|/o\?", self.path) is not None


@dataclass
class Proxy:
    """Passes requests on to a server; `spoil` may change each answer. requests: (method, path, Range) of each."""

    upstream: int
    spoil: Callable[[Answer], None] = lambda answer: None
    requests: list[tuple[str, str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                proxy._pass(self)

        for method in ("HEAD", "PUT", "POST", "DELETE"):
            setattr(Handler, f"do_{method}", Handler.do_GET)

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        self.port = int(self._server.server_address[1])
        self.url = f"http://127.0.0.1:{self.port}"
        KINDS[self.port] = KINDS.get(self.upstream, "s3")

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def gets(self, ending: str) -> list[str]:
        """Return the header Range ("" for none) of each GET of a path with this ending."""
        gets = [(path.partition("?")[0], ranges) for method, path, ranges in self.requests if method == "GET"]
        return [ranges for path, ranges in gets if unquote(path).endswith(ending)]

    def _pass(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("Content-Length") or 0)
        body = handler.rfile.read(length)
        headers = {name: value for name, value in handler.headers.items() if name.lower() != "connection"}
        connection = http.client.HTTPConnection("127.0.0.1", self.upstream, timeout=180)
        try:
            connection.request(handler.command, handler.path, body=body, headers=headers)
            found = connection.getresponse()
            content = found.read()
        except OSError:
            handler.close_connection = True
            return
        finally:
            connection.close()
        ranges = handler.headers.get("Range") or handler.headers.get("x-ms-range", "")
        self.requests.append((handler.command, handler.path, ranges))
        answer = Answer(
            method=handler.command,
            path=handler.path,
            request_headers={name.lower().replace("x-ms-range", "range"): value for name, value in headers.items()},
            status=found.status,
            # Azurite writes names of headers in lower case.
            headers={name.title(): value for name, value in found.getheaders() if name.lower() != "transfer-encoding"},
            body=content,
        )
        if handler.command != "HEAD":
            answer.headers["Content-Length"] = str(len(content))
        self.spoil(answer)
        time.sleep(answer.delay_s)
        handler.send_response_only(answer.status)
        for name, value in answer.headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        with contextlib.suppress(OSError):
            if handler.command != "HEAD":
                handler.wfile.write(answer.body if answer.cut_after is None else answer.body[: answer.cut_after])
        if answer.cut_after is not None:
            handler.close_connection = True
            with contextlib.suppress(OSError):
                handler.connection.shutdown(socket.SHUT_RDWR)


class RangeHandler(http.server.SimpleHTTPRequestHandler):
    """Python's file server, with ranges and etags."""

    protocol_version = "HTTP/1.1"
    password: str | None = None

    def log_message(self, *_: Any) -> None:
        pass

    def send_head(self) -> Any:
        if self.password is not None and self.headers.get("Authorization") != f"Bearer {self.password}":
            self.send_error(401, "who are you?")
            return None
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            return super().send_head()
        content = path.read_bytes()
        etag = f'"{path.stat().st_mtime_ns:x}-{len(content):x}"'
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if self.headers.get("If-Match", etag) != etag:
            self.send_error(412)
            return None
        part = content[int(match[1]) : int(match[2]) + 1] if match else content
        self.send_response(206 if match else 200)
        if match:
            self.send_header("Content-Range", f"bytes {match[1]}-{match[2]}/{len(content)}")
        self.send_header("Content-Length", str(len(part)))
        self.send_header("ETag", etag)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        return io.BytesIO(part)


@contextlib.contextmanager
def http_server(folder: Path, password: str | None = None) -> Iterator[int]:
    """The port of a server of this folder's files. password: the bearer token that it wants."""
    handler = type("Handler", (RangeHandler,), {"password": password})
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), lambda *arguments: handler(*arguments, directory=str(folder))
    )
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def find_sshd() -> str | None:
    """The sshd of this machine, or None; without an ssh-keygen it is of no use."""
    found = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    return found if found and shutil.which("ssh-keygen") else None


class Sshd:
    """An sshd of our own: its own keys and configuration, one user, the one who runs the tests."""

    def __init__(self, folder: Path) -> None:
        program = find_sshd()
        assert program is not None
        self.folder, self.user = folder, getpass.getuser()
        for name in ("host", "user"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)],
                check=True,
                stdin=subprocess.DEVNULL,
            )
        self.port = free_port()
        (folder / "authorized").write_text((folder / "user.pub").read_text())
        (folder / "authorized").chmod(0o600)
        (folder / "config").write_text(
            f"ListenAddress 127.0.0.1\nPort {self.port}\nHostKey {folder}/host\nPidFile {folder}/pid\n"
            f"AuthorizedKeysFile {folder}/authorized\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
            "PermitRootLogin yes\nSubsystem sftp internal-sftp\nPerSourceMaxStartups none\nMaxStartups 100\n"
        )
        host = (folder / "host.pub").read_text().split()
        self.known_hosts = folder / "known_hosts"
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {host[0]} {host[1]}\n")
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        with open(folder / "log", "wb") as log:
            command = [program, "-D", "-e", "-f", str(folder / "config")]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(self._answers, "sshd answers")

    def options(self, **others: Any) -> dict[str, Any]:
        """Options with which a store reaches it."""
        return {"key_filename": str(self.folder / "user"), "known_hosts": str(self.known_hosts), **others}

    def url(self, path: Path) -> str:
        return f"sftp://{self.user}@127.0.0.1:{self.port}{path}"

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()

    def _answers(self) -> bool:
        assert self.process.poll() is None, (self.folder / "log").read_text()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=30) as link:
            return bool(link.recv(4))
        return False


def port_of(url: str) -> int:
    return int(urlsplit(url).port or 0)
