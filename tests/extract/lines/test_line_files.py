"""Cutting text into lines, at any block size, against Python's own ways of doing it; and odd lines of every kind."""

import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dflash_offline import UserError
from dflash_offline.extract.lines.inputs import InputLine, LeftOut, read_lines
from dflash_offline.extract.lines.json_array import array_values
from dflash_offline.extract.lines.json_lines import MAX_LINE_BYTES
from dflash_offline.extract.lines.line_files import json_document, raw_lines, stretches
from hypothesis import given, settings
from hypothesis import strategies as st

SOURCE = Path("x")
Read = Callable[..., list[InputLine]]


class Trickle:
    """A file that gives a few bytes at a time, as a pipe may."""

    def __init__(self, raw: bytes, size: int) -> None:
        self.file = io.BytesIO(raw)
        self.size = size

    def read(self, size: int = -1, /) -> bytes:
        return self.file.read(self.size)


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def read_it(raw: bytes, name: str = "x.jsonl") -> list[InputLine]:
        (tmp_path / name).write_bytes(raw)
        return list(read_lines(tmp_path / name))

    return read_it


def lines_of(raw: bytes, size: int) -> list[InputLine]:
    found: list[InputLine] = []
    for first, num_lines, piece in raw_lines(Trickle(raw, size)):
        lines = list(piece.lines(SOURCE, first, None))
        assert len(lines) == num_lines
        found += lines
    return found


pieces = st.sampled_from(
    [b"\n", b"\r", b"\r\n", b" ", b"{}", b'{"a": "', b'"}', b"\xef\xbb\xbf", b"\x00", b"1", b"\xe2\x80\xa8"]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(pieces, max_size=12), st.integers(1, 9))
def test_lines_are_those_of_a_text_editor(parts: list[bytes], size: int) -> None:
    """Their numbers and contents are those of Python's text files, however few bytes come at a time."""
    raw = b"".join(parts)
    expected: list[tuple[int, Any]] = []
    for number, text in enumerate(io.TextIOWrapper(io.BytesIO(raw), encoding="latin-1", newline=None), start=1):
        content = text.encode("latin-1").removeprefix(b"\xef\xbb\xbf").strip()
        if content:
            try:
                value = json.loads(content.decode())
            except ValueError:
                value = None
            expected.append((number, value if isinstance(value, dict) else None))
    found = lines_of(raw, size)
    assert [(line.number, line.value) for line in found] == expected
    assert all((line.value is None) == (line.fault is not None) for line in found)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.lists(json_values, max_size=5), st.integers(1, 40), st.sampled_from([None, 1]), st.booleans())
def test_arrays_read_in_blocks_are_whole(values: list[Any], size: int, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(values, indent=indent, ensure_ascii=ascii_only)
    text = text.encode("utf-8", "replace").decode()  # a lone surrogate has no form in UTF-8
    blocks = (text[i : i + size] for i in range(0, len(text), size))
    assert [value for value, _ in array_values(SOURCE, blocks)] == json.loads(text)


@settings(max_examples=200, deadline=None)
@given(st.lists(json_values, min_size=1, max_size=4), st.data())
def test_a_cut_or_spoiled_array_is_never_read_as_a_whole_one(values: list[Any], data: st.DataObject) -> None:
    text = json.dumps(values)
    place = data.draw(st.integers(1, len(text) - 1))
    spoiled = data.draw(st.sampled_from([text[:place], text + "x", text + text]))
    try:
        expected = json.loads(spoiled)
    except ValueError:
        with pytest.raises(UserError, match="not JSON"):
            list(array_values(SOURCE, iter([spoiled])))
    else:
        assert [value for value, _ in array_values(SOURCE, iter([spoiled]))] == expected


def test_one_bad_value_costs_an_array_that_value_alone(read: Read) -> None:
    deep = '{"a": ' + '["}]{", ' * 5000 + "1" + "]" * 5000 + "}"
    text = f'[{{"a": 1}}, {deep}, 5, {{"b": {{"k": 1, "k": 2}}}}, {{"a": "\\ud800"}}, {{"a": 2}}]'
    for size in (7, 1000):
        blocks = (text[i : i + size] for i in range(0, len(text), size))
        values = [value for value, _ in array_values(SOURCE, blocks)]
        assert (values[0], values[2], values[4:]) == ({"a": 1}, 5, [{"a": "\ud800"}, {"a": 2}])
    lines = read(text.encode(), "x.json")
    reasons = [line.fault and line.fault.reason for line in lines]
    assert reasons == [None, "nested too deeply", "not an object", "key given twice", None, None]
    assert [line.number for line in lines] == [1, 2, 3, 4, 5, 6]
    assert (lines[4].value, lines[4].num_replaced, lines[5].value) == ({"a": "\ufffd"}, 1, {"a": 2})


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"", []),
        (b" \n\xef\xbb\xbf\n", []),
        (b"[]", []),
        (b"\xef\xbb\xbf[ ]\n", []),
        (b'{"a": 1}', [{"a": 1}]),
        (b'{\n "a": [\n{"a": 5}\n]\n}\n', [{"a": [{"a": 5}]}]),
        (b'{"a": 1}\n{"a": 2}\n', [{"a": 1}, {"a": 2}]),
        (b'\n\n{"a": 1}\r{"a": \r{"a": 2}', [{"a": 1}, None, {"a": 2}]),
        (b'{"a": \n{"a": 2}\n', [None, {"a": 2}]),
        (b'{\n"a": 1,\n"a": 2\n}', [None]),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 2**20])
