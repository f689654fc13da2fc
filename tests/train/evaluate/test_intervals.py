"""Confidence intervals: how often they hold what they should, and the bootstrap against its plain form."""

import math

import numpy as np
import pytest
from dflash_offline.train.evaluate import intervals
from dflash_offline.train.evaluate.acceptance import Acceptance, AnswerCycles, judge
from dflash_offline.train.evaluate.intervals import (
    LEVEL,
    bootstrap,
    expanded_tail,
    interval_text,
    ratio_interval,
    student_quantile,
)

BLOCK = 8
EASE = np.array([0.2, 0.6, 0.9])  # a draft is right with this chance; every prompt has one of them
CYCLES = np.array([30, 15, 5])  # hard prompts take more cycles, so the two means differ
EXPECTED = np.array([sum(p**k for k in range(BLOCK)) for p in EASE])  # tokens of a cycle


def simulated(rng: np.random.Generator, num_prompts: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and cycles of prompts [n] of random ease."""
    kinds = rng.integers(0, len(EASE), num_prompts)
    tokens = [
        np.minimum(rng.geometric(1 - EASE[kind], CYCLES[kind]), BLOCK).sum()  # the first refused draft, or none
        for kind in kinds
    ]
    return np.array(tokens), CYCLES[kinds]


@pytest.mark.parametrize("num_prompts", [8, 24])
def test_the_intervals_hold_the_true_mean_as_often_as_they_say(num_prompts):
    trials = 400
    true = {"prompts": EXPECTED.mean(), "cycles": (EXPECTED * CYCLES).sum() / CYCLES.sum()}
    assert abs(true["prompts"] - true["cycles"]) > 1
    hits = dict.fromkeys(true, 0)
    rng = np.random.default_rng(3)
    for _ in range(trials):
        tokens, cycles = simulated(rng, num_prompts)
        found = {"prompts": (tokens / cycles, np.ones(num_prompts)), "cycles": (tokens, cycles)}
        for name, sums in found.items():
            interval = ratio_interval(*sums)
            assert interval is not None
            hits[name] += interval[0] <= true[name] <= interval[1]
    noise = math.sqrt(LEVEL * (1 - LEVEL) / trials)
    for name, count in hits.items():
        assert abs(count / trials - LEVEL) <= 4 * noise, (name, count / trials)


def test_the_bootstrap_is_its_plain_form(monkeypatch):
    tokens, cycles = simulated(np.random.default_rng(0), 7)
    rng, values = np.random.default_rng(intervals.SEED), []
    for _ in range(intervals.RESAMPLES):
        drawn = rng.integers(0, 7, 7)
        values.append(sum(tokens[i] for i in drawn) / sum(cycles[i] for i in drawn))
    tail = expanded_tail(7)
    expected = (float(np.quantile(values, tail)), float(np.quantile(values, 1 - tail)))
    assert ratio_interval(tokens, cycles) == pytest.approx(expected)
    monkeypatch.setattr(intervals, "DRAWN_AT_ONCE", 50)
    assert ratio_interval(tokens, cycles) == pytest.approx(expected), "in parts as in one"


@pytest.mark.parametrize(
    "degrees, quantile, error",
    [(1, 12.706, 0.12), (2, 4.303, 0.01), (3, 3.182, 0.002), (9, 2.262, 1e-4), (60, 2.0003, 1e-4)],
)
def test_the_quantiles_are_those_of_the_tables(degrees, quantile, error):
    assert student_quantile(degrees) == pytest.approx(quantile, rel=error)


def test_few_prompts_widen_the_tails_and_many_do_not():
    assert expanded_tail(4) < expanded_tail(10) < expanded_tail(1000) < 0.025
    assert expanded_tail(100_000) == pytest.approx(0.025, rel=1e-3)


def test_of_fewer_than_two_there_is_no_interval():
    assert bootstrap(lambda drawn: drawn.sum(1), 1) is None
    assert ratio_interval(np.array([]), np.array([])) is None
    assert interval_text(None) == "[no interval]"
    assert interval_text((1.0, 2.5)) == "[1.000, 2.500]"


def answer(lengths: list[int], **facts: str) -> AnswerCycles:
    return AnswerCycles(tuple(judge(length - 1, 99, BLOCK) for length in lengths), **facts)


def test_an_exam_has_an_interval_for_each_of_its_means():
    exam = Acceptance(tuple(answer(lengths) for lengths in ([8, 8], [1] * 6, [3, 5, 4], [2, 2])), BLOCK)
    found = exam.intervals
    means = np.array([8, 1, 4, 2])
    assert found["acceptance_length"] == pytest.approx(ratio_interval(means, np.ones(4)))
    sums = np.array([16, 6, 12, 4]), np.array([2, 6, 3, 2])
    assert found["acceptance_length_cycles"] == pytest.approx(ratio_interval(*sums))
    for name, interval in found.items():
        assert interval is not None
        assert interval[0] < getattr(exam, name) < interval[1]
    without = {"accepted_drafts": "acceptance_length", "accepted_drafts_cycles": "acceptance_length_cycles"}
    for name, with_bonus in without.items():
        assert np.array(found[name]) + 1 == pytest.approx(np.array(found[with_bonus])), "no cycle is cut here"


def test_the_turns_of_a_conversation_are_drawn_together():
    turns = [answer([8, 8], conversation="a"), answer([8, 7], conversation="a")]
    turns += [answer([1, 1], conversation="b"), answer([1, 2], conversation="b")]
    together = Acceptance(tuple(turns), BLOCK).intervals["acceptance_length"]
    assert together == pytest.approx(ratio_interval(np.array([15.5, 2.5]), np.array([2, 2])))
    assert Acceptance(tuple(turns[:2]), BLOCK).intervals["acceptance_length"] is None, "one conversation"
