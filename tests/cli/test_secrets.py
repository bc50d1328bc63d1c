"""Secret values arrive where they are needed, and are recorded nowhere."""

from __future__ import annotations

import hashlib
import html
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import paceline as pl
from paceline.job.secret_values import credentials_in, hidden, looks_secret
from paceline.system import processes
from tests.cli.conftest import Cli
from tests.helpers import contents, wait_until, write_tree
from tests.services.conftest import SCRIPT as SERVICE_SCRIPT

if TYPE_CHECKING:
    from starlette.testclient import TestClient

VALUE = "hf_t0p\"secret ${x}'é"
TOLD = hashlib.sha256(VALUE.encode()).hexdigest()
#: This script prints a hash of the token instead of the token, and waits for permission to end.
SCRIPT = """
    import hashlib, os, time
    print(hashlib.sha256(os.environ["HF_TOKEN"].encode()).hexdigest(), flush=True)
    while not os.path.exists(os.environ["PACELINE_RUN_DIR"] + "/go"):
        time.sleep(0.02)
"""


def holders(folder: Path) -> list[str]:
    """Files below the folder that contain the value as it is or as JSON writes it."""
    wanted = (VALUE.encode(), json.dumps(VALUE)[1:-1].encode(), b"t0p")
    return sorted(path.name for path, data in contents(folder).items() if any(w in data for w in wanted))


def command_lines() -> str:
    return subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True).stdout


@pytest.mark.promise("secret-reaches-workers-record-log")
@pytest.mark.parametrize(("nodes", "backend"), [("2x1", "gloo"), ("2", "mpi")])
def test_secret_variable_is_passed_to_every_worker_but_not_to_command_lines_output_or_run_records(
    cli: Cli, nodes: str, backend: str
) -> None:
    given = {"HF_TOKEN": VALUE}
    words = [cli.script(SCRIPT), "--env", "HF_TOKEN", "-j", nodes, "--backend", backend]
    dry = cli("run", "--dry-run", *words, env=given).stdout
    dry += cli("run", "--dry-run", "--json", *words, env=given).stdout
    run_id = cli("submit", *words, env=given).stdout.strip()
    folder = cli.run_folder(run_id)
    logs = [folder / "logs" / f"rank_{rank}.log" for rank in (0, 1)]
    wait_until(
        lambda: all(log.exists() and TOLD in log.read_text() for log in logs), "the workers have said so", timeout_s=90
    )

    assert holders(cli.folder) == ["secrets.json"]
    assert (folder / "secrets.json").stat().st_mode & 0o777 == 0o600
    assert [(folder / name).stat().st_mode & 0o777 for name in ("job.json", "state.json")] == [0o600, 0o600]
    assert "t0p" not in command_lines()
    said = dry + cli("show", run_id).stdout + cli("show", run_id, "--json").stdout + cli("status", run_id).stdout
    assert "t0p" not in said
    assert "HF_TOKEN='***'" in dry
    assert json.loads(cli("show", run_id, "--json").stdout)["job"]["secrets"] == {"HF_TOKEN": "env:HF_TOKEN"}

    (folder / "go").touch()
    assert cli.wait(run_id) == "Completed"
    assert holders(cli.folder) == []


@pytest.mark.promise("killed-run-leaves-secret-behind")
def test_secret_is_passed_to_a_restarted_attempt_and_removed_from_disk_after_the_run_is_killed(cli: Cli) -> None:
    script = SCRIPT.replace(
        "    while", "    if os.environ['PACELINE_ATTEMPT'] == '1': os.kill(os.getpid(), 9)\n    while"
    )
    words = ["--env", "HF_TOKEN", "--max-restarts", "1", cli.script(script)]
    run_id = cli("submit", *words, env={"HF_TOKEN": VALUE}).stdout.strip()
    folder = cli.run_folder(run_id)
    second = folder / "attempts" / "2" / "rank_0.log"
    wait_until(lambda: second.exists() and TOLD in second.read_text(), "the workers have said so", timeout_s=90)
    for pid in processes.with_variable(processes.SUPERVISOR_VARIABLE, run_id):
        processes.send(pid, signal.SIGKILL)
    wait_until(lambda: cli.json("status", run_id)["status"] == "Failed", "the run is over", timeout_s=90)

    assert holders(cli.folder) == []


