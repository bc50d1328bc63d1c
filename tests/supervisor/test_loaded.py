"""The modules that a supervisor loads, and when: each run waits for the modules loaded at its start."""

from __future__ import annotations

from tests.helpers import run_python
from tests.supervisor.test_supervise import Stage

#: Modules that explain why a run has failed or hangs.
TELLS = {
    "paceline.supervisor.diagnosis.findings",
    "paceline.observe.wait_graph",
    "paceline.observe.stacks",
}


def test_rarely_needed_modules_are_not_loaded_at_start():
    loaded = set(run_python("import sys, paceline.supervisor.__main__; print(*sys.modules)").split())
    assert "paceline.supervisor.watch" in loaded
    assert not loaded & TELLS
    assert not loaded & {
        "paceline.observe.stragglers",
        "paceline.observe.profile",
        "statistics",
        "_hashlib",
        "traceback",
    }


def test_successful_short_run_loads_no_diagnosis_modules(tmp_path):
    stage = Stage(tmp_path, "print('done')")
    assert stage.see_through({"name": "a"}).status == "Completed"
    assert not TELLS & set((stage.folder.path / "loaded").read_text().split())


def test_long_run_loads_diagnosis_modules_before_a_failure(tmp_path):
    """Regression: Paceline was reinstalled during a run of several days. When the run failed, its supervisor could not
    import the modules that find the cause."""
    script = "import os, time\nfor _ in range(12_000):\n    if os.path.exists('outputs/loaded'): break\n    time.sleep(0.01)\n"
    stage = Stage(tmp_path, script)
    assert stage.see_through({"name": "a", "loads_after_s": 0}).status == "Completed"
    assert set((stage.folder.path / "loaded").read_text().split()) >= TELLS
