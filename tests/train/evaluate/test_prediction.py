"""What the offline exam foretells of decoding: by its two results, on the tiny target, and drawn."""

import json
import shutil

import numpy as np
import pytest
from dflash_offline.extract.questions import read_lines, read_questions
from dflash_offline.train.evaluate.config import EvaluateConfig
from dflash_offline.train.evaluate.evaluate import evaluate
from dflash_offline.train.evaluate.prediction import Prediction, foretold
from dflash_offline.train.plots import PREDICTION_NAME, prediction_figure

TOKENS = 24


def kept(name: str, tokens: int, cycles: int, digest: str = "ab") -> dict:
    return {"name": name, "prompt_sha256": digest, "num_tokens": tokens, "num_cycles": cycles}


def exam(mode: str, *prompts: dict, **changes) -> dict:
    return {"mode": mode, "step": 4, "definitions": {}, "per_prompt": list(prompts)} | changes


OFFLINE = exam("offline", kept("sample 1", 6, 2), kept("sample 2", 4, 4), kept("sample 2, answer 2", 9, 3))
DECODED = exam("decoded", kept("sample 1", 10, 4), kept("sample 2", 4, 4), kept("sample 3", 9, 3))


@pytest.mark.parametrize("is_offline_last", [False, True])
def test_the_answers_that_both_have_give_both_means(tmp_path, is_offline_last):
    other, name = (DECODED, "evaluation.json") if is_offline_last else (OFFLINE, "evaluation-offline.json")
    (tmp_path / name).write_text(json.dumps(other))
    found = foretold(tmp_path, OFFLINE if is_offline_last else DECODED)
    assert isinstance(found, Prediction)
    assert found.points == (("sample 1", 3.0, 2.5), ("sample 2", 1.0, 1.0))
    assert (found.offline, found.decoded) == (2.0, 1.75)
    assert found.relative_error == pytest.approx(2.0 / 1.75 - 1)
    assert "2.000 foretells 1.750 decoded, off by +14.3 %" in found.text()
    assert found.as_dict()["relative_error"] == found.relative_error


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"step": 5}, "offline is of step 5, decoded of step 4"),
        ({"mode": "decoded"}, "both are decoded"),
        ({"per_prompt": [kept("sample 1", 6, 2, "cd")]}, "no whole answer to the same prompts"),
        ({"per_prompt": None}, "an earlier version wrote it"),
        ({"definitions": None, "mode": None}, "mode"),
    ],
)
def test_what_cannot_be_compared_is_said_and_no_error(tmp_path, changes, said):
    other = {key: value for key, value in (OFFLINE | changes).items() if value is not None}
    (tmp_path / "evaluation-offline.json").write_text(json.dumps(other))
    found = foretold(tmp_path, DECODED)
    assert isinstance(found, str)
    assert found.startswith("not compared with evaluation-offline.json: ")
    assert said in found


def test_answers_that_decoding_may_not_give_whole_are_left_out(tmp_path):
    (tmp_path / "evaluation-offline.json").write_text(json.dumps(OFFLINE))
    found = foretold(tmp_path, DECODED | {"max_new_tokens": 7})  # the first token, and the six of the cycles
    assert isinstance(found, Prediction)
    assert len(found.points) == 2
    found = foretold(tmp_path, DECODED | {"max_new_tokens": 6})
    assert isinstance(found, Prediction)
    assert found.points == (("sample 2", 1.0, 1.0),)


def test_sampled_answers_are_not_foretold(tmp_path):
    (tmp_path / "evaluation.json").write_text(json.dumps(DECODED | {"temperature": 0.7}))
    assert "temperature 0.7" in str(foretold(tmp_path, OFFLINE))


def test_without_the_other_result_there_is_nothing_to_say(tmp_path):
    assert foretold(tmp_path, OFFLINE) is None


def test_the_picture_has_a_point_for_each_answer_and_one_for_the_means():
    (axes,) = prediction_figure([("a", 3.0, 2.5), ("b", 1.0, 1.0)]).axes
    answers, means = axes.collections
    assert np.asarray(answers.get_offsets()).tolist() == [[2.5, 3.0], [1.0, 1.0]]
    assert np.asarray(means.get_offsets()).tolist() == [[1.75, 2.0]]
    (line,) = axes.lines
    assert np.asarray(line.get_xydata()).tolist() == [[1.0, 1.0], [3.0, 3.0]]
    assert "+14.3 %" in str(means.get_label())


def test_offline_foretells_decoding_of_the_targets_own_answers(tiny_run, tmp_path):
    """Within 3 %: the held-out answers are those that the target writes greedily."""
    run_dir = tmp_path / "run"
    shutil.copytree(tiny_run.run_dir, run_dir)

    def open_target(name, device, dtype):
        return tiny_run.target

    def examined(**settings):
        config = EvaluateConfig(device="cpu", **settings)
        return evaluate(run_dir, config, open_target, read_questions, read_lines)

    decoded = examined(max_new_tokens=TOKENS)
    assert decoded.prediction is None
    assert not (run_dir / PREDICTION_NAME).exists()
    offline = examined(offline=True)
    found = json.loads((run_dir / "evaluation-offline.json").read_text())["offline_vs_decoded"]
    assert found["num_prompts"] == 6
    assert found["decoded"] == pytest.approx(decoded.acceptance.acceptance_length)
    assert abs(found["relative_error"]) < 0.03
    assert str(run_dir / PREDICTION_NAME) in offline.saved
    assert (run_dir / PREDICTION_NAME).read_bytes().startswith(b"\x89PNG")
    assert f"foretells {found['decoded']:.3f} decoded" in offline.text()
    partly = examined(offline=True, limit=2)
    assert isinstance(partly.prediction, Prediction)
    assert len(partly.prediction.points) == 2
    others = examined(prompts="standard", limit=1, max_new_tokens=2)
    assert others.prediction is None, "prompts of a file were never walked"
