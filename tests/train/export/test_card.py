"""The model card: facts of the target and the training, the measured acceptance as a table, how it is served."""

import pytest
from dflash_offline.train.export.card import CardFacts, converted_rows, exam_lines, model_card, shown_target

EXAM = {
    "acceptance_length": 3.25,
    "intervals": {"acceptance_length": [3.0, 3.5]},
    "num_measured": 9,
    "num_prompts": 10,
    "num_equal": 10,
    "max_new_tokens": 64,
    "definitions": {"acceptance_length": "tokens of one cycle, mean over prompts"},
    "by_task": {
        "maths": {"acceptance_length": 4.0, "intervals": {"acceptance_length": [3.5, 4.5]}, "num_measured": 5},
        "chat": {"acceptance_length": 2.5, "intervals": {"acceptance_length": None}, "num_measured": 4},
        "empty": {"acceptance_length": None, "num_measured": 0},
    },
}


def card(spec, shelf, **changes):
    facts = {
        "spec": spec,
        "target": shelf.TARGET | {"weights_sha256": "abc"},
        "dtype": "bfloat16",
        "training": converted_rows("zlab", "def"),
        "commands": ["vllm serve here"],
        "notes": ["no command for SGLang: it would not"],
    }
    return model_card(CardFacts(**(facts | changes)))


def test_it_says_what_the_drafter_is(tiny_spec, shelf) -> None:
    text = card(tiny_spec(tap_layers=(4, 0, 2), attention=shelf.LAYOUTS["mixed"]), shelf)
    assert "base_model: some/target" in text
    assert "| target | some/target, 6 layers, weights sha256 `abc` |" in text
    assert "| taps | outputs of layers 4, 0, 2 |" in text
    assert "| attention | 1 x sliding 64, 1 x full |" in text
    assert "| rotary embedding | plain, theta 10000, over the whole head |" in text
    assert "| converted from | a folder in the format of zlab, tensors sha256 `def` |" in text
    assert "```\nvllm serve here\n```" in text
    assert "No command for SGLang: it would not." in text
    assert "## Acceptance" not in text


def test_acceptance_is_a_table_by_task_with_intervals(tiny_spec, shelf) -> None:
    text = card(tiny_spec(), shelf, exam=EXAM)
    rows = [line for line in text.splitlines() if line.startswith("| ") and ("|" in line[2:])][-3:]
    assert rows == [
        "| all | 3.25 | 3.00 to 3.50 | 9 |",
        "| maths | 4.00 | 3.50 to 4.50 | 5 |",
        "| chat | 2.50 |  | 4 |",
    ]
    assert "Over 10 prompts, greedy, at most 64 new tokens; 10 of 10 outputs equal to plain decoding." in text


def test_a_sampled_exam_says_how_it_drew_and_compares_nothing() -> None:
    text = "\n".join(exam_lines(EXAM | {"decoding": "temperature 0.7, seed 3", "temperature": 0.7, "num_equal": None}))
    assert "Over 10 prompts, temperature 0.7, seed 3, at most 64 new tokens." in text
    assert "None" not in text


@pytest.mark.parametrize("exam", [None, EXAM | {"acceptance_length": None}])
def test_without_a_measurement_there_is_no_table(exam) -> None:
    assert exam_lines(exam) == []


def test_an_exam_of_the_time_before_intervals_is_shown_too() -> None:
    old = {name: value for name, value in EXAM.items() if name not in ("intervals", "by_task")}
    assert "| all | 3.25 |  | 9 |" in exam_lines(old)


def test_a_path_of_this_machine_is_not_shown() -> None:
    assert shown_target({"name": "/home/me/models/target"}) == "target"
    assert shown_target({}) == "its target"


def test_a_task_of_a_file_of_prompts_breaks_no_table() -> None:
    exam = EXAM | {"by_task": {"a\n|b\x1b[31m": EXAM["by_task"]["maths"]}}
    assert exam_lines(exam)[-2] == "| a \\|b [31m | 4.00 | 3.50 to 4.50 | 5 |"
