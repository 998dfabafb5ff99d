"""The frames of fd.sock: round trips, what is refused, and docs/fd-socket.md held against the constants."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightship.kernel import fdframes
from tightship.kernel.fdframes import BadFrame, ExitKind, Frame, Stream, Type

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "fd-socket.md").read_text()
TOKEN = bytes(range(32))
TRACEPARENT = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading of the page."""
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_page_has_the_header_as_it_is() -> None:
    table = rows("Header, 16 bytes, little-endian")
    size = {"magic": 4, "request": 4, "length": 4}
    at = 0
    for span, field, _ in table:
        width = size.get(field, 1)
        assert span in {f"{at}–{at + width - 1}", str(at)}, field
        at += width
    assert at == fdframes.HEADER.size == 16
    fields = {field: value for _, field, value in table}
    assert fields["magic"] == f"`{fdframes.MAGIC.decode()}`"
    assert fields["format"] == str(fdframes.FORMAT)
    assert f"0 to {fdframes.FDS_MAX}" in fields["fds"]
    assert f"at most {fdframes.PAYLOAD_MAX:,}" in fields["length"]


def test_the_page_has_every_type_with_its_number() -> None:
    told = {name: int(number) for number, name, *_ in rows("Requests") + rows("Answers")}
    assert told == {kind.name: kind.value for kind in Type}


