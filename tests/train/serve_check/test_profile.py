"""Profiles, their distance, and the diagnosis that is made of them."""

import pytest
from dflash_offline.train.serve_check.diagnosis import diagnose
from dflash_offline.train.serve_check.profile import Profile, distance, relative_error


def test_a_profile_counts_cycles_by_their_accepted_drafts() -> None:
    profile = Profile.of([0, 3, 1, 3], 3)
    assert profile == Profile(4, (3, 2, 2))
    assert profile.acceptance_length == 1 + (0 + 3 + 1 + 3) / 4
    assert profile.shares == [0.75, 0.5, 0.5]
    assert Profile.of([], 3).acceptance_length == 1.0


def test_the_distance_sees_a_position_that_the_length_does_not() -> None:
    ours, engine = Profile(100, (80, 40)), Profile(100, (60, 60))
    assert relative_error(engine, ours) == 0
    assert distance(engine, ours) == pytest.approx(0.2)
    assert distance(ours, ours) == 0


ENGINE, OURS = Profile(100, (50, 20)), Profile(100, (90, 80))
RIGHT, NEAR, FAR = Profile(100, (50, 20)), Profile(100, (51, 21)), Profile(100, (10, 0))


def test_what_fits_is_named_the_nearest_first() -> None:
    found = diagnose(ENGINE, OURS, {"far": FAR, "near": NEAR, "right": RIGHT}, 0.02)
    assert [hypothesis.fact for hypothesis in found.named] == ["right", "near"]
    assert [hypothesis.fact for hypothesis in found.hypotheses] == ["right", "near", "far"]
    text = "\n".join(found.text())
    assert "cause      right" in text
    assert "as well as near" in text
    assert "far" not in text


def test_where_nothing_fits_that_is_said() -> None:
    found = diagnose(ENGINE, OURS, {"far": FAR}, 0.02)
    assert found.named == ()
    assert "unknown: none of 1 altered facts" in "\n".join(found.text())
    assert "unknown" in diagnose(ENGINE, OURS, {}, 0.02).text()[0]


def test_an_altered_fact_that_changes_nothing_explains_nothing() -> None:
    """Within the tolerance, but no nearer than our own profile is."""
    ours = Profile(100, (51, 21))
    assert diagnose(ENGINE, ours, {"idle": ours, "right": RIGHT}, 0.05).named[0].fact == "right"
    assert diagnose(ENGINE, ours, {"idle": ours}, 0.05).named == ()
