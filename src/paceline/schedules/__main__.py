"""The timer's program: start `paceline schedule tick` if a workspace's schedule is due."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from paceline.schedules.tick import is_due


def main() -> int:
    """Replace this program by `paceline schedule tick` if a schedule is due."""
    workspace_dir = Path(sys.argv[1])
    if not (workspace_dir / "schedules").is_dir():
        # Keep the timer: the folder may be on a disk that is not mounted now.
        print(
            f"paceline: there are no schedules in {str(workspace_dir)!r}. If you have removed this workspace, remove its timer "
            "from `crontab -e`, or from `systemctl --user list-timers`.",
            file=sys.stderr,
        )
        return 1
    if not is_due(workspace_dir):
        return 0
    os.environ["PACELINE_WORKSPACE"] = str(workspace_dir)
    # Start Paceline's command line only now: loading it takes longer than the check above, which runs each minute.
    os.execv(sys.executable, [sys.executable, "-m", "paceline", "schedule", "tick"])


if __name__ == "__main__":
    sys.exit(main())