def test_env_file_is_parsed_like_dotenv_and_excluded_from_snapshots(cli: Cli) -> None:
    quoted = VALUE.replace("'", "\\'")
    text = f"# comment\nexport A = 'b c' # more\nB=\"x\\ny\"\n\nHF_TOKEN='{quoted}'\nSHELL_ONE\nE=\n"
    file = Path(cli.folder / cli.script("", "src/.env"))
    file.write_text(text)
    (cli.folder / "src" / "link").symlink_to(".env")
    script = """
        import json, os
        names = ("A", "B", "E", "SHELL_ONE", "OTHER")
        with open(os.environ["PACELINE_OUTPUT_DIR"] + "/seen.json", "w") as file:
            json.dump([os.environ[name] for name in names] + [len(os.environ["HF_TOKEN"])] + sorted(os.listdir("src")), file)
    """
    words = ["--env-file", "src/.env", "--env", "OTHER=1", cli.script(script)]
    run_id = cli("submit", *words, env={"SHELL_ONE": "of the shell"}).stdout.strip()
    assert cli.wait(run_id) == "Completed"

    seen = json.loads((cli.run_folder(run_id) / "outputs" / "seen.json").read_text())
    assert seen == ["b c", "x\ny", "", "of the shell", "1", len(VALUE), ".env", "link", "train.py"]
    assert holders(cli.folder) == [".env"]


def test_rerun_reads_secret_values_again_and_its_error_names_missing_secrets(cli: Cli) -> None:
    script = cli.script("import os; print(os.environ['A_TOKEN'] + os.environ['B_TOKEN'])")
    words = ["run", "-q", script, "--env", "A_TOKEN", "--env", "B_TOKEN"]
    assert cli(*words, env={"A_TOKEN": "x1", "B_TOKEN": "y2"}).stdout == "x1y2\n"
    (run_id,) = cli.run_ids()

    refused = cli("rerun", run_id, env={"A_TOKEN": "x1"}, code=2).stderr
    assert (
        "the value of a secret is missing; nothing was started. B_TOKEN: it is to be found at 'env:B_TOKEN'" in refused
    )
    assert cli.run_ids() == [run_id]
    assert cli("rerun", "-q", run_id, env={"A_TOKEN": "x3", "B_TOKEN": "y4"}).stdout == "x3y4\n"
    (cli.folder / "b.env").write_text("B_TOKEN=y5")
    again = cli("rerun", "-q", run_id, "--env-file", "b.env", "--name", "third", env={"A_TOKEN": "x3"})
    assert again.stdout == "x3y5\n"
    assert "  third  " in cli("list").stdout


def test_variable_that_looks_like_a_secret_reaches_the_script_and_is_not_recorded(cli: Cli) -> None:
    token = "ghp_" + "a1B2" * 9
    script = cli.script("import os; print(len(os.environ['MINE']))")
    dry = cli("run", "--dry-run", script, "--env", f"MINE={token}", "--env", "PLAIN=1")
    file = cli("run", "--dry-run", "--yaml", script, "--env", f"MINE={token}", "--env", "PLAIN=1")
    done = cli("run", "-q", script, "--env", f"MINE={token}", "--env", "PLAIN=1")

    assert done.stdout == "40\n"
    assert "MINE: env:MINE" in file.stdout
    for stderr in (dry.stderr, file.stderr, done.stderr):
        (line,) = [line for line in stderr.splitlines() if "warning" in line]
        assert line.startswith("paceline: warning: MINE looks like a secret: its value is not recorded")
        assert "`export MINE=...`" in line
        assert token not in line
    (run_id,) = cli.run_ids()
    shown = dry.stdout + file.stdout + cli("show", run_id, "--json").stdout
    assert token not in shown
    assert not [path for path, data in contents(cli.folder).items() if token.encode() in data]
    assert cli("rerun", "-q", run_id, env={"MINE": token}).stdout == "40\n"
    assert cli.run_folder(run_id).joinpath("state.json").stat().st_mode & 0o777 == 0o600


