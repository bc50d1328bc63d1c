"""The arrows of DESIGN.md: the allowed imports. They are read from the source, whenever they run."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from tests.helpers import run_python
from tests.sources import SOURCE, read

UP_TO_TARGETS = "errors system job runs environments data containers remote launchers targets observe"
UP_TO_SUBMIT = f"{UP_TO_TARGETS} supervisor snapshot submit"

# Layer -> layers, or modules of layers, that it may import in addition to itself.
MAY_IMPORT = {
    # The lowest layers import almost nothing.
    "errors": "",
    "system": "",
    "torch_private": "errors",
    # A worker's process loads `collectives` and `torch_mpi` together with the user's script, so they import few layers.
    "collectives": "errors system torch_private",
    "torch_mpi": "system torch_private collectives",
    # `checkpoint` and `worker` run in the process of the user's script. `checkpoint` finds its rank in the same way as
    # a sampler.
    "checkpoint": "errors system torch_private data.sampling.world",
    "worker": "errors system.run_variables system.lazy_import system.spare_client system.kept_states system.memory "
    "trackers.hooks collectives.answer_recorder_requests "
    "collectives.count_steps collectives.keep_to_master_address torch_mpi.install_when_loaded",
    # `parallel` knows no jobs and no runs. Of the collectives, it uses the backend "mpi" and the store through which
    # ranks connect.
    "parallel": "errors system torch_private collectives.store_listener collectives.rendezvous torch_mpi.install checkpoint",
    "compat": "errors system worker.nested",
    # `compat.horovod` has horovodrun, which starts processes as a run's launcher does, and names the rank that failed
    # first as a run's report does.
    "compat.horovod": "errors system torch_private collectives torch_mpi launchers supervisor.diagnosis worker checkpoint",
    # `compat.azureml` offers Paceline's public classes under the names of the Azure SDK.
    "compat.azureml": f"{UP_TO_SUBMIT} estimator workspace workspace_dir children sweeps pipelines models services compat "
    "trackers.export",
    "azureml": "compat",
    # `job` describes jobs by frozen data classes.
    "job": "errors system",
    "containers": "errors system job",
    "runs": "errors system job containers",
    # Workers load `trackers` next to the script, and the command line loads it to export runs to other trackers.
    "trackers": "errors system job runs models workspace_dir reports",
    "snapshot": "errors system job.secret_values",
    "environments": "errors system job",
    "data": "errors system job",
    # `remote` starts a process on another machine, holds the link to it, and transfers the files of a run.
    "remote": "errors system job runs environments data observe.node",
    "launchers": "errors system job runs",
    "targets": "errors system job runs data remote observe.node",
    "doctor": "errors system job remote targets",
    # `node` looks for Open MPI on the machine where the workers run.
    "node": "errors system job runs environments data containers remote launchers observe.node checkpoint.api",
    # The supervisor locks environments and cached data. Nodes build environments and fetch data.
    "supervisor": f"{UP_TO_TARGETS} trackers",
    # `models` keeps versions of files that runs have made. It gets the run, the experiment and the workspace as
    # arguments, so it does not import them.
    "models": "errors system job runs data",
    # `pruning` deletes all kinds of files of a workspace, and starts no process.
    "pruning": "errors system runs environments data containers models",
    # `backups` copies all kinds of files of a workspace, and starts no process.
    "backups": "errors system job runs data models.keep",
    # `observe` measures the load and the progress of workers. Nodes use its standard-library part, and the supervisor
    # and readers of a run use all of it.
    "observe": "errors system job runs launchers.environment targets",
    "observe.node": "errors system",
    "runs.run": "errors system job containers observe",
    # `runs.tunnel` and `remote.agent.relay` are the two ends of a tunnel, and share the format of its messages.
    "runs.tunnel": "errors system remote.agent.relay",
    # `reports` computes from run folders what the command line and the web page show. The report on a fault names the
    # Open MPI that the run would use.
    "reports": "errors system job runs launchers.mpi",
    "submit": f"{UP_TO_TARGETS} supervisor snapshot",
    "estimator": UP_TO_SUBMIT,
    # `functions` runs functions as runs. A worker loads the decorator, the calls and the pool next to the user's module.
    "functions": f"{UP_TO_SUBMIT} estimator workspace checkpoint.api worker.script.without_ours",
    # `sessions` runs in the worker of an interactive session, and defines the line that the worker prints for the
    # command line.
    "sessions": "errors system runs.folder",
    # `children` creates child runs, which are like all other runs. The controller of a sweep or of a pipeline submits
    # them.
    "children": f"{UP_TO_SUBMIT}",
    "sweeps": f"{UP_TO_SUBMIT} estimator children",
    "pipelines": f"{UP_TO_SUBMIT} estimator children sweeps",
    "workspace_dir": "errors system",
    # `services` has its own supervisor, which starts a server by a command line. A file describes what the server has
    # to serve.
    "services": f"{UP_TO_SUBMIT} models serving.api serving.__main__",
    "workspace": f"{UP_TO_SUBMIT} estimator pruning workspace_dir sweeps pipelines models services reports rerun ui.report "
    "schedules",
    # `job_files` reads files of jobs, sweeps and pipelines, for the command line, the web page and schedules.
    "job_files": f"{UP_TO_SUBMIT} estimator workspace_dir sweeps pipelines",
    "schedules": f"{UP_TO_SUBMIT} models children job_files",
    # `serving` runs in the environment of a service, which has only what a service needs.
    "serving": "errors system",
    # `tracking` records a plain program as a run.
    "tracking": "errors system runs workspace",
    # Authors of compute targets use `testing` for their tests. No other layer imports it.
    "testing": f"{UP_TO_SUBMIT} estimator workspace",
    # `rerun` submits the job of a run again, for the command line and for the page.
    "rerun": f"{UP_TO_SUBMIT} sweeps",
    # `ui` is the web page of a workspace. It changes the workspace by the same functions as the command line.
    "ui": f"{UP_TO_SUBMIT} rerun workspace sweeps pipelines models services reports job_files",
    "cli": f"{UP_TO_SUBMIT} rerun estimator workspace workspace_dir pruning doctor children sweeps pipelines models "
    "serving.api services compat reports ui trackers sessions backups schedules job_files",
    "__main__": "cli",
}

# Third-party module -> layers that may import it
THIRD_PARTY = {
    "pathspec": "snapshot",
    "click": "cli",
    "cronsim": "schedules",
    "rich": "cli sweeps",
    "tomli": "workspace_dir environments",
    **dict.fromkeys(("uv", "rattler"), "environments"),
    "packaging": "environments compat",
    "IPython": "runs sweeps",
    "apprise": "runs",
    # `targets` encrypts secrets and commands that travel through a datastore.
    "cryptography": "targets",
    # `targets` sends requests to a Kubernetes cluster.
    **dict.fromkeys(("httpx2", "lightkube", "websockets"), "targets"),
    "msgspec": "targets ui",
    "yaml": "environments compat job_files cli models trackers targets",
    "dotenv": "job_files",
    **dict.fromkeys(("fsspec", "s3fs", "gcsfs", "obstore", "botocore", "paramiko", "aiohttp", "keyring"), "data"),
    **dict.fromkeys(("torch", "numpy"), "checkpoint data torch_private collectives torch_mpi compat parallel serving"),
    "mpi4py": "collectives torch_mpi compat",
    "pytest": "testing",
    "cloudpickle": "compat",
    "matplotlib": "serving parallel sweeps runs",
    "tensorflow": "data compat",
    # `system` loads triton in processes that are about to load TensorFlow.
    "triton": "system",
    **dict.fromkeys(("keras", "tf_keras"), "compat"),
    "pandas": "serving data runs sweeps trackers reports",
    **dict.fromkeys(("optuna", "cmaes"), "sweeps"),
    "sklearn": "compat serving",
    "pyarrow": "data trackers ui",
    "mlflow": "models trackers",
    **dict.fromkeys(("tensorboard", "transformers", "aim"), "trackers"),
    **dict.fromkeys(("inference_schema", "joblib", "onnxruntime", "uvloop"), "serving"),
    **dict.fromkeys(("starlette", "uvicorn"), "serving ui"),
    **dict.fromkeys(("anyio", "jinja2", "markdown_it", "markupsafe", "pygments"), "ui"),
}


#: Modules and packages directly below `paceline`.
OWN = {item.name.removesuffix(".py") for item in SOURCE.iterdir()}


def layer_of(module: str) -> str:
    return module.partition(".")[0]


def module_of(path: Path) -> str:
    """The module of a file, without `paceline.`; "" for the package itself."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(code: bytes | str, package: str) -> set[str]:
    """Every module that the code imports at run time; `package` is what relative imports start from."""
    found: set[str] = set()
    for node in read(code).at_run_time:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            top = ".".join(part for part in (base, node.module) if part)
            found |= {f"{top}.{alias.name}" for alias in node.names}
    return found


