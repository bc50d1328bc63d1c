"""No file that another user could have written is opened in a way that runs its content, as pickles do.

The source is read for every call that can; each that there is stands here, with the reason why it is safe. A new one needs
a reason, and a line in docs/security.md.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline

SOURCE = Path(paceline.__file__).parent
DOCS = SOURCE.parents[1] / "docs"

_OPENERS = frozenset(("pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"))
_OPENING = frozenset(("load", "loads", "Unpickler", "open"))
_OBJECT_COLLECTIVES = frozenset(
    (
        *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
        *("send_object_list", "recv_object_list"),
    )
)
#: Methods of mpi4py with lower-case names, which send pickles.
_OBJECTS_OF_MPI = frozenset(
    (
        *(
            "bcast",
            "allgather",
            "gather",
            "scatter",
            "alltoall",
            "allreduce",
            "reduce",
            "send",
            "recv",
            "isend",
            "irecv",
        ),
        *("sendrecv", "exscan", "scan"),
    )
)

#: A file without any of these words loads no untrusted data. Most files have none, and are not parsed.
_WORDS = re.compile(
    "|".join(
        (
            *_OPENERS,
            *_OBJECT_COLLECTIVES,
            *("yaml", "multiprocessing", "read_pickle", "allow_pickle", r"\bload\b"),
            *(rf"\b{name}\b" for name in ("comm", "COMM_WORLD", "_comm", "mpi_comm")),
        )
    )
)

OF_MPI = "between ranks of one mpirun, over Open MPI's own connections: shared memory on one machine"
#: (file, call) -> reason why the call is safe.
ALLOWED = {
    ("collectives/request.py", "pickle.Unpickler"): "refuses every name but those of two of our own tuples",
    ("compat/horovod/common/objects.py", "pickle.loads"): "signed by a rank with the run's secret, where there is one",
    (
        "compat/horovod/runner/common/util/__init__.py",
        "pickle.loads",
    ): "Horovod's own function for launchers built on it, which say what they give it; nothing here calls it",
    (
        "compat/horovod/runner/call.py",
        "pickle.loads",
    ): "the ranks' results, over connections that have proved the job's key",
    ("compat/horovod/runner/task.py", "pickle.load"): "of the process beside the rank, in a folder of mode 0700",
    (
        "compat/horovod/runner/task.py",
        "pickle.loads",
    ): "the same; and what this process has just pickled, to see whether it can",
    (
        "functions/calls.py",
        "pickle.load",
    ): "with pickle=True alone, from the run's folder, a file of this user's or root's",
    (
        "serving/model/runners/sklearn.py",
        "joblib.load",
    ): "a model that its owner serves without an entry script; its files are compared with those that were registered",
    **dict.fromkeys(
        (
            ("torch_mpi/calls.py", "comm.allgather"),
            ("torch_mpi/calls.py", "comm.alltoall"),
            ("torch_mpi/comm_thread.py", "comm.allgather"),
            ("compat/horovod/common/process_sets.py", "comm.allgather"),
        ),
        OF_MPI,
    ),
}


def found_in(tree: ast.AST) -> Iterator[str]:
    """Yield the calls of a module that can run what they open, by name."""
    nodes = list(ast.walk(tree))
    connections = any(
        isinstance(node, ast.ImportFrom) and (node.module or "").startswith("multiprocessing") for node in nodes
    )
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in _OPENERS:
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name in _OPENING)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in _OPENERS and node.attr in _OPENING:
                yield f"{node.value.id}.{node.attr}"
            if node.value.id == "yaml" and node.attr.startswith(("load", "full_load", "unsafe_load")):
                yield f"yaml.{node.attr}"
        if isinstance(node, ast.Attribute) and node.attr in _OBJECT_COLLECTIVES | {"read_pickle"}:
            # Ignore Horovod's module common/objects.py, in which a function has the same name as a function of torch.
            yield from () if ast.unparse(node.value) == "objects" else (node.attr,)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield from _calls(node, node.func, connections)


def _calls(node: ast.Call, func: ast.Attribute, connections: bool) -> Iterator[str]:
    of = ast.unparse(func.value)
    given = {word.arg: ast.unparse(word.value) for word in node.keywords}
    if of == "torch" and func.attr == "load" and given.get("weights_only") != "True":
        yield "torch.load"
    if given.get("allow_pickle", "False") != "False":
        yield "allow_pickle"
    if func.attr in _OBJECTS_OF_MPI and of.rpartition(".")[2] in ("comm", "COMM_WORLD", "_comm", "mpi_comm"):
        yield f"comm.{func.attr}"
    if connections and func.attr in ("recv", "send") and "connection" in of:
        yield f"Connection.{func.attr}"


@pytest.mark.promise("other-pickles-opened-table")
def test_every_unsafe_deserialization_call_in_the_source_is_on_the_list_of_allowed_ones() -> None:
    found = {
        (str(path.relative_to(SOURCE)), what)
        for path in SOURCE.rglob("*.py")
        if _WORDS.search(text := path.read_text(encoding="utf-8"))
        for what in found_in(ast.parse(text))
    }
    assert found - ALLOWED.keys() == set(), "new: read it as JSON, or give a reason here and in docs/security.md"
    assert ALLOWED.keys() - found == set(), "gone: take it out of the list"
    assert "## Pickles" in (DOCS / "security.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("import pickle\npickle.loads(x)", "pickle.loads"),
        ("from pickle import loads", "pickle.loads"),
        ("import marshal\nmarshal.load(f)", "marshal.load"),
        ("class R(pickle.Unpickler): pass", "pickle.Unpickler"),
        ("torch.load(f)", "torch.load"),
        ("torch.load(f, weights_only=flag)", "torch.load"),
        ("numpy.load(f, allow_pickle=True)", "allow_pickle"),
        ("yaml.load(f, Loader=yaml.Loader)", "yaml.load"),
        ("dist.broadcast_object_list(x)", "broadcast_object_list"),
        ("self.comm.allgather(x)", "comm.allgather"),
        ("from multiprocessing.connection import Connection\nconnection.recv()", "Connection.recv"),
    ],
)
def test_scan_finds_each_form_of_unsafe_deserialization(text: str, what: str) -> None:
    assert what in set(found_in(ast.parse(text)))
    assert _WORDS.search(text)


@pytest.mark.parametrize(
    "text",
    [
        "torch.load(f, weights_only=True)",
        "yaml.safe_load(f)",
        "pickle.dumps(x)",
        "comm.Allgather(x, y)",
        "sock.recv(3)",
        "hvd.allgather(x)",
        "json.loads(x)",
    ],
)
def test_scan_does_not_report_safe_deserialization_calls(text: str) -> None:
    assert list(found_in(ast.parse(text))) == []
