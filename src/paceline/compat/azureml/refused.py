"""Classes of the SDK that need a service of Azure's, or a program that is not here. Each says what to do instead."""

from __future__ import annotations

from typing import Any, ClassVar

from paceline.compat.azureml.exceptions import ScenarioNotSupportedException


class Refused:
    """Raises ScenarioNotSupportedException, as each of its calls does."""

    #: What to do instead. `paceline azureml check` says the same.
    refused: ClassVar[str] = ""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        raise self.refusal()

    @classmethod
    def refusal(cls) -> ScenarioNotSupportedException:
        return ScenarioNotSupportedException(f"{cls.__name__} is not here. {cls.refused}")