def complaints(module: str, imported: set[str]) -> list[str]:
    """Return the errors of these imports in `module` of Paceline."""
    layer, wrong = layer_of(module), []
    allowed = MAY_IMPORT.get(".".join(module.split(".")[:2]), MAY_IMPORT[layer]).split()
    for name in sorted(imported):
        top, _, rest = name.partition(".")
        if top != "paceline":
            if top not in sys.stdlib_module_names and layer not in THIRD_PARTY.get(top, "").split():
                wrong.append(f"{module} imports {top}")
        elif layer_of(rest) == layer or layer_of(rest) not in OWN:
            continue  # its own layer, or another name of `paceline`, such as __version__
        elif not any(f"{rest}.".startswith(f"{part}.") for part in allowed):
            wrong.append(f"{module} imports paceline.{rest}")
    return wrong


FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


@pytest.mark.promise("arrows-point-one-way-modules")
def test_every_import_follows_the_layers():
    wrong = []
    for path in FILES:
        module = module_of(path)
        package = f"paceline.{module}" if path.name == "__init__.py" else f"paceline.{module}".rpartition(".")[0]
        wrong += complaints(module, imports(path.read_bytes(), package))
    assert wrong == []


@pytest.mark.parametrize(
    ("module", "code", "complaint"),
    [
        (
            "launchers.mpi",
            "from paceline.targets import get_target",
            "launchers.mpi imports paceline.targets.get_target",
        ),
        (
            "targets.local",
            "def f():\n    import paceline.launchers.mpi",
            "targets.local imports paceline.launchers.mpi",
        ),
        ("runs.run", "from paceline import submit", "runs.run imports paceline.submit"),
        ("snapshot.store", "from paceline.runs import store", "snapshot.store imports paceline.runs.store"),
        ("worker.script", "from ..system import files", "worker.script imports paceline.system.files"),
        ("worker.report", "import torch.distributed", "worker.report imports torch"),
        ("runs.metrics", "try:\n    import numpy\nexcept ImportError:\n    pass", "runs.metrics imports numpy"),
        ("submit", "from paceline.cli.main import main", "submit imports paceline.cli.main.main"),
        (
            "job.job",
            "if TYPE_CHECKING:\n    pass\nelse:\n    import paceline.runs.run",
            "job.job imports paceline.runs.run",
        ),
        ("workspace", "from rich import print", "workspace imports rich"),
        ("compat.azureml.core.run", "from paceline import cli", "compat.azureml.core.run imports paceline.cli"),
        ("compat.horovod.aliases", "import paceline.workspace", "compat.horovod.aliases imports paceline.workspace"),
    ],
)
def test_import_against_the_layers_is_detected(module, code, complaint):
    package = f"paceline.{module}".rpartition(".")[0]
    assert complaints(module, imports(code, package)) == [complaint]


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("snapshot.store", "from paceline.system.files import write_json"),
        ("errors", "if TYPE_CHECKING:\n    from paceline.runs.failure import FailureReport"),
        ("workspace_dir", "import tomli as tomllib"),
        ("cli.main", "from paceline import __version__"),
        ("runs.run", "from . import store"),
    ],
)
def test_import_allowed_by_the_layers_is_not_reported(module, code):
    package = f"paceline.{module}".rpartition(".")[0]
    assert complaints(module, imports(code, package)) == []


