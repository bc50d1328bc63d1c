"""Nodes that an agent on each looks after: shared by the targets whose nodes are other machines."""

from paceline.targets.agents.hello import Hello
from paceline.targets.agents.interpreter import script_python
from paceline.targets.agents.link import Done, Link, bootstrap_words
from paceline.targets.agents.link_error import LinkError
from paceline.targets.agents.nodes import AgentNodes

__all__ = ["AgentNodes", "Done", "Hello", "Link", "LinkError", "bootstrap_words", "script_python"]
