"""Arrays of JSON in which a value is broken: it costs itself alone, or the error says where it stands."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dflash_offline import UserError
from dflash_offline.extract.lines.inputs import LeftOut, read_lines
from dflash_offline.extract.lines.json_array import array_values, text_of
from hypothesis import given, settings
from hypothesis import strategies as st

SOURCE = Path("x")
GOOD = {"a": '}] " \\ {[, : \u4f60', "b": [1, {"c": None}, []]}


def values_of(raw: bytes, size: int) -> list[Any]:
    blocks = (raw[i : i + size] for i in range(0, len(raw), size))
    return [value for value, _ in array_values(SOURCE, text_of(blocks))]


def around(bad: bytes) -> bytes:
    good = json.dumps(GOOD, ensure_ascii=False).encode()
    return b"[" + good + b" , " + bad + b",\n" + good + b"]"


@pytest.mark.parametrize(
    "bad",
    [
        b'{"a": 1,}',
        b'{"a": nul}',
        b'{"a": None, "b": [True, .5, 1_000]}',
        b'{a: "x"}',
        b"{'a': 'x'}",
        b'{"a": "raw\ttab and\nline end"}',
        b'{"a": "\\x41"}',
        b'{"a": ["x", , "y"]}',
        b'{"a": 1 b: 2}',
        b'{"a": /* why */ 1}',
        b'[1, 2,, {"}": "]"}]',
        b"None",
        b"nul",
        b'"\\x"',
        b'{"a": ' + b"9" * 5000 + b"}",
    ],
)
@pytest.mark.parametrize("size", [1, 7, 2**20])
def test_a_value_that_is_no_json_costs_itself_alone(bad: bytes, size: int) -> None:
    first, fault, last = values_of(around(bad), size)
    assert first == last == GOOD
    assert isinstance(fault, LeftOut)
    assert fault.reason == "not JSON"
    assert "value 2" in fault.detail


@pytest.mark.parametrize(
    "bad",
    [
        b'{"a": "x"y"}',
        b'{"a": "he said "hi" twice"}',
        b'{"a": "x}',
        b'{"a": x"}',
        b'{"a": "x\\"}',
        b'{"a": "x""}',
        b'{"a": ["x"}',
        b'{"a": "x"]}',
        b'{"a": {"b": 1}',
        b'{"a": 1, {"b": 2}}',
        b'{{"a": 1}}',
        b'{"a": 1} {"b": 2}',
        b"",
        b"}",
    ],
)
@pytest.mark.parametrize("size", [1, 7, 2**20])
def test_a_value_whose_end_cannot_be_told_is_an_error_that_names_it(bad: bytes, size: int) -> None:
    with pytest.raises(UserError, match=r"value 2|after value 2") as caught:
        values_of(around(bad), size)
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("size", range(1, 12))
def test_bytes_that_are_not_utf8_cost_their_value_alone(size: int) -> None:
    bad = (b'{"a": "\xff"}', b'{"a": "\xe4\xbd"}', b'{"\xed\xa0\xbd": 1}', b'{"a": \xff}', b'["\xf0\x9f"]')
    good = json.dumps(GOOD, ensure_ascii=False).encode()
    values = values_of(b"[" + b",".join(b"%s, %s" % (one, good) for one in bad) + b"]", size)
    assert values[1::2] == [GOOD] * len(bad)
    assert [fault.reason for fault in values[::2]] == ["not UTF-8"] * len(bad)


@pytest.mark.parametrize("raw", [b'[{"a": 1} \xff, {"a": 2}]', b'[{"a": 1}, {"a": 2}\xff]', b'[{"a": 1}]\xff'])
def test_bytes_between_the_values_end_the_run(raw: bytes) -> None:
    with pytest.raises(UserError, match="is not JSON"):
        values_of(raw, 5)


@pytest.mark.parametrize("raw", [b'{"a": "\xff"}', b'{\n"a": "\xff",\n"b": 2\n}'])
def test_one_object_that_is_not_utf8_is_one_line(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "x.json").write_bytes(raw)
    (line,) = read_lines(tmp_path / "x.json")
    assert line.fault is not None
    assert line.fault.reason == "not UTF-8"


json_values = st.recursive(
    st.none() | st.integers() | st.text('ab"\\:,[]{}\n', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a"]},', max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=600, deadline=None)
@given(st.lists(json_values, min_size=1, max_size=5), st.data())
def test_a_spoiled_value_never_hides_or_changes_another(values: list[Any], data: st.DataObject) -> None:
    """One character of one value is lost, doubled or replaced: all values come out, or none."""
    place = data.draw(st.integers(0, len(values) - 1))
    texts = [json.dumps(value) for value in values]
    at = data.draw(st.integers(0, len(texts[place]) - 1))
    put = data.draw(st.sampled_from(["", *'"\\[]{}:,x \n', texts[place][at] * 2]))
    texts[place] = texts[place][:at] + put + texts[place][at + 1 :]
    text = "[" + ", ".join(texts) + "]"
    before, after = values[:place], values[place + 1 :]
    try:
        found = values_of(text.encode(), data.draw(st.integers(1, 30)))
    except UserError:
        with pytest.raises(ValueError, match=":"):
            json.loads(text)
        return
    spoiled = found[place : len(found) - len(after)]
    assert found == [*before, *spoiled, *after]
    if not any(isinstance(value, LeftOut) for value in spoiled):
        assert found == json.loads(text)


def test_a_long_array_with_many_broken_values(tmp_path: Path) -> None:
    """Every tenth of 30,000 values over several blocks is broken, each in one of three ways."""
    random.seed(0)
    broken = ['{"a": nul}', '{"a": "\\x"}', '{"a": [1,]}']

    def texts() -> Iterator[str]:
        for i in range(30_000):
            yield random.choice(broken) if i % 10 == 3 else json.dumps({"a": i, "b": "x" * random.randrange(200)})

    (tmp_path / "x.json").write_text("[\n" + ",\n".join(texts()) + "\n]\n")
    lines = list(read_lines(tmp_path / "x.json"))
    assert [line.number for line in lines] == list(range(1, 30_001))
    assert all((line.value is None) == (i % 10 == 3) for i, line in enumerate(lines))
    assert all(line.value["a"] == i for i, line in enumerate(lines) if line.value)