#: Package -> (its modules that other packages may import, the packages that may import all its modules).
BORDERS = {
    "parallel": ({"parallel"}, {"parallel"}),
    "checkpoint": ({"checkpoint", "checkpoint.api"}, {"checkpoint", "parallel"}),
}


def inner_imports(module: str, imported: set[str]) -> list[str]:
    """Return the imports in `module` that pass another package's border."""
    wrong = []
    for name in sorted(imported):
        own = name.removeprefix("paceline.")
        modules, insiders = BORDERS.get(layer_of(own), (set(), {layer_of(module)}))
        if layer_of(module) not in insiders and module_in(own) not in modules:
            wrong.append(f"{module} imports {name}")
    return wrong


def module_in(name: str) -> str:
    """Return the module of an import: `from paceline.parallel import X` reads as parallel.X, which is a module or a name."""
    path = SOURCE.joinpath(*name.split("."))
    return name if path.is_dir() or path.with_suffix(".py").is_file() else name.rpartition(".")[0]


#: Modules on which the names of the Azure SDK are built: the public packages, and a few modules below them.
BELOW_AZURE = {
    *("", "containers", "data", "environments", "errors", "pipelines", "runs", "submit", "sweeps", "targets"),
    *("trackers.export", "workspace_dir", "system.handshake", "system.lazy_import", "system.registry"),
}


