"""Lines of public benchmarks: which one a line is of, what is asked, and what fits none or two."""

import json

import pytest
from dflash_offline.train.evaluate.formats import FORMATS, REASON, question_of
from dflash_offline.train.evaluate.prompts import PACKAGED

LINES = {
    "gsm8k": {"question": "How many?", "answer": "2 + 2 = 4\n#### 4"},
    "question": {"question": "How many?", "answer": "4"},
    "math-500": {
        "problem": "Find x.",
        "solution": "...",
        "answer": "3",
        "subject": "Algebra",
        "level": 2,
        "unique_id": "test/algebra/1.json",
    },
    "problem": {"id": 60, "problem": "Find m + n.", "answer": "204", "url": "u", "year": "2024"},
    "humaneval": {
        "task_id": "HumanEval/0",
        "prompt": "def f(x):\n",
        "canonical_solution": "    return x\n",
        "test": "assert f(1) == 1",
        "entry_point": "f",
    },
    "mbpp": {"task_id": 11, "text": "Write f.", "code": "def f(): ...", "test_list": ["assert f() == 1"]},
    "mt-bench": {"category": "writing", "prompt": ["Write.", "Again."], "prompt_id": 1, "reference": []},
    "turns": {"question_id": 81, "category": "roleplay", "turns": ["Be an owl.", "Now a fox."]},
    "livecodebench": {"question_content": "Add.", "starter_code": "class S:", "question_id": "1873_A", "platform": "x"},
    "alpaca": {"instruction": "Shorten.", "input": "A long text.", "output": "Text."},
    "gpqa": {
        "Question": "Which?",
        "Correct Answer": "gold",
        "Incorrect Answer 1": "iron",
        "Incorrect Answer 2": "tin",
        "Incorrect Answer 3": "lead",
        "Record ID": "rec1",
    },
    "chat": {"messages": [{"role": "user", "content": "Hi."}], "id": 3},
}


def asked_text(line, stem="exam"):
    return question_of(line, stem).asked["messages"][0]["content"]


def test_every_format_of_the_table_is_tried_here():
    assert {one.name for one in FORMATS} | {"chat", "alpaca"} == set(LINES)


@pytest.mark.parametrize("name", LINES)
def test_a_line_is_of_its_benchmark_and_of_no_other(name):
    found = question_of(LINES[name], "exam")
    assert found.format == name
    generic = {"question": "exam", "problem": "exam", "chat": "exam", "mt-bench": "writing", "turns": "roleplay"}
    assert found.task == generic.get(name, name)


def test_math_is_asked_for_its_steps_and_a_box():
    assert asked_text(LINES["gsm8k"]) == "How many?" + REASON
    assert asked_text(LINES["math-500"]) == "Find x." + REASON
    assert REASON.endswith("put your final answer within \\boxed{}.")


def test_programs_are_asked_with_their_code_and_tests():
    assert "```python\ndef f(x):\n\n```" in asked_text(LINES["humaneval"])
    assert asked_text(LINES["mbpp"]).endswith("pass these tests:\nassert f() == 1")
    sanitized = {"task_id": 2, "prompt": "Write f.", "test_list": ["assert f() == 1"], "test_imports": []}
    assert asked_text(sanitized) == asked_text(LINES["mbpp"])
    assert asked_text(LINES["livecodebench"]).endswith("Add.\n\nStart from this code:\n```python\nclass S:\n```")
    assert asked_text(LINES["livecodebench"] | {"starter_code": ""}).endswith("following problem.\n\nAdd.")


def test_choices_are_in_an_order_that_is_always_the_same_and_not_the_files():
    text = asked_text(LINES["gpqa"])
    letters = {line[3:]: line[0] for line in text.splitlines() if line[1:3] == ") "}
    assert set(letters) == {"gold", "iron", "tin", "lead"}
    first = [asked_text(LINES["gpqa"] | {"Question": f"Which {i}?"}).index("gold") for i in range(40)]
    assert len(set(first)) > 2, "the right one stands anywhere"
    swapped = LINES["gpqa"] | {"Incorrect Answer 1": "lead", "Incorrect Answer 3": "iron"}
    assert asked_text(swapped) == text


@pytest.mark.parametrize("name", ["mt-bench", "turns"])
def test_later_turns_wait_for_an_answer(name):
    found = question_of(LINES[name], "exam")
    turns = LINES[name].get("turns") or LINES[name]["prompt"]
    assert found.asked == {"messages": [{"role": "user", "content": turns[0]}]}
    assert found.follow_ups == tuple(turns[1:])


