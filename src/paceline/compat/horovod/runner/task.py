"""One rank of `horovod.run`: calls the function, and leaves what came of it for the process beside it.

In the scratch folder: `call` comes from the caller; `result` goes back, a pickle of {failed, value, traceback}, where
the value is a pickle of the result or of the exception.
"""

import os
import sys

# As in `main_script`: the modules beside this file must not take the place of the function's.
if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]

import pickle
import traceback


def main() -> int:
    # Taken out of the environment before the function is called, for what it starts is no rank.
    scratch = os.environ.pop("HOROVODRUN_SCRATCH")
    with open(os.path.join(scratch, "call"), "rb") as file:
        told = pickle.load(file)
    # Behind this process's own: with another `executable` the caller's standard library is of another release.
    sys.path += [place for place in told["path"] if place not in sys.path]
    error: BaseException | None = None
    try:
        import cloudpickle

        # Within the block: what can't be unpickled here, as its module is missing on this host, is told as any error.
        func, args, kwargs = pickle.loads(told["call"])
        result = func(*args, **kwargs)
        try:
            value = cloudpickle.dumps(result)
        except Exception as failure:
            raise TypeError(
                f"the result, a {type(result).__name__}, can't be sent to the caller: {failure}. Return plain values or arrays."
            ) from failure
        content = {"failed": False, "value": value, "traceback": ""}
    except BaseException as failure:
        error = failure
        # sys.exit(0) within the function is no failure; the result is None.
        if isinstance(failure, SystemExit) and failure.code in (None, 0):
            content = {"failed": False, "value": pickle.dumps(None), "traceback": ""}
            error = None
        else:
            content = {"failed": True, "value": _dumped(failure), "traceback": traceback.format_exc()}
    # Under another name first: the process beside this one sends `result` if there is one, so it has to be whole.
    beside = os.path.join(scratch, "result.part")
    with open(beside, "wb") as file:
        pickle.dump(content, file, pickle.HIGHEST_PROTOCOL)
    os.replace(beside, os.path.join(scratch, "result"))
    if error is None:
        return 0
    _tell(scratch, error)
    _leave_mpi()
    return int(error.code) & 0xFF if isinstance(error, SystemExit) and isinstance(error.code, int) else 1


def _dumped(error: BaseException) -> bytes:
    try:
        import cloudpickle

        data: bytes = cloudpickle.dumps(error)
        pickle.loads(data)  # some exceptions can't be made again from what they keep
    except BaseException:
        data = pickle.dumps(None)
    return data


def _tell(scratch: str, error: BaseException) -> None:
    """Write down when and with what it failed, as a worker of a run does: who failed first is found by that."""
    from paceline.worker import report

    os.environ["PACELINE_RUN_DIR"], os.environ["PACELINE_ATTEMPT"] = scratch, "1"
    report.failed(error)


def _leave_mpi() -> None:
    # Only if it was used. Otherwise MPI would wait at exit for the other ranks, which wait for this one.
    mpi = sys.modules.get("paceline.collectives.mpi")
    if mpi is not None:
        mpi.abandon()


if __name__ == "__main__":
    sys.exit(main())
