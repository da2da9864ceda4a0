"""The judge of concurrent histories finds what is wrong and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.integration.histories import (
    NEVER,
    Bounds,
    Call,
    Diary,
    History,
    Note,
    Origin,
    Outcome,
    Rules,
    Seen,
    Taken,
    Verb,
    out_of_order,
    unexplained,
)

ENDS = Rules(pauses=False, wakes=False)
PAUSES = Rules(pauses=True, wakes=False)
WAKES = Rules(pauses=True, wakes=True)
MADE = Call(Verb.CREATE, 0, 1, seconds=1000)
PAUSED = Call(Verb.PAUSE, 2, 4)
RESUMED = Call(Verb.CONNECT, 6, 8, seconds=1000)
KILLED = Call(Verb.KILL, 2, 4)
BACK = Call(Verb.ROLLBACK, 2, 6)


def saw(seen: Seen, began: float, ended: float) -> Call:
    return Call(Verb.SEE, began, ended, seen=seen)


CRASHED = Call(Verb.CRASH, 3.5, 4.5)
RIGHT = [
    (ENDS, MADE, PAUSED, saw(Seen.PAUSED, 3, 3.5)),
    (ENDS, MADE, PAUSED, saw(Seen.RUNNING, 3, 3.5), saw(Seen.PAUSED, 3.6, 3.7)),
    (ENDS, MADE, PAUSED, Call(Verb.PAUSE, 3, 5, Outcome.CONFLICT)),
    (ENDS, MADE, PAUSED, RESUMED, Call(Verb.PAUSE, 5, 7)),
    (ENDS, MADE, KILLED, Call(Verb.KILL, 3, 5), Call(Verb.KILL, 5, 6, Outcome.MISSING)),
    (ENDS, MADE, BACK, saw(Seen.PAUSED, 3, 4), Call(Verb.FORK, 4, 5, Outcome.CONFLICT), saw(Seen.RUNNING, 7, 8)),
    (ENDS, MADE, Call(Verb.ROLLBACK, 2, 6, Outcome.MISSING), saw(Seen.PAUSED, 3, 3.5), Call(Verb.KILL, 4, 6)),
    (ENDS, MADE, Call(Verb.TIMEOUT, 2, 3, seconds=1), saw(Seen.RUNNING, 3, 3.1), saw(Seen.NOWHERE, 4, 5)),
    (PAUSES, MADE, Call(Verb.TIMEOUT, 2, 3, seconds=1), saw(Seen.PAUSED, 4, 5), Call(Verb.CONNECT, 6, 7)),
    (WAKES, MADE, PAUSED, Call(Verb.TALK, 5, 6), saw(Seen.RUNNING, 7, 8)),
    (ENDS, MADE, PAUSED, Call(Verb.TALK, 5, 6, Outcome.MISSING), Call(Verb.TALK, 3, 3.5, Outcome.CUT)),
    (ENDS, MADE, Call(Verb.PAUSE, 2, 4, Outcome.UNKNOWN), saw(Seen.PAUSED, 5, 6)),
    (ENDS, MADE, Call(Verb.PAUSE, 2, 4, Outcome.UNKNOWN), saw(Seen.RUNNING, 5, 6)),
    (ENDS, MADE, Call(Verb.ROLLBACK, 2, 4, Outcome.UNKNOWN), saw(Seen.PAUSED, 5, 6)),
    # The daemon was killed in the middle of a pause, and the next one found the machine running.
    (ENDS, MADE, Call(Verb.PAUSE, 2, 4, Outcome.UNKNOWN), saw(Seen.PAUSED, 2.5, 3), CRASHED, saw(Seen.RUNNING, 5, 6)),
    (ENDS, MADE, Call(Verb.PAUSE, 2, 4, Outcome.UNKNOWN), saw(Seen.PAUSED, 2.5, 3), CRASHED, saw(Seen.PAUSED, 5, 6)),
    (
        PAUSES,
        MADE,
        Call(Verb.TIMEOUT, 1, 2, seconds=1),
        saw(Seen.PAUSED, 2.5, 3),
        CRASHED,
        saw(Seen.RUNNING, 5, 6),
        saw(Seen.PAUSED, 7, 8),
    ),
    (WAKES, MADE, PAUSED, Call(Verb.TALK, 3, 9, Outcome.CUT), saw(Seen.PAUSED, 5, 5.1), saw(Seen.RUNNING, 6, 7)),
    (WAKES, MADE, PAUSED, Call(Verb.TALK, 3, 9, Outcome.MISSING), saw(Seen.RUNNING, 6, 7)),
    (WAKES, MADE, PAUSED, Call(Verb.TALK, 3, 9), Call(Verb.PAUSE, 5, 6), Call(Verb.PAUSE, 7, 8)),
    (WAKES, Call(Verb.CREATE, 0, 1, seconds=1000, keeper=False), PAUSED, Call(Verb.TALK, 5, 6, Outcome.CLOSED)),
    (ENDS, MADE, Call(Verb.PAUSE, 2, 3, memory=False), RESUMED, Call(Verb.TALK, 9, 10, Outcome.CLOSED)),
]
WRONG = [
    (ENDS, MADE, PAUSED, saw(Seen.RUNNING, 5, 6)),
    (ENDS, MADE, PAUSED, saw(Seen.PAUSED, 3, 3.5), saw(Seen.RUNNING, 3.6, 3.7)),
    (ENDS, MADE, Call(Verb.PAUSE, 2, 4, Outcome.CONFLICT)),
    (ENDS, MADE, PAUSED, Call(Verb.PAUSE, 3, 5)),
    (ENDS, MADE, PAUSED, RESUMED, Call(Verb.CONNECT, 6, 8)),
    (ENDS, MADE, KILLED, Call(Verb.KILL, 5, 6)),
    (ENDS, MADE, KILLED, saw(Seen.PAUSED, 5, 6)),
    (ENDS, MADE, KILLED, Call(Verb.SNAPSHOT, 5, 6)),
    (ENDS, MADE, saw(Seen.NOWHERE, 2, 3)),
    (ENDS, MADE, BACK, saw(Seen.PAUSED, 7, 8)),
    (ENDS, MADE, BACK, Call(Verb.SNAPSHOT, 3, 4, Outcome.MISSING)),
    (ENDS, MADE, Call(Verb.TIMEOUT, 2, 3, seconds=1), saw(Seen.NOWHERE, 2.1, 2.5)),
    # The extension was acknowledged before it ended.
    (ENDS, MADE, Call(Verb.TIMEOUT, 2, 3, seconds=1), Call(Verb.TIMEOUT, 4, 5, seconds=99), saw(Seen.NOWHERE, 6, 7)),
    (PAUSES, MADE, Call(Verb.TIMEOUT, 2, 3, seconds=1), Call(Verb.CONNECT, 4, 5, Outcome.RAN, 99),
     saw(Seen.PAUSED, 6, 7)),
    (PAUSES, MADE, PAUSED, Call(Verb.TALK, 5, 6)),
    (PAUSES, MADE, Call(Verb.TALK, 2, 3, Outcome.MISSING)),
    (WAKES, MADE, PAUSED, Call(Verb.TALK, 5, 6, Outcome.MISSING)),
    (WAKES, MADE, PAUSED, Call(Verb.TALK, 3, 6), Call(Verb.PAUSE, 7, 8), Call(Verb.PAUSE, 9, 10)),
    (WAKES, MADE, Call(Verb.PAUSE, 2, 3, memory=False), Call(Verb.TALK, 5, 6)),
    (ENDS, MADE, Call(Verb.PAUSE, 2, 4, Outcome.UNKNOWN), saw(Seen.RUNNING, 5, 6), saw(Seen.PAUSED, 7, 8)),
    (ENDS, MADE, PAUSED, RESUMED, Call(Verb.TALK, 9, 10, Outcome.CLOSED)),
    # Somebody was told that it was paused, or nobody was killed.
    (ENDS, MADE, Call(Verb.PAUSE, 2, 3), CRASHED, saw(Seen.RUNNING, 5, 6)),
    (ENDS, MADE, Call(Verb.PAUSE, 2, 4, Outcome.UNKNOWN), saw(Seen.PAUSED, 2.5, 3), saw(Seen.RUNNING, 5, 6)),
    (ENDS, MADE, Call(Verb.PAUSE, 2, 4, Outcome.UNKNOWN), CRASHED, saw(Seen.PAUSED, 5, 6), saw(Seen.RUNNING, 7, 8)),
]  # fmt: skip


@pytest.mark.parametrize("story", RIGHT)
def test_what_can_have_been(story: tuple[Rules, *tuple[Call, ...]]) -> None:
    history = History(story[0], story[1:])
    assert history.possible()
    assert history.first_impossible() is None


@pytest.mark.parametrize("story", WRONG)
def test_what_cannot_have_been(story: tuple[Rules, *tuple[Call, ...]]) -> None:
    history = History(story[0], story[1:])
    assert not history.possible()
    assert history.first_impossible() is not None


@given(st.data())
def test_one_after_the_other_and_blurred_is_always_possible(data: st.DataObject) -> None:
    """Calls with the answers of a sandbox that does one after the other; then each began earlier and ended later."""
    calls, state = [MADE], "running"
    for moment in range(2, data.draw(st.integers(2, 14))):
        verb = data.draw(st.sampled_from([Verb.PAUSE, Verb.CONNECT, Verb.RESUME, Verb.SEE, Verb.ROLLBACK, Verb.KILL]))
        outcome, seen = Outcome.DONE, Seen(state)
        if verb is Verb.SEE:
            pass
        elif state == "not there":
            outcome = Outcome.MISSING
        elif verb is Verb.PAUSE:
            outcome, state = (Outcome.DONE if state == "running" else Outcome.CONFLICT), "paused"
        elif verb is Verb.CONNECT:
            outcome, state = (Outcome.DONE if state == "paused" else Outcome.RAN), "running"
        elif verb is Verb.RESUME:
            outcome, state = (Outcome.DONE if state == "paused" else Outcome.CONFLICT), "running"
        else:
            state = "not there" if verb is Verb.KILL else "running"
        early, late = data.draw(st.floats(0, 3)), data.draw(st.floats(0, 3))
        calls.append(Call(verb, max(1.1, moment - early), moment + late, outcome, 1000, seen=seen))
    assert History(PAUSES, calls).possible()


# Contents

START = Origin([Taken(None, 0, 0)], 0, 1)


def test_bounds_of_a_content() -> None:
    source = Diary([START], [Note("a", 2, 3), Note("b", 4, 8), Note("c", 9, 10), Note("lost", 2, NEVER)])
    assert source.bounds(5, 6) == [Bounds(frozenset("a"), frozenset({"a", "b", "lost"}))]
    taken = Taken(source, 5, 6)
    child = Diary([Origin([taken], 20, 21)], [Note("d", 22, 23)])
    (bounds,) = child.bounds(30, 31)
    assert bounds == Bounds(frozenset("ad"), frozenset({"a", "b", "lost", "d"}))
    assert unexplained(["a", "b", "d"], [bounds]) is None
    assert unexplained(["a", "b", "c", "d"], [bounds]) == "lost [], there without reason ['c']"
    assert unexplained(["b", "d"], [bounds]) == "lost ['a'], there without reason []"


def test_bounds_after_a_roll_back() -> None:
    source = Diary([START], [Note("a", 2, 3), Note("b", 7, 8), Note("c", 11, 14), Note("d", 20, 21)])
    source.origins.append(Origin([Taken(source, 4, 5)], 12, 13))
    before, during, after = (source.bounds(*when) for when in ((9, 10), (12, 12.5), (30, 31)))
    assert before == [Bounds(frozenset("ab"), frozenset("ab"))]
    assert set(during) == {
        Bounds(frozenset("ab"), frozenset("abc")),
        Bounds(frozenset("a"), frozenset("ac")),
    }
    assert after == [Bounds(frozenset("ad"), frozenset("acd"))]
    source.origins[-1] = Origin(source.origins[-1].taken, 12, 13, sure=False)
    assert len(source.bounds(30, 31)) == 2


def test_order_and_repetition() -> None:
    notes = {"a": Note("a", 0, 1), "b": Note("b", 2, 3), "c": Note("c", 2, 5)}
    told = [Bounds(frozenset("abc"), frozenset("abc"))]
    assert out_of_order(["a", "b", "c"], notes, told) is None
    assert out_of_order(["a", "c", "b"], notes, told) is None
    assert out_of_order(["b", "a"], notes, told) == "a"
    assert out_of_order(["a", "b", "a"], notes, told) == "a"
    assert out_of_order(["b", "a"], notes, [Bounds(frozenset("b"), frozenset("ab"))]) is None
