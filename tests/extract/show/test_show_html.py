"""Samples as one HTML file: escaped, self-contained, every token told."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from dflash_offline import UserError
from dflash_offline.extract.show.html import require_page_path, show_html
from dflash_offline.extract.show.tokens import visible
from dflash_offline.extract.targets.facts import load_tokenizer

GRIN = "\U0001f600"
INJECTION = '</pre></mark><script>alert(1)</script><img src=x onerror=alert(2)>" onmouseover="alert(3)\' &lt; &#60;'
TAGS = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "dl", "dt", "dd", "input", "label", "main"}
TAGS |= {"section", "pre", "mark", "span", "b", "u", "i"}
EMPTY = {"meta", "input"}


class Page(HTMLParser):
    """The file as a browser takes it: its tags, the tokens of each <pre> of a sample, and what is marked."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.texts: dict[str, str] = {}
        self.tokens: list[tuple[str, str, bool, bool]] = []  # title, text, marked, in the tail
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS, tag
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in EMPTY:
            self.open.append(tag)
        if (title := dict(attrs).get("title")) is not None:
            self.tokens.append((title, "", "mark" in self.open, "u" in self.open))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        where = self.open[-1] if self.open else ""
        self.texts[where] = self.texts.get(where, "") + data
        if "section" in self.open and "pre" in self.open and where in ("span", "b"):
            title, text, is_marked, is_tail = self.tokens[-1]
            self.tokens[-1] = (title, text + data, is_marked, is_tail)


def written(folder: Path, count: int = 5) -> tuple[Page, str]:
    path = folder.parent / "show.html"
    show_html(folder, count, path)
    page = Page(path)
    assert page.open == []
    return page, path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tiny() -> Any:
    return load_tokenizer("tiny")


def test_every_token_is_told_and_the_trained_ones_are_marked(halves_target: Path, spelled: Any, make_data: Any) -> None:
    tokenizer = load_tokenizer(str(halves_target))
    sample = spelled(
        tokenizer,
        ("<|im_start|>user\nhi \u05e9\u05dc\u05d5\u05dd<|im_end|>\n<|im_start|>assistant\n", False),
        (f"a{GRIN} e\u0301 \u0645\u0631<|im_end|>", True),
        ("\n", False),
    )
    page, _ = written(make_data([sample], halves_target))
    told: list[int] = []
    for title, text, is_marked, is_tail in page.tokens:
        match = re.fullmatch(r'token ([\d,]+)(?:-([\d,]+))?, id ([\d ]+), (not )?trained on: "(.*)"', title)
        assert match, title
        ids = [int(token) for token in match[3].split()]
        first, last = int(match[1]), int(match[2] or match[1])
        assert (first, last) == (len(told), len(told) + len(ids) - 1)
        assert [sample["mask"][place] for place in range(first, last + 1)] == [is_marked] * len(ids)
        assert (match[4] is None) == is_marked
        assert text.replace("\n", "") == match[5]
        assert is_tail == (first >= len(sample["ids"]) - 2)
        told += ids
    assert told == sample["ids"]
    trained = "".join(text for _, text, is_marked, _ in page.tokens if is_marked)
    assert trained == visible(tokenizer.decode([i for i, is_on in zip(told, sample["mask"]) if is_on]))
    assert f"a{GRIN}" in [text for _, text, _, _ in page.tokens]


def test_nothing_of_a_sample_becomes_html(tiny: Any, spelled: Any, make_data: Any) -> None:
    sample = spelled(tiny, (INJECTION, False), (f"{INJECTION}<|end|>", True), task=INJECTION, source=INJECTION)
    page, text = written(make_data([sample]))  # Page refuses any tag that is not ours
    assert {name for _, name, _ in page.attributes} <= {"charset", "http-equiv", "content", "name", "lang"} | {
        *("class", "title", "type", "id", "for")
    }
    assert "<script" not in text
    assert "<img" not in text
    assert "".join(shown for _, shown, _, _ in page.tokens) == f"{INJECTION * 2}<|end|>"
    assert INJECTION in page.texts["dd"]


def test_nothing_is_loaded_and_no_control_character_is_left(tiny: Any, spelled: Any, make_data: Any) -> None:
    hostile = "".join(map(chr, [*range(32), 127, *range(128, 160), 0x202E, 0x2066, 0x2028, 0xFEFF]))
    sample = spelled(tiny, ("<|user|>", False), (f"{hostile} see https://a.test/x.png<|end|>", True), task=hostile)
    page, text = written(make_data([sample]))
    rules = [value for _, name, value in page.attributes if name == "content"]
    assert "default-src 'none'; style-src 'unsafe-inline'" in rules
    assert {name for _, name, _ in page.attributes}.isdisjoint({"src", "href", "srcset", "style", "action"})
    assert re.findall(r"url\(|@import", text) == []
    assert re.findall("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\u202e\u2066\u2028\ufeff]", text) == []


def test_a_very_long_run_loses_its_middle(tiny: Any, spelled: Any, make_data: Any) -> None:
    rest = list(range(5, 105))
    sample = {"ids": rest * 60, "mask": [False] * 10 + [True] * 5990}
    page, _ = written(make_data([sample]))
    (count,) = re.findall(r"([\d,]+) tokens, all trained on, are not shown", page.texts["i"])
    shown = sum(len(re.findall(r"id ([\d ]+),", title)[0].split()) for title, _, _, _ in page.tokens)
    assert int(count.replace(",", "")) + shown == 6000


def test_a_file_that_cannot_be_written_is_a_user_error(tiny: Any, spelled: Any, make_data: Any) -> None:
    folder = make_data([spelled(tiny, ("<|user|>", False), ("yes", True))])
    with pytest.raises(UserError, match="its folder is not there"):
        show_html(folder, 1, folder / "missing" / "show.html")


def test_a_place_for_the_page_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    data = tmp_path / "data"
    earlier, notes = tmp_path / "earlier.html", tmp_path / "notes.html"
    earlier.write_text("<!doctype html>\n<html>")
    notes.write_text("mine")
    for good in (tmp_path / "new.html", earlier, data / "show.html"):
        require_page_path(good, data)
    bad = {
        tmp_path: "is a folder",
        data: "is a folder",
        notes: "is there and is no page",
        notes / "x.html": "its folder is not there",
        data / "deep" / "x.html": "its folder is not there",
        Path("/proc/x.html"): "failed",
        Path("/dev/null"): "is there and is no page",
        tmp_path / ("x" * 300): "too long",
    }
    for path, told in bad.items():
        with pytest.raises((UserError, OSError), match=rf"(?i){told}"):
            require_page_path(path, data)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["earlier.html", "notes.html"]
