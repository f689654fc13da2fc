"""The handed data cases, each with the outcome that expected.json asks for."""

import json
from pathlib import Path
from typing import Any

import pytest
from dflash_offline.extract.chats.chat import ChatRenderer
from dflash_offline.extract.config import PrepareConfig
from dflash_offline.extract.lines.shapes import Chat, understand
from dflash_offline.extract.prepare import prepare
from dflash_offline.extract.rejected import LINE, read_rejected
from dflash_offline.store.samples import SampleTable, eligible_anchors

TEMPLATES = {"c07": "tools", "c08": "drops-old-thoughts"}


class Prepared:
    """One case, prepared: what became of every line, by its id and by its number."""

    def __init__(self, folder: Path, source: Path, target: Path) -> None:
        self.target = target
        config = PrepareConfig(target=str(target), out=str(folder), max_length=512, min_trained=2, duplicates="keep")
        self.report = prepare(config, [str(source)])
        self.table = SampleTable(folder)
        self.left_out = read_rejected(folder, LINE)
        raw = source.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
        self.lines = {i: json.loads(line) for i, line in enumerate(raw, start=1) if line.strip()}

    def rows(self, name: str) -> list[int]:
        """Sample rows of the line with this id."""
        number = next(i for i, line in self.lines.items() if line.get("id") == name)
        return [row for row, line in enumerate(self.table.column("source_line")) if line == number]

    def reason(self, name: str) -> str | None:
        return next((str(entry["reason"]) for entry in self.left_out if entry["id"] == repr(name)), None)


@pytest.fixture(scope="module")
def prepared(cases: Path, case_target: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Prepared] = {}

    def make(case: str) -> Prepared:
        if case not in made:
            (source,) = (cases / "data").glob(f"{case}-*.jsonl")
            made[case] = Prepared(
                tmp_path_factory.mktemp(case) / "data", source, case_target(TEMPLATES.get(case, "plain"))
            )
        return made[case]

    return make


@pytest.mark.parametrize("case", ["c01", "c03", "c05", "c07", "c08", "c11", "c12"])
def test_every_line_is_used_or_named(prepared: Any, case: str) -> None:
    done = prepared(case)
    counts = done.report.counts
    assert counts["lines_in"] == len(done.lines)
    used = set(done.table.column("source_line").tolist())
    out = {entry["line"] for entry in done.left_out}
    assert used | out == set(done.lines)
    assert not used & out
    assert counts["lines_used"] == len(used)
    assert sum(counts["left_out"].values()) == len(out)
    assert (done.table.column("num_recorded") > 0).all()


@pytest.mark.parametrize("case", ["c01", "c03", "c05", "c07"])
def test_expected_outcomes(prepared: Any, cases: Path, case: str) -> None:
    done = prepared(case)
    for name, outcome in json.loads((cases / "expected.json").read_text())[case].items():
        rows, reason = done.rows(name), done.reason(name)
        assert bool(rows) != bool(reason), name
        if outcome != "either":
            assert bool(rows) == (outcome == "use"), (name, reason)


def test_c01_surrogate_rule(prepared: Any) -> None:
    done = prepared("c01")
    assert done.report.counts["replaced_surrogates"] == 1
    assert len(done.rows("lone-surrogate")) == 1


def test_c03_reasons_and_input(prepared: Any) -> None:
    done = prepared("c03")
    assert done.reason("both-keys-disagree") == "shapes disagree"
    assert done.reason("text-only") == "rendered chat in plain text"
    assert done.reason("unknown-shape") == "unknown shape"
    assert "2 and 4" in text(done, done.rows("instruction")[0])


def text(done: Prepared, row: int) -> str:
    from dflash_offline.extract.targets.hf import load_tokenizer

    return load_tokenizer(str(done.target)).decode(done.table.tokens(row)[0])


def test_c05_only_the_full_turn_is_trained_on(prepared: Any) -> None:
    done = prepared("c05")
    for name, answer in (("empty-then-full", "The second"), ("full-then-empty", "The first")):
        (row,) = done.rows(name)
        assert done.table.tokens(row)[1].sum() == len(f"{answer} answer is long enough to be used.") + 1


def test_c07_text_and_object_arguments_give_the_same_ids(prepared: Any, text_side: Any) -> None:
    done = prepared("c07")
    value = next(line for line in done.lines.values() if line["id"] == "arguments-as-string")
    as_object = json.loads(json.dumps(value))
    function = as_object["messages"][1]["tool_calls"][0]["function"]
    function["arguments"] = json.loads(function["arguments"])
    assert function != value["messages"][1]["tool_calls"][0]["function"]
    renderer = ChatRenderer(text_side("tools"), {})
    both = [understand(line).content for line in (value, as_object)]
    assert all(isinstance(content, Chat) for content in both)
    first, second = (renderer.render(content).samples for content in both if isinstance(content, Chat))
    assert first == second
    assert "[call look " in text(done, done.rows("ends-with-a-call")[0])
    assert done.reason("broken-arguments") == "broken tool calls"


def test_c08_every_trained_token_follows_its_own_prompt(prepared: Any) -> None:
    """Each trained run must stand right after the ids that a server would send for that turn."""
    from dflash_offline.extract.targets.hf import load_tokenizer

    done = prepared("c08")
    tokenizer = load_tokenizer(str(done.target))
    for line in done.lines.values():
        expected = []
        for i, message in enumerate(line["messages"]):
            if message["role"] == "assistant":
                sent = tokenizer.apply_chat_template(
                    line["messages"][:i], add_generation_prompt=True, return_dict=False
                )
                expected.append((sent, message["content"] + "<|im_end|>"))
        found = []
        for row in done.rows(line["id"]):
            ids, mask = done.table.tokens(row)
            for start in range(1, len(ids)):
                if mask[start] and not mask[start - 1]:
                    stop = start + (mask[start:].argmin() if not mask[start:].all() else len(mask) - start)
                    found.append((ids[:start].tolist(), tokenizer.decode(ids[start:stop])))
        assert found == expected, line["id"]


def test_c11_anchors(prepared: Any, cases: Path) -> None:
    """Our rule: trained on, and the next token of the sample too; so a tail after the answer costs one."""
    done = prepared("c11")
    expected = json.loads((cases / "expected.json").read_text())["c11"]["_anchors_with_at_least_one_target"]
    for name, count in expected.items():
        count -= name == "answer-early-long-tail"
        rows = done.rows(name)
        assert len(rows) == (count > 0), name
        assert sum(eligible_anchors(done.table.tokens(row)[1]).sum() for row in rows) == count, name
    assert done.report.counts["cut"] == 3
    assert done.report.counts["left_out"] == {
        "too few tokens to train on": 2,
        "too few tokens to train on after the cut": 1,
        "no answer": 1,
    }


def test_c12_ids_identify_nothing(prepared: Any, cases: Path) -> None:
    done = prepared("c12")
    facts = json.loads((cases / "expected.json").read_text())["c12"]
    assert len(done.lines) == facts["_rows_in"]
    assert len(done.table) == facts["_rows_required_in_store"]
    assert done.table.column("source_line").tolist() == list(range(1, 11))
