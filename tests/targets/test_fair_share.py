"""The order of a machine's queue, as a pure function of files: which run is next, which may pass, which has to leave."""

from __future__ import annotations

import datetime as dt
import os
import random
import re
import zoneinfo
from typing import Any

import pytest

from paceline.targets import shares
from paceline.targets.fair_share import expected_starts, in_order, plan
from paceline.targets.shares import PRIORITIES, SharePolicy, ident
from tests.targets.queue_simulation import Simulation, make_ticket

HOUR_S = 3600.0
GPUS = tuple("01234567")


def running(uid: int, key: str, gpus: str, at: float = 0.0, **values: Any) -> dict[str, Any]:
    return make_ticket(
        uid, key, at, **{"granted": {"gpus": list(gpus)}, "granted_at": at, "gpu_count": len(gpus), **values}
    )


def waiting(uid: int, key: str, gpus: int = 1, at: float = 0.0, **values: Any) -> dict[str, Any]:
    return make_ticket(uid, key, at, gpu_count=gpus, **values)


def use(uid: int, gpu_hours: float, urgent: float = 0.0) -> dict[int, Any]:
    row = (0.0, gpu_hours * HOUR_S, gpu_hours * HOUR_S, urgent * HOUR_S)
    return {uid: {"user": f"user{uid}", "hours": [row], "typical_s": 0.0, "changed": 0.0}}


def keys(tickets: list[dict[str, Any]]) -> list[str]:
    return [ticket["key"] for ticket in tickets if ticket["granted"] is None]


def planned(tickets: list[dict[str, Any]], policy: SharePolicy | None = None, **values: Any) -> Any:
    return plan(tickets, 64, GPUS, values.pop("now", 100.0), policy, **values)


# --- All observers compute the same plan


def random_history(chance: random.Random) -> tuple[list[dict[str, Any]], dict[int, Any]]:
    """Return the tickets and records that a history of events has left, with nonsense that a hostile user may write."""
    tickets: list[dict[str, Any]] = []
    for number in range(chance.randrange(1, 16)):
        uid, at = chance.randrange(5), chance.uniform(0, 1e6)
        more = {
            "priority": chance.choice([*PRIORITIES, None, 7, "root"]),
            "limit_s": chance.choice([None, 60.0, 7200, -1, "long", float("nan")]),
            "gpu_share": chance.choice([1.0, 0.5, 0.3, 9, None]),
            "cores": chance.randrange(9),
        }
        gpus = chance.sample(GPUS, chance.randrange(3))
        state = {"granted": {"gpus": gpus}, "granted_at": chance.uniform(-1, 2e6)} if chance.random() < 0.4 else {}
        tickets.append(make_ticket(uid, f"{number}", at, gpu_count=len(gpus) or chance.randrange(9), **more, **state))
    uses = {
        uid: use(uid, chance.uniform(0, 1e4), chance.uniform(0, 20))[uid] for uid in range(5) if chance.random() < 0.6
    }
    return tickets, uses


def assert_observers_agree(histories: int) -> None:
    chance = random.Random(1)
    policies = [
        None,
        SharePolicy({}),
        SharePolicy(
            {
                "shares": {"user0": 3, "*": 1},
                "groups": {"a": {"share": 2, "members": ["user1", "user2"]}},
                "limits": {"user3": {"gpus": 2, "priority": "normal"}, "*": {"gpu_hours_a_week": 500}},
                "reservations": [{"for": "user4", "gpus": ["2"], "when": "daily 00:00-24:00"}],
            }
        ),
    ]
    for _ in range(histories):
        tickets, uses = random_history(chance)
        policy = chance.choice(policies)
        now = 2e6 + chance.uniform(0, 1e6)
        first = planned(tickets, policy, uses=uses, now=now)
        order = [ident(ticket) for ticket in in_order(tickets, policy, uses)]
        for _ in range(4):
            seen = [dict(ticket) for ticket in chance.sample(tickets, len(tickets))]
            records = dict(chance.sample(sorted(uses.items()), len(uses)))
            assert planned(seen, policy, uses=records, now=now) == first
            assert [ident(ticket) for ticket in in_order(seen, policy, records)] == order
        # The following lines check that the granted shares of a GPU are at most the whole GPU.
        assert len(first["starts"]) <= len(tickets)
        free = dict.fromkeys(GPUS, 1.0)
        for ticket in tickets:
            share = ticket["gpu_share"] if ticket["gpu_share"] in (0.5, 0.3) else 1.0
            given = first["starts"].get(ident(ticket)) or []
            for gpu in (ticket["granted"] or {"gpus": []})["gpus"]:
                free[gpu] -= share
            assert len(set(given)) == len(given)
        for key, given in first["starts"].items():
            ticket = next(one for one in tickets if ident(one) == key)
            for gpu in given:
                free[gpu] -= ticket["gpu_share"] if ticket["gpu_share"] in (0.5, 0.3) else 1.0
                assert free[gpu] > -1e-6


