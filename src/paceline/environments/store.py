"""The environments of a workspace, by cache key. Each environment is built only once.

<folder>/<key>/                      the environment, complete with its paceline-environment.json
<folder>/<key>.lock                  held exclusively by a build, shared by a run; its modification time is the last use
<folder>/<key>.log                   output of the last failed build
<folder>/aliases/<key>               for the cache key of locked versions, the key of the environment that has them
<folder>/bases/                      cached properties of base interpreters
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path

from paceline.environments import build
from paceline.environments.base import Base, base
from paceline.environments.built import RECORD, Built, utc
from paceline.environments.key import key as key_of
from paceline.environments.program import Say
from paceline.errors import EnvironmentBuildError, EnvironmentSpecError
from paceline.job.environment import EnvironmentSpec
from paceline.system import locks
from paceline.system.files import changed_at, gone_is_fine, names_in, read_json, remove_tree, write_json, write_whole


class EnvironmentStore:
    """The built environments below `<workspace>/environments`."""

    def __init__(self, folder: Path) -> None:
        self._folder = Path(os.path.abspath(folder))

    def find(self, environment: EnvironmentSpec, base_python: str) -> Built | None:
        """Return the environment if it is built for this base interpreter, else None.

        Raises:
            EnvironmentSpecError: A requirement can't be parsed, or the interpreter does not exist.
        """
        built = self._found(key_of(environment, self._base(base_python)))
        return None if built is None else built.asked_as(environment)

    def ensure(self, environment: EnvironmentSpec, base_python: str, say: Say) -> Built:
        """Return the built environment. Build it if it is missing.

        Args:
            environment: The requested environment.
            base_python: The base interpreter.
            say: Called with each line of the build's output.

        Raises:
            EnvironmentSpecError: The request can't be built; nothing was changed.
            EnvironmentBuildError: The build failed. The file `<key>.log` has its output.
        """
        base = self._base(base_python)
        key = key_of(environment, base)
        # Look for the environment without the lock first, because almost every run finds it built already.
        built = self._found(key)
        if built is None:
            build.check(environment, base)
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                with self._locked(key, say) as fd:
                    # Look again with the lock, because its previous holder may have built the environment.
                    built = self._found(key) or self._build(key, environment, base, say, fd)
            except OSError as error:
                raise self._failed(key, _os_reason(error)) from error
        # Update the time of last use, which `prune` reads, because no lock protects the environment from `prune` yet.
        self._touch(built.key)
        return built.asked_as(environment)

    def all(self) -> list[Built]:
        """Return all built environments, most recently used first."""
        environments = [built for name in names_in(self._folder) if (built := self._read(name)) is not None]
        return sorted(environments, key=lambda built: (built.last_used_utc, built.key), reverse=True)

    def get(self, key_prefix: str) -> Built:
        """Return the environment whose key begins with this prefix.

        Raises:
            EnvironmentSpecError: No or several keys match.
        """
        matches = [built for built in self.all() if key_prefix and built.key.startswith(key_prefix)]
        if len(matches) == 1:
            return matches[0]
        if not matches:
            raise EnvironmentSpecError(
                f"there is no environment {key_prefix!r} in {str(self._folder)!r}. `paceline env list` shows what there is."
            )
        raise EnvironmentSpecError(
            f"{key_prefix!r} is the beginning of {len(matches)} environments: {', '.join(built.key for built in matches)}. "
            "Give more of it."
        )

    @contextlib.contextmanager
    def hold(self, built: Built) -> Iterator[int]:
        """Within the block, protect the environment from `prune`.

        Yield the descriptor of the lock. A process that makes this descriptor inheritable (`os.set_inheritable`)
        protects the environment even after exec.

        Raises:
            EnvironmentBuildError: The environment has been pruned. `ensure` builds it again.
        """
        # Any number of runs share this lock. `prune` needs an exclusive lock, and skips environments in use.
        with locks.shared(self._lock(built.key)) as lock:
            if self._read(built.key) is None:
                raise EnvironmentBuildError(f"environment {built.key} has just been pruned. Submit the run again.")
            self._touch(built.key)
            yield lock

    def prune(
        self, *, unused_for_s: float = 0.0, only: Collection[str] | None = None, dry_run: bool = False
    ) -> list[Built]:
        """Remove unused environments and files of interrupted builds. Return the removed environments.

        Args:
            unused_for_s: Remove only environments whose last use is at least this many seconds ago.
            only: Remove only environments with these keys. None: with any key.
            dry_run: Return the environments that would be removed, but do not remove them.
        """
        removed = []
        now = time.time()
        for built in self.all():
            if (only is not None and built.key not in only) or now - self._used(built.key) < unused_for_s:
                continue
            with self._free(built.key) as is_free:
                # Check the time again with the lock held: a run may have used the environment since the environments were listed.
                if is_free and self._read(built.key) is not None and now - self._used(built.key) >= unused_for_s:
                    removed.append(built)
                    if not dry_run:
                        self._remove(built.key)
        if not dry_run:
            self._sweep()
        return removed

    def log_path(self, key: str) -> Path:
        """Return the path of the log of the environment's last failed build."""
        return self._folder / f"{key}.log"

    def _base(self, python: str) -> Base:
        return base(python, self._folder / "bases")

    def _found(self, key: str) -> Built | None:
        found = self._read(key)
        if found is not None:
            return found
        try:
            alias = (self._folder / "aliases" / key).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return None
        return self._read(alias) if _is_key(alias) else None

    def _read(self, key: str) -> Built | None:
        if not _is_key(key):
            return None
        try:
            built = Built.from_json(read_json(self._folder / key / RECORD))
        except (KeyError, TypeError, ValueError, AttributeError):
            return None  # there is no record, or another version of Paceline has written it
        # Ignore an environment after the workspace was moved, because its files contain absolute paths.
        if built.prefix != self._folder / key or not os.path.exists(built.python):
            return None
        return replace(built, last_used_utc=utc(self._used(key)))

    def _build(self, key: str, environment: EnvironmentSpec, base: Base, say: Say, fd: int) -> Built:
        prefix = self._folder / key
        # This process holds the lock and there is no record, so an existing folder is left from a killed build.
        remove_tree(prefix)
        log = self.log_path(key)
        # Use line buffering, so that the log shows how far a hanging build came.
        with open(log, "w", encoding="utf-8", buffering=1) as file:

            def tell(line: str) -> None:
                file.write(f"{line}\n")
                say(line)

            try:
                built = build.build(key, environment, base, prefix, tell, fd)
                # Write the record last and synced: the record implies that all other files exist.
                write_json(prefix / RECORD, built.to_json(), sync=True)
            except EnvironmentBuildError as error:
                remove_tree(prefix)
                raise self._failed(key, str(error)) from error
            except BaseException:
                with gone_is_fine():
                    remove_tree(prefix)
                raise
        log.unlink(missing_ok=True)
        self._alias(built, base)
        return built

    def _alias(self, built: Built, base: Base) -> None:
        key = key_of(built.locked, base)
        if key != built.key:
            (self._folder / "aliases").mkdir(exist_ok=True)
            write_whole(self._folder / "aliases" / key, built.key)

    def _failed(self, key: str, reason: str) -> EnvironmentBuildError:
        log = self.log_path(key)
        more = f" All that was printed is in {str(log)!r}." if log.exists() else ""
        return EnvironmentBuildError(f"the environment could not be built: {reason}{more}")

    def _lock(self, key: str) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / f"{key}.lock"

    @contextlib.contextmanager
    def _locked(self, key: str, say: Callable[[str], None]) -> Iterator[int]:
        waits = "another process builds this environment; waiting for it"
        with locks.locked(self._lock(key), on_wait=lambda: say(waits)) as fd:
            yield fd

    @contextlib.contextmanager
    def _free(self, key: str) -> Iterator[bool]:
        # Don't wait for a held lock: the environment is in use or being built.
        fd = locks.take(self._lock(key))
        try:
            yield fd is not None
        finally:
            if fd is not None:
                os.close(fd)

    def _touch(self, key: str) -> None:
        with gone_is_fine():
            os.utime(self._folder / f"{key}.lock")

    def _used(self, key: str) -> float:
        return changed_at(self._folder / f"{key}.lock")

    def _remove(self, key: str) -> None:
        # Remove the record first, so that an interrupted removal leaves no valid environment.
        (self._folder / key / RECORD).unlink(missing_ok=True)
        remove_tree(self._folder / key)

    def _sweep(self) -> None:
        """Remove files of interrupted builds, and aliases of removed environments."""
        with gone_is_fine():
            for name in os.listdir(self._folder):
                if _is_key(name) and self._read(name) is None:
                    with self._free(name) as is_free:
                        # Check again with the lock held: a build may have finished and written its record.
                        if is_free and self._read(name) is None:
                            self._remove(name)
        with gone_is_fine():
            for alias in (self._folder / "aliases").iterdir():
                if self._read(alias.read_text().strip()) is None:
                    alias.unlink(missing_ok=True)


def _is_key(name: str) -> bool:
    return len(name) == 20 and set(name) <= set("0123456789abcdef")


def _os_reason(error: OSError) -> str:
    return f"{error.strerror or error}{f': {error.filename!r}' if error.filename else ''}."