def test_estimator_secret_is_read_from_a_variable_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token.json").write_text('{"wandb": "v2"}')
    (tmp_path / "token.json").chmod(0o600)
    (tmp_path / "train.py").write_text("import os; print(os.environ['A'], os.environ['B'], os.environ['C'])")
    monkeypatch.setenv("MY_TOKEN", "v1")
    place = f"file:{tmp_path}/token.json#wandb"
    variables = {"A": pl.secret("MY_TOKEN"), "B": pl.secret(place), "C": "3"}
    est = pl.Estimator(tmp_path, entry_script="train.py", environment_variables=variables)

    assert est.job().to_json()["secrets"] == {"A": "env:MY_TOKEN", "B": place}
    assert pl.Job.from_json(est.job().to_json()) == est.job()
    run = pl.Experiment(pl.Workspace(tmp_path / "ws"), "e").submit(est, display_name="with secrets")
    run.wait_for_completion()
    assert (run.folder.live_log(0).read_text(), run.display_name) == ("v1 v2 3\n", "with secrets")
    assert not run.folder.secrets.exists()

    monkeypatch.delenv("MY_TOKEN")
    (tmp_path / "token.json").chmod(0o644)
    with pytest.raises(
        pl.errors.JobError, match=r"(?s)the values of secrets are missing.*A: .*'MY_TOKEN'.*B: .*mode 644"
    ):
        run.experiment.submit(est)
    with pytest.raises(pl.errors.JobError, match="not shown here"):
        pl.secret("hf_abcdefgh01234567")


def test_variables_with_secret_names_or_values_are_recognized_and_harmless_ones_are_not() -> None:
    for name, value in {
        "HF_TOKEN": "x1",
        "WANDB_API_KEY": "0123abcd",
        "AWS_SECRET_ACCESS_KEY": "a/b",
        "DB_PASSWORD": "p",
        "X": "hf_" + "a" * 20,
        "Y": "AKIAIOSFODNN7EXAMPLE",
        "Z": "sk-proj-0123456789abcdefg",
        "DB": "postgres://me:pw@db/x",
        "BUCKET": "s3://token@bucket",
        "HTTP_PROXY": "me:pw@proxy:3128",
        "MIRROR": "http://a token/with a slash@host/x",
        "HOSTED": "http://me:pw@${HOST}/x",
    }.items():
        assert looks_secret(name, value), name
    for name, value in {
        "TOKENIZERS_PARALLELISM": "false",
        "MAX_TOKENS": "128",
        "PAD_TOKEN": "0",
        "TOKEN_FILE": "/run/token",
        "AWS_ACCESS_KEY_ID": "me",
        "MASTER_ADDR": "10.0.0.1",
        "HF_TOKEN": "",
        "URL": "https://example.org/a",
        "REPO_URL": "git+https://${USER}:${TOKEN}@github.com/o/r.git@v1",
        "GIT_URL": "ssh://git@host/a:b@c",
        "CONTAINER": "abfs://container@account.dfs.core.windows.net/a@b",
        "HOST_LIST": "gpu1:4,alice@gpu2",
        "IMAGE_URL": "registry.example.org:5000/x:1@sha256:0123",
        "MODEL": "digits:3@best",
        "ADDRESS": "mailto:ann@example.com",
        "SERVER": '{"mail": "ann:x@example.com"}',
        "KEYBOARD": "us",
    }.items():
        assert not looks_secret(name, value), name
    assert "t0p" not in repr(pl.secret("HF_TOKEN"))
    assert os.environ.get("HF_TOKEN") is None


@pytest.mark.parametrize("text", ["http://" + "a " * 20_000, "http://a:" + "b " * 20_000, "http://a b " * 4_000 + "@ "])
def test_secret_search_takes_linear_time_on_a_long_line(text: str) -> None:
    """The search took a minute for 40,000 characters while it tried each blank as the first character of a token."""
    assert hidden(text) == text
    assert not credentials_in(text)


