"""The documented types of JSON have the fields of the records they print."""

from __future__ import annotations

import dataclasses
from dataclasses import fields

import pytest

from paceline.backups.create import Created
from paceline.backups.restore import Restored
from paceline.cli import outputs
from paceline.data.transfer.listing import FileInfo
from paceline.doctor.examination import Finding
from paceline.environments.built import Built
from paceline.models.check import Changed
from paceline.observe.goodput import Goodput
from paceline.observe.profile import FunctionTime
from paceline.pipelines.spec import PipelineSpec
from paceline.reports.diff import Change, MetricChange
from paceline.reports.usage import Usage
from paceline.runs.search.groups import MeanSpread
from paceline.services.record import ServiceRecord
from paceline.serving.bench import BenchResult
from paceline.targets.status import JobUse, NodeStatus, UserUse


@pytest.mark.parametrize(
    ("printed", "record", "added"),
    [
        (outputs.ServiceRow, ServiceRecord, {"record_version", "scoring_uri", "models"}),
        (outputs.ServiceLoad, BenchResult, {}),
        (outputs.BuiltRow, Built, {}),
        (outputs.NodeRow, NodeStatus, {}),
        (outputs.JobRow, JobUse, {}),
        (outputs.UserShareRow, UserUse, {}),
        (outputs.PipelinePlan, PipelineSpec, {}),
        (outputs.CreatedBackup, Created, {}),
        (outputs.RestoredBackup, Restored, {}),
        (outputs.FindingJson, Finding, {}),
        (outputs.DataFile, FileInfo, {}),
        (outputs.ChangedFile, Changed, {}),
        (outputs.ChangeJson, Change, {}),
        (outputs.MetricChangeJson, MetricChange, {}),
        (outputs.SpreadJson, MeanSpread, {}),
        (outputs.FunctionShare, FunctionTime, {}),
        (outputs.UsageRow, Usage, {"lost_gpu_hours", "lost_core_hours"}),
        (outputs.GoodputJson, Goodput, {"percent", "ettr"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_documented_json_type_has_every_field_of_the_record_that_the_command_prints(printed, record, added):
    assert dataclasses.is_dataclass(record)
    assert {*printed.__annotations__} == {each.name for each in fields(record)} | {*added}
