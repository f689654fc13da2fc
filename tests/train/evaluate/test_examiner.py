"""The exam of a target and a drafter: one prompt at a time or many, greedy or sampled, the same answers."""

import copy
import time
from dataclasses import replace

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.extract.targets.hf import load_target
from dflash_offline.train.evaluate.config import EvaluateConfig
from dflash_offline.train.evaluate.drafting import DrafterProposer
from dflash_offline.train.evaluate.examiner import Examiner
from dflash_offline.train.evaluate.lockstep import Together, serve
from dflash_offline.train.evaluate.prompts import Prompt
from dflash_offline.train.evaluate.sampling import Greedy
from dflash_offline.train.evaluate.steps import Draft, plain

BLOCK, NEW = 4, 12


@pytest.fixture(scope="module")
def exam(make_exam):
    """A target and a drafter that is sometimes right, with 6 prompts."""
    return make_exam(BLOCK, seed=2, steps=36, count=6, max_new_tokens=NEW)


@pytest.fixture(scope="module")
def prompts(exam):
    return [Prompt(ids=ids, name=f"prompt {i}") for i, ids in enumerate(exam.prompts)]


def examined(exam, prompts, **settings):
    config = EvaluateConfig(max_new_tokens=NEW, device="cpu", **settings)
    examiner = Examiner(exam.drafter, exam.target, config)
    return *examiner.examine(prompts), examiner


def cycles_of(acceptance):
    return [answer.cycles for answer in acceptance.answers]


def test_a_batch_gives_the_same_answers_and_cycles(exam, prompts, monkeypatch):
    alone, compared, examiner = examined(exam, prompts)
    assert examiner.settings["batch"] == 1
    assert examiner.settings["decoding"] == "greedy"
    assert compared.num_equal == compared.num_prompts == 6
    assert len({cycle.produced for cycles in cycles_of(alone) for cycle in cycles}) > 2
    monkeypatch.setattr("dflash_offline.train.evaluate.examiner.GROUP", 2)  # of the six prompts first four, then two
    together, outcome, examiner = examined(exam, prompts, batch=2)
    assert examiner.settings["batch"] == 2
    assert cycles_of(together) == cycles_of(alone)
    assert [list(o.plain_tokens) for o in outcome.outcomes] == exam.answers
    assert [list(o.plain_tokens) for o in compared.outcomes] == exam.answers
    assert outcome.num_equal == 6
    assert min(min(o.plain_s, o.speculative_s) for o in outcome.outcomes) > 0


def test_sampled_answers_depend_on_seed_and_name_and_are_not_compared(exam, prompts):
    settings = {"temperature": 1.0, "top_p": 0.95, "seed": 3}
    alone, compared, examiner = examined(exam, prompts, **settings)
    assert examiner.settings["decoding"] == "temperature 1, top-p 0.95, seed 3"
    assert (compared.num_equal, compared.num_exact_ties, compared.mismatches) == (None, None, [])
    assert compared.as_dict()["num_equal"] is None
    assert {outcome.as_dict()["is_equal"] for outcome in compared.outcomes} == {None}
    assert "not compared" in "\n".join(compared.text())
    together, other, examiner = examined(exam, prompts[:4], batch=4, **settings)
    assert cycles_of(together) == cycles_of(alone)[:4]
    assert [o.plain_tokens for o in other.outcomes] == [o.plain_tokens for o in compared.outcomes][:4]
    rest, _ = examiner.examine(prompts[4:])  # whatever was decoded before: --limit changes no draw of a later turn
    assert cycles_of(rest) == cycles_of(alone)[4:]
    renamed, _ = examiner.examine([replace(prompt, name=f"{prompt.name}, answer 2") for prompt in prompts[4:]])
    assert cycles_of(renamed) != cycles_of(rest), "other names, other draws"


def test_a_recurrent_target_is_examined_one_prompt_at_a_time_and_says_so(lab):
    target = load_target("tiny-hybrid", dtype="float32")
    drafter = lab.make_drafter(target, BLOCK)
    prompts = [Prompt(ids=[20 + i, 30, 40], name=f"{i}") for i in range(2)]
    examiner = Examiner(drafter, target, EvaluateConfig(max_new_tokens=5, batch=8))
    _, compared = examiner.examine(prompts)
    assert (examiner.settings["batch"], examiner.settings["batch_note"]) == (1, "recurrent target")
    assert compared.num_equal == 2


def test_a_target_that_computes_batches_wrongly_is_refused_before_the_exam(exam, monkeypatch):
    def wrong(tap_layers):
        raise UserError("decodes a batch wrongly", "right", "evaluate with batch=1")

    monkeypatch.setattr(exam.target, "open_batch", wrong)
    with pytest.raises(UserError, match="batch=1"):
        Examiner(exam.drafter, exam.target, EvaluateConfig(batch=2))
    Examiner(exam.drafter, exam.target, EvaluateConfig())


def test_the_targets_scale_and_soft_cap_reach_what_drafts_are_drawn_from(exam, monkeypatch):
    asked = {0: Draft(torch.randn(3, 2 * 32, generator=torch.Generator().manual_seed(0)), 3, 5)}

    def drafted(**options):
        side = DrafterProposer(exam.drafter, exam.embedding, exam.head, "float32", **options)
        return side.propose(asked)[0]

    raw = drafted()
    torch.testing.assert_close(drafted(output_multiplier=0.25, softcap=2.0), 2.0 * torch.tanh(raw * 0.25 / 2.0))
    sampled = Examiner(exam.drafter, exam.target, EvaluateConfig(temperature=1.0))
    greedy = Examiner(exam.drafter, exam.target, EvaluateConfig())
    monkeypatch.setattr(exam.target, "facts", replace(exam.target.facts, output_multiplier=0.25, logit_softcap=2.0))
    assert (sampled.proposer().output_multiplier, sampled.proposer().softcap) == (0.25, 2.0)
    assert (greedy.proposer().output_multiplier, greedy.proposer().softcap) == (1.0, None)


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"batch": 4}])
def test_a_drafter_that_is_no_number_is_refused(exam, prompts, settings):
    drafter = copy.deepcopy(exam.drafter)
    with torch.no_grad():
        drafter.fc.weight[0, 0] = torch.nan
    examiner = Examiner(drafter, exam.target, EvaluateConfig(max_new_tokens=NEW, **settings))
    with pytest.raises(UserError, match="are not all finite") as caught:
        examiner.examine(prompts)
    assert "--checkpoint" in str(caught.value)


class Timed(Together):
    """A target's side whose every call takes a second of its own clock."""

    now = 100.0

    def read(self, text, prompt):
        self.now += 1.0
        return super().read(text, prompt)

    def forward(self, asked):
        self.now += 1.0
        return super().forward(asked)


def test_shares_of_the_wall_time_add_up_to_it(exam, monkeypatch):
    texts = [plain(prompt, Greedy(), max_new_tokens=10, stop_ids=()) for prompt in exam.prompts]
    side = Timed(lambda: exam.target.open((0,)), exam.target.open_batch((0,)))
    monkeypatch.setattr(time, "perf_counter", lambda: side.now)
    answers = serve(texts, side, None, 5)
    assert sum(answer.wall_s for answer in answers) == pytest.approx(side.now - 100.0)
    assert all(0 < answer.prompt_s < answer.wall_s for answer in answers)
