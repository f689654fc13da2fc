"""Statistics of cycles against counts made the slow way, and the ends of the text."""

import math

from dflash_offline.train.evaluate.acceptance import (
    DEFINITIONS,
    NOTHING,
    Acceptance,
    AnswerCycles,
    Cycle,
    acceptance_text,
    judge,
)
from hypothesis import given, settings
from hypothesis import strategies as st


def test_a_cycle_gives_its_drafts_and_the_bonus():
    assert judge(0, 10, 4) == Cycle(accepted=0, produced=1, is_refused=True)
    assert judge(2, 10, 4) == Cycle(accepted=2, produced=3, is_refused=True)
    assert judge(3, 10, 4) == Cycle(accepted=3, produced=4, is_refused=False)


def test_the_end_of_the_text_cuts_a_cycle():
    # two tokens left: the second accepted draft is the last token, so there is no bonus
    assert judge(3, 2, 4) == Cycle(accepted=2, produced=2, is_refused=False)
    assert judge(2, 2, 4) == Cycle(accepted=2, produced=2, is_refused=False)
    # the bonus is the last token, and the draft in its place was another one
    assert judge(1, 2, 4) == Cycle(accepted=1, produced=2, is_refused=True)
    assert judge(0, 1, 4) == Cycle(accepted=0, produced=1, is_refused=True)
    assert judge(1, 1, 4) == Cycle(accepted=1, produced=1, is_refused=False)


def test_the_two_means_differ_where_prompts_differ():
    short = AnswerCycles((judge(3, 9, 4), judge(3, 9, 4)))  # 4, 4
    long = AnswerCycles(tuple(judge(0, 9, 4) for _ in range(6)))  # six times 1
    exam = Acceptance((short, long), 4)
    assert exam.acceptance_length == (4 + 1) / 2
    assert exam.acceptance_length_cycles == (4 + 4 + 6) / 8
    assert exam.accepted_drafts == (3 + 0) / 2
    assert exam.accepted_drafts_cycles == 6 / 8
    assert (exam.num_prompts, exam.num_cycles, exam.num_tokens) == (2, 8, 14)
    assert exam.histogram == [6, 0, 0, 2]
    assert exam.per_position == [2 / 8, 2 / 8, 2 / 8]
    assert exam.per_position_conditional == [2 / 8, 1.0, 1.0]


def test_a_cut_cycle_says_nothing_about_later_drafts():
    exam = Acceptance((AnswerCycles((judge(3, 9, 4), judge(1, 1, 4))),), 4)
    assert exam.per_position == [1.0, 0.5, 0.5]
    assert exam.per_position_conditional == [1.0, 1.0, 1.0]
    assert exam.histogram == [1, 0, 0, 1]


def test_nothing_is_neither_zero_nor_nan():
    for exam in (Acceptance((), 4), Acceptance((AnswerCycles(()), AnswerCycles((), "list")), 4)):
        numbers = exam.as_dict()
        for name in ("acceptance_length", "acceptance_length_cycles", "accepted_drafts", "accepted_drafts_cycles"):
            assert numbers[name] is None
            assert numbers["intervals"][name] is None
        assert numbers["per_position"] == [None] * 3
        assert numbers["num_cycles"] == numbers["num_measured"] == 0
        assert NOTHING in acceptance_text(exam)


def test_an_answer_without_a_cycle_does_not_pull_the_mean():
    exam = Acceptance((AnswerCycles((judge(2, 9, 4),)), AnswerCycles(())), 4)
    assert exam.acceptance_length == 3
    assert exam.num_prompts == 1


def test_tasks_are_reported_apart():
    exam = Acceptance((AnswerCycles((judge(3, 9, 4),), "list"), AnswerCycles((judge(0, 9, 4),), "count")), 4)
    assert list(exam.by_task()) == ["count", "list"]
    assert exam.by_task()["list"].acceptance_length == 4
    assert "count" in acceptance_text(exam)
    assert Acceptance((AnswerCycles((judge(0, 9, 4),)),), 4).by_task() == {}


def test_the_text_shows_every_length_and_position():
    exam = Acceptance((AnswerCycles((judge(3, 9, 4), judge(0, 9, 4), judge(0, 9, 4))),), 4)
    lines = acceptance_text(exam).splitlines()
    bars = [line for line in lines if line.lstrip()[:1].isdigit() and "%" in line]
    assert [line.split()[0] for line in bars] == ["1", "2", "3", "4"]
    assert bars[0].count("#") == 40
    assert bars[3].count("#") == 20
    assert "66.7 %" in bars[0]


def test_a_single_prompt_is_shown_without_an_interval():
    single, other = AnswerCycles((judge(3, 9, 4), judge(0, 9, 4)), "list"), AnswerCycles((judge(0, 9, 4),), "count")
    assert "2.500 [no interval] tokens" in acceptance_text(Acceptance((single,), 4))
    lines = acceptance_text(Acceptance((single, other), 4)).splitlines()
    assert "1.750 [1.000, 2.500] tokens" in lines[0]
    assert "2.500 [no interval]" in next(line for line in lines if line.startswith("list"))


def test_what_is_kept_of_a_prompt_gives_its_numbers_again():
    cut = AnswerCycles((judge(3, 9, 4), judge(3, 2, 4)), "list", "made", "one, answer 2", "one", "ab")
    assert cut.as_dict(4) == {
        "name": "one, answer 2",
        "conversation": "one",
        "prompt_sha256": "ab",
        "task": "list",
        "origin": "made",
        "num_cycles": 2,
        "num_tokens": 6,
        "num_accepted": 5,
        "histogram": [0, 1, 0, 1],
    }
    assert AnswerCycles((), name="two").as_dict(4)["conversation"] == "two"


def test_every_number_has_a_definition():
    assert set(Acceptance((), 4).as_dict()) - {"block_size"} == set(DEFINITIONS)


one_cycle = st.tuples(st.integers(0, 5), st.integers(1, 9)).map(lambda pair: judge(pair[0], pair[1], 6))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(one_cycle, max_size=8), max_size=6))
def test_shares_equal_a_slow_count(prompts):
    exam = Acceptance(tuple(AnswerCycles(tuple(cycles)) for cycles in prompts), 6)
    # verdicts of the drafts of each cycle: True accepted, False refused, None never judged
    verdicts = []
    for cycle in exam.cycles:
        row = [True] * cycle.accepted + ([False] if cycle.is_refused else [])
        verdicts.append(row + [None] * (5 - len(row)))
    for k in range(1, 6):
        judged = [row[k - 1] for row in verdicts if row[k - 1] is not None]
        up_to = [all(row[:k]) for row in verdicts]
        for found, wanted in ((exam.per_position_conditional[k - 1], judged), (exam.per_position[k - 1], up_to)):
            assert (found is None) == (not wanted)
            assert found is None or math.isclose(found, sum(wanted) / len(wanted))
    shares = [share for share in exam.per_position if share is not None]
    assert math.isclose(sum(shares), exam.accepted_drafts_cycles or 0, abs_tol=1e-12)
    assert sum(exam.histogram) == exam.num_cycles
    assert sum(count * length for length, count in enumerate(exam.histogram, start=1)) == exam.num_tokens
    means = [sum(c.produced for c in cycles) / len(cycles) for cycles in prompts if cycles]
    assert exam.acceptance_length == (sum(means) / len(means) if means else None)