@pytest.mark.promise("queue-order-equal-for-all")
def test_fair_share_order_is_the_same_for_all_observers_and_grants_no_gpu_twice() -> None:
    assert_observers_agree(400)


@pytest.mark.promise("queue-order-equal-for-all")
@pytest.mark.proof
def test_fair_share_order_is_the_same_for_all_observers_of_many_random_histories() -> None:
    assert_observers_agree(10_000)


# --- Which user is next


@pytest.mark.promise("shares-priorities-quotas-reservations")
def test_user_with_the_least_use_relative_to_their_share_is_next() -> None:
    tickets = [waiting(1, "a"), waiting(2, "b"), waiting(3, "c")]
    uses = {**use(1, 10), **use(2, 30), **use(3, 11)}
    assert keys(in_order(tickets, SharePolicy({}), uses)) == ["a", "c", "b"]
    assert keys(in_order(tickets, SharePolicy({"shares": {"user2": 4, "*": 1}}), uses)) == ["b", "a", "c"]


@pytest.mark.promise("shares-priorities-quotas-reservations")
def test_usage_of_a_group_lowers_the_priority_of_all_its_members() -> None:
    policy = SharePolicy({"groups": {"vision": {"members": ["user1", "user2"]}}})
    uses = {**use(1, 100), **use(3, 50)}
    assert keys(in_order([waiting(2, "member"), waiting(3, "other")], policy, uses)) == ["other", "member"]


@pytest.mark.promise("shares-priorities-quotas-reservations")
def test_recorded_usage_of_a_user_decays_with_a_half_life() -> None:
    week_ago = {"user": "user1", "hours": [(0.0, 100 * HOUR_S, 0.0, 0.0)], "typical_s": 0.0, "changed": 7 * 86400.0}
    today = {"user": "user2", "hours": [(7 * 86400.0, 60 * HOUR_S, 0.0, 0.0)], "typical_s": 0.0, "changed": 7 * 86400.0}
    tickets = [waiting(2, "new use"), waiting(1, "old use")]
    assert keys(in_order(tickets, SharePolicy({}), {1: week_ago, 2: today})) == ["old use", "new use"]  # type: ignore[dict-item]


def test_runs_of_two_users_with_equal_usage_alternate() -> None:
    tickets = [waiting(uid, f"{uid}{number}", at=float(number)) for uid in (1, 2) for number in range(3)]
    assert keys(in_order(tickets, SharePolicy({}))) == ["10", "20", "11", "21", "12", "22"]


def test_high_priority_run_starts_first_but_its_hours_are_charged_double() -> None:
    tickets = [waiting(1, "high", priority="high"), waiting(2, "normal"), waiting(3, "low", priority="low")]
    assert keys(in_order(tickets, SharePolicy({}), use(1, 100))) == ["high", "normal", "low"]
    policy = SharePolicy({})
    assert policy.weight(tickets[0], 2) == 2 * policy.weight(tickets[0], 1)


@pytest.mark.promise("shares-priorities-quotas-reservations")
def test_priority_above_the_limit_of_a_user_is_lowered_to_the_limit() -> None:
    policy = SharePolicy({"limits": {"user1": {"priority": "normal"}}})
    tickets = [waiting(1, "capped", priority="urgent", at=1.0), waiting(2, "normal")]
    assert keys(in_order(tickets, policy)) == ["normal", "capped"]