#: All printable characters between two marker words. Every written part of the value contains one of the two words.
PLANTED = f"PLANTED{''.join(map(chr, range(32, 127)))}DETNALP"


class Told:
    """`paceline` and its page, and all their output, which must not contain the planted secret."""

    def __init__(self, cli: Cli) -> None:
        self.cli = cli
        self.texts: list[str] = []

    def __call__(self, *words: str, code: int, **env: str) -> None:
        quick = {"PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0", "UV_HTTP_RETRIES": "0", "TOKEN": PLANTED}
        done = self.cli(*words, code=code, env={**quick, **env})
        self.texts.append(done.stdout + done.stderr)

    def get_pages(self) -> None:
        """Get each path of the page's server for each run, file and service; of streams those that end with their run."""
        from starlette.routing import Route

        from paceline.ui.app import make_app
        from paceline.ui.config import UiConfig
        from paceline.ui.guard import Token
        from tests.ui.conftest import TestClient

        workspace = self.cli.folder / ".paceline"
        token = Token(workspace)
        app: Any = make_app(UiConfig(workspace=str(workspace)), token)
        client = TestClient(app, base_url="http://127.0.0.1:7223")
        client.cookies.set(token.cookie, token.cookie_value)
        ids = self.cli.run_ids()
        services = [folder.name for folder in workspace.glob("services/*")]
        compared = f"?run={ids[0]}&run={ids[-1]}" if ids else ""
        paths = {
            *(f"{route.path}{compared}" for route in app.routes if isinstance(route, Route)),
            *(f"/runs/{run_id}/look/{name}" for run_id in ids for name in names_of(self.cli.run_folder(run_id))),
            *(f"/runs/{run_id}/file/{name}" for run_id in ids for name in names_of(self.cli.run_folder(run_id))),
        }
        # Inside this `with` block, the client uses one event loop for all requests. Streams of events need that.
        with client:
            self._get(client, sorted(paths), ids, services)

    def _get(self, client: TestClient, paths: list[str], ids: list[str], services: list[str]) -> None:
        for path in paths:
            if "{name:path}" in path or path.startswith("/live"):
                continue
            of_services = [path.replace("{name}", name) for name in services] if "/services/{name}" in path else [path]
            of_runs = (
                [one.replace("{run_id}", run_id) for one in of_services for run_id in ids]
                if "{run_id}" in path
                else of_services
            )
            for one in of_runs:
                answer = client.get(one, headers={"accept": "text/html"})
                assert answer.status_code < 500, (one, answer.text)
                self.texts.append(html.unescape(answer.text))

    def check(self, *holders: str) -> None:
        """Fail if the secret is in a text, or in a file that is none of `holders`, which their user alone may read."""
        for text in self.texts:
            assert "PLANTED" not in text.replace("PLANTED_TOKEN", ""), text
            assert "DETNALP" not in text, text
        found = set()
        for path, data in contents(self.cli.folder).items():
            if b"PLANTED" in data.replace(b"PLANTED_TOKEN", b"") or b"DETNALP" in data:
                found.add(path.relative_to(self.cli.folder).as_posix())
                assert path.stat().st_mode & 0o077 == 0, path
        assert found == set(holders)


