"""Specs as a user gives them: text stays text, JSON becomes a message, and what is wrong is told with its place."""

from __future__ import annotations

import pytest

from tightship.cli import specs
from tightship.cli.failure import Failure
from tightship.v1.spec_pb2 import ContainerSpec


def test_text_is_left_to_the_service() -> None:
    for text in ("", "cpu { limit: 1 }", "nonsense {"):
        assert specs.parse(text, json=True) == text
        assert specs.parse(text, json=False) == text


def test_json_becomes_a_message() -> None:
    made = specs.parse(' {"cpu": {"limit": 500, "maxLimit": "1500"}, "lifecycle": {"grace": "1.5s"}}', json=True)
    assert isinstance(made, ContainerSpec)
    assert (made.cpu.limit, made.cpu.max_limit, made.lifecycle.grace.ToMilliseconds()) == (500, 1500, 1500)


def test_json_without_the_option_is_refused_with_the_next_step() -> None:
    with pytest.raises(Failure, match="--json"):
        specs.parse('{"cpu": {}}', json=False)


@pytest.mark.parametrize(
    ("text", "says", "place", "field"),
    [
        ('{"cpu": ', "Expecting value", (1, 9), None),
        ('{\n "cpu": {"limit": "x"}}', "invalid literal", (2, 10), "cpu.limit"),
        ('{"cpu": {"limit": -1}}', "out of range", (1, 10), "cpu.limit"),
        ('{"cpu": {\n  "foo": 1}}', "no such field", (2, 3), "cpu.foo"),
        ('{"foo": 1}', "no such field", (1, 2), "foo"),
        ('{"cpu": 5}', "not iterable", (1, 2), "cpu"),
        ('{"lifecycle": {"grace": "2"}}', "must end with letter", (1, 16), "lifecycle.grace"),
        ('{"blockio": {"device_limit_set": {"device_limits": [{"limit": 1}, {"limi": 2}]}}}', "no such field",
         (1, 68), "blockio.device_limit_set.device_limits[1].limi"),
        ('{"cpu": {"limit": 1, "limit": 2}}', "duplicate key", None, None),
        ("{" * 3000, "", None, None),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_place(
    text: str, says: str, place: tuple[int, int] | None, field: str | None
) -> None:
    with pytest.raises(Failure) as caught:
        specs.parse(text, json=True)
    failed = caught.value
    assert (failed.code, failed.reason) == (3, "BAD_SPEC")
    assert says in failed.message
    assert failed.metadata.get("field") == field
    if place is not None:
        assert (failed.metadata["line"], failed.metadata["column"]) == tuple(map(str, place))


def test_what_the_service_refuses_gets_its_place() -> None:
    metadata = {"field": "memory.max_limit"}
    specs.place('{"cpu": {"limit": 1},\n "memory": {"limit": 1, "maxLimit": 2}}', metadata)
    assert metadata == {"field": "memory.max_limit", "line": "2", "column": "25"}
    metadata = {"field": "name"}
    specs.place('{"cpu": {}}', metadata)
    assert metadata == {"field": "name"}


def test_a_value_is_no_key() -> None:
    assert specs.locate('{"a": "cpu", "cpu": {"mask": 1}}', "cpu.mask") == (1, 22)
    assert specs.locate('{"a": "{\\"cpu\\": 1}", "b": 2}', "cpu") is None
