"""One rank of `horovod.run`: call the function and write its result to a file.

    main_script.py task.py <scratch folder>

The folder's file `call` has the function and its arguments. `result` is a pickle of {failed, value, traceback}; value
is a pickled result or exception. `main_script` ends the process after an exception, which only `horovod.run` shows.
"""

import os
import sys

# Remove this file's folder, which Python has put first on the path: its modules would hide the function's modules.
if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]

import pickle
import traceback


def main(scratch: str) -> None:
    with open(os.path.join(scratch, "call"), "rb") as file:
        request = pickle.load(file)
    # Append the caller's sys.path behind this interpreter's standard library: `executable` may have selected another Python.
    sys.path += [place for place in request["path"] if place not in sys.path]
    try:
        import cloudpickle

        # Unpickle inside the block, so that a failure, such as a missing module, is reported like any error.
        func, args, kwargs = pickle.loads(request["call"])
        result = func(*args, **kwargs)
        try:
            value = cloudpickle.dumps(result)
        except Exception as failure:
            raise TypeError(
                f"the result, a {type(result).__name__}, can't be sent to the caller: {failure}. Return plain values or arrays."
            ) from failure
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            value = pickle.dumps(None)
        else:
            _leave(scratch, {"failed": True, "value": _dumped(error), "traceback": traceback.format_exc()})
            sys.excepthook = lambda *_: None
            raise
    _leave(scratch, {"failed": False, "value": value, "traceback": ""})


def _leave(scratch: str, content: "dict[str, object]") -> None:
    # Rename the file when it is complete, because the parent process (rank.py) sends a file named `result` if it exists.
    beside = os.path.join(scratch, "result.part")
    with open(beside, "wb") as file:
        pickle.dump(content, file, pickle.HIGHEST_PROTOCOL)
    os.replace(beside, os.path.join(scratch, "result"))


def _dumped(error: BaseException) -> bytes:
    try:
        import cloudpickle

        data: bytes = cloudpickle.dumps(error)
        pickle.loads(data)  # check: some exceptions can be pickled but not unpickled
    except BaseException:
        data = pickle.dumps(None)
    return data


if __name__ == "__main__":
    main(sys.argv[1])
