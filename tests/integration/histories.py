"""What clients did to sandboxes at the same time, and whether it can have been so.

A history has one `Call` an answer: when it began, when it ended, and what came back. It is right when the calls can be
put into an order, none before one that had ended when it began, in which each answer is the one that a sandbox gives
which does one thing after the other. Contents are judged by bounds: what was acknowledged before somebody looked must
be there, what was begun later must not.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

NEVER = math.inf
CLOCKS = 0.25  # seconds by which a time-out may come early: its reader and the daemon look at different clocks
NOTICE = 300.0  # seconds that a sandbox gets at least when traffic wakes it


class Verb(enum.Enum):
    CREATE = "create"
    PAUSE = "pause"
    CONNECT = "connect"
    RESUME = "resume"
    TIMEOUT = "set time-out"
    SNAPSHOT = "snapshot"
    FORK = "fork"
    ROLLBACK = "roll back"
    RETURN = "go on after the roll-back"
    KILL = "kill"
    SEE = "see"
    TALK = "talk"
    CRASH = "crash"


class Outcome(enum.Enum):
    DONE = "done"
    RAN = "ran already"
    CONFLICT = "conflict"
    MISSING = "missing"
    CLOSED = "port closed"
    CUT = "connection cut"
    UNKNOWN = "no answer"  # it was done by the end of the call, or was not


class Seen(enum.Enum):
    RUNNING = "running"
    PAUSED = "paused"
    NOWHERE = "not there"


@dataclass(frozen=True)
class Call:
    """One call and its answer. `seconds` is a time-out, `memory` whether memory is kept, `keeper` whether what ran in
    the sandbox is sure to run after it, `seen` what a list said."""

    verb: Verb
    began: float
    ended: float
    outcome: Outcome = Outcome.DONE
    seconds: float = 0
    memory: bool = True
    keeper: bool = True
    seen: Seen = Seen.NOWHERE
    note: str = ""

    def overlaps(self, other: Call) -> bool:
        return self.began < other.ended and other.began < self.ended

    def __str__(self) -> str:
        more = [f"{self.seconds:g} s"] if self.seconds else []
        more += ["without memory"] if not self.memory else []
        more += [self.seen.value] if self.verb is Verb.SEE else []
        more += [self.note] if self.note else []
        told = "" if self.verb is Verb.SEE else f": {self.outcome.value}"
        return f"{self.began:9.3f} {self.ended:9.3f}  {self.verb.value} {' '.join(more)}{told}"


class Stage(enum.Enum):
    ABSENT = enum.auto()
    RUNNING = enum.auto()
    PAUSED = enum.auto()
    RETURNING = enum.auto()  # in the middle of a roll-back: the old machine is gone, the new one is not there
    GONE = enum.auto()


@dataclass(frozen=True)
class State:
    """A sandbox between two calls."""

    stage: Stage = Stage.ABSENT
    memory: bool = True  # of one that is paused
    booted: bool = False  # what ran in it does not any more
    due: float = NEVER  # the earliest moment of its time-out; of one that is paused: if nobody was told so yet
    by: int = -1  # the call that rolls back, or that ended it

    def running(self, due: float, *, booted: bool = False) -> State:
        return State(Stage.RUNNING, booted=self.booted or booted, due=due)

    def paused(self, *, memory: bool, told: bool = True) -> State:
        """As long as nobody is `told`, a daemon that is killed may find it running."""
        return State(Stage.PAUSED, memory=memory, booted=self.booted, due=NEVER if told else self.due)


@dataclass(frozen=True)
class Rules:
    """What a sandbox was made with."""

    pauses: bool  # at its time-out; else it ends
    wakes: bool  # when there is traffic


GONE_BY_TIME = -2
BREAKS = (Verb.PAUSE, Verb.KILL, Verb.ROLLBACK, Verb.CRASH)


def cut(call: Call, calls: Iterable[Call]) -> bool:
    """Whether one of the others may have cut the connection of `call`: a time-out does so from when it is due."""
    return any(
        c.overlaps(call) if c.verb in BREAKS else c.verb is Verb.TIMEOUT and c.began + c.seconds < call.ended + CLOCKS
        for c in calls
        if c is not call
    )


class History:
    """The calls to one sandbox."""

    def __init__(self, rules: Rules, calls: Iterable[Call]) -> None:
        self.rules = rules
        self.calls: list[Call] = []
        calls = sorted(calls, key=lambda c: c.began)
        for call in calls:
            if call.verb is Verb.TALK and call.outcome in (Outcome.CUT, Outcome.MISSING) and cut(call, calls):
                # What had been sent when its machine ended is answered as if there were no sandbox.
                if rules.wakes:
                    self.calls.append(replace(call, outcome=Outcome.UNKNOWN))
                continue
            self.calls.append(call)
            if call.verb is Verb.ROLLBACK and call.outcome is not Outcome.CONFLICT:
                self.calls.append(replace(call, verb=Verb.RETURN))

    def possible(self) -> bool:
        """Whether there is an order that explains all answers."""
        everything = (1 << len(self.calls)) - 1
        start = (everything, State())
        seen, stack = {start}, [start]
        while stack:
            left, state = stack.pop()
            if not left:
                return True
            for position in self._after(left, state):
                if position not in seen:
                    seen.add(position)
                    stack.append(position)
        return False

    def first_impossible(self) -> Call | None:
        """The call that ends earliest and whose answer cannot be explained any more; None when all can."""
        for call in sorted(self.calls, key=lambda c: c.ended):
            # What had not ended by then may have happened, and its answer is not asked for.
            known = [
                c if c.ended <= call.ended else replace(c, outcome=Outcome.UNKNOWN, ended=NEVER)
                for c in self.calls
                if c.began <= call.ended and c.verb is not Verb.RETURN
            ]
            if not History(self.rules, known).possible():
                return call
        return None

    def _after(self, left: int, state: State) -> Iterator[tuple[int, State]]:
        """All positions one step on."""
        waiting, until = [], NEVER
        for index in _bits(left):
            if self.calls[index].began > until:
                break  # they are sorted
            waiting.append(index)
            until = min(until, self.calls[index].ended)
        if state.stage is Stage.RUNNING and state.due <= until + CLOCKS:
            ended = state.paused(memory=True, told=False) if self.rules.pauses else State(Stage.GONE, by=GONE_BY_TIME)
            yield left, ended
        for index in waiting:
            call = self.calls[index]
            if call.began <= until:
                if call.verb is Verb.TALK and self.rules.wakes and state.stage is Stage.PAUSED and state.memory:
                    yield left, state.running(call.began + NOTICE)  # it may be paused again before it has heard
                for following in self._steps(index, state):
                    yield left & ~(1 << index), following

    def _steps(self, index: int, state: State) -> Iterator[State]:
        call = self.calls[index]
        if call.verb is Verb.CRASH:
            yield state
            if state.stage is Stage.PAUSED and state.due != NEVER:
                yield state.running(state.due)
            return
        if call.outcome is Outcome.UNKNOWN:
            if call.verb is not Verb.RETURN or state.by != index - 1 or state.stage is not Stage.RETURNING:
                yield state
            elif call.verb is Verb.RETURN:
                yield state.paused(memory=call.memory)  # it was cut short
        found = self._does(index, call, state)
        if found is not None:
            yield found
        if call.verb is Verb.ROLLBACK and call.outcome is Outcome.MISSING and state.stage in BOTH:
            yield replace(state, stage=Stage.RETURNING, by=index)  # it was killed while it went back

    def _does(self, index: int, call: Call, state: State) -> State | None:
        """The state after `call`; None when `state` does not give that answer."""
        stage, outcome, due = state.stage, call.outcome, call.began + call.seconds
        if outcome is Outcome.UNKNOWN:
            outcome = Outcome.DONE
        match call.verb, outcome:
            case Verb.CREATE, Outcome.DONE:
                return state.running(due, booted=not call.keeper) if stage is Stage.ABSENT else None
            case Verb.SEE, _:
                return state if SHOWN[stage] is call.seen or call.outcome is Outcome.UNKNOWN else None
            case Verb.KILL, Outcome.DONE:
                if stage is not Stage.GONE:
                    return State(Stage.GONE, by=index) if stage is not Stage.ABSENT else None
                together = state.by == GONE_BY_TIME or self.calls[state.by].overlaps(call)
                return state if together else None
            case Verb.RETURN, Outcome.DONE:
                mine = stage is Stage.RETURNING and state.by == index - 1
                return state.running(state.due, booted=not call.keeper) if mine else None
            case Verb.RETURN, Outcome.MISSING:
                return state if stage is Stage.GONE else None
            case _, Outcome.MISSING if call.verb is not Verb.TALK:
                return state if stage is Stage.GONE else None
            case Verb.PAUSE, Outcome.DONE:
                told = call.outcome is Outcome.DONE
                return state.paused(memory=call.memory, told=told) if stage is Stage.RUNNING else None
            case Verb.PAUSE, Outcome.CONFLICT:
                return state if stage is Stage.PAUSED else None
            case ((Verb.CONNECT | Verb.RESUME), Outcome.DONE):
                return state.running(due, booted=not state.memory) if stage is Stage.PAUSED else None
            case Verb.CONNECT, Outcome.RAN:
                return replace(state, due=max(state.due, due)) if stage is Stage.RUNNING else None
            case Verb.RESUME, Outcome.CONFLICT:
                return state if stage is Stage.RUNNING else None
            case Verb.TIMEOUT, Outcome.DONE:
                return replace(state, due=due) if stage is Stage.RUNNING else None
            case ((Verb.TIMEOUT | Verb.FORK), Outcome.CONFLICT):
                return state if stage in (Stage.PAUSED, Stage.RETURNING) else None
            case Verb.FORK, Outcome.DONE:
                return state if stage is Stage.RUNNING else None
            case Verb.SNAPSHOT, Outcome.DONE:
                return state if stage in BOTH else None
            case Verb.ROLLBACK, Outcome.DONE:
                left = max(call.began + 1, state.due - 0.5) if stage is Stage.RUNNING else due
                return State(Stage.RETURNING, due=left, by=index) if stage in BOTH else None
            case Verb.TALK, (Outcome.DONE | Outcome.CLOSED):
                return state if stage is Stage.RUNNING and (outcome is Outcome.DONE or state.booted) else None
            case Verb.TALK, (Outcome.MISSING | Outcome.CONFLICT):
                asleep = stage is Stage.PAUSED and not (self.rules.wakes and state.memory)
                return state if asleep or stage in (Stage.RETURNING, Stage.GONE) else None
        return None


BOTH = (Stage.RUNNING, Stage.PAUSED)
SHOWN = {
    Stage.ABSENT: Seen.NOWHERE,
    Stage.RUNNING: Seen.RUNNING,
    Stage.PAUSED: Seen.PAUSED,
    Stage.RETURNING: Seen.PAUSED,
    Stage.GONE: Seen.NOWHERE,
}


def _bits(number: int) -> Iterator[int]:
    while number:
        low = number & -number
        yield low.bit_length() - 1
        number ^= low


# Contents


@dataclass(frozen=True)
class Note:
    """Something written. `ended` is NEVER when nobody was told that it was done."""

    value: str
    began: float
    ended: float


@dataclass(frozen=True)
class Bounds:
    must: frozenset[str] = frozenset()
    may: frozenset[str] = frozenset()


@dataclass(eq=False)
class Taken:
    """A capture of `source`; of nothing for the first sandbox. `keeper`: what ran in it runs in those made from it;
    `written`: what was acknowledged is in it."""

    source: Diary | None
    began: float
    ended: float
    memory: bool = True
    keeper: bool = True
    written: bool = True

    @functools.cached_property
    def bounds(self) -> list[Bounds]:
        """Once nobody writes any more."""
        if self.source is None:
            return [Bounds()]
        found = self.source.bounds(self.began, self.ended)
        return found if self.written else [Bounds(may=bounds.may) for bounds in found]


@dataclass(frozen=True)
class Origin:
    """From `began` on a sandbox may have what was taken, from `ended` on it has it, if `sure`."""

    taken: Sequence[Taken]
    began: float
    ended: float
    sure: bool = True


@dataclass(eq=False)
class Diary:
    """All that was written into one sandbox, and where its content came from."""

    origins: list[Origin]
    notes: list[Note] = field(default_factory=list)

    def bounds(self, began: float, ended: float) -> list[Bounds]:
        """What somebody who looked between `began` and `ended` must and may have found: one of these."""
        found = set()
        for origin in self.origins:
            if origin.began >= ended or self._hidden(origin, began):
                continue
            must = frozenset(n.value for n in self.notes if n.began > origin.ended and n.ended < began)
            may = frozenset(n.value for n in self.notes if n.ended > origin.began and n.began < ended)
            for below in itertools.chain.from_iterable(taken.bounds for taken in origin.taken):
                found.add(Bounds(must | below.must, may | must | below.may))
        return list(found)

    def _hidden(self, origin: Origin, began: float) -> bool:
        """Another one has surely come after it."""
        return any(o.sure and o.began > origin.ended and o.ended < began for o in self.origins if o is not origin)


def out_of_order(found: Sequence[str], notes: dict[str, Note], bounds: Sequence[Bounds]) -> str | None:
    """A value that stands after one which was begun when it had been acknowledged; or that is there twice. What was
    under way when a sandbox was captured comes to its end in each copy, whenever that runs."""
    if len(set(found)) != len(found):
        return next(value for value in found if found.count(value) > 1)
    earliest, culprit = NEVER, ""
    for value in reversed([value for value in found if all(value in b.must for b in bounds)]):
        if notes[value].began > earliest:
            return culprit
        if notes[value].ended < earliest:
            earliest, culprit = notes[value].ended, value
    return None


def unexplained(found: Sequence[str], bounds: Sequence[Bounds]) -> str | None:
    """What is wrong with a content; None if one of the bounds allows it."""
    have = frozenset(found)
    if any(b.must <= have <= b.may for b in bounds):
        return None
    nearest = min(bounds, key=lambda b: len(b.must - have) + len(have - b.may), default=Bounds())
    return f"lost {sorted(nearest.must - have)}, there without reason {sorted(have - nearest.may)}"
