"""Requests a second of a small linear model, one worker: Paceline's server, LitServe, Azure's inference server and MLServer.

    apt-get install wrk
    python benchmarks/serve_throughput.py --environments FOLDER

Each peer gets an environment of its own below FOLDER, made there where it is not yet. The model is the same for all: 64 numbers
in, one out, numpy. All servers are up, and are measured in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from pathlib import Path

from common import in_turn, median, report, scratch
from serving import Load, answered, configured, free_port, process, resident_mib, wrk

ROUNDS, SECONDS = 5, 8
PEERS = {"litserve": "litserve", "azure": "azureml-inference-server-http", "mlserver": "mlserver"}
TIMES = {"litserve": 4.0, "azure": 3.5, "mlserver": 2.5}

MODEL = """
import json
import numpy as np
def init():
    global weights
    weights = np.arange(64, dtype=np.float64) / 64
def run(data):
    return float(weights @ np.array(json.loads(data)["data"]))
"""
#: Without numpy: what is left in memory is the server's own.
BARE = "def init(): pass\ndef run(data): return 1\n"

LITSERVE = """
import sys
import litserve as ls
import numpy as np
class Api(ls.LitAPI):
    def setup(self, device): self.weights = np.arange(64, dtype=np.float64) / 64
    def decode_request(self, request): return np.array(request["data"])
    def predict(self, x): return float(self.weights @ x)
    def encode_response(self, output): return output
if __name__ == "__main__":
    ls.LitServer(Api(), accelerator="cpu", api_path="/score").run(
        host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, log_level="warning")
"""

MLSERVER = """
import numpy as np
from mlserver import MLModel
from mlserver.codecs import decode_args
class Linear(MLModel):
    async def load(self):
        self.weights = np.arange(64, dtype=np.float64) / 64
        return True
    @decode_args
    async def predict(self, x: np.ndarray) -> np.ndarray:
        return x @ self.weights
"""


def peer_python(environments: Path, name: str) -> str:
    """The interpreter of a peer's environment, which is made where it is not there."""
    python = environments / name / "bin" / "python"
    if not python.exists():
        print(f"making {environments / name}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(environments / name)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", PEERS[name], "numpy"], check=True)
    return str(python)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--environments", type=Path, default=Path("peers"))
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=int, default=SECONDS)
    asked = parser.parse_args()
    row = [0.5] * 64
    body = json.dumps({"data": row})
    tensor = {"name": "x", "shape": [1, 64], "datatype": "FP64", "data": row}
    with scratch() as folder, contextlib.ExitStack() as stack:

        def start(name: str, command: list[str], port: int, body: str, path: str = "/score", **variables: str):
            made = stack.enter_context(process(command, folder / name, variables))
            url = f"http://127.0.0.1:{port}{path}"
            print(f"{name}: {answered(url, body)[:80]}", file=sys.stderr)
            return made, url, body

        port = free_port()
        sides = {"paceline": start("paceline", configured(folder / "paceline", MODEL, port=port), port, body)}
        for name in asked.peers.split(","):
            python, port, place = peer_python(asked.environments.absolute(), name), free_port(), folder / name
            place.mkdir(parents=True)
            if name == "litserve":
                (place / "server.py").write_text(LITSERVE)
                sides[name] = start(name, [python, "server.py", str(port)], port, body)
            elif name == "azure":
                (place / "score.py").write_text(MODEL)
                program = str(Path(python).parent / "azmlinfsrv")
                command = [program, "--entry_script", "score.py", "--port", str(port)]
                sides[name] = start(name, command, port, body, AML_APP_ROOT=str(place), WORKER_COUNT="1")
            else:
                (place / "linear.py").write_text(MLSERVER)
                (place / "model-settings.json").write_text('{"name": "linear", "implementation": "linear.Linear"}')
                settings = {
                    **{"http_port": port, "grpc_port": free_port(), "metrics_port": free_port()},
                    **{"host": "127.0.0.1", "parallel_workers": 0, "debug": False},
                }
                (place / "settings.json").write_text(json.dumps(settings))
                program = str(Path(python).parent / "mlserver")
                inputs = json.dumps({"inputs": [tensor]})
                sides[name] = start(name, [program, "start", "."], port, inputs, "/v2/models/linear/infer")

        loads: dict[str, list[Load]] = {name: [] for name in sides}

        def many(name: str) -> float:
            _, url, body = sides[name]
            loads[name].append(wrk(url, body, 32, asked.seconds))
            return loads[name][-1].per_second

        rates = dict(zip(sides, in_turn(asked.rounds, *(lambda name=name: many(name) for name in sides)), strict=True))
        ours = median(rates["paceline"])
        for name, times in TIMES.items():
            if name in rates:
                ratio = ours / median(rates[name])
                report(
                    f"serve_{name}",
                    f"requests a second at 32 clients, small linear model, against {name}",
                    f"at least {times:g} times",
                    ratio >= times and not any(load.failures for load in loads["paceline"]),
                    ours_per_second=ours,
                    theirs_per_second=median(rates[name]),
                    ratio=ratio,
                    ours_p99_ms=median([load.p99_ms for load in loads["paceline"]]),
                    theirs_p99_ms=median([load.p99_ms for load in loads[name]]),
                    rates={side: rates[side] for side in ("paceline", name)},
                )
        _, url, body = sides["paceline"]
        one = [wrk(url, body, 1, asked.seconds) for _ in range(asked.rounds)]
        p50 = median([load.p50_ms for load in one])
        port = free_port()
        bare, *_ = start("bare", configured(folder / "bare", BARE, port=port), port, "1")
        wrk(f"http://127.0.0.1:{port}/score", "1", 32, 2)
        memory = resident_mib(bare.pid)
        report(
            "serve_one_client",
            "one client of a server, and what its processes have in memory beside the model",
            "p50 at most 0.4 ms, at most 70 MiB",
            p50 <= 0.4 and memory <= 70,
            p50_ms=p50,
            per_second=median([load.per_second for load in one]),
            memory_mib=memory,
        )


if __name__ == "__main__":
    main()
