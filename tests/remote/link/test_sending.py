from __future__ import annotations

from paceline.remote.link.messages import LinkError
from paceline.remote.link.sending import ask_each


class FakeLink:
    """A link that records its messages and waits, and gives one answer."""

    def __init__(self, name, seen, answer):
        self.name, self._seen, self._answer = name, seen, answer

    def send(self, op, values):
        self._seen.append(("sent", self.name, op, values))
        return self.name

    def answer(self, pending, op, timeout_s):
        self._seen.append(("waited", pending, op, timeout_s > 0))
        if isinstance(self._answer, Exception):
            raise self._answer
        return {"found": self._answer}


def test_request_is_sent_to_all_nodes_before_the_first_answer():
    seen = []
    links = [FakeLink(name, seen, name) for name in "ab"]
    assert ask_each(links, "load", 1.0, lambda link: {"of": link.name}) == [{"found": "a"}, {"found": "b"}]
    assert seen == [
        ("sent", "a", "load", {"of": "a"}),
        ("sent", "b", "load", {"of": "b"}),
        ("waited", "a", "load", True),
        ("waited", "b", "load", True),
    ]


def test_request_to_all_nodes_returns_answers_although_one_node_is_lost():
    error = LinkError("gone")
    links = [FakeLink("a", [], error), FakeLink("b", [], 2)]
    assert ask_each(links, "load", 1.0) == [error, {"found": 2}]
