"""`horovod.run`: functions on several ranks."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from paceline.compat import horovod
from paceline.errors import RunFailedError, UserError
from paceline.system import processes
from tests.engines.conftest import require_engine
from tests.engines.lab import WHEEL, find_mpirun
from tests.warm import submitting_with, warm_python


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    if found := find_mpirun(WHEEL):
        monkeypatch.setenv("PACELINE_MPIRUN", found)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(params=[{"use_mpi": True}, {"use_gloo": True}], ids=["mpi", "gloo"])
def transport(request: pytest.FixtureRequest) -> dict[str, bool]:
    if "use_mpi" in request.param:
        require_engine(WHEEL, find_mpirun(WHEEL))
    return dict(request.param)


def rank() -> int:
    return int(os.environ["HOROVOD_RANK"])


@pytest.mark.promise("horovod-run-gives-results-order")
def test_run_returns_results_in_rank_order(transport, tmp_path):
    offset = 10

    def function(a, b=0):
        return int(os.environ["HOROVOD_RANK"]) + offset, a, b, os.getcwd()

    results = horovod.run(function, (1,), {"b": {"x": [2]}}, num_proc=3, **transport)
    assert results == [(10 + rank, 1, {"x": [2]}, str(tmp_path)) for rank in range(3)]


def test_allreduce_in_a_function_called_by_horovod_run_sums_over_its_ranks(tmp_path):
    require_engine("the Open MPI of the wheel", find_mpirun(WHEEL))

    def function():
        import horovod.torch as hvd
        import torch

        hvd.init()
        # Scripts call this function too. torch's own wheels have no MPI, but Paceline adds it.
        has_mpi = torch.distributed.is_mpi_available()
        return hvd.rank(), hvd.size(), hvd.allreduce(torch.ones(1) * hvd.rank(), op=hvd.Sum).item(), has_mpi

    # Fork the ranks from a process that has already loaded torch, because loading torch would take most of the test.
    with warm_python(tmp_path / "warm") as python, submitting_with(python):
        assert horovod.run(function, num_proc=2) == [(0, 2, 1.0, True), (1, 2, 1.0, True)]


@pytest.mark.proof
def test_large_result_is_returned_whole():
    results = horovod.run(lambda: bytes([int(os.environ["HOROVOD_RANK"])]) * 50_000_000, num_proc=2, use_gloo=True)
    assert [(len(result), set(result)) for result in results] == [(50_000_000, {0}), (50_000_000, {1})]


def test_function_without_a_result_returns_none():
    assert horovod.run(lambda: None, use_gloo=True) == [None]


@pytest.mark.promise("horovod-run-gives-results-order")
def test_exception_on_a_rank_is_raised_in_the_caller_with_rank_and_traceback(transport):
    def function():
        if os.environ["HOROVOD_RANK"] == "1":
            raise KeyError("boom")
        threading.Event().wait(600)

    with pytest.raises(RunFailedError, match=r"rank 1 on \S+ failed first: KeyError: 'boom'") as caught:
        horovod.run(function, num_proc=2, **transport)
    assert isinstance(caught.value, RuntimeError)
    assert "in function\n" in str(caught.value), "the rank's own traceback"
    assert isinstance(caught.value.__cause__, KeyError)


def test_unpicklable_exception_is_reported_by_its_text():
    def function():
        class NeedsTwoError(Exception):
            def __init__(self, a, b):
                super().__init__(a)

        raise NeedsTwoError("left", "right")

    with pytest.raises(RunFailedError, match="NeedsTwoError: left") as caught:
        horovod.run(function, use_gloo=True)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("code", "told"),
    [("import os; os._exit(0)", "left with exit code 0 before"), ("import os; os._exit(9)", "ended with exit code 9")],
)
def test_rank_that_exits_without_a_result_raises(code, told):
    with pytest.raises(RunFailedError, match=told):
        horovod.run(exec, (code,), use_gloo=True)


@pytest.mark.parametrize(("code", "told"), [(None, ""), (0, ""), (9, "ended with exit code 9"), ("text", "code 1")])
def test_sys_exit_in_the_function_fails_the_run_unless_the_code_is_zero(code, told, capfd):
    if not told:
        assert horovod.run(sys.exit, (code,), use_gloo=True) == [None]
    else:
        with pytest.raises(RunFailedError, match=told) as caught:
            horovod.run(sys.exit, (code,), use_gloo=True)
        assert isinstance(caught.value.__cause__, SystemExit)
    assert "Traceback" not in capfd.readouterr().err, "the caller shows it"


def test_unpicklable_result_raises_an_error():
    with pytest.raises(RunFailedError, match="the result, a generator, can't be sent to the caller"):
        horovod.run(lambda: (number for number in range(3)), use_gloo=True)


def test_horovod_run_prints_the_output_of_each_rank_with_its_rank_in_front(capsys):
    horovod.run(print, ("hello",), num_proc=2, use_gloo=True)
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0]<stdout>:hello", "[1]<stdout>:hello"]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"func": 5}, "func=5 can't be called"),
        ({"func": print, "args": (threading.Lock(),)}, "can't be sent to other processes"),
        ({"func": print, "args": 0.1}, r"args=0.1 is not a tuple of arguments. For a single one write args=\(0.1,\)"),
        ({"func": print, "args": "data"}, "args='data' is not a tuple of arguments"),
        ({"func": print, "num_proc": 0}, "num_proc=0 must be a whole number"),
        ({"func": print, "num_proc": "2"}, "num_proc='2' must be a whole number"),
        ({"func": print, "min_num_proc": 2}, "--min-np 2, -np 1: they have to grow"),
        ({"func": print, "use_gloo": True, "use_mpi": True}, "choose one of them"),
        ({"func": print, "hosts": "localhost:1", "hostfile": "f"}, "give one of them"),
        ({"func": print, "num_proc": 2, "hosts": "localhost:1"}, "needs as many slots"),
    ],
)
def test_invalid_argument_of_horovod_run_is_refused_with_the_reason(values, told):
    with pytest.raises(UserError, match=told):
        horovod.run(**values)


def test_np_is_accepted_as_the_old_name_of_num_proc():
    with pytest.warns(DeprecationWarning, match="num_proc"):
        assert horovod.run(int, np=2, use_gloo=True) == [0, 0]


@pytest.mark.parametrize("interfaces", [{"network_interfaces": ["lo"]}, {"network_interface": "lo"}])
def test_network_interfaces_are_passed_to_the_ranks(interfaces, recwarn):
    assert horovod.run(os.getenv, ("NCCL_SOCKET_IFNAME",), use_gloo=True, **interfaces) == ["lo"]
    assert [w.category for w in recwarn] == [DeprecationWarning] * ("network_interface" in interfaces)


def test_run_in_a_thread_leaves_no_threads_or_processes(monkeypatch, tmp_path):
    # Find processes by this variable and not by their parent, because other tests may start processes at any time.
    mark = ("TEST_IN_A_THREAD", str(tmp_path))
    monkeypatch.setenv(*mark)
    before = set(threading.enumerate())
    found = []
    thread = threading.Thread(target=lambda: found.extend(horovod.run(int, num_proc=2, use_gloo=True)))
    thread.start()
    thread.join()
    assert found == [0, 0]
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert set(threading.enumerate()) <= before  # threads of earlier tests may end meanwhile
    assert processes.belonging(*mark) == []
