"""Private parts of torch that Paceline uses, with signatures: a test fails if a release of torch has changed one."""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from pathlib import Path

import pytest

from paceline import parallelize, torch_private
from paceline.collectives import CollectivesError
from paceline.parallel import ParallelError
from paceline.torch_mpi import backend
from paceline.torch_private import TorchError
from tests.helpers import run_python
from tests.late import late

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


torch, nn, fsdp = late("torch"), late("torch.nn"), late("torch.distributed.fsdp")
c10d = late("torch.distributed.distributed_c10d")
ROOT = Path(__file__).parents[1]

# Callable -> the parameters with which Paceline calls it, in order if they are passed by position.
CALLED = [
    ("torch_private.FakeTensorMode", ["allow_non_fake_inputs"]),
    ("torch_private.FakeTensorMode.from_tensor", ["self", "tensor"]),
    ("torch_private.BatchNorm.__init__", ["self", "num_features", "eps", "momentum", "affine", "track_running_stats"]),
    ("torch_private.BatchNorm._check_input_dim", ["self", "input"]),
    ("torch_private.InstanceNorm._get_no_batch_dim", ["self"]),
    ("torch_private.DispatchMode.__torch_dispatch__", ["self", "func", "types", "args", "kwargs"]),
    ("torch.compiler.set_stance", ["stance"]),
    ("fsdp.FSDPModule._get_fsdp_state", ["self"]),
    ("fsdp.FSDPModule.unshard", ["self"]),
    ("fsdp.FSDPModule.reshard", ["self"]),
    ("torch.distributed.tensor.DTensor.__create_chunk_list__", ["self"]),
    ("c10d._get_default_store", []),
    ("c10d._new_process_group_helper", ["group_size", "group_rank", "global_ranks_in_group", "backend", "timeout"]),
    # Public functions that have other names or parameters in older releases of torch.
    ("fsdp.FSDPModule.set_is_last_backward", ["self", "is_last_backward"]),
    ("fsdp.FSDPModule.set_reshard_after_backward", ["self", "reshard_after_backward"]),
    ("fsdp.FSDPModule.set_requires_gradient_sync", ["self", "requires_gradient_sync"]),
    ("fsdp.FSDPModule.set_requires_all_reduce", ["self", "requires_all_reduce"]),
    ("fsdp.FSDPModule.set_gradient_divide_factor", ["self", "factor"]),
    ("fsdp.FSDPModule.set_force_sum_reduction_for_comms", ["self", "enable"]),
    ("torch.distributed.isend", ["tensor", "group", "group_dst"]),
    ("torch.distributed.irecv", ["tensor", "group", "group_src"]),
    ("nn.parallel.DistributedDataParallel.__init__", ["self", "module", "init_sync", "gradient_as_bucket_view"]),
]


def named(path):
    """Return the object that `torch.a.b` or `torch_private.a` names."""
    first, *names = path.split(".")
    found = globals()[first]
    for name in names:
        found = getattr(found, name)
    return found


@pytest.mark.parametrize(("called", "names"), CALLED, ids=[called for called, _ in CALLED])
def test_private_torch_function_has_the_expected_signature(called, names):
    parameters = inspect.signature(named(called)).parameters
    assert [name for name in parameters if name in names] == names
    required = [
        name
        for name, one in parameters.items()
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    unknown = {"store", "group_name", "backend_options"}  # torch itself passes these
    assert set(required) <= set(names) | unknown


@pytest.mark.parametrize("name", torch_private._WHERE)
def test_private_torch_name_exists(name):
    assert getattr(torch_private, name) is not None


def test_torch_can_create_a_process_group_over_mpi():
    assert isinstance(c10d._MPI_AVAILABLE, bool)
    assert "ProcessGroupMPI.create(" in inspect.getsource(sys.modules[c10d.__name__])
    assert isinstance(getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set()), set)


def test_tcp_store_takes_a_listening_socket():
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    assert issubclass(rendezvous.TCPStore, torch.distributed.TCPStore)
    assert "master_listen_fd: " in torch.distributed.TCPStore.__init__.__doc__
    assert "TCPStore(" in inspect.getsource(rendezvous)


def test_process_group_has_the_methods_that_paceline_overrides():
    missing = [
        name
        for name in ("_device_types", "_get_backend", "_set_group_name", "_set_group_desc", "group_name", "group_desc")
        if not hasattr(torch.distributed.ProcessGroup, name)
    ]
    assert not missing


def test_torch_function_mode_sees_reads_of_tensor_values():
    seen = []

    class Watch(torch.overrides.TorchFunctionMode):  # type: ignore[name-defined]
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    one = torch.ones(())
    with Watch():
        bool(one), float(one), int(one), one.item(), one.tolist(), one.numpy(), torch.arange(2)
    assert {"__bool__", "__float__", "__int__", "item", "tolist", "numpy", "arange"} <= set(seen)


