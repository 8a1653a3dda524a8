"""The schedule: a table from steps to what is due."""

from __future__ import annotations

import pytest

from offbeat.replicas.schedule import Entry, Schedule


def level_of(due):
    """The level of the one fragment that is due, or None."""
    ((level, part),) = due or [(None, 0)]
    assert part == 0
    return level


def test_schedule_of_numbers():
    schedule = Schedule([Entry(2), Entry(6)], 3)
    due = []
    for _ in range(14):
        due.append(level_of(schedule.due()))
        schedule.advance()
    assert due == [None, None, None, 1, None, 0, None, 0, None, 1, None, 0, None, 0]


def test_schedule_of_functions():
    schedule = Schedule([Entry(lambda s: 2), Entry(lambda s: 5)], lambda s: s < 3)
    due = []
    for _ in range(14):
        level = level_of(schedule.due())
        if level is not None:
            schedule.exchanged(level)
        due.append(level)
        schedule.advance()
    # A higher level does for the lower one too.
    assert due == [None, None, None, 1, None, 0, None, 0, 1, None, 0, None, 0, 1]
    again = Schedule([Entry(lambda s: 2), Entry(lambda s: 5)], lambda s: pytest.fail("warm-up was over"))
    again.load_state_dict(schedule.state_dict())
    assert again.is_local
    assert [again.due(), again.step] == [schedule.due(), 14]
    for bad, error in ((0, ValueError), (1.5, TypeError), (None, TypeError)):
        with pytest.raises(error, match="what every returned for step 0"):
            Schedule([Entry(lambda s, bad=bad: bad)], 0).due()


def test_warmup_is_asked_once_a_step_and_not_after_it_is_over():
    asked = []

    def warm(step):
        asked.append(step)
        return step < 2

    schedule = Schedule([Entry(1)], warm)
    for _ in range(5):
        assert schedule.is_local is (schedule.step >= 2)  # looking decides nothing
        assert [schedule.settle() for _ in range(3)] == [schedule.step >= 2] * 3
        assert schedule.is_local is (schedule.step >= 2)
        schedule.advance()
    assert asked == [0, 0, 1, 1, 2, 2]
