"""Says where a file or module is that a script did not find: pure functions from what it named to a sentence."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence

from paceline.job.job import Job
from paceline.runs.work_dir import Place
from paceline.system.linked import NotCopied, why_kept

_FILE = re.compile(r"FileNotFoundError: .*'([^']+)'")
#: Modules whose distribution has another name.
_DISTRIBUTIONS = {
    "PIL": "pillow",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dotenv": "python-dotenv",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")


def missing_text(
    exception: str,
    job: Job,
    at: Place,
    not_copied: Sequence[NotCopied],
    *,
    is_shared: bool,
    exists: Callable[[str], bool] = os.path.lexists,
) -> str | None:
    """Return where what the script did not find is, and the option that brings it; None for a file that is nowhere.

    Args:
        exception: The exception's last line.
        job: What was run.
        at: Where its copy lies, and of which folder of the user's.
        not_copied: The names of that folder that are not in the copy.
        is_shared: Whether the nodes have the user's own folders, to which the copy links.
        exists: Whether a path of this machine is there.
    """
    file, module = _FILE.search(exception), _MODULE.search(exception)
    if file is not None:
        names = [file[1]]
    elif module is not None:
        # A package's folder, or its file, from the working directory and from the script's own folder.
        name = module[1].partition(".")[0]
        names = [
            name,
            f"{name}.py",
            *(os.path.join(os.path.dirname(job.entry_script), one) for one in (name, f"{name}.py")),
        ]
    else:
        return None
    # A supervisor on a cluster may be where the user's folders are not.
    sees_source = exists(at.source)
    for name in names:
        path = os.path.normpath(os.path.join(at.source, job.working_directory or "", _users_own(name)))
        inside = os.path.relpath(path, at.source)
        for one in not_copied:
            if f"{inside}/".startswith(f"{one.path}/") and (exists(path) or not sees_source):
                typed = os.path.relpath(inside, job.working_directory or ".")
                return _of_not_copied(
                    path, one, inside, typed, is_shared=is_shared and sees_source, is_there=exists(path)
                )
        if job.working_directory is None and inside.split(os.sep)[0] == ".." and exists(path):
            above = os.path.commonpath((path, at.source))
            return f"It is there as {path!r}, above the source folder, which alone is copied. Give source_directory={above!r}."
    # Of a package that is there, a part may be missing in this version.
    if module is None or "." in module[1] or module[1] in sys.stdlib_module_names:
        return None
    name = _DISTRIBUTIONS.get(module[1], module[1])
    return f"It is not installed in the run's environment. Install it there: --pip {name} (pip_packages=[{name!r}])."


def _users_own(name: str) -> str:
    """Return the user's own path of one in the working folder of a run (`paceline.runs.work_dir`)."""
    return re.sub(r"^.*/runs/[^/]+/work(?=/)", "", name)


def _of_not_copied(
    path: str, one: NotCopied, inside: str, typed: str, *, is_shared: bool, is_there: bool
) -> str | None:
    """Return what to say of a file that lies in what was not copied.

    Args:
        path: The file, on the submitting machine.
        one: What was not copied.
        inside: The file, relative to the source folder.
        typed: The file, as the user would name it where they stand.
        is_shared: Whether the nodes have the user's own folders.
        is_there: Whether the file is seen from here.
    """
    whole = os.path.normpath(os.path.join(typed, os.path.relpath(one.path, inside)))
    if is_shared:
        if one.is_linked:
            return None  # it is linked to: what is missing is something else
        return f"It is there as {path!r}, among {one.why}, which a run does not see. Bring them: --link {whole}."
    there = f"It is there as {path!r} on the submitting machine"
    if not is_there:
        there = f"{one.path!r} lies on the submitting machine"
        if one.is_sent:
            return None  # whether it has this file is not known here
    if not one.is_sent:
        return f"{there}, and was not sent: {one.kept_back or one.why}. Send it: --send {whole} (send=[{one.path!r}])."
    parts = os.path.relpath(inside, one.path).split(os.sep)
    if why := next(filter(None, (why_kept(part, is_folder=True, named=False) for part in parts)), None):
        return f"{there}, and was not sent: {why}. Send it: --send {typed} (send=[{inside!r}])."
    return (
        f"{there}, and was sent with the copy of the source. Open it by its path from the working directory: {typed!r}."
    )
