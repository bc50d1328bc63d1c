"""The reason out of all that was printed, as each tool and version draws it."""

from __future__ import annotations

import pytest

from paceline.environments import pip_install


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "Using Python 3.11.7 environment at: x\nerror: No solution found when resolving dependencies\n"
            "  cause: Because there is no version of numpy==99 and you require numpy==99, we can\n         conclude the end.\n",
            "Because there is no version of numpy==99 and you require numpy==99, we can conclude the end",
        ),
        (
            "  × No solution found when resolving dependencies:\n  ╰─▶ Because a was not found in the package registry and you\n"
            "      require a, we can conclude that your requirements are unsatisfiable.\n\n  hint: look elsewhere\n",
            "Because a was not found in the package registry and you require a, we can conclude that your requirements are "
            "unsatisfiable",
        ),
        (
            "error: Failed to build `bad @ file:///bad`\n  cause: The build backend returned an error\n"
            "  cause: Call to `x` failed (exit status: 1)\n\n         [stderr]\n         boom: no compiler\n\nhint: usually\n",
            "Failed to build `bad @ file:///bad`: The build backend returned an error: Call to `x` failed (exit status: 1) "
            "[stderr] boom: no compiler",
        ),
        ("error: Failed to fetch\n  Caused by: no route\n", "Failed to fetch: no route"),
        ("something else\nlast words\n\n", "last words"),
        ("", "it printed nothing"),
    ],
)
def test_reason_of_a_failure_is_extracted_from_uv_output(text, reason):
    assert pip_install.of_uv(text.splitlines()) == reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "ERROR: Could not find a version that satisfies the requirement a==9 (from versions: 1)\n"
            "ERROR: No matching distribution found for a==9\n",
            "Could not find a version that satisfies the requirement a==9 (from versions: 1). No matching distribution found "
            "for a==9",
        ),
        (
            "ERROR: Cannot install a and b because\n\nThe conflict is caused by:\n    a 1 depends on c>2\n"
            "    b 1 depends on c<2\n\nTo fix this\n",
            "a 1 depends on c>2; b 1 depends on c<2. Cannot install a and b because",
        ),
        ("ERROR: HASHES\n    a==1 from x:\n        Expected 0\n", "HASHES a==1 from x: Expected 0"),
        (
            "  error: subprocess-exited-with-error\n  | RuntimeError: no compiler\nerror: metadata-generation-failed\n",
            "RuntimeError: no compiler",
        ),
        ("last words", "last words"),
    ],
)
def test_reason_of_a_failure_is_extracted_from_pip_output(text, reason):
    assert pip_install.of_pip(text.splitlines()) == reason


def test_long_failure_reason_is_shortened_in_the_middle():
    text = pip_install.of_uv([f"error: begins {'x' * 2000} ends"])
    assert len(text) < 700
    assert text.startswith("begins")
    assert text.endswith("ends")
