"""Names of containers: one spelling for each, and nothing that could be a control file or climb out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightship.common.errors import ServiceError
from tightship.containerizer import names


@pytest.mark.parametrize(
    ("given_name", "clean"),
    [
        ("/test", "/test"),
        ("//t/t2//t3///", "/t/t2/t3"),
        ("/top/./test", "/top/test"),
        ("/top/../test", "/test"),
        ("/../../test", "/test"),
        ("/", "/"),
        ("/..", "/"),
        ("/a_b.c-d", "/a_b.c-d"),
        ("/0", "/0"),
        ("/cpu", "/cpu"),
        ("/memory/x", "/memory/x"),
        ("/mytasks", "/mytasks"),
    ],
)
def test_cleaned(given_name: str, clean: str) -> None:
    assert names.normalize(given_name) == clean


@pytest.mark.parametrize(
    "name",
    [
        "", "<", "+", "/.bad", "/_bad", "_bad", "test", "./test", "/a b", "/a\n", "/a\0b", "/ä", "/a/.b",
        "/tasks", "/a/tasks", "/notify_on_release", "/release_agent", "/cgroup.procs", "/cgroup.x", "/memory.x",
        "/cpu.shares", "/cpuset.cpus/x", "/pids.max", "/" + "x" * 256, "/" + "/".join(["abc"] * 600),
        "/a" * 65,
    ],
)  # fmt: skip
def test_refused(name: str) -> None:
    with pytest.raises(ServiceError) as caught:
        names.normalize(name)
    assert caught.value.metadata["field"] == "name"


def test_64_levels_are_allowed_and_what_is_dropped_does_not_count() -> None:
    assert names.normalize("/a" * 64) == "/a" * 64
    assert names.normalize("/a/.." * 100 + "/a") == "/a"
    with pytest.raises(ServiceError) as caught:
        names.normalize("/a" * 1000)
    assert "64" in caught.value.message


def test_the_root_is_no_container() -> None:
    with pytest.raises(ServiceError):
        names.container("/a/..")


@given(st.text(alphabet="ab./_-", max_size=30))
def test_a_cleaned_name_stays_and_never_climbs(text: str) -> None:
    try:
        clean = names.normalize("/" + text)
    except ServiceError:
        return
    assert names.normalize(clean) == clean
    assert clean.startswith("/")
    assert not {"", ".", ".."} & set(clean.split("/")[1:]) or clean == "/"


def test_lineage() -> None:
    assert names.lineage("/a/b/c") == ["/a/b", "/a"]
    assert names.lineage("/a") == []
    assert names.parent("/a") == "/"


def test_below_is_by_component() -> None:
    assert names.is_below("/a/b", "/a")
    assert names.is_below("/a", "/")
    assert not names.is_below("/ab", "/a")
    assert not names.is_below("/a", "/a")


def test_an_endless_name_is_refused_before_it_is_looked_at() -> None:
    with pytest.raises(ServiceError, match="over the limit"):
        names.normalize("/." * (names.NAME_MAX // 2 + 1))
