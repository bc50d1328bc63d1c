"""The schedules of a workspace, and for each schedule the events that had happened before it was added."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from paceline.errors import PacelineError, ScheduleError
from paceline.runs import read, store
from paceline.runs.ids import experiment_of, is_trial
from paceline.runs.record import utc_now
from paceline.schedules import timer, times
from paceline.schedules.occurrences import DATASET, MODEL, Occurrences
from paceline.schedules.schedule import COMPLETED, NAME, ONCE, QUEUE, Schedule
from paceline.system import locks
from paceline.system.files import read_json, write_json
from paceline.system.names import did_you_mean
from paceline.system.registry import Documents, NamedDocuments
from paceline.system.serialization import fits, known_fields

#: Seconds to wait for another process that works on the schedules: it may be copying the source of a run.
_PATIENCE_S = 120.0


class Schedules(NamedDocuments[Schedule]):
    """The schedules of a workspace by name.

    `[name]` raises KeyError for an unknown name.

    Args:
        workspace_dir: The workspace's folder.

    Examples:
        >>> schedules = pl.Workspace.from_config().schedules
        >>> schedules.add("0 3 * * *", "job.yaml", name="nightly", parameters={"lr": 0.2})
        >>> schedules.pause("nightly")
    """

    _error, _title, _advice = ScheduleError, "schedule", "`paceline schedule add` makes one."

    def __init__(self, workspace_dir: Path) -> None:
        self.workspace_dir = workspace_dir
        self._folder = workspace_dir / "schedules"
        self._documents = Documents(self._folder, NAME)

    def add(
        self,
        cron: str | None,
        file: str | os.PathLike[str] | None = None,
        *,
        name: str | None = None,
        template: str | None = None,
        parameters: Mapping[str, object] | None = None,
        arguments: Sequence[str] | None = None,
        on_dataset: Sequence[str] = (),
        on_model: Sequence[str] = (),
        after: Sequence[str] = (),
        ended: str | None = None,
        time_zone: str | None = None,
        overlap: str = QUEUE,
        missed: str | None = None,
        timer: str = "auto",
    ) -> Schedule:
        """Add a schedule, and return it.

        Args:
            cron: Cron expression such as "0 3 * * *", or None.
            file: Job file, or None with `template`.
            name: Name of the schedule; default: the name of the file or template.
            template: Name of a template.
            parameters: Values of the file's parameters.
            arguments: Arguments of the script, which replace the file's arguments.
            on_dataset: Datasets whose new versions start a run.
            on_model: Models whose new versions start a run.
            after: Experiments and ids of runs. A run starts when such a run, or a run of such an experiment, ends.
            ended: "completed", "failed" or "any": how a run of `after` must have ended. Default: "completed".
            time_zone: Time zone of `cron`; default: this machine's time zone.
            overlap: While a run of the schedule is active, "queue" lets the next run wait, and "skip" skips it.
            missed: For times at which the timer was off, "once" (the default) starts one run for all of them, "skip" none.
            timer: The timer to install: "auto", "systemd", "cron" or "none".

        Raises:
            ScheduleError: A value is wrong; the message names the command line's option.
        """
        zone = time_zone or times.local_zone()
        if ended is not None and not after:
            raise ScheduleError(f"--ended {ended} belongs to --after, which names an experiment or a run.")
        for option, value in (("--time-zone", time_zone), ("--missed", missed)):
            if value and not cron:
                raise ScheduleError(f"{option} {value} belongs to a cron expression, such as '0 3 * * *'.")
        experiments, runs = self._awaited(after)
        schedule = Schedule(
            name=name or template or Path(file or "").stem,
            cron=times.check(cron, zone) if cron else None,
            time_zone=zone if cron else None,
            on_dataset=tuple(on_dataset),
            on_model=tuple(on_model),
            after=(*experiments, *runs),
            ended=ended or COMPLETED,
            overlap=overlap,
            missed=missed or ONCE,
            file=os.path.abspath(file) if file is not None else None,
            template=template,
            parameters={key: str(value) for key, value in (parameters or {}).items()},
            arguments=tuple(arguments) if arguments is not None else None,
            created_utc=utc_now(),
            search_path=os.environ.get("PATH", ""),
            versions=self._latest(on_dataset, on_model),
        )
        # Import here, because the timer's check, which runs each minute, does not need this module.
        from paceline.schedules.start import check_job

        check_job(schedule, self.workspace_dir)
        self.save(schedule, self._ended(experiments), kind=timer)
        return schedule

    def pause(self, name: str) -> None:
        """Pause a schedule: it starts nothing until `resume`.

        Raises:
            ScheduleError: There is no such schedule, it is paused, or it can't be written.
        """
        with self.locked():
            if self.find(name).is_paused:
                raise ScheduleError(
                    f"schedule {name!r} is paused already. `paceline schedule resume {name}` resumes it."
                )
            write_json(self.folder(name) / "paused.json", True, sync=True)

    def remove(self, name: str) -> None:
        """Remove a schedule, but not its runs. The last schedule of this user takes the timer with it.

        Raises:
            ScheduleError: There is no such schedule, or it or the timer can't be removed.
        """
        with self.locked():
            self.find(name)
            self._documents.remove(name)
            shutil.rmtree(self.folder(name), ignore_errors=True)
            self.remove_idle_timer()

    def remove_idle_timer(self) -> None:
        """Remove the timer if this user has no schedule. The caller holds the lock."""
        if not any(self.is_own(name) for name in self):
            timer.remove(self.workspace_dir)

    def save(self, schedule: Schedule, ended_runs: Sequence[str], *, kind: str = timer.NONE) -> None:
        """Write a new schedule, which the earlier runs `ended_runs` do not trigger, and install a timer of this kind.

        Raises:
            ScheduleError: The name is taken, the workspace can't be written, or there is no such timer.
        """
        with self.locked():
            if schedule.name in self._documents.names():
                raise ScheduleError(
                    f"a schedule {schedule.name!r} exists already. Choose another --name, or remove it: "
                    f"paceline schedule remove {schedule.name}"
                )
            folder = self.folder(schedule.name)
            # A removal that was killed may have left the occurrences of another schedule with this name.
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            write_json(folder / "before.json", [*ended_runs], sync=True)
            # Install the timer after the first write: a workspace that can't be written would keep a timer without schedules.
            timer.install(self.workspace_dir, kind)
            document = {key: value for key, value in asdict(schedule).items() if key != "is_paused"}
            self._documents.add(schedule.name, {"version": 1, **document})

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock on the schedules during a `with` block.

        Raises:
            ScheduleError: Another process holds the lock for too long, or the workspace can't be written.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            fd = locks.take_within(self.lock_path, _PATIENCE_S)
        except OSError as error:
            raise ScheduleError(f"{str(self._folder)!r} can't be written: {error.strerror}.") from error
        if fd is None:
            raise ScheduleError(
                f"another process has been starting scheduled runs for {_PATIENCE_S:.0f} s. Try again, or see "
                "`paceline schedule list`."
            )
        try:
            yield
        finally:
            os.close(fd)

    def folder(self, name: str) -> Path:
        """Return the folder with a schedule's occurrences."""
        return self._folder / name

    def occurrences(self, name: str) -> Occurrences:
        """Return the occurrences of a schedule."""
        return Occurrences(self.folder(name))

    def ended_before(self, name: str) -> set[str]:
        """Return ids of runs that ended too early to trigger the schedule."""
        found = read_json(self.folder(name) / "before.json")
        return set(found) if fits(found, tuple[str, ...]) else set()

    def versions(self, kind: str, name: str) -> list[int]:
        """Return the version numbers of a dataset or model, ascending.

        Raises:
            DataError, ModelError: The name is wrong.
        """
        if kind == DATASET:
            from paceline.data.datasets import registered

            return registered.versions(self.workspace_dir, registered.check_dataset_name(name))
        from paceline.models import names, registry

        return registry.versions_of(self.workspace_dir).versions(names.check_model_name(name))

    def is_own(self, name: str) -> bool:
        """Return whether this user has added the schedule."""
        try:
            return self._documents.path(name).stat().st_uid == os.geteuid()
        except OSError:
            return False

    @property
    def lock_path(self) -> Path:
        return self._folder / ".lock-timer"

    @property
    def tick_path(self) -> Path:
        """The file that each check of the schedules touches."""
        return self._folder / ".ticked"

    def _names(self) -> Iterable[str]:
        return self._documents.names()

    def _read(self, name: str) -> Schedule | None:
        found = self._documents.read(name) if NAME.fullmatch(name) else None
        if found is None or not fits(found, Schedule) or found.get("version") != 1:
            return None
        known = known_fields(Schedule, found)
        tuples = {key: tuple(value) for key, value in known.items() if isinstance(value, list)}
        try:
            is_paused = (self.folder(name) / "paused.json").exists()
            return Schedule(**{**known, **tuples, "name": name, "is_paused": is_paused})
        except (TypeError, ScheduleError):
            return None

    def _awaited(self, given: Sequence[str]) -> tuple[list[str], list[str]]:
        runs_dir = self.workspace_dir / "runs"
        known = {experiment_of(run_id) for run_id in store.ids(runs_dir)} - {None}
        experiments, runs = [], []
        for name in given:
            if name in known:
                experiments.append(name)
                continue
            try:
                runs.append(store.find(runs_dir, name).run_id)
            except PacelineError:
                hint = did_you_mean(name, [one for one in known if one])
                raise ScheduleError(
                    f"--after {name!r} is neither an experiment with runs nor a run.{hint} `paceline list` shows both."
                ) from None
        return experiments, runs

    def _latest(self, datasets: Sequence[str], models: Sequence[str]) -> dict[str, int]:
        names = [*((DATASET, name) for name in datasets), *((MODEL, name) for name in models)]
        return {f"{kind}:{name}": max(self.versions(kind, name), default=0) for kind, name in names}

    def _ended(self, experiments: Sequence[str]) -> list[str]:
        runs_dir = self.workspace_dir / "runs"
        ids = [one for one in store.ids(runs_dir) if experiment_of(one) in experiments and not is_trial(one)]
        return [record.run_id for record in read.records_of(runs_dir, ids) if record.is_terminal]