def test_long_waiting_run_rises_in_priority() -> None:
    old = waiting(1, "old", priority="low", at=0.0, changed=5 * 86400.0)
    new = waiting(2, "new", priority="normal", at=5 * 86400.0)
    assert keys(in_order([old, new], SharePolicy({}), use(1, 1000))) == ["old", "new"]


def test_without_fair_share_rules_priority_reorders_only_runs_of_the_same_user() -> None:
    tickets = [waiting(1, "a", at=1.0), waiting(2, "b", at=2.0), waiting(1, "c", at=3.0, priority="high")]
    assert keys(in_order(tickets)) == ["c", "b", "a"]


# --- Passing a run that does not fit


@pytest.mark.promise("short-runs-backfill")
def test_short_run_backfills_before_a_larger_waiting_run() -> None:
    tickets = [
        running(1, "holder", "012345", limit_s=7200.0),
        waiting(2, "wide", gpus=8, at=1.0),
        waiting(3, "short", at=2.0, limit_s=HOUR_S),
        waiting(3, "long", at=3.0, limit_s=5 * HOUR_S),
        waiting(3, "unlimited", at=4.0),
    ]
    assert set(planned(tickets)["starts"]) == {(3, "short")}


def test_run_backfills_if_enough_resources_stay_for_the_larger_run() -> None:
    tickets = [running(1, "holder", "0123456"), waiting(2, "wide", gpus=4, at=1.0), waiting(3, "unlimited", at=2.0)]
    assert set(planned(tickets)["starts"]) == {(3, "unlimited")}


@pytest.mark.promise("short-runs-backfill")
def test_backfilled_runs_pass_a_waiting_run_only_for_a_limited_time() -> None:
    policy = SharePolicy({"patience_hours": 2})
    tickets = [running(1, "holder", "012345"), waiting(2, "wide", gpus=8, at=50.0), waiting(1, "short", limit_s=HOUR_S)]
    assert (1, "short") in planned(tickets, policy)["starts"]
    late = planned(tickets, policy, now=1.5 * HOUR_S)
    assert (1, "short") not in late["starts"]


@pytest.mark.parametrize(("lead_hours", "starts"), [(7.5, True), (8.5, False)])
def test_run_passes_a_wide_run_until_its_user_is_ahead_by_an_hour_of_that_run(lead_hours: float, starts: bool) -> None:
    policy = SharePolicy({"core_weight": 0, "shares": {"user2": 2, "*": 1}})
    tickets = [running(3, "holder", "01234"), waiting(2, "wide", gpus=8), waiting(1, "narrow", limit_s=HOUR_S)]
    # User 1 has half of user 2's share, so an hour of user 1 counts as two hours of user 2.
    uses = {**use(1, 10 + lead_hours / 2), **use(2, 20), **use(3, 100)}
    assert ((1, "narrow") in planned(tickets, policy, uses=uses)["starts"]) is starts
    # Within a group, the order of two runs depends on how much their users have used.
    groups = {"a": {"members": ["user1"]}, "b": {"members": ["user2", "user4"]}}
    group_policy = SharePolicy({"core_weight": 0, "groups": groups})
    uses = {**use(1, 10 + lead_hours), **use(2, 4), **use(4, 6), **use(3, 100)}
    assert ((1, "narrow") in planned(tickets, group_policy, uses=uses)["starts"]) is starts


@pytest.mark.parametrize(("lead_hours", "first"), [(3.5, "wide"), (4.5, "narrow")])
def test_wide_run_that_fits_starts_first_unless_its_user_is_ahead_by_more_than_an_hour_of_it(
    lead_hours: float, first: str
) -> None:
    policy = SharePolicy({"core_weight": 0})
    tickets = [running(3, "holder", "0123"), waiting(1, "narrow"), waiting(2, "wide", gpus=4, at=1.0)]
    uses = {**use(1, 10), **use(2, 10 + lead_hours), **use(3, 100)}
    assert keys(in_order(tickets, policy, uses)) == ["narrow", "wide"]
    found = planned(tickets, policy, uses=uses)["starts"]
    assert [key for _, key in found] == [first]


