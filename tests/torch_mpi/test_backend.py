"""How the backend "mpi" comes into torch.distributed, without any MPI."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tests.engines.conftest import require_engine
from tests.helpers import run_python
from tests.ranks import clean_environment
from tests.warm import TORCH, run_alone


def run_with_torch(folder: Path, code: str, **options: bool) -> str:
    """What a process that has torch loaded, and nothing of ours, prints when it runs this. options: see `run_alone`."""
    script = folder / "script.py"
    script.write_text(code)
    done = run_alone(str(script), loaded=TORCH, environment=clean_environment(), **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_installing_the_import_hook_of_the_mpi_backend_imports_neither_torch_nor_mpi() -> None:
    code = """
import sys
before = set(sys.modules)
from paceline.torch_mpi import backend
backend.install_when_loaded()
backend.install_when_loaded()
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(loaded - set(sys.stdlib_module_names)))
print(len([finder for finder in sys.meta_path if type(finder).__name__ == "_Finder" and "paceline" in type(finder).__module__]))
"""
    assert run_python(code).split("\n")[:2] == ["['paceline']", "1"]


def test_mpi_backend_is_installed_when_torch_distributed_loads(tmp_path: Path) -> None:
    require_engine("torch", importlib.util.find_spec("torch"))
    code = """
import sys
from paceline.torch_mpi import backend
backend.install_when_loaded()
import torch.distributed as dist
made = dist.distributed_c10d._new_process_group_helper
backend.install()
backend.install_when_loaded()
print(dist.is_mpi_available(), dist.distributed_c10d._new_process_group_helper is made)
print(type(dist.__spec__.loader).__name__, type(dist.__loader__).__name__)
print([finder for finder in sys.meta_path if type(finder).__name__ == "_Finder" and "paceline" in type(finder).__module__])
print("mpi4py" in sys.modules)
"""
    lines = run_with_torch(tmp_path, code, hides=True).splitlines()
    assert lines == ["True True", "SourceFileLoader SourceFileLoader", "[]", "False"]


def test_mpi_backend_is_installed_into_a_loaded_torch(tmp_path: Path) -> None:
    require_engine("torch", importlib.util.find_spec("torch"))
    code = """
import torch.distributed as dist
from paceline.torch_mpi import backend
assert not dist.is_mpi_available()
backend.install_when_loaded()
print(dist.is_mpi_available())
"""
    assert run_with_torch(tmp_path, code) == "True\n"


def test_other_backends_are_unchanged(tmp_path: Path) -> None:
    require_engine("torch", importlib.util.find_spec("torch"))
    code = """
from paceline.torch_mpi import backend
backend.install()
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(2)
dist.all_reduce(tensor)
print(type(dist.group.WORLD).__name__, tensor.tolist())
dist.destroy_process_group()
"""
    # In torch 2.9 and 2.10, Gloo prints the number of ranks that it has found first.
    assert run_with_torch(tmp_path, code).splitlines()[-1] == "ProcessGroup [1.0, 1.0]"


def test_missing_mpi4py_names_the_install_command(tmp_path: Path) -> None:
    require_engine("torch", importlib.util.find_spec("torch"))
    code = """
import sys
sys.modules["mpi4py"] = None
from paceline.torch_mpi import backend
backend.install()
import torch.distributed as dist
try:
    dist.init_process_group("mpi")
except RuntimeError as error:
    print(error)
"""
    assert "pip install 'paceline[mpi]'" in run_with_torch(tmp_path, code)