def payload_size(text: str) -> int:
    """Bytes of a payload as its row says: `32 bytes token; u8 kind; 3 zero bytes; i32 code`."""
    text = text.partition(". ")[0].partition(", or ")[0]
    sizes = [int(number) for number in re.findall(r"(\d+) (?:zero )?bytes", text)]
    return sum(sizes) + sum(int(bits) // 8 for bits in re.findall(r"\b[ui](\d+) ", text))


@pytest.mark.parametrize(
    ("name", "frame"),
    [
        ("HELLO", fdframes.hello(1)),
        ("CLAIM", fdframes.claim(1, TOKEN, TRACEPARENT)),
        ("TAKE", fdframes.take(1, TOKEN, TRACEPARENT, b"")),
        ("BIND", fdframes.bind(1, TOKEN)),
        ("EXIT", fdframes.exited(1, TOKEN, ExitKind.EXITED, 3)),
        ("LETGO", fdframes.letgo(1, TOKEN)),
        ("OK", fdframes.hello_ok(1, 1, "0123456789abcdef")),
    ],
)
def test_the_page_has_the_size_and_descriptors_of_each_payload(name: str, frame: Frame) -> None:
    row = {cells[1]: cells for cells in rows("Requests") + rows("Answers")}[name]
    assert payload_size(row[3].replace("for HELLO: ", "").replace("; else empty", "")) == len(frame.payload)
    assert int(row[2].split(":")[0]) == frame.fds


def test_the_page_has_the_numbers_of_streams_and_exits() -> None:
    answers = {cells[1]: cells[3] for cells in rows("Answers")}
    requests = {cells[1]: cells[3] for cells in rows("Requests")}
    assert dict(re.findall(r"(\d) (stdin|stdout|stderr)", answers["FDS"])) == {
        str(stream.value): stream.name.lower() for stream in Stream
    }
    assert dict(re.findall(r"(\d) (exited|signalled|unknown)", requests["EXIT"])) == {
        str(kind.value): kind.name.lower() for kind in ExitKind
    }
    assert f"{fdframes.TOKEN_SIZE} bytes token" in requests["CLAIM"]
    assert f"{fdframes.TRACEPARENT_SIZE} bytes W3C traceparent" in requests["CLAIM"]
    assert f"{fdframes.EPOCH_SIZE} bytes epoch" in answers["OK"]


def test_every_frame_comes_back_as_it_was() -> None:
    assert fdframes.read_hello(fdframes.hello(1).payload) == (fdframes.LOWEST_VERSION, fdframes.VERSION)
    assert fdframes.read_hello_ok(fdframes.hello_ok(1, 1, "0123456789abcdef").payload) == (1, "0123456789abcdef")
    assert fdframes.read_claim(fdframes.claim(1, TOKEN, TRACEPARENT).payload) == (TOKEN, TRACEPARENT)
    assert fdframes.read_claim(fdframes.claim(1, TOKEN).payload) == (TOKEN, "")
    taken = fdframes.take(1, TOKEN, TRACEPARENT, b"acquire")
    assert fdframes.read_take(taken.payload) == (TOKEN, TRACEPARENT, b"acquire")
    with pytest.raises(ValueError, match="too long"):
        fdframes.take(1, TOKEN, "", bytes(fdframes.PAYLOAD_MAX))
    assert fdframes.read_token(fdframes.bind(1, TOKEN).payload) == TOKEN
    assert fdframes.read_exit(fdframes.exited(1, TOKEN, ExitKind.SIGNALLED, 9).payload) == (
        TOKEN,
        ExitKind.SIGNALLED,
        9,
    )
    streams = (Stream.STDERR, Stream.STDIN)
    assert fdframes.read_fds(fdframes.fds(1, 30_000, streams).payload) == (30_000, streams)
    assert fdframes.read_error(fdframes.error(1, 5, "gone").payload) == (5, "gone")
    assert len(fdframes.error(1, 5, "x" * 50_000).payload) == fdframes.PAYLOAD_MAX


@given(
    st.sampled_from(Type),
    st.integers(1, 0xFFFFFFFF),
    st.binary(max_size=fdframes.PAYLOAD_MAX),
    st.integers(0, fdframes.FDS_MAX),
)
def test_a_frame_is_read_as_it_was_written(kind: Type, request: int, payload: bytes, fds: int) -> None:
    frame = fdframes.decode(Frame(kind, request, payload, fds).encode(), fds)
    assert (frame.type, frame.request, frame.payload, frame.fds) == (kind, request, payload, fds)


@given(st.binary(max_size=64), st.integers(0, 4))
def test_noise_is_a_bad_frame_or_a_frame(data: bytes, fds: int) -> None:
    try:
        frame = fdframes.decode(data, fds)
    except BadFrame:
        return
    assert frame.encode() == data


GOOD = fdframes.claim(7, TOKEN).encode()


@pytest.mark.parametrize(
    ("packet", "fds"),
    [
        (b"", 0),
        (GOOD[:15], 0),
        (b"X" + GOOD[1:], 0),
        (GOOD[:4] + b"\x02" + GOOD[5:], 0),
        (GOOD[:5] + b"\x63" + GOOD[6:], 0),
        (GOOD[:6] + b"\x01" + GOOD[7:], 0),
        (GOOD, 1),
        (GOOD[:7] + b"\x01" + GOOD[8:], 0),
        (GOOD[:8] + bytes(4) + GOOD[12:], 0),
        (GOOD[:-1], 0),
        (GOOD + b"\0", 0),
        (Frame(Type.CLAIM, 1, bytes(fdframes.PAYLOAD_MAX + 1)).encode(), 0),
        (Frame(Type.FDS, 1, b"", 4).encode(), 4),
    ],
)
def test_what_is_no_frame_is_refused(packet: bytes, fds: int) -> None:
    with pytest.raises(BadFrame):
        fdframes.decode(packet, fds)


@pytest.mark.parametrize(
    ("read", "payload"),
    [
        (fdframes.read_hello, b"\x02\x01\0\0"),
        (fdframes.read_hello, b"\x01\x01\0"),
        (fdframes.read_claim, TOKEN),
        (fdframes.read_claim, TOKEN + b"\xff" * 55),
        (fdframes.read_token, TOKEN[:-1]),
        (fdframes.read_exit, TOKEN + b"\x09\0\0\0" + bytes(4)),
        (fdframes.read_fds, b"\0\0\0\0"),
        (fdframes.read_fds, b"\0\0\0\0\x02\x02\x02"),
        (fdframes.read_fds, b"\0\0\0\0\x02\x02"),
        (fdframes.read_fds, b"\0\0\0\0\x01\x07"),
        (fdframes.read_error, b"\0"),
    ],
)
def test_a_payload_that_does_not_hold_is_refused(read: object, payload: bytes) -> None:
    assert callable(read)
    with pytest.raises(BadFrame):
        read(payload)
