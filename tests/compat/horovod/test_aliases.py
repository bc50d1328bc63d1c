"""`import horovod...` finds Paceline's modules, each once, and never hides a real horovod unasked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import paceline.compat
from paceline.errors import UserError
from tests.engines.conftest import require_module
from tests.ranks import clean_environment
from tests.warm import TORCH, run_alone

MODULES = (
    "horovod",
    "horovod.torch",
    "horovod.torch.mpi_ops",
    "horovod.torch.compression",
    "horovod.torch.functions",
    "horovod.torch.optimizer",
    "horovod.torch.sync_batch_norm",
    "horovod.torch.elastic",
    "horovod.torch.elastic.sampler",
    "horovod.torch.elastic.state",
    "horovod.common",
    "horovod.common.basics",
    "horovod.common.elastic",
    "horovod.common.exceptions",
    "horovod.common.process_sets",
    "horovod.common.util",
    "horovod.data",
    "horovod.data.data_loader_base",
    "horovod.runner",
    "horovod.runner.common",
    "horovod.runner.common.util.codec",
    "horovod.runner.common.util.env",
    "horovod.runner.common.util.host_hash",
    "horovod.runner.common.util.hosts",
    "horovod.runner.common.util.safe_shell_exec",
    "horovod.runner.common.util.secret",
    "horovod.runner.common.util.settings",
    "horovod.runner.common.util.timeout",
    "horovod.runner.common.util.tiny_shell_exec",
    "horovod.runner.launch",
    "horovod.runner.util.threads",
)


def run(code: str, *path: Path, check: bool = True) -> str:
    """What a fresh interpreter prints, with these folders on its PYTHONPATH."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode == 0) == check, done.stderr
    return done.stdout.strip() if check else done.stderr.strip()


def run_with_torch(code: str, *path: Path) -> str:
    """The same of a process that has torch loaded already, and nothing of ours."""
    Path("script.py").write_text(code)
    environment = clean_environment() | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    done = run_alone("script.py", loaded=TORCH, environment=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def real(tmp_path):
    """A folder with a real package `horovod`."""
    (tmp_path / "site" / "horovod").mkdir(parents=True)
    (tmp_path / "site" / "horovod" / "__init__.py").write_text("real = True\n")
    return tmp_path / "site"


#: Small modules of Horovod that Paceline combines into one module.
MERGED = {
    "horovod.data": ("data_loader_base",),
    "horovod.runner.common.util": ("codec", "env", "secret", "settings", "timeout"),
    "horovod.torch.elastic": ("sampler", "state"),
}
IMPORT_EACH = (
    "import importlib, sys\nfor name in {names}:\n"
    "    parent, _, last = name.rpartition('.')\n"
    "    merged = {merged}.get(parent, ())\n"
    "    own_name = 'paceline.compat.' + (parent if last in merged else name)\n"
    "    own = importlib.import_module(own_name)\n"
    "    assert not parent or getattr(importlib.import_module(parent), last) is own, name\n"
    "    spec = own.__spec__\n"
    "    assert importlib.import_module(name) is own is sys.modules[name], name\n"
    "    assert own.__spec__ is spec and own.__name__ == own_name, name\n"
)
IMPORT_ALL = IMPORT_EACH.format(names=MODULES, merged=MERGED) + (
    "import horovod.torch as hvd, horovod.torch.elastic.state\n"
    "assert hvd.elastic.state is horovod.torch.elastic.state\n"
    "missing = [name for name in hvd.__all__ if not hasattr(hvd, name)]; assert not missing, missing\n"
    "print('ok')"
)


def test_every_module_imported_as_horovod_is_the_same_object_as_in_paceline_compat_horovod():
    require_module("torch")
    assert (
        run_with_torch("import paceline.compat as c; c.install('horovod'); c.install('horovod')\n" + IMPORT_ALL) == "ok"
    )


def test_every_horovod_module_can_be_imported_if_the_alias_folder_is_on_pythonpath():
    require_module("torch")
    assert run_with_torch(IMPORT_ALL, paceline.compat.shim_dir()) == "ok"


@pytest.mark.promise("real-horovod-comes-first")
def test_real_horovod_is_not_replaced_without_force(real):
    answer = run("import paceline.compat as c; c.install('horovod')", real, check=False)
    assert "the real horovod is installed" in answer
    assert "force=True" in answer


def test_real_horovod_is_replaced_with_force(real):
    code = (
        "import horovod; assert horovod.real\nimport paceline.compat as c; c.install('horovod', force=True)\n"
        "import horovod; print(horovod.__name__)"
    )
    assert run(code, real) == "paceline.compat.horovod"


def test_loaded_real_horovod_is_not_replaced_without_force(real):
    code = (
        f"import sys; sys.path.insert(0, {str(real)!r}); import horovod; sys.path.pop(0)\n"
        "import paceline.compat as c; c.install('horovod')"
    )
    assert "the real horovod is installed" in run(code, check=False)


def test_alias_is_imported_instead_of_the_real_horovod_if_the_alias_folder_is_first_on_pythonpath(real):
    assert run("import horovod; print(horovod.__name__)", paceline.compat.shim_dir(), real) == "paceline.compat.horovod"


def test_uninstalled_alias_is_no_longer_importable():
    code = (
        "import paceline.compat as c; c.install('horovod'); import horovod\n"
        "from paceline.compat.horovod import aliases; aliases.uninstall()\nimport importlib.util\n"
        "print(importlib.util.find_spec('horovod'))"
    )
    assert run(code) == "None"


def test_importing_an_unsupported_horovod_module_raises_an_error_that_names_the_reason():
    answers = {
        "mxnet": "MXNet is retired",
        **dict.fromkeys(
            (
                "runner.http.http_server",
                "runner.driver.driver_service",
                "runner.gloo_run",
                "runner.common.service.task_service",
                "runner.util.network",
            ),
            "horovod.runner.launch._run (docs/horovod.md)",
        ),
        "torch.nothing": "No module named 'horovod.torch.nothing'",
    }
    code = (
        "import importlib, json\nimport paceline.compat as c; c.install('horovod')\ntold = {}\n"
        f"for name in {list(answers)}:\n"
        "    try:\n        importlib.import_module('horovod.' + name)\n"
        "    except ImportError as error:\n        told[name] = str(error)\n"
        "print(json.dumps(told))"
    )
    told = json.loads(run(code))
    for name, answer in answers.items():
        assert answer in told[name]


def test_install_refuses_names_other_than_horovod():
    with pytest.raises(UserError, match=r"no 'azure'\. There is: 'horovod'"):
        paceline.compat.install("azure")


def test_importing_horovod_loads_neither_torch_nor_numpy_nor_mpi():
    code = (
        "import paceline.compat as c; c.install('horovod'); import horovod, horovod.common.util, sys\n"
        "print([name for name in ('torch', 'numpy', 'mpi4py') if name in sys.modules])"
    )
    assert run(code) == "[]"
