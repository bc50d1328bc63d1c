"""The rights of a user are compared with the smallest Role."""

from __future__ import annotations

from typing import Any, cast

import pytest
import yaml

pytest.importorskip("lightkube")

from paceline.targets.kubernetes.api import Cluster
from paceline.targets.kubernetes.examine import RULES, lacking_rights, missing_rights, role_text


def rule(group: str, resources: Any, verbs: Any) -> dict[str, Any]:
    return {"apiGroups": [group], "resources": list(resources), "verbs": list(verbs)}


def test_documented_role_has_all_needed_rights():
    assert missing_rights([rule(*one) for one in RULES]) == []


def test_removal_of_any_right_from_the_documented_role_is_reported_as_missing():
    for number, (group, resources, verbs) in enumerate(RULES):
        others = [rule(*one) for one in (*RULES[:number], *RULES[number + 1 :])]
        less = [*others, rule(group, resources, verbs[1:])]
        assert missing_rights(less) == [f"{verbs[0]} {resource}" for resource in resources]  # type: ignore[arg-type]


def test_kubernetes_role_with_wildcards_has_all_needed_rights():
    assert missing_rights([rule("*", ["*"], ["*"])]) == []


def test_kubernetes_role_limited_to_named_objects_is_reported_as_missing_rights():
    assert missing_rights([{**rule("*", ["*"], ["*"]), "resourceNames": ["one"]}]) != []


def test_role_printed_as_yaml_grants_all_needed_rights():
    role = yaml.safe_load(role_text("lab"))

    assert role["metadata"] == {"name": "paceline", "namespace": "lab"}
    assert missing_rights(role["rules"]) == []


class Incomplete(Cluster):
    """A cluster with a webhook authorizer, which lists no rights and grants those on batch jobs and Deployments."""

    namespace = "lab"

    def __init__(self) -> None:
        pass

    def review(self, kind: str, spec: Any) -> dict[str, Any]:
        if kind == "SelfSubjectRulesReview":
            return {"incomplete": True, "resourceRules": []}
        about = spec["resourceAttributes"]
        place = (about["group"], about["resource"], about["subresource"])
        return {"allowed": place in (("batch", "jobs", ""), ("apps", "deployments", ""), ("", "pods", "log"))}


def test_rights_that_an_incomplete_review_does_not_list_are_checked_one_by_one():
    lacking = {right.partition(" ")[2] for right in lacking_rights(cast("Cluster", Incomplete()))}

    assert lacking == {"pods", "events", "secrets", "services", "pods/portforward"}
