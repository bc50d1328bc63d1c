"""Nodes that an agent on each looks after: shared by the targets whose nodes are other machines."""

from paceline.remote.call import bootstrap_words
from paceline.remote.link.handshake import Hello
from paceline.remote.link.interpreter import script_python
from paceline.remote.link.link import CommandEnd, Link
from paceline.remote.link.link_error import LinkError
from paceline.remote.link.nodes import AgentNodes

__all__ = ["AgentNodes", "CommandEnd", "Hello", "Link", "LinkError", "bootstrap_words", "script_python"]