def test_wide_run_does_not_start_before_a_run_of_higher_priority() -> None:
    tickets = [
        running(3, "holder", "0123"),
        waiting(1, "narrow", priority="high"),
        waiting(2, "wide", gpus=4, at=1.0),
    ]
    assert set(planned(tickets, SharePolicy({}))["starts"]) == {(1, "narrow")}


def test_on_a_machine_without_gpus_the_run_with_most_cores_is_the_widest() -> None:
    tickets = [waiting(1, "narrow", gpus=0, cores=1), waiting(2, "wide", gpus=0, cores=8, at=1.0)]
    assert set(plan(tickets, 8, (), 100.0, SharePolicy({}))["starts"]) == {(2, "wide")}


def test_user_with_a_reservation_gets_the_reserved_gpus_first() -> None:
    policy = SharePolicy({"reservations": [{"for": "user1", "gpus": ["5"], "when": "daily"}]})
    assert planned([waiting(1, "owner", gpus=2)], policy)["starts"] == {(1, "owner"): ["5", "0"]}


def test_run_that_does_not_start_when_scheduled_is_skipped() -> None:
    tickets = [waiting(1, "stopped", gpus=8), waiting(2, "next", gpus=8, at=1.0)]
    assert set(planned(tickets)["starts"]) == {(1, "stopped")}
    assert set(planned(tickets, passed={(1, "stopped")})["starts"]) == {(2, "next")}


@pytest.mark.promise("use-outside-paceline-not-handed-out")
def test_gpus_in_use_outside_paceline_are_not_given_out() -> None:
    found = planned([waiting(1, "a", gpus=7), waiting(1, "b", gpus=1)], blocked=["3"])
    assert found["starts"] == {(1, "a"): [gpu for gpu in GPUS if gpu != "3"]}


# --- Quotas


@pytest.mark.promise("shares-priorities-quotas-reservations")
def test_run_over_the_quota_of_its_user_waits_without_blocking_other_runs() -> None:
    policy = SharePolicy({"limits": {"*": {"gpus": 2}}})
    tickets = [running(1, "r", "01"), waiting(1, "over"), waiting(2, "fits", at=1.0)]
    found = planned(tickets, policy)
    assert set(found["starts"]) == {(2, "fits")}
    assert found["why"] == {(1, "over"): "over quota: user1 holds 2 GPUs, asks for 1 more, and may hold 2 at once"}


@pytest.mark.promise("shares-priorities-quotas-reservations")
def test_weekly_gpu_hours_of_a_user_are_limited() -> None:
    policy = SharePolicy({"limits": {"user1": {"gpu_hours_a_week": 10}}})
    assert not planned([waiting(1, "a")], policy, uses=use(1, 10))["starts"]
    assert planned([waiting(1, "a")], policy, uses=use(1, 10), now=8 * 86400.0)["starts"]


@pytest.mark.promise("shares-priorities-quotas-reservations")
def test_reserved_gpu_is_given_only_to_its_user() -> None:
    policy = SharePolicy({"reservations": [{"for": "user1", "gpus": list("1234567"), "when": "daily"}]})
    found = planned([waiting(2, "a"), waiting(2, "b", at=1.0), waiting(1, "owner", gpus=2, at=2.0)], policy)
    assert found["starts"][2, "a"] == ["0"]
    assert "GPU 1 is reserved for user1 (daily)" in found["why"][2, "b"]
    assert (1, "owner") in found["starts"]


# --- Urgent runs


@pytest.mark.promise("urgent-run-makes-room")
def test_urgent_run_preempts_the_newest_run_of_the_lowest_priority() -> None:
    tickets = [
        running(1, "old", "0123", at=1.0),
        running(2, "new", "45", at=2.0),
        running(3, "newest but high", "67", at=3.0, priority="high"),
        waiting(4, "now", gpus=2, at=9.0, priority="urgent"),
    ]
    found = planned(tickets, SharePolicy({}))
    assert (found["leave"], set(found["starts"])) == ([(2, "new")], set())


