"""A rank of a ParallelRunStep.

Run it as `python -m paceline.compat.azureml.parallel_run SETTINGS [argument of the script ...]`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from paceline.compat.azureml.exceptions import UserErrorException
from paceline.compat.azureml.parallel_run import asking, batches
from paceline.compat.azureml.parallel_run.batches import Batch, ParallelRunSettings
from paceline.compat.azureml.parallel_run.scoring import Scorer
from paceline.compat.azureml.parallel_run.sharing import Sharing


def main(argv: Sequence[str]) -> None:
    settings, arguments = ParallelRunSettings.of_text(argv[0]), argv[1:]
    if os.environ["PACELINE_RANK"] != "0":
        work(asking.of_first_rank(), settings, arguments)
        return
    listening = asking.Listening(int(os.environ["PACELINE_WORLD_SIZE"]) - 1)
    found = batches.all_of(settings)
    if not found:
        print("The inputs are empty.", flush=True)
    path = None
    if settings.output is not None:
        # Create the output folder: if it is a PipelineData, it is missing until the step writes to it.
        folder = batches.folder_of(settings.output)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / settings.file if settings.file else None
    sharing = Sharing(found, settings, path)
    listening.share(sharing)
    work(sharing.handle, settings, arguments)
    listening.wait()
    sharing.close()
    if sharing.failure is not None:
        raise UserErrorException(sharing.failure)


def work(ask: asking.Ask, settings: ParallelRunSettings, arguments: Sequence[str]) -> None:
    """Run mini-batches until none are left.

    `ask` sends a message to the first rank and returns the response.

    Raises:
        UserErrorException: The script can't be loaded, or its init() has failed.
    """
    scorer: Scorer | None = None
    answer = ask({"kind": "ready"})
    while (values := answer["batch"]) is not None:
        batch = Batch.of_fields(values)
        if scorer is None or not scorer.is_alive:
            try:
                scorer = Scorer(settings, arguments)
            except UserErrorException as error:
                ask({"kind": "give_up", "why": str(error)})
                raise
        answer = ask(scorer.score(batch))
    if scorer is not None:
        scorer.end()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserErrorException as error:
        # Hide the frames of Paceline in the traceback: the user's script has failed, and its own traceback is in the log.
        raise error.with_traceback(None) from None
