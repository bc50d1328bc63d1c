"""Continue a training with new ranks in the places of lost ranks (`on_failure="replace"`).

    1  step() or save() fails on a rank that stays. It goes back to the call's beginning, and connects to the new rank (`regroup`)
    2  the new rank runs the script. Its parallelize() takes the results of messages from the journal of a rank that stays
    3  load() on the new rank: the ranks tell each other their positions, and one of them sends the state
    4  the ranks that stay repeat the failed call, in which the new rank takes part after load()

All replicas have the same state after a step. So no rank goes back by a step: a rank whose step failed, although another
rank has finished it, takes that rank's result.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypedDict, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.checkpoint import leaving
from paceline.parallel import regroup
from paceline.parallel.checkpoint import store
from paceline.parallel.checkpoint.state import OWN_OPTIONS, OwnRecord, Resumable, own_record, put_back, targets, tensors
from paceline.parallel.deterministic_rng import numpys_random
from paceline.parallel.errors import WorkerError
from paceline.parallel.exchange import from_rank, gather, journal, packed
from paceline.parallel.executor import ParallelHandle, Progress, TrainingState
from paceline.parallel.failure import is_communication
from paceline.parallel.reduce import broadcast
from paceline.parallel.regroup import RegroupError
from paceline.parallel.replicas.core import Plain
from paceline.torch_private import count_messages

_T = TypeVar("_T")

#: Calls in which the loss of a rank can be repaired, and calls that send no messages under data parallelism.
_REPAIRED, _SILENT = ("step()", "save()", "epoch()"), ("average()", "full_state_dict()")
_POLL_S = 0.01


class HandedOver(TypedDict):
    """Values that checkpoints lack, for a rank that replaces a lost rank.

    compared: The result of the check of the first step. hides_count: Whether the loss hides the number that it divides by.
    """

    compared: str
    hides_count: bool
    gradient_norm: Tensor | None


class RejoiningHandle(ParallelHandle, Protocol):
    """A training (`Parallel`) that can hand over its state."""

    @property
    def unfit(self) -> str: ...

    def handed_over(self) -> HandedOver: ...

    def take_over(self, values: HandedOver, progress: Progress) -> None: ...


class Position(TypedDict):
    """A rank's training position when the ranks meet after a rank was lost.

    Attributes:
        is_new: Whether the rank replaces a lost rank.
        steps: The number of finished steps.
        call: The call that has failed, or "load()" on a new rank.
        is_unchanged: Whether parameters and buffers are those at the end of the last step.
        changes_late: Whether the script has changed the optimizer or a scheduler between save() and the next step.
        schedulers, averages: The numbers of the rank's schedulers and of its averages of the weights.
    """

    is_new: bool
    steps: int
    call: str
    is_unchanged: bool
    changes_late: bool
    schedulers: int
    averages: int


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """The plan by which all ranks continue after a rank was lost.

    root: The rank that sends its model and optimizer to the new ranks.
    behind: Ranks that had not finished their last step. They take its result from `root`.
    saves: Whether all ranks repeat the last checkpoint.
    """

    root: int
    behind: frozenset[int]
    saves: bool


def agree(positions: Sequence[Position]) -> Continuation:
    """Return how the ranks continue after a rank was lost.

    Raises:
        RegroupError: The ranks can't continue without a restart of all workers.
    """
    staying = {rank: one for rank, one in enumerate(positions) if not one["is_new"]}
    steps = max(one["steps"] for one in staying.values())
    ahead = [rank for rank, one in staying.items() if one["steps"] == steps]
    behind = frozenset(staying) - frozenset(ahead)
    if far := [rank for rank in behind if staying[rank]["steps"] != steps - 1 or staying[rank]["call"] != "step()"]:
        raise RegroupError(f"rank {far[0]} is more than one step behind rank {ahead[0]}")
    unchanged = [rank for rank in ahead if staying[rank]["is_unchanged"]]
    if behind and not unchanged:
        raise RegroupError("the script changes parameters between two steps, so a rank can't take a step's result")
    saves = any(staying[rank]["call"] == "save()" for rank in ahead)
    if saves and any(one["changes_late"] for one in staying.values()):
        raise RegroupError("the script changes the optimizer or a scheduler after save(), and the loss was in save()")
    root = (unchanged or ahead)[0]
    for name in ("schedulers", "averages"):
        counts = {one[name] for one in positions}
        if len(counts) > 1:
            raise RegroupError(f"the ranks have different numbers of {name}: {sorted(counts)}")
    return Continuation(root=root, behind=behind, saves=saves)


@dataclass(frozen=True)
class SaveArguments:
    """The arguments of a call of `save`."""

    path: str | None = None
    asynchronous: bool | None = None
    every: int | None = None


class Rejoining:
    """One rank's part in the replacement of lost ranks, for one training.

    Attributes:
        is_new: Whether this rank replaces a lost rank, and has not joined the other ranks yet.
    """

    _trainings = 0

    def __init__(self, par: RejoiningHandle) -> None:
        Rejoining._trainings += 1
        self._par = par
        self.is_new = journal.is_read
        #: Why lost ranks can't be replaced, or "". Final only after the first step, when `_is_ready` becomes true.
        self._why_not = ""
        self._is_ready = False
        self._is_elsewhere = False
        self._aligns = False
        self._has_loaded = False
        self._messages = (0, 0)
        self._saved = SaveArguments()
        self._schedulers: Sequence[Resumable] = ()
        self._journal: list[tuple[str, Any]] = []
        self._watched: list[Tensor] = []
        self._buffers: list[Tensor] = []
        self._kept: list[Tensor] = []
        self._generators: tuple[Any, list[Any]] = (None, [])
        #: At the end of the last step: versions of parameters and buffers; `_after`: options of the optimizer's groups.
        self._versions: list[int] = []
        self._after: list[dict[str, Any]] = []
        #: At the end of the last save: the optimizer's options, the schedulers' counts and the versions of the tensors.
        self._at_save: object = None
        self._changes_late = False
        self._is_unchanged = True
        self._loss: Tensor | None = None
        #: The epoch that has just ended, or None. `_number`: calls since then. `_ends`: results of such calls by epoch.
        self._epoch: int | None = None
        self._number = 0
        self._ends: dict[int, list[tuple[str, Any]]] = {}
        #: The state that the script of a new rank must not change between `load` and the first step.
        self._joined: object = None

    @classmethod
    def of_run(cls, par: RejoiningHandle) -> Rejoining | None:
        """Return the object for a new training, or None if the run replaces no workers."""
        if regroup.first_generation() is None or par.world.size == 1:
            return None
        own = cls(par)
        par.watch.listener = own
        return own

    # --- the calls of the script

    def entered(self, what: str) -> None:
        """Record whether a rank that is lost in this call can be replaced.

        `what`: The training's method that the script calls, such as "step()".
        """
        if self._joined is not None and what not in ("step()", "epoch()", *_SILENT):
            raise self._given_up(RegroupError(f"its script calls {what} before its first step"), "")
        if not self._is_ready:
            self._note_early(what)
        elif not self._why_not:
            if self._messages != count_messages():
                self._refuse("the script communicates beside the calls of its training")
            elif what in _REPAIRED:
                if self._is_elsewhere:
                    self._report()
                self._is_elsewhere = False
            elif what not in _SILENT:
                self._is_elsewhere = True
                self._report(f"a worker was lost while rank {self._par.world.rank} was in {what}")

    def returned(self) -> None:
        """Store the number of messages, so that `entered` detects the script's own messages."""
        self._messages = count_messages()

    def lost(self, what: str) -> None:
        """Tell the supervisor that a rank was lost in a call that can't be repeated."""
        if self._is_ready and not self._why_not:
            self._report(f"a worker was lost while rank {self._par.world.rank} was in {what}", gave_up=True)

    def epoch_ended(self, epoch: int, *, is_skipped: bool = False) -> None:
        """Record that an epoch has ended, or that a resumed script skips it (`is_skipped`)."""
        self._epoch, self._number = epoch, 0
        if not is_skipped:
            self._arrive()

    def note(self, what: str, result: object) -> None:
        """Keep the result of a call at an epoch's end, for new ranks.

        The method `known` returns this result on a rank that replaces a lost rank.
        """
        if self._epoch is not None:
            self._ends.setdefault(self._epoch, []).append((what, result))

    def known(self, what: str) -> tuple[Any] | None:
        """Return the result of a call that the other ranks have already made.

        A new rank gets results until its first step, for calls at an epoch's end. Return (result,), or None if all ranks make the
        call together.

        Raises:
            WorkerError: The other ranks have not made this call.
        """
        if self._joined is None:
            return None
        found = self._ends.get(-1 if self._epoch is None else self._epoch, [])[self._number :][:1]
        self._number += 1
        if not found or found[0][0] != what:
            raise self._given_up(RegroupError(f"its script calls {what} before its first step"), "")
        return (found[0][1],)

    def _arrive(self) -> None:
        """Raise WorkerError if a new rank's script changed model, optimizer or scheduler after `load`."""
        if self._joined is not None and self._joined != self._outer_state():
            why = "its script changes the optimizer or a scheduler before its first step"
            raise self._given_up(RegroupError(why), "")
        self._joined = None

    def _note_early(self, what: str) -> None:
        if self._epoch is not None and what in ("evaluate()", "save()"):
            return
        allowed = ("step()", "epoch()") if self._has_loaded else ("load()",)
        if what not in (*allowed, *_SILENT):
            when = "between par.load() and" if self._has_loaded else "before par.load() and"
            self._why_not = self._why_not or f"the script calls {what} {when} its first step"
        if self._messages != count_messages():
            self._why_not = self._why_not or "the script communicates beside the calls of its training"

    def loaded(self, path: str | Path | None, schedulers: Sequence[Resumable]) -> None:
        """Keep the arguments of a finished call of `load`."""
        self._schedulers = schedulers
        if not self._is_ready:
            self._has_loaded = True
            if path is not None:
                self._why_not = self._why_not or "the script loads a checkpoint by its path"

    def step(self, body: Callable[[], Tensor]) -> Tensor:
        """Run the step `body`. If a rank is lost, repeat it or take another rank's result."""
        self._arrive()
        self._epoch = None
        if self._aligns:
            self._par.watch.align("step()")
            self._aligns = False
        repairs = self._is_ready and not self._why_not
        if repairs:
            self._keep()
        attributes = None if self._is_ready else _attributes(self._par.module)
        loss = self._repaired("step()", body) if repairs else body()
        if not self._is_ready:
            self._is_ready = True
            if attributes != _attributes(self._par.module):
                self._why_not = self._why_not or "the model's forward changes plain attributes of its modules"
            self._begin()
        if not self._why_not:
            self._loss = loss.detach().clone()
            self._versions = self._versions_now()
            self._after = _options(self._par.optimizer)
            self._at_save = None
        return loss

    def save(
        self, body: Callable[[], Path | None], given: SaveArguments, schedulers: Sequence[Resumable]
    ) -> Path | None:
        """Run the save `body`, and repeat it if a rank is lost."""
        if not self._is_ready or self._why_not:
            self._schedulers = schedulers
            return self._noted(body())
        if len(schedulers) != len(self._schedulers):
            self._refuse("save() and load() have different numbers of schedulers")
            return body()
        self._saved, self._schedulers = given, schedulers
        self._is_unchanged = self._versions == self._versions_now()
        path: Path | None = self._repaired("save()", body)
        self._at_save = self._outer_state()
        return self._noted(path)

    def _noted(self, path: Path | None) -> Path | None:
        self.note("save()", None if path is None else str(path))
        return path

    # --- what a rank that stays needs to go back

    def _begin(self) -> None:
        """Find out once whether lost ranks can be replaced, and tell the supervisor."""
        par = self._par
        self._journal = list(journal.results)
        self._why_not = self._why_not or self._unfit()
        if not self._why_not:
            self._watch_tensors()
            try:
                states = [scheduler.state_dict() for scheduler in self._schedulers]
                packed([self._journal, own_record(store.hold(par)), _options(par.optimizer), states])
            except TypeError as error:
                self._why_not = f"a rank can't send a {error} to another rank"
        self._report()

    def _watch_tensors(self) -> None:
        self._buffers = list(self._par.module.buffers())
        self._watched = [*self._par.module.parameters(), *self._buffers]

    def _versions_now(self) -> list[int]:
        return [tensor._version for tensor in self._watched]

    def _unfit(self) -> str:
        par = self._par
        layout = par.world.layout
        if layout.data != par.world.size:
            return f"with the layout '{layout}' a lost rank had a part of the state alone"
        if regroup.generation is None:
            return "the script makes its own process group"
        if Rejoining._trainings > 1:
            return "the script calls parallelize() several times"
        if layout.batch_norm == "local":
            return "with batch_norm='local' each rank has its own buffers"
        if isinstance(par.task.loss, nn.Module) and any(True for _ in par.task.loss.buffers()):
            return "the loss has buffers, which no checkpoint keeps"
        has_scheduler = par.optimizer is not None and any("initial_lr" in one for one in par.optimizer.param_groups)
        if has_scheduler and not self._schedulers:
            return "load() was not given the script's learning-rate scheduler"
        if par.executor.written:
            return "the model's forward changes its parameters"
        return par.unfit

    def _refuse(self, why: str) -> None:
        self._why_not = why
        self._report()

    def _report(self, why: str = "", *, gave_up: bool = False) -> None:
        regroup.report(why or self._why_not, gave_up=gave_up)

    def _keep(self) -> None:
        self._is_unchanged = self._versions == self._versions_now()
        if self._at_save is not None and self._at_save != self._outer_state():
            self._changes_late = True
        self._keep_start()

    def _keep_start(self) -> None:
        with torch.no_grad():
            self._kept = [buffer.clone() for buffer in self._buffers]
        self._generators = random.getstate(), [one.get_state() for one in numpys_random()]

    def _go_back(self) -> None:
        with torch.no_grad():
            for buffer, kept in zip(self._buffers, self._kept, strict=True):
                buffer.copy_(kept)
        own, numpys = self._generators
        random.setstate(own)
        for generator, state in zip(numpys_random(), numpys, strict=False):
            generator.set_state(state)

    def _outer_state(self) -> object:
        counts = [getattr(scheduler, "last_epoch", None) for scheduler in self._schedulers]
        return repr((_options(self._par.optimizer), counts)), self._versions_now()

    # --- a loss

    def _repaired(self, call: str, body: Callable[[], _T]) -> Any:
        while True:
            try:
                return body()
            except Exception as error:
                if self._why_not or not is_communication(error) or self._par.watch.knows_cause():
                    raise
                # Keep only the error's text: its traceback would keep the former process group alive.
                text = str(error)
            if self._meet(call, text):
                return self._loss

    def _meet(self, call: str, why: str) -> bool:
        """Connect to all ranks. Return whether another rank's result replaces this rank's failed step."""
        par = self._par
        try:
            if call == "step()":
                self._go_back()
            par.watch.drop()
            executor = _plain(par)
            executor.leave_group()
            regroup.leave()
            regroup.meet((regroup.generation or 0) + 1, _check_asked)
            par.world.renew()
            par.watch.renew(par.world)
            executor.join_group()
            journal.results = self._journal
            new, _ = regroup.share_journal(is_new=False)
            self._await_new(new)
            return self._exchange(call)
        except Exception as error:
            raise self._given_up(error, why) from error

    def _await_new(self, ranks: Sequence[int]) -> None:
        end_s = time.monotonic() + regroup.LIMIT_S
        while ranks and not self._store.check([f"ready/{rank}" for rank in ranks]):
            _check_asked()
            if time.monotonic() > end_s:
                raise RegroupError(f"rank {ranks[0]} did not call par.load() within {regroup.LIMIT_S:g} s")
            time.sleep(_POLL_S)

    def join(self, schedulers: Sequence[Resumable]) -> None:
        """Let a new rank join the other ranks in its call of `load`, and take their state."""
        self.is_new, journal.is_read = False, False
        self._schedulers, self._has_loaded, self._is_ready, self._why_not = schedulers, True, True, ""
        try:
            par = self._par
            self._journal = list(journal.results)
            self._watch_tensors()
            self._store.set(f"ready/{par.world.rank}", "1")
            self._exchange("load()")
        except Exception as error:
            raise self._given_up(error, "") from error

    @property
    def _store(self) -> Any:
        return self._par.world.store

    def _given_up(self, error: Exception, why: str) -> WorkerError:
        self._why_not = f"rank {self._par.world.rank} could not join the other ranks again ({error})"
        self._report(gave_up=True)
        return WorkerError(f"{self._why_not}. {why}".rstrip(), rank=-1, cause_text="")

    def _exchange(self, call: str) -> bool:
        """Follow a common `Continuation`. Return whether this rank received a step's result."""
        par, is_new = self._par, call == "load()"
        position: Position = {
            "is_new": is_new,
            "steps": par.progress.steps,
            "call": call,
            "is_unchanged": self._is_unchanged,
            "changes_late": self._changes_late,
            "schedulers": len(self._schedulers),
            "averages": len(par.averages),
        }
        positions = gather(position)
        agreement = agree(positions)
        rank = par.world.rank
        is_behind = rank in agreement.behind
        held = store.hold(par)
        own = tensors(held) if rank == agreement.root else {}
        sent: dict[str, Any] = from_rank(self._sent(own) if rank == agreement.root else {}, agreement.root)
        shapes = {key: (torch.Size(shape), dtype) for key, (shape, dtype) in sent["shapes"].items()}
        values = own if rank == agreement.root else targets(held, shapes)
        if values.keys() != shapes.keys():
            raise RegroupError(f"rank {rank} has other tensors than rank {agreement.root}")
        broadcast([values[key] for key in sorted(values)], dist.group.WORLD, agreement.root)
        # Send all buffers, because checkpoints lack buffers that are not persistent.
        takes, buffers = is_new or is_behind, list(par.module.buffers())
        broadcast(buffers if takes or own else [buffer.clone() for buffer in buffers], dist.group.WORLD, agreement.root)
        state: TrainingState = sent["state"]
        if takes:
            # A rank that is one step behind also takes the optimizer's options from the end of the missed step.
            record: OwnRecord = sent["record"]
            for group, after in zip(record["groups"], sent["after"] if is_behind else (), strict=is_behind):
                group["options"] = after
            put_back(held, values, record)
            for average, one in zip(par.averages, sent["averages"], strict=True):
                average.state = one
            par.take_over(sent["handed"], Progress(**state["progress"]))
            self._loss, self._after, self._is_unchanged = sent["loss"], sent["after"], True
        if is_new:
            par.load_state(state)
            for scheduler, of_scheduler in zip(self._schedulers, sent["schedulers"], strict=True):
                scheduler.load_state_dict(of_scheduler)
            self._saved = SaveArguments(**sent["saved"])
            self._ends = sent["ends"]
        store.regrouped(par, sent["loads"], is_new=is_new)
        self._versions = self._versions_now()
        self._at_save, self._aligns = None, True
        if agreement.saves and not is_behind and call != "save()":
            path = store.save(par, schedulers=self._schedulers, **asdict(self._saved))
            if is_new and positions[agreement.root]["call"] == "save()" and sent["epoch"] is not None:
                self._ends.setdefault(sent["epoch"], []).append(("save()", None if path is None else str(path)))
        if is_new:
            self._joined = self._outer_state()
        if call == "step()" and not is_behind:
            par.watch.align(call)
            self._aligns = False
            self._keep_start()
        self._messages = count_messages()
        self._is_elsewhere = False
        self._report()
        return is_behind

    def _sent(self, own: Mapping[str, Tensor]) -> dict[str, Any]:
        par = self._par
        return {
            "shapes": {key: (list(tensor.shape), tensor.dtype) for key, tensor in own.items()},
            "record": own_record(store.hold(par)),
            "after": self._after,
            "state": par.state(),
            "handed": par.handed_over(),
            "averages": [average.state for average in par.averages],
            "schedulers": [scheduler.state_dict() for scheduler in self._schedulers],
            "saved": asdict(self._saved),
            "ends": self._ends,
            "epoch": self._epoch,
            "loads": store.loads_of(par),
            "loss": self._loss,
        }


def _plain(par: RejoiningHandle) -> Plain:
    assert isinstance(par.executor, Plain), "only data parallelism replaces ranks"
    return par.executor


def _check_asked() -> None:
    if leaving.asked() is not None:
        raise RegroupError("this worker has to end")


def _options(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    return [
        {
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key not in OWN_OPTIONS
        }
        for group in (optimizer.param_groups if optimizer is not None else ())
    ]


def _attributes(module: nn.Module) -> dict[tuple[str, str], object]:
    """Return (module's name, attribute) -> value, of attributes that are numbers or text."""
    return {
        (name, key): value
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, (bool, int, float, str))
    }