@pytest.mark.promise("urgent-run-makes-room")
def test_urgent_run_preempts_nothing_if_it_fits_or_preemption_would_not_help() -> None:
    urgent = waiting(4, "now", gpus=2, at=9.0, priority="urgent")
    assert planned([running(1, "r", "012345"), urgent], SharePolicy({}))["leave"] == []
    tickets = [running(1, "r", "0123456", priority="urgent"), running(2, "s", "7"), urgent]
    assert planned(tickets, SharePolicy({}))["leave"] == []


def test_without_fair_share_rules_an_urgent_run_preempts_only_runs_of_its_own_user() -> None:
    tickets = [running(1, "other", "0123", at=5.0), running(2, "own", "4567", at=1.0)]
    assert planned([*tickets, waiting(2, "now", gpus=1, priority="urgent")])["leave"] == [(2, "own")]
    assert planned([*tickets, waiting(3, "now", gpus=1, priority="urgent")])["leave"] == []


@pytest.mark.promise("shares-priorities-quotas-reservations")
def test_hours_of_urgent_runs_are_limited_per_user() -> None:
    tickets = [running(1, "r", "01234567"), waiting(2, "now", priority="urgent")]
    assert planned(tickets, SharePolicy({}), uses=use(2, 8, urgent=7.9))["leave"] == [(1, "r")]
    assert planned(tickets, SharePolicy({}), uses=use(2, 9, urgent=8.1))["leave"] == []


@pytest.mark.parametrize(("hours", "leaves"), [(1.9, True), (2.1, False)])
def test_running_urgent_runs_count_against_the_limit_of_urgent_hours(hours: float, leaves: bool) -> None:
    held = running(2, "u", "0123", at=10.0, granted_at=10.0, priority="urgent", changed=10.0 + hours * HOUR_S)
    tickets = [running(1, "r", "4567"), held, waiting(2, "now", priority="urgent")]
    assert planned(tickets, SharePolicy({}))["leave"] == ([(1, "r")] if leaves else [])


@pytest.mark.promise("shares-priorities-quotas-reservations")
def test_machine_without_gpus_is_reserved_for_a_user() -> None:
    policy = SharePolicy({"reservations": [{"for": "user1", "when": "daily"}]})
    tickets = [waiting(1, "own", gpus=0), waiting(2, "other", gpus=0), waiting(2, "now", gpus=1, priority="urgent")]
    found = planned([*tickets, running(1, "r", "01234567")], policy)
    assert (found["starts"], found["leave"]) == ({(1, "own"): []}, [])
    assert found["why"] == dict.fromkeys([(2, "other"), (2, "now")], "the machine is reserved for user1 (daily)")


def test_urgent_run_over_a_quota_preempts_nothing() -> None:
    """A preempted run got its GPU back at once, and was asked to leave again."""
    policy = SharePolicy({"limits": {"*": {"gpu_hours_a_week": 10}}})
    found = planned([running(1, "r", "01234567"), waiting(2, "now", priority="urgent")], policy, uses=use(2, 11))
    assert (found["leave"], found["starts"]) == ([], {})
    assert found["why"][2, "now"].startswith("over quota")


def test_without_rules_a_running_run_takes_no_queue_position_of_its_user() -> None:
    # A running run's record of its life renews the change time of its file, so it seems to be submitted late.
    tickets = [running(1, "r", "0", at=1740.0), waiting(1, "w", at=0.0), waiting(2, "v", at=600.0)]
    assert keys(in_order(tickets)) == ["w", "v"]


# --- Expected start times


def test_expected_starts_use_time_limits_and_past_durations() -> None:
    tickets = [running(1, "r", "01234567", limit_s=HOUR_S), waiting(2, "a", gpus=8), waiting(2, "b", gpus=8, at=1.0)]
    uses = use(2, 1)
    uses[2]["typical_s"] = 600.0
    found = expected_starts(tickets, 64, GPUS, 100.0, uses)
    assert found == {(2, "a"): HOUR_S - 100.0, (2, "b"): HOUR_S + 500.0}


def test_expected_starts_leave_out_blocked_gpus_and_count_on_runs_that_leave() -> None:
    tickets = [running(1, "r", "0123", limit_s=HOUR_S), waiting(2, "a", gpus=4), waiting(2, "b", gpus=8, at=1.0)]
    assert expected_starts(tickets, 64, GPUS, 0.0, {}, ["7"]) == {(2, "a"): HOUR_S}
    assert expected_starts(tickets, 64, GPUS, 0.0, {}, ["7"], [(1, "r")]) == {(2, "a"): 60.0}


