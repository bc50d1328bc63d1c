"""One rank of `horovod.run`: call the function and write its result to a file.

    main_script.py task.py <scratch folder>

The folder's file `call` has the function and its arguments. `result` is a pickle of {failed, value, traceback}; value
is a pickled result or exception. `main_script` ends the process after an exception, which only `horovod.run` shows.
"""

import os
import sys

# Python has put this file's folder first on the path. Remove it, because its modules would hide modules of the function.
if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]

import pickle
import traceback


def main(scratch: str) -> None:
    with open(os.path.join(scratch, "call"), "rb") as file:
        request = pickle.load(file)
    # Append the caller's sys.path: if `executable` selects another Python, its own standard library must come first.
    sys.path += [place for place in request["path"] if place not in sys.path]
    try:
        import cloudpickle

        # Unpickle inside the `try` block, so that an error such as a missing module is reported to the caller.
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
    # Rename the file only when it is complete: if a file `result` exists, the parent process (rank.py) sends it.
    beside = os.path.join(scratch, "result.part")
    with open(beside, "wb") as file:
        pickle.dump(content, file, pickle.HIGHEST_PROTOCOL)
    os.replace(beside, os.path.join(scratch, "result"))


def _dumped(error: BaseException) -> bytes:
    try:
        import cloudpickle

        data: bytes = cloudpickle.dumps(error)
        pickle.loads(data)  # test this now, because some exceptions can be pickled but not unpickled
    except BaseException:
        data = pickle.dumps(None)
    return data


if __name__ == "__main__":
    main(sys.argv[1])
