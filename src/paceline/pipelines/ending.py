"""Why a pipeline ends, and what is written down at its end."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.controlling import canceling, ending
from paceline.controlling.child import record_of
from paceline.errors import PacelineError
from paceline.pipelines.spec import PipelineSpec, child_id
from paceline.pipelines.state import PipelineState, StepState
from paceline.runs import states, store
from paceline.runs.failure import FailureReport
from paceline.runs.folder import RunFolder


def wanted(pipeline: PipelineState) -> str | None:
    """Why the pipeline is to end before its time; None while it goes on."""
    if pipeline.folder.cancel_request.exists():
        return "the pipeline is canceled"
    if pipeline.failed and not pipeline.spec.continue_on_step_failure:
        # Of several that ended in one look, the one that was not told to.
        first = _first(pipeline)
        return f"step {first.spec.name!r} {'has failed' if first.status == states.FAILED else 'was canceled'}"
    return None


def write(pipeline: PipelineState) -> None:
    """Write down the end of a pipeline none of whose steps runs any more."""
    pipeline.record = ending.close(pipeline.folder, pipeline.record, _report(pipeline) if pipeline.failed else None)


def give_up(folder: RunFolder, error: Exception) -> None:
    """End a pipeline whose controller can't go on: its steps are ended, and it has Failed. For the holder of its lock."""
    count = len(PipelineSpec.from_json(store.stored(folder).pipeline or {}).steps)

    def living() -> Iterator[RunFolder]:
        for number in range(count):
            step = RunFolder(folder.path.parent / child_id(folder.run_id, number))
            if (record := record_of(step)) is not None and not record.is_terminal:
                yield step

    canceling.give_up(folder, error, "step", living)


def _first(pipeline: PipelineState) -> StepState:
    """The step that the others were ended for."""

    def key(step: StepState) -> tuple[bool, str]:
        try:
            record = store.stored(step.folder)
        except PacelineError:
            return True, ""
        return step.status != states.FAILED, record.ended_utc or ""

    return min(pipeline.failed, key=key)


def _report(pipeline: PipelineState) -> FailureReport:
    first = _first(pipeline)
    name, run_id = first.spec.name, first.folder.run_id
    try:
        record = store.stored(first.folder)
    except PacelineError:
        return FailureReport(cause="step", message=f"step {name!r} is gone: its run {run_id} was removed.")
    if record.failure is None:
        by = f" by {record.canceled_by}" if record.canceled_by else ""
        return FailureReport(cause="step", message=f"step {name!r} ({run_id}) was canceled{by}.")
    others = [step.spec.name for step in pipeline.steps if step.status is None]
    never = f" Not begun: {', '.join(others)}." if others else ""
    why = record.failure.exception or record.failure.message
    return FailureReport(
        cause="step",
        message=f"step {name!r} ({run_id}) failed: {why.strip()}{never}",
        exit_code=record.exit_code or 1,
        traceback=record.failure.traceback,
        last_lines=record.failure.last_lines,
        see=f"paceline show {run_id}",
    )