def test_blank_later_turns_are_kept_to_be_named_and_a_blank_first_one_is_refused():
    assert question_of({"turns": ["a", None, " "]}, "exam").follow_ups == ("", " ")
    assert question_of(LINES["mt-bench"] | {"prompt": ["a", None]}, "exam").follow_ups == ("",)
    for turns in (["", "b"], [None, "b"]):
        with pytest.raises(ValueError, match="begins with no text"):
            question_of({"turns": turns}, "exam")


def test_problems_are_known_by_capital_keys_too():
    line = {"ID": "2024-I-4", "Problem": "Find m + n.", "Solution": "...", "Answer": 116}
    found = question_of(line, "aime24")
    assert (found.format, found.task, found.label) == ("problem", "aime24", "2024-I-4")
    assert asked_text(line) == asked_text(LINES["problem"])


@pytest.mark.parametrize("answer, text", [(204, "204"), (0.5, "0.5"), ("204", "204")])
def test_an_answer_beside_a_chat_may_be_a_number(answer, text):
    assert question_of({"prompt": "Hi.", "answer": answer}, "exam").answer == text


def test_what_stands_beside_a_question_is_kept():
    line = LINES["gsm8k"] | {"system": "be short", "chat_template_kwargs": {"enable_thinking": False}}
    asked = question_of(line, "exam").asked
    assert (asked["system"], asked["chat_template_kwargs"]) == ("be short", {"enable_thinking": False})


def test_a_line_of_prepare_is_handed_on_whole():
    line = {"prompt": "Hi.", "answer": "Ho.", "tools": [], "task": "greet"}
    found = question_of(line, "exam")
    assert (found.asked, found.task, found.answer) == (line, "greet", "Ho.")
    assert question_of({"nothing": 1}, "exam").format == "chat", "its reader says what it lacks"


def test_the_words_of_a_line_name_its_task():
    assert question_of(LINES["gsm8k"] | {"task": "sums"}, "exam").task == "sums"
    assert question_of({"prompt": "Hi.", "category": "smalltalk"}, "exam").task == "smalltalk"
    assert question_of(LINES["problem"], "aime25").task == "aime25"
    assert question_of(LINES["gsm8k"] | {"task": None}, "exam").task == "gsm8k"
    assert question_of({"prompt": "Hi.", "task": " two\nlines "}, "exam").task == "two lines"


@pytest.mark.parametrize(
    "name, label",
    [("humaneval", "HumanEval/0"), ("turns", "81"), ("math-500", "test/algebra/1.json"), ("gpqa", "rec1")],
)
def test_the_benchmarks_own_ids_are_names(name, label):
    assert question_of(LINES[name], "exam").label == label


@pytest.mark.parametrize(
    "line, said",
    [
        (LINES["problem"] | LINES["gsm8k"], "fits 2 formats, gsm8k and problem"),
        (LINES["gsm8k"] | LINES["chat"], "fits 2 formats, gsm8k and chat"),
        (LINES["turns"] | {"prompt": "Hi."}, "fits 2 formats, turns and chat"),
        (LINES["humaneval"] | {"test_list": ["assert f(1)"]}, "fits 2 formats, humaneval and mbpp"),
        (LINES["gsm8k"] | {"question": 7}, "'question' is 7, not a text"),
        (LINES["gsm8k"] | {"question": " "}, "'question' is ' ', not a text"),
        (LINES["turns"] | {"turns": []}, r"'turns' is \[\], and begins with no text"),
        (LINES["turns"] | {"turns": ["a", 2]}, "not a list of texts"),
        (LINES["mbpp"] | {"test_list": "assert"}, "'test_list' is 'assert', not a list of texts"),
        ({"prompt": "Hi.", "answer": [4]}, "'answer' is a list, neither a text nor a number"),
        ({"prompt": "Hi.", "answer": True}, "'answer' is a bool, neither a text nor a number"),
    ],
)
def test_what_fits_two_formats_or_is_broken_is_refused(line, said):
    with pytest.raises(ValueError, match=said):
        question_of(line, "exam")


def test_a_question_about_something_else_is_no_sum():
    for key in ("choices", "context"):
        assert question_of(LINES["question"] | {key: ["a"]}, "exam").format == "chat"


def test_the_packaged_prompts_are_of_many_tasks_and_all_different():
    lines = [json.loads(line) for line in PACKAGED.read_text(encoding="utf-8").splitlines()]
    found = [question_of(line, "standard") for line in lines]
    assert len(found) == len({one.label for one in found}) == 48
    tasks = {one.task for one in found}
    assert tasks == {"maths", "code", "chat", "writing", "extraction", "reasoning", "multilingual", "summary"}
    assert {one.format for one in found} == {"turns"}
    assert sum(bool(one.follow_ups) for one in found) >= 6
    assert len({json.dumps(one.asked) for one in found}) == 48