def test_in_place_change_of_a_fake_tensor_increments_the_version_of_its_views():
    with torch_private.FakeTensorMode():
        whole = torch.zeros(4)
        view = whole[1:]
        before = view._version
        nn.ReLU(inplace=True)(whole)
        assert view._version == before + 1
        assert view._is_view()
        assert view.untyped_storage()._cdata == whole.untyped_storage()._cdata
        with pytest.raises(torch_private.VALUE_NEEDED):
            bool(whole.sum() > 0)


def test_masks_of_two_embeddings_are_distinct_dict_keys_even_if_they_compare_equal(monkeypatch):
    class Older:
        def __init__(self, offset_shape, offset_dim=0):
            self.offset_shape, self.mask_buffer = offset_shape, object()

        def __eq__(self, other):
            return isinstance(other, Older) and self.offset_shape == other.offset_shape

        def __hash__(self):
            return hash(self.offset_shape)

    embedding = importlib.import_module("torch.distributed.tensor._ops._embedding_ops")
    name = "_MaskPartial" if hasattr(embedding, "_MaskPartial") else "MaskPartial"
    kinds = [getattr(embedding, name), Older]
    for kind in kinds:
        # torch's `__eq__` compares with the class of this name in its module, so replace the class there.
        monkeypatch.setattr(embedding, name, kind)
        torch_private.keep_lookups_apart()
        one, other = kind(offset_shape=(4, 2)), kind(offset_shape=(4, 2))
        assert len({one, one, other}) == 2
        other.__dict__["mask_buffer"] = one.mask_buffer
        assert one == other
        assert hash(one) == hash(other)


# --- The supported releases of torch


def test_supported_torch_versions_equal_the_torch_requirement_in_pyproject_toml():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [name for name in project["optional-dependencies"]["torch"] if name.startswith("torch")]
    assert found == [torch_private.requirement()]


@pytest.fixture
def pretend(monkeypatch):
    monkeypatch.setattr(torch_private, "_told", [])
    return lambda version: monkeypatch.setattr(torch, "__version__", version)


@pytest.mark.promise("torch-2-9-2-15")
@pytest.mark.parametrize("version", ["2.9.0", "2.13.0+cpu", "2.15.1", "2.15.0a0+gitabc", "a build of my own"])
def test_supported_torch_release_gives_no_warning(pretend, version):
    pretend(version)
    assert torch_private.too_old("parallelize") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_private.warn_if_untried("parallelize")


@pytest.mark.promise("torch-2-9-2-15")
@pytest.mark.parametrize("version", ["1.13.1", "2.4.1+cu121", "2.8.0"])
def test_older_torch_is_refused_on_use(pretend, version):
    pretend(version)
    rule = f"needs torch 2.9 to 2.15; this is {version}: pip install 'torch>=2.9,<2.16'."
    with pytest.raises(ParallelError) as refused:
        parallelize(nn.Linear(2, 2), loss=nn.functional.mse_loss)
    assert str(refused.value) == f"parallelize {rule}"
    with pytest.raises(CollectivesError) as refused:
        backend.ProcessGroupMPI.create([])
    assert str(refused.value) == f'init_process_group("mpi") {rule}'


def test_newer_torch_is_used_with_one_warning(pretend):
    pretend("2.16.0+cu140")
    with pytest.warns(
        UserWarning, match=r"tried with torch 2\.9 to 2\.15; this is 2\.16\.0\+cu140\. .*'torch>=2.9,<2.16'"
    ):
        parallelize(nn.Linear(2, 2), loss=nn.functional.mse_loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_private.warn_if_untried("parallelize")


def test_name_missing_in_a_newer_torch_is_reported(pretend, monkeypatch):
    pretend("2.17.0")
    monkeypatch.delitem(vars(torch_private), "VALUE_NEEDED", raising=False)
    monkeypatch.setitem(torch_private._WHERE, "VALUE_NEEDED", ("torch._subclasses.fake_tensor", "Gone"))
    with pytest.raises(TorchError, match=r"needs torch 2\.9 to 2\.15; this is 2\.17\.0: .*fake_tensor: Gone"):
        from paceline.torch_private import VALUE_NEEDED  # noqa: F401
    monkeypatch.delattr(c10d, "_new_process_group_helper")
    with pytest.raises(TorchError, match=r"_new_process_group_helper"):
        torch_private.offer_mpi(torch.distributed, object, lambda make: make)


def test_importing_torch_private_loads_no_torch():
    code = "import sys; from paceline import torch_private; print(torch_private.requirement(), 'torch' in sys.modules)"
    assert run_python(code).split() == [torch_private.requirement(), "False"]
