"""2,000 files of 100 kB from an S3 server on loopback: a run's download, against `fs.get` of fsspec and `aws s3 cp`.

The server is moto's behind nginx, which keeps and repeats moto's answers: moto alone, in Python, takes longer for each
object than any of the sides, and would make them all equal.

    apt-get install nginx-light; pip install -e '.[s3,dev]'; python -m venv aws; aws/bin/pip install awscli
    python benchmarks/s3_download.py --aws aws/bin/aws
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from common import in_turn, median, report, scratch

ROUNDS = 5
FILES, FILE_BYTES = 2000, 100_000
BUCKET, FOLDER = "bench", "train"

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "benchmark",
    "AWS_SECRET_ACCESS_KEY": "benchmark",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}

NGINX = """
daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 512; }}
http {{
  access_log off; sendfile on; tcp_nodelay on; keepalive_requests 1000000; client_max_body_size 0;
  {temporary}
  proxy_cache_path {folder}/cache keys_zone=s3:20m max_size=1g inactive=1h;
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://127.0.0.1:{moto}; proxy_set_header Host $http_host; proxy_http_version 1.1;
      proxy_cache s3; proxy_cache_key $request_method$request_uri; proxy_cache_valid 200 1h;
      proxy_ignore_headers Cache-Control Expires Set-Cookie Vary;
    }}
  }}
}}
"""

OURS = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
before = time.perf_counter()
from paceline.data.transfer.cache import DataCache
from paceline.data.stores.datastore import Datastore
from paceline.data.transfer.fetch import fetch
workspace, cache = Path(sys.argv[1]), DataCache(Path(sys.argv[2]))
store = Datastore.get(SimpleNamespace(path=workspace), "bench")
fetched = fetch(
    store.path(sys.argv[3]).as_download(), workspace_dir=workspace, cache=cache, view_dir=cache.view_dir(sys.argv[4], 0),
    node_rank=0, ranks=range(1), node_count=1, world_size=1,
)
print(time.perf_counter() - before)
print(fetched.path)
"""

FSSPEC = """
import sys, time
before = time.perf_counter()
import fsspec
fs = fsspec.filesystem("s3", endpoint_url=sys.argv[1])
fs.get(sys.argv[2], sys.argv[3], recursive=True)
print(time.perf_counter() - before)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(port: int) -> None:
    for _ in range(400):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise SystemExit(f"nothing answers on port {port}")


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """The URL of moto behind nginx."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        raise SystemExit("needs nginx: apt-get install nginx-light")
    moto, port = free_port(), free_port()
    folder.mkdir()
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder, temporary=temporary, port=port, moto=moto))
    # As root, nginx would serve as another user, who can't read the folder.
    user = "user root;" if os.getuid() == 0 else ""
    commands = [
        [sys.executable, "-c", "from moto.server import main; main()", "-H", "127.0.0.1", "-p", str(moto)],
        [program, "-e", str(folder / "error.log"), "-c", str(folder / "nginx.conf"), *(["-g", user] if user else [])],
    ]
    with open(folder / "log", "wb") as log, contextlib.ExitStack() as stack:
        for command in commands:
            process = subprocess.Popen(command, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        wait_for(moto)
        wait_for(port)
        yield f"http://127.0.0.1:{port}"


def fill(url: str, folder: Path) -> None:
    import s3fs

    folder.mkdir()
    for number in range(FILES):
        (folder / f"{number:05d}.bin").write_bytes(os.urandom(FILE_BYTES))
    fs = s3fs.S3FileSystem(endpoint_url=url)
    fs.mkdir(BUCKET)
    fs.put(f"{folder}/", f"{BUCKET}/{FOLDER}/", recursive=True)


class Sides:
    """Each side is a process of its own, imports included, and ends with 2,000 files in a folder of its own."""

    def __init__(self, folder: Path, url: str, aws: str | None) -> None:
        from paceline.data.stores.datastore import Datastore

        self._folder, self._url, self._aws, self._round = folder, url, aws, 0
        self._workspace = folder / "workspace"
        Datastore.register(
            SimpleNamespace(path=self._workspace), "bench", f"s3://{BUCKET}", options={"endpoint_url": url}
        )

    def cold(self) -> float:
        self._round += 1
        shutil.rmtree(self._folder / "cache", ignore_errors=True)
        return self._ours()

    def warm(self) -> float:
        self._round += 1
        return self._ours()

    def fsspec(self) -> float:
        target = self._empty("fsspec")
        done = self._python(FSSPEC, self._url, f"{BUCKET}/{FOLDER}", target)
        self._check(target)
        return float(done.split()[0])

    def aws(self) -> float:
        target = self._empty("aws")
        source = f"s3://{BUCKET}/{FOLDER}"
        before = time.perf_counter()
        subprocess.run(
            [
                str(self._aws),
                "--endpoint-url",
                self._url,
                "s3",
                "cp",
                "--recursive",
                "--only-show-errors",
                source,
                target,
            ],
            check=True,
        )
        seconds = time.perf_counter() - before
        self._check(target)
        return seconds

    def _ours(self) -> float:
        seconds, path = self._python(
            OURS, self._workspace, self._folder / "cache", FOLDER, f"round_{self._round}"
        ).splitlines()
        self._check(Path(path))
        return float(seconds)

    def _python(self, code: str, *arguments: object) -> str:
        return subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)], check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    def _empty(self, name: str) -> Path:
        path = self._folder / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path

    def _check(self, folder: Path) -> None:
        sizes = [entry.stat().st_size for entry in folder.rglob("*.bin")]
        assert sizes == [FILE_BYTES] * FILES, f"{folder} has {len(sizes)} files"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--aws", default=shutil.which("aws"), help="the AWS command line program; default: on PATH")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    with scratch() as folder:
        os.environ.update(CREDENTIALS, HOME=str(folder))
        with s3_server(folder / "server") as url:
            fill(url, folder / "files")
            sides = Sides(folder, url, given.aws)
            calls = [sides.cold, sides.warm, sides.fsspec] + ([sides.aws] if given.aws else [])
            cold, warm, fsspec, *aws = map(median, in_turn(given.rounds, *calls))
    report(
        "s3_download",
        f"download of {FILES:,} files of {FILE_BYTES // 1000} kB from S3 on loopback, cold, against fsspec and aws s3 cp",
        "at least 3 times as fast as fs.get, 1.2 times aws s3 cp",
        fsspec / cold >= 3 and all(other / cold >= 1.2 for other in aws),
        ours_s=cold,
        fsspec_s=fsspec,
        times_fsspec=fsspec / cold,
        **({"aws_s": aws[0], "times_aws": aws[0] / cold} if aws else {}),
        rounds=given.rounds,
    )
    report(
        "s3_download_warm",
        "the same, warm, listing included",
        "at most 1 s",
        warm <= 1,
        ours_s=warm,
        rounds=given.rounds,
    )


if __name__ == "__main__":
    main()
