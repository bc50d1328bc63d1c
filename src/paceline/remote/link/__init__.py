"""Links from the supervisor to agents on nodes, for all targets whose nodes are other machines."""

from paceline.remote.foreign_python import bootstrap_words
from paceline.remote.link.link import CommandEnd, Link
from paceline.remote.link.messages import Hello, LinkError
from paceline.remote.link.nodes import AgentNodes, script_python

__all__ = ["AgentNodes", "CommandEnd", "Hello", "Link", "LinkError", "bootstrap_words", "script_python"]
