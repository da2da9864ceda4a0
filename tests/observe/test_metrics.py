from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from aenv.observe.metrics import MetricPoint, MetricStore

START = datetime(2026, 1, 1, tzinfo=UTC)


def point(seconds: int, cpu: float = 1.5) -> MetricPoint:
    return MetricPoint(START + timedelta(seconds=seconds), 2, cpu, 1 << 40, 1 << 41, 3, 4, 5)


def test_points_survive_packing() -> None:
    sample = MetricPoint(START + timedelta(microseconds=123456), 4, 99.5, 1, 2, 3, 4, 5)
    assert MetricPoint.unpack(sample.pack()) == sample


def test_window_is_inclusive_on_both_ends() -> None:
    store = MetricStore()
    for seconds in range(5):
        store.add("a", point(seconds))
    window = store.window("a", START + timedelta(seconds=1), START + timedelta(seconds=3))
    assert window == [point(1), point(2), point(3)]
    assert store.window("a", START + timedelta(seconds=4)) == [point(4)]
    assert store.window("a", None, START) == [point(0)]
    assert len(store.window("a")) == 5
    assert store.window("a", START + timedelta(days=1)) == []


def test_oldest_sample_makes_room() -> None:
    store = MetricStore(capacity=2)
    for seconds in range(4):
        store.add("a", point(seconds))
    assert store.window("a") == [point(2), point(3)]
    assert store.latest("a") == point(3)


def test_sample_from_the_past_is_dropped() -> None:
    store = MetricStore()
    store.add("a", point(5))
    store.add("a", point(1))
    assert store.window("a") == [point(5)]


def test_sandboxes_are_kept_apart_and_forgotten() -> None:
    store = MetricStore()
    store.add("a", point(1))
    store.add("b", point(2))
    store.forget("a")
    assert store.latest("a") is None
    assert store.window("a") == []
    assert store.latest("b") == point(2)
    store.forget("never seen")


def test_capacity_must_be_positive() -> None:
    with pytest.raises(ValueError):
        MetricStore(0)