def names_of(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


@pytest.mark.promise("secret-field-screen-page-file")
def test_secret_given_by_any_option_is_never_shown_or_stored(cli: Cli) -> None:
    """Regression: a requirements line with a blank, such as `--index-url http://me:${TOKEN}@host`, was stored with the
    password in clear."""
    script = cli.script("import os; print(len(os.environ.get('PLANTED_TOKEN', '')))")
    host = "127.0.0.1:9"
    fields = {
        "index": f"--index-url http://me:${{TOKEN}}@{host}/simple\nnosuch\n",
        "user": f"--index-url http://${{TOKEN}}@{host}/simple\nnosuch\n",
        "extra": f"--index-url http://{host}/a\n--extra-index-url http://me:${{TOKEN}}@{host}/simple\nnosuch\n",
        "git": f"nosuch @ git+http://me:${{TOKEN}}@{host}/x.git\n",
        "wheel": f"nosuch @ http://me:${{TOKEN}}@{host}/nosuch-1.0-py3-none-any.whl\n",
        "clear": f"--index-url http://me:{PLANTED}@{host}/simple\nnosuch\n",
    }
    call = Told(cli)

    for name, text in fields.items():
        file = cli.folder / f"{name}.txt"
        file.write_text(text)
        call("run", script, "--requirements", str(file), code=2 if name == "clear" else 1)
        file.unlink()
    url = f"http://me:{PLANTED}@{host}"
    call("run", script, "--pip", "nosuch", code=1, PIP_INDEX_URL=f"{url}/simple")
    call(
        "run", script, "--pip", "nosuch", code=1, PIP_EXTRA_INDEX_URL=f"{url}/simple", PIP_INDEX_URL=f"http://{host}/a"
    )
    call("run", script, "--pip", "nosuch", code=1, PIP_INDEX_URL=f"http://{host}/a", PIP_PROXY=url)
    call("run", script, "--pip", "nosuch", code=1, PIP_INDEX_URL="http://index.example/a", HTTP_PROXY=url)
    call("run", script, "--pip", f"nosuch @ {url}/x.whl", code=2)
    call("run", script, "--env", f"PLANTED_TOKEN={PLANTED}", "--env", f"DATABASE={url}/db", code=0)
    call("submit", script, "--notify", f"slack:{url}", code=2)
    call("submit", script, "--notify", f"slack:hooks.example/{PLANTED}", code=2)
    call("submit", script, "--notify", PLANTED, code=2)
    call("submit", script, "--notify", f"command:curl '{url.replace(chr(39), '')}'", code=2)
    call("data", "add", "lab", f"sftp://me:{PLANTED}@{host}/x", code=2)
    call("data", "add", "lab", "s3://bucket", "--option", f"secret={PLANTED}", code=2)
    call("data", "add", "lab", "s3://bucket", "--option", f"endpoint_url={url}", code=2)
    call("data", "add", "lab", "s3://bucket", "--credential", f"secret={PLANTED}", code=2)
    call("compute", "add", "far", "--kind", "ray", "--address", url, code=2)
    call("compute", "add", "far", "--kind", "ray", "--address", f"{host}", "--headers", f"X-Token: {PLANTED}", code=2)
    call("export", "--to", url, code=2)
    call("run", script, "--input", f"data={url}/d", code=2)
    call("run", script, "--input", f"data=s3://me:{PLANTED}@bucket/d", code=2)
    git = f"nosuch @ git+http://me:${{TOKEN}}@{host}/x.git"
    variables = {"PLANTED_TOKEN": PLANTED, "DATABASE": f"{url}/db"}
    words = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    for given in (["--pip", git], words):
        call("run", *given, "--dry-run", script, code=0)
        call("run", *given, "--dry-run", "--json", script, code=0)
    call("env", "build", "--pip", git, code=1)
    call("env", "build", "--pip", "nosuch", code=1, PIP_INDEX_URL=f"{url}/simple")
    call("env", "build", "--pip", "nosuch", code=1, PIP_FIND_LINKS=f"{url}/simple", PIP_NO_INDEX="1")
    for channel, code in ((url, 2), (f"http://me:${{TOKEN}}@{host}/c", 1)):
        (cli.folder / "conda.yml").write_text(json.dumps({"channels": [channel], "dependencies": ["nosuch"]}))
        call("run", script, "--conda-file", "conda.yml", code=code)
        (cli.folder / "conda.yml").unlink()
    said = {"entry_script": "train.py", "environment_variables": variables}
    files = {
        "job": (said, 0),
        "place": ({**said, "secrets": {"A": PLANTED}}, 2),
        "told": ({**said, "notify": [url]}, 2),
    }
    for name, (text, code) in files.items():
        (cli.folder / f"src/{name}.yaml").write_text(json.dumps(text))
        call("run", f"src/{name}.yaml", code=code)
        (cli.folder / f"src/{name}.yaml").unlink()
    sweep = [
        "sweep",
        "run",
        script,
        "--param",
        "x=choice(1)",
        "--metric",
        "m",
        "--sampler",
        "grid",
        "--pass-as",
        "environment",
    ]
    for dry in (["--dry-run"], ["--dry-run", "--json"], []):
        call(*sweep, *words, *dry, code=0)
    subprocess.run(["git", "init", "-q", str(cli.folder / "src")], check=True)
    subprocess.run(["git", "-C", str(cli.folder / "src"), "remote", "add", "origin", f"{url}/x.git"], check=True)
    call("run", script, code=0)
    (cli.folder / "src/.git/config").unlink()
    for words in (["list"], ["list", "--json"], ["usage"], ["env", "list"], ["data", "list", "--json"]):
        call(*words, code=0)
    ids = cli.run_ids()
    call("diff", ids[0], ids[-1], code=0)
    for run_id in ids:
        for words in (
            ["show"],
            ["show", "--json"],
            ["status", "--json"],
            ["logs"],
            ["logs", "--prepare"],
            ["bug-report"],
        ):
            call(words[0], run_id, *words[1:], code=0)

    call.get_pages()

    assert f"{len(PLANTED)}\n" in "".join(call.texts)
    call.check()


@pytest.mark.promise("secret-field-screen-page-file")
def test_secret_of_a_pipeline_is_never_shown_or_stored(cli: Cli) -> None:
    """Regression: a pipeline's YAML file in the source folder contained a secret, and the snapshot had a copy of this
    file."""
    cli.script("import os; print(len(os.environ['PLANTED_TOKEN']), len(os.environ['HTTP_PROXY']))")
    variables = {"PLANTED_TOKEN": PLANTED, "HTTP_PROXY": f"me:{PLANTED}@127.0.0.1:9"}
    step = {"entry_script": "train.py", "environment_variables": variables}
    index = {"entry_script": "train.py", "pip_packages": ["nosuch @ git+http://me:${TOKEN}@127.0.0.1:9/x.git"]}
    steps = {"first": step, "second": {"entry_script": "train.py", "after": ["first"], **step}}
    files = {"good": (steps, 0), "bad": ({"first": index}, 1)}
    call = Told(cli)
    for name, (said, code) in files.items():
        (cli.folder / f"src/{name}.yaml").write_text(json.dumps({"steps": said}))
        call("pipeline", "run", f"src/{name}.yaml", "--dry-run", code=0)
        call("pipeline", "run", f"src/{name}.yaml", "--dry-run", "--json", code=0)
        call("pipeline", "run", f"src/{name}.yaml", code=code)
        (cli.folder / f"src/{name}.yaml").unlink()
    for run_id in cli.run_ids():
        for words in (["show"], ["show", "--json"], ["logs"], ["bug-report"]):
            call(words[0], run_id, *words[1:], code=0)
    call("pipeline", "show", code=0)
    call("pipeline", "show", "--json", code=0)
    call.get_pages()

    assert f"{len(PLANTED)} {len(variables['HTTP_PROXY'])}" in "".join(call.texts)
    call.check()


@pytest.mark.promise("service-s-secret-own-private")
def test_secret_of_a_service_is_stored_only_in_private_files(cli: Cli) -> None:
    write_tree(cli.folder, {"score.py": SERVICE_SCRIPT, "two.txt": "2"})
    url = f"http://me:{PLANTED}@127.0.0.1:9"
    deploy = ["service", "deploy", "digits", "--model", "./two.txt", "--entry", "score.py"]
    call = Told(cli)
    call(*deploy, "--pip", f"nosuch @ {url}/x.whl", code=2)
    call(*deploy, "--pip", "nosuch", code=1, PIP_INDEX_URL=f"{url}/simple")
    call("service", "show", "digits", code=0)
    call("service", "logs", "digits", code=0)
    call("service", "delete", "digits", code=0)
    call.check()
    try:
        call(*deploy, "--env", f"PLANTED_TOKEN={PLANTED}", "--env", f"HTTP_PROXY={url}", code=0)
        for words in (
            ["list"],
            ["list", "--json"],
            ["show", "digits"],
            ["show", "digits", "--json"],
            ["logs", "digits"],
        ):
            call("service", *words, code=0)
        call("service", "call", "digits", '{"x": [1]}', code=0)
        call("service", "unit", "digits", code=0)
        call.get_pages()
        place = ".paceline/services/digits"
        call.check(f"{place}/revisions/1/revision.json", f"{place}/server/config.json")
    finally:
        cli("service", "delete", "digits")
    call.check()


@pytest.mark.promise("password-without-scheme-refused-would")
@pytest.mark.parametrize("secret", [PLANTED, "s3cr3t"], ids=["all characters", "one word"])
def test_password_in_a_url_that_lacks_a_scheme_is_refused_and_not_shown(cli: Cli, secret: str) -> None:
    """Regression: `compute add lab --hosts me:password@host` stored the password, and the error for `--image` showed a
    password."""
    script, one = cli.script("print(1)"), f"me:{secret}@host"
    (cli.folder / "hosts.txt").write_text(f"gpu1 slots=4\n{one}\n")
    (cli.folder / "index.txt").write_text(f"--index-url {one}/simple\nnosuch\n")
    ssh, slurm, ray = (["compute", "add", "far", "--kind", kind] for kind in ("ssh", "slurm", "ray"))
    calls = [
        [*ssh, "--hosts", one],
        [*ssh, "--hosts", f"gpu1,{one}:2"],
        [*ssh, "--hosts", "hosts.txt"],
        [*ssh, "--hosts", "gpu1", "--user", f"me:{secret}"],
        [*slurm, "--login", one],
        [*ray, "--address", f"{one}:8265"],
        ["run", script, "--image", f"{one}/x"],
        ["run", script, "--image", f"{one}/x", "--dry-run"],
        ["run", script, "--compute", one],
        ["run", script, "--input", f"data={one}/d"],
        ["run", script, "--output", f"data={one}/d"],
        ["run", script, "--pip", f"{one}/x"],
        ["run", script, "--requirements", "index.txt"],
        ["run", script, "--conda", "nosuch", "--channel", f"{one}/x"],
        ["run", script, "--python", f"{one}/x"],
        ["run", script, "--notify", f"mail:{one}"],
        ["data", "add", "lab", f"{one}/x"],
        ["data", "add", "lab", "s3://bucket", "--option", f"endpoint_url={one}"],
        ["export", "--to", one],
    ]
    told = "".join(cli(*words, code=2).stderr for words in calls)
    for name in ("hosts.txt", "index.txt"):
        (cli.folder / name).unlink()
    words = ["run", "-q", script, "--pip", "nosuch"]
    quick = {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_RETRIES": "0",
        "UV_HTTP_RETRIES": "0",
        "PIP_INDEX_URL": "http://index.example/a",
    }
    for name in ("PIP_PROXY", "HTTP_PROXY"):
        told += cli(*words, code=1, env={**quick, name: f"{one}:3128"}).stderr

    lost = (b"PLANTED", b"DETNALP", b"s3cr3t")
    assert not [word for word in lost if word in told.encode()], told
    assert not [path for path, data in contents(cli.folder).items() if any(word in data for word in lost)]


@pytest.mark.promise("snapshot-copy-job-file-pipeline")
def test_snapshot_has_a_symlink_to_a_job_file_that_contains_a_secret_and_a_copy_of_any_other(cli: Cli) -> None:
    """Regression: a job file in the source folder contained a token, and each snapshot of the folder had a copy of this
    file."""
    token = "ghp_" + "a1B2" * 9
    cli.script("import os; print(len(os.environ['MINE']), os.path.islink('job.yaml'), os.path.exists('job.yaml'))")
    for value, is_secret in ((token, True), ("x" * 40, False)):
        (cli.folder / "src/job.yaml").write_text(f"entry_script: train.py\nenvironment_variables: {{MINE: {value}}}\n")
        assert cli("run", "-q", "src/job.yaml").stdout == f"40 {is_secret} True\n"
        assert not [path for path, data in contents(cli.folder / ".paceline").items() if token.encode() in data]
