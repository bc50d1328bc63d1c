"""What such a driver takes from the SDK; it is read, and never run."""

from azureml.core.run import Run
from azureml.interpret import ExplanationClient

client = ExplanationClient.from_run(Run.get_context())
