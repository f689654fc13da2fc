"""Answers, tokens and the report: pure comparisons of what the engine gave with ours."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dflash_offline.train.serve_check.diagnosis import diagnose
from dflash_offline.train.serve_check.outputs import Answers, parting
from dflash_offline.train.serve_check.profile import Profile
from dflash_offline.train.serve_check.report import Measured, ServeCheckReport
from dflash_offline.train.serve_check.tokens import TokenCheck, check_tokens, other_ids

OURS = Profile(100, (90, 80))


@pytest.fixture(scope="module")
def target(lab: Any) -> Any:
    torch.set_num_threads(1)
    return lab.make_target(2)


def test_equal_answers_do_not_part(target: Any) -> None:
    assert parting(target, (0,), ("a", [3, 4]), [5, 6], [5, 6]) is None


def test_answers_part_with_the_gap_of_the_two_logits(target: Any) -> None:
    session = target.open((0,))
    logits = session.forward(torch.tensor([3, 4, 5]))[0][-1]
    best, second = logits.topk(2).indices.tolist()
    found = parting(target, (0,), ("a", [3, 4]), [5, best, 7], [5, second, 8])
    assert found is not None
    assert (found.position, found.ours, found.engine) == (1, best, second)
    assert found.logit_gap == pytest.approx(float(logits[best] - logits[second]), abs=1e-5)
    assert not found.is_tie
    assert "answer token 1" in found.text()


def test_a_gap_that_rounding_moves_is_a_tie(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(parting.__globals__["TIE_GAPS"], "float32", 1e9)
    found = parting(target, (0,), ("a", [3, 4]), [5, 6], [5, 7])
    assert found is not None
    assert found.is_tie
    assert "near tie" in found.text()
    assert Answers(3, (found,)).agree
    assert (Answers(3, (found,)).num_equal, Answers(3, (found,)).num_ties) == (2, 1)


@pytest.mark.parametrize("ours, engine, words", [([5], [5, 6], "the engine goes on"), ([5, 6], [5], "ended before")])
def test_an_answer_that_ends_elsewhere_is_no_tie(ours: list[int], engine: list[int], words: str, target: Any) -> None:
    found = parting(target, (0,), ("a", [3, 4]), ours, engine)
    assert found is not None
    assert found.logit_gap is None
    assert not Answers(1, (found,)).agree
    assert words in found.text()


def test_the_first_other_token_is_shown() -> None:
    assert other_ids("a", "template", [1, 2, 3], [1, 2, 3]) is None
    found = other_ids("a", "template", [1, 2, 3], [1, 2])
    assert found is not None
    assert (found.position, found.ours, found.engine) == (2, (3,), ())
    longer = other_ids("a", "tokenizer", [1, *range(20)], [1, 9, *range(20)])
    assert longer is not None
    assert longer.ours == (0, 1, 2, 3, 4, 5)


def test_chats_and_texts_are_counted_and_each_kind_shows_its_first() -> None:
    engine: Any = SimpleNamespace(chat_ids=lambda server, chat: [1, 2], text_ids=lambda server, text: None)
    chats: list[Any] = [("a", {}, [1, 2]), ("b", {}, [1, 3]), ("c", {}, [4])]
    found = check_tokens(engine, None, chats, [("a", "text")], lambda text: [7])  # type: ignore[arg-type]
    assert (found.num_chats, found.num_texts) == (3, 0), "an engine that cannot be asked for texts is not counted"
    assert [(other.prompt, other.kind) for other in found.others] == [("b", "template")]


def report_of(engine: Profile, **changes: Any) -> ServeCheckReport:
    altered = {"mask token: 0 (pad), not 4": engine}
    parts: dict[str, Any] = {
        "engine": engine,
        "ours": OURS,
        "answers": Answers(4, ()),
        "tokens": TokenCheck(2, 4, ()),
        "diagnosis": diagnose(engine, OURS, altered, 0.02) if engine != OURS else None,
    }
    settings: dict[str, Any] = dict.fromkeys(("engine_package", "dtype", "device", "prompts", "max_new_tokens"), "x")
    return ServeCheckReport(
        run="run", step=3, folder="folder", settings=settings, tolerance=0.02, measured=Measured(**parts | changes)
    )


def test_a_report_that_agrees_says_so() -> None:
    report = report_of(OURS)
    assert report.agrees
    assert report.as_dict()["agrees"] is True
    assert report.verdict() == "the engine does what training measured"
    assert "               1   0.900          0.900       +0.000" in report.text()


def test_a_report_names_what_differs() -> None:
    engine = Profile(100, (50, 20))
    report = report_of(engine)
    assert not report.agrees
    assert report.verdict() == "NOT the same: acceptance differs"
    assert "cause      mask token: 0 (pad), not 4" in report.text()
    assert report.as_dict()["diagnosis"]["named"] == ["mask token: 0 (pad), not 4"]
    assert report.as_dict()["relative_error"] == pytest.approx(1.0 / 2.7)


def test_equal_acceptance_does_not_hide_other_tokens_or_answers(target: Any) -> None:
    other = other_ids("a", "template", [1], [2])
    assert other is not None
    assert report_of(OURS, tokens=TokenCheck(1, 1, (other,))).verdict() == "NOT the same: the template differs"
    found = parting(target, (0,), ("a", [3, 4]), [5], [5, 6])
    assert found is not None
    assert report_of(OURS, answers=Answers(4, (found,))).verdict() == "NOT the same: outputs differ"


def test_a_position_apart_is_seen_where_the_lengths_are_equal() -> None:
    assert not report_of(Profile(100, (95, 75))).agrees