def test_azureml_modules_import_only_public_packages() -> None:
    assert len(BELOW_AZURE) == 15
    found: set[str] = set()
    for path in (SOURCE / "compat" / "azureml").rglob("*.py"):
        for node in read(path.read_bytes()).imports:
            if isinstance(node, ast.ImportFrom):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            else:
                # The dot marks a module that is imported itself, and not one of its names.
                found |= {f"{alias.name}." for alias in node.names}
    own = {name.removeprefix("paceline.") for name in found if name.startswith("paceline.")}
    assert {module_in(name) for name in own if not name.startswith("compat.")} == BELOW_AZURE


def test_packages_are_imported_only_through_their_public_modules():
    wrong = []
    for path in [*FILES, SOURCE / "__init__.py"]:
        wrong += inner_imports(module_of(path), imports(path.read_bytes(), "paceline"))
    assert wrong == []


@pytest.mark.parametrize(
    "code",
    [
        "from paceline.parallel import exchange",
        "from paceline.parallel.mesh import World",
        "from paceline.checkpoint.files import write_file",
        "import paceline.checkpoint.values",
    ],
)
def test_import_of_another_packages_inner_module_is_detected(code):
    assert len(inner_imports("compat.horovod.torch", imports(code, "paceline"))) == 1


def test_import_of_a_public_module_is_accepted():
    code = "from paceline import checkpoint\nfrom paceline.checkpoint.api import write_file\nfrom paceline.parallel import Layout"
    assert inner_imports("compat.horovod.torch", imports(code, "paceline")) == []


def test_every_part_of_the_package_has_a_layer():
    assert {layer_of(module_of(path)) for path in FILES} <= set(MAY_IMPORT)


@pytest.mark.promise("worker-needs-python-3-10")
def test_every_source_file_has_valid_python_3_10_syntax():
    wrong = []
    for path in FILES:
        try:
            read(path.read_bytes())
        except SyntaxError as error:
            wrong.append(f"{module_of(path)}: {error}")
    assert FILES
    assert wrong == []


def test_modules_run_as_programs_define_all_functions_before_main_runs() -> None:
    """Regression: functions were defined below `if __name__ == "__main__": sys.exit(main())`. So they did not exist yet
    when `main` called them."""
    late = []
    for path in (path for path in FILES if b"__main__" in path.read_bytes()):
        has_started = False
        for node in ast.parse(path.read_bytes()).body:
            if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) and "main(" in ast.unparse(node):
                has_started = True
            elif has_started and isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Assign)):
                late.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert late == []


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("paceline.node.__main__", "paceline.containers.layer"),
        ("paceline.services.supervise", "paceline.serving.bench"),
        ("paceline.sweeps.controller", "paceline.sweeps.pictures.draw"),
    ],
)
def test_process_of_a_run_starts_without_modules_it_rarely_needs(module: str, heavy: str) -> None:
    """Regression: small modules were merged into the modules that use them, so each process imported the heavy
    dependencies at its start."""
    assert run_python(f"import sys, {module}; print({heavy!r} in sys.modules)") == "False\n"
