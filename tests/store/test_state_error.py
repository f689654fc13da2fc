"""Counted errors against the errors themselves."""

import json
from pathlib import Path

import numpy as np
import pytest
from dflash_offline import UserError
from dflash_offline.store import int8
from dflash_offline.store.state_error import Measurement, StateErrors, error_text, measured_error, write_errors


def pairs(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """States [2, count, 16] u16 before and after, at relative distances of 1e-6 to 1e-1, some of them equal."""
    draw = np.random.default_rng(seed)
    before = draw.normal(size=(2, count, 16)).astype(np.float32)
    noise = draw.normal(size=before.shape) * 10 ** draw.uniform(-3, -1, size=(2, count, 1))
    noise[:, ::7] = 0
    return int8.as_bfloat16(before), int8.as_bfloat16((before * (1 + noise)).astype(np.float32))


def slow(before: np.ndarray, after: np.ndarray) -> list[float]:
    """The relative L2 error of each state, one at a time."""
    errors = []
    for old, new in zip(before.reshape(-1, 16), after.reshape(-1, 16)):
        a, b = int8.as_float(old).astype(float), int8.as_float(new).astype(float)
        errors.append(float(np.linalg.norm(b - a) / np.linalg.norm(a)))
    return errors


@pytest.mark.parametrize("count", [1, 2, 501])
def test_median_and_worst_over_several_additions(count: int) -> None:
    errors, merged, expected = StateErrors(), StateErrors(), []
    for seed in range(3):
        before, after = pairs(seed, count)
        errors.add(before, after)
        own = StateErrors()
        own.add(before, after)
        merged.merge(StateErrors.from_json(json.loads(json.dumps(own.as_json()))))
        expected += slow(before, after)
    assert errors.num_states == len(expected) == 6 * count
    assert errors.worst == pytest.approx(max(expected), rel=1e-5)
    lower = float(np.quantile(expected, 0.5, method="inverted_cdf"))
    assert errors.median == pytest.approx(lower, rel=0.006, abs=1e-8)
    assert merged.as_json() == errors.as_json()


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_states_of_any_size(scale: float) -> None:
    before, after = (int8.as_bfloat16(int8.as_float(bits) * np.float32(scale)) for bits in pairs(2, 50))
    errors = StateErrors()
    with np.errstate(all="raise", under="ignore"):
        errors.add(before, after)
    expected = slow(before, after)
    assert errors.worst == pytest.approx(max(expected), rel=1e-5)
    assert errors.median == pytest.approx(float(np.quantile(expected, 0.5, method="inverted_cdf")), rel=0.006)


def test_equal_states_have_no_error() -> None:
    errors = StateErrors()
    before, _ = pairs(0, 5)
    errors.add(before, before)
    assert (errors.num_states, errors.median, errors.worst) == (10, 0.0, 0.0)
    assert StateErrors().median == 0.0


def test_the_file_comes_back_and_a_changed_byte_is_found(tmp_path: Path) -> None:
    errors = StateErrors()
    errors.add(*pairs(1, 40))
    measurement = Measurement(errors=errors, num_all=80, codecs={"int8:16"}, against={"raw"})
    write_errors(tmp_path, measurement)
    found = measured_error(tmp_path)
    assert found is not None
    assert found == {
        "median": errors.median,
        "worst": errors.worst,
        "num_states": 80,
        "num_all": 80,
        "codecs": ["int8:16"],
        "against": ["raw"],
        "is_own": True,
        "unmeasured": [],
        "before": [],
    }
    assert error_text(found).startswith("of int8:16 against raw, relative L2 of 80 states: median ")
    measurement.num_all, measurement.unmeasured = 8_000, {"plan 12 (int8:4)"}
    told = error_text(measurement.facts())
    assert "relative L2 of 80 states (1.00% of them): median " in told
    assert told.endswith("; not measured: plan 12 (int8:4)")
    path = tmp_path / "state_errors.json"
    whole = path.read_bytes()
    for place in range(0, len(whole), 9):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(UserError, match="state_errors.json"):
            measured_error(tmp_path)
    path.write_bytes(whole[:-20])
    with pytest.raises(UserError, match="is damaged"):
        measured_error(tmp_path)