# --- The shares file


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([], "the file=[] is not an object"),
        ({"share": {}}, "unknown key 'share'"),
        ({"shares": {"a": 0}}, "shares.a=0 is not a number above 0"),
        ({"shares": {"a": True}}, "shares.a=True"),
        ({"half_life_days": float("nan")}, "half_life_days=nan"),
        ({"priority_weights": {"hihg": 1}}, "priority_weights: unknown key 'hihg'"),
        ({"groups": {"g": {"shares": 2, "members": []}}}, "groups.g: unknown key 'shares'"),
        ({"groups": {"g": {"members": ["a"]}, "h": {"members": ["a"]}}}, "groups.h.members: a is in another group"),
        ({"reservations": [{"for": "a", "gpu": ["1"]}]}, "reservations: unknown key 'gpu'"),
        ({"reservations": [{"for": "a", "gpus": ["1"], "when": "2026-13-01"}]}, "reservations.when='2026-13-01': "),
        ({"groups": {"g": {"members": "a"}}}, "groups.g.members='a' is not a list of texts"),
        ({"limits": {"*": {"gpu": 2}}}, "limits.*: unknown key 'gpu'"),
        ({"limits": {"a": {"priority": "max"}}}, "limits.a.priority='max' is not one of low"),
        ({"reservations": [{"for": "a", "gpus": ["1"], "when": "soon"}]}, "reservations.when='soon': it is not a time"),
        ({"reservations": [{"for": "a", "gpus": ["1"], "when": "friday 18:00-09:00"}]}, "ends before it starts"),
        ({"reservations": [{"gpus": ["1"], "when": "friday"}]}, "reservations.for=[None]"),
    ],
)
def test_error_for_a_wrong_value_in_the_fair_share_file_names_the_value(given: Any, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        SharePolicy(given)


def test_reservation_times_use_the_time_zone_of_the_machine_and_ignore_the_tz_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(os.environ, "TZ", "Pacific/Auckland")  # a user's time zone must have no effect
    (one,) = SharePolicy({"reservations": [{"for": "a", "gpus": ["0"], "when": "2026-12-01 09:00-18:00"}]}).reservations
    nine = dt.datetime(2026, 12, 1, 9, tzinfo=shares._zone()).timestamp()
    found = [one.begins_in(nine + hours * HOUR_S) for hours in (-2, 0, 8.9)]
    assert found == [2 * HOUR_S, 0.0, 0.0]
    assert one.begins_in(nine + 10 * HOUR_S) == float("inf")


def test_time_until_a_reservation_respects_the_change_to_summer_time(monkeypatch: pytest.MonkeyPatch) -> None:
    berlin = zoneinfo.ZoneInfo("Europe/Berlin")
    monkeypatch.setattr(shares, "_zone", lambda: berlin)
    (one,) = SharePolicy({"reservations": [{"for": "a", "gpus": ["0"], "when": "daily 09:00-18:00"}]}).reservations
    assert one.begins_in(dt.datetime(2027, 3, 27, 23, tzinfo=berlin).timestamp()) == 9 * HOUR_S


# --- A simulation of three days


def assert_shares_are_kept(seed: int, shares: dict[str, float]) -> None:
    machine = Simulation(SharePolicy({"shares": shares}), users=range(5), gpus=8, seed=seed)
    machine.run(days=3)
    machine.assert_shares_are_kept(days=3)


@pytest.mark.parametrize("shares", [{"*": 1}, {"user0": 4, "user1": 2, "*": 1}])
@pytest.mark.parametrize("seed", [1, 2])
def test_simulated_users_get_gpu_hours_by_their_shares_without_idle_gpus(seed: int, shares: dict[str, float]) -> None:
    assert_shares_are_kept(seed, shares)


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(3, 41))
def test_simulated_users_of_many_seeds_get_gpu_hours_by_their_shares(seed: int) -> None:
    assert_shares_are_kept(seed, {"user0": 4, "user1": 2, "*": 1})