def test_what_a_file_named_json_may_hold(raw: bytes, expected: list[Any], size: int) -> None:
    found = [
        line
        for first, _, piece in json_document(SOURCE, Trickle(raw, size))
        for line in piece.lines(SOURCE, first, None)
    ]
    assert [line.value for line in found] == expected


def test_lines_of_odd_encodings_are_named(read: Read) -> None:
    text = '{"a": "gr\u00fc\u00df \u4f60"}'
    raw = b"\n".join(
        [
            text.encode(),
            text[:12].encode("latin-1"),
            text.encode("gbk", "replace"),
            text[:9].encode("utf-16-be"),
            b"\0" * 50,
        ]
    )
    reasons = [line.fault and line.fault.reason for line in read(raw)]
    assert reasons == [None, "not UTF-8", "not UTF-8", "not JSON", "not JSON"]


def test_files_put_together_keep_every_line(read: Read) -> None:
    raw = b'\xef\xbb\xbf{"a": 1}\n' + b'\xef\xbb\xbf{"a": 2}\r\n' + b'\xef\xbb\xbf{"a": 3}\r' + b'{"a": 4}\xef\xbb\xbf'
    lines = read(raw)
    assert [line.value for line in lines[:3]] == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert lines[3].fault is not None
    assert lines[3].number == 4


def test_huge_lines(read: Read) -> None:
    """Ten MiB of text, a hundred thousand keys, a number beyond any integer type, and 64 MiB without a line end."""
    long_text = {"a": "\u4f60x" * 2_500_000}
    many_keys = {f"k{i}": i for i in range(100_000)}
    number = {"a": 10**4000}
    values = [long_text, many_keys, number]
    raw = b"\n".join(json.dumps(value, ensure_ascii=False).encode() for value in values)
    raw += b'\n{"a": 1' + b"0" * 5000 + b'}\n"' + b"x" * (65 * 2**20) + b'"\n{"last": 1}'
    lines = read(raw)
    assert [line.value for line in lines] == [*values, None, None, {"last": 1}]
    assert [line.fault and line.fault.reason for line in lines][3:5] == ["not JSON", "line too long"]
    assert [line.number for line in lines] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("size", range(1, 50))
def test_the_end_of_a_bad_value_is_not_found_inside_a_string(size: int) -> None:
    text = r'[{"a": {"k": 1, "k": 2}, "b": "}]}\"}}\\", "c": [0]}, {"z": 1}]'
    blocks = (text[i : i + size] for i in range(0, len(text), size))
    bad, good = [value for value, _ in array_values(SOURCE, blocks)]
    assert isinstance(bad, LeftOut)
    assert good == {"z": 1}


def test_a_file_without_line_ends_is_not_held_as_a_whole() -> None:
    class Endless:
        num_left = 100

        def read(self, size: int = -1, /) -> bytes:
            self.num_left -= 1
            return b"x" * 2**20 if self.num_left >= 0 else b""

    assert sum(map(len, stretches(Endless()))) <= MAX_LINE_BYTES + 2**20


def test_a_key_that_means_two_things_means_nothing(read: Read) -> None:
    raw = b'{"a": {"k": 1, "k": 1}}\n{"a": {"k": 1, "k": true}}\n{"a": NaN, "a": NaN}\n{"k": "x", "b": 0, "k": "y"}\n'
    lines = read(raw)
    assert [line.fault and line.fault.reason for line in lines] == [None, "key given twice", None, "key given twice"]
    assert lines[3].fault is not None
    assert "'k' is 'x' and 'y'" in lines[3].fault.detail


def test_escapes_and_depth_are_looked_for_where_they_may_be(read: Read) -> None:
    """The quick way past lines without surrogates and deep nesting takes no line with one."""
    random.seed(0)
    escapes = [r"\ud83d", r"\uDBFF", r"\uDC00", r"\udfff", r"\ud83d\ude00", r"\u0064", r"\\ud83d", "d8", r"\uD7ff"]
    for _ in range(200):
        text = "".join(random.choices(escapes, k=3))
        (line,) = read(f'{{"a": "{text}"}}'.encode())
        loaded = json.loads(f'"{text}"')
        lone = sum(0xD800 <= ord(character) < 0xE000 for character in loaded)
        assert line.value is not None
        assert line.num_replaced == lone
        assert line.value["a"] == "".join("\ufffd" if 0xD800 <= ord(c) < 0xE000 else c for c in loaded)
    for depth in (99, 100, 101, 150):
        (line,) = read(b'{"a": ' + b"[" * depth + b'"x"' + b"]" * depth + b"}")
        assert (line.fault is None) == (depth < 101)
