"""Speculative decoding against the target's own greedy text, which plain forwards give the slow way."""

import pytest
import torch
from dflash_offline.train.evaluate.acceptance import Acceptance, AnswerCycles, Cycle
from dflash_offline.train.evaluate.decode import Mismatch, decode, decode_plain, first_difference
from dflash_offline.train.evaluate.drafting import DrafterProposer
from dflash_offline.train.evaluate.lockstep import Decoded
from dflash_offline.train.evaluate.steps import Draft
from dflash_offline.train.evaluate.target import PROMPT_CHUNK

BLOCK, EOS, MASK = 4, 1, 2
TAPS = (0, 2)


def greedy_without_cache(target, prompt, max_new_tokens):
    """One whole forward for each token."""
    ids = list(prompt)
    while len(ids) - len(prompt) < max_new_tokens:
        ids.append(int(target.model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == EOS:
            break
    return ids[len(prompt) :]


def reciter(prompt, text):
    """Drafts the known text, as a perfect drafter would; 0 behind its end."""
    padded = text + [0] * BLOCK

    def propose(taps, start, anchor):
        place = start - len(prompt)
        assert anchor == text[place]
        return padded[place + 1 : place + BLOCK]

    return propose


@pytest.fixture(scope="module")
def run(lab):
    """run(target, drafts, prompt, max_new_tokens): greedily; drafts are a drafter's, or a function's."""

    def decoded(target, drafts, prompt, max_new_tokens, stop_ids=(EOS,)):
        side = drafts if isinstance(drafts, DrafterProposer) else lab.Scripted(drafts)
        return decode(
            target.open(TAPS), side, prompt, block_size=BLOCK, max_new_tokens=max_new_tokens, stop_ids=stop_ids
        )

    return decoded


def drafter_of(lab, target, seed=0):
    """A function that makes a proposer of one untrained drafter."""
    drafter, (embedding, head) = lab.make_drafter(target, BLOCK, seed), lab.frozen_ends(target)
    return lambda tap_dtype="store": DrafterProposer(drafter, embedding, head, tap_dtype)


def lengths(decoded):
    return [cycle.produced for cycle in decoded.cycles]


@pytest.fixture(scope="module")
def target(lab):
    return lab.make_target(2)


@pytest.fixture(scope="module")
def texts(lab, target):
    """Pairs of prompt and greedy answer of 30 tokens or to the end."""
    return [(prompt, lab.answer(target, prompt, 30)) for prompt in lab.random_prompts(8, 12, 2)]


def long_text(texts):
    return next((prompt, text) for prompt, text in texts if EOS not in text)


def short_text(texts):
    return next((prompt, text) for prompt, text in texts if text[-1] == EOS and len(text) > BLOCK)


def test_plain_decoding_is_the_targets_greedy_text(target, texts):
    for prompt, text in texts:
        assert text == greedy_without_cache(target, prompt, 30)
    assert {text[-1] == EOS for _, text in texts} == {True, False}, "texts that end and texts that are cut"


@pytest.mark.parametrize("tap_dtype", ["store", "float32"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_an_untrained_drafter_changes_no_token(run, lab, seed, tap_dtype):
    target = lab.make_target(seed)
    proposer = drafter_of(lab, target, seed)
    answers = []
    for prompt in lab.random_prompts(6, 12, seed):
        decoded = run(target, proposer(tap_dtype), prompt, 24)
        assert decoded.tokens == greedy_without_cache(target, prompt, 24)
        assert len(decoded.tokens) == 1 + sum(lengths(decoded))
        answers.append(AnswerCycles(decoded.cycles))
    length = Acceptance(tuple(answers), BLOCK).acceptance_length
    assert length is not None
    assert 1 <= length < 1.5


def test_a_perfect_drafter_gains_a_whole_block_each_cycle(run, target, texts):
    prompt, text = long_text(texts)
    decoded = run(target, reciter(prompt, text), prompt, 1 + 5 * BLOCK)
    assert decoded.tokens == text[: 1 + 5 * BLOCK]
    assert lengths(decoded) == [BLOCK] * 5
    assert Acceptance((AnswerCycles(decoded.cycles),), BLOCK).acceptance_length == BLOCK


def test_a_drafter_that_is_always_wrong_gains_the_bonus_only(run, target, texts):
    prompt, text = long_text(texts)
    wrong = reciter(prompt, [token ^ 1 for token in text])

    def propose(taps, start, anchor):
        return wrong(taps, start, anchor ^ 1)

    decoded = run(target, propose, prompt, 20)
    assert decoded.tokens == text[:20]
    assert lengths(decoded) == [1] * 19


def test_an_answer_ends_with_its_stop_token_inside_a_block(run, target, texts):
    prompt, text = short_text(texts)
    # the perfect drafter also drafts what would come after the stop token; nothing of it may stay
    endless = decode_plain(target.open(TAPS), prompt, max_new_tokens=len(text) + BLOCK, stop_ids=()).tokens
    decoded = run(target, reciter(prompt, endless), prompt, 40)
    assert decoded.tokens == text
    full, rest = divmod(len(text) - 1, BLOCK)
    assert lengths(decoded) == [BLOCK] * full + [rest] * (rest > 0)


@pytest.mark.parametrize("max_new_tokens", range(1, 2 * BLOCK + 3))
def test_an_answer_is_never_longer_than_asked(run, target, texts, max_new_tokens):
    prompt, text = long_text(texts)
    decoded = run(target, reciter(prompt, text), prompt, max_new_tokens)
    assert decoded.tokens == text[:max_new_tokens]
    assert sum(lengths(decoded)) == max_new_tokens - 1


def test_real_tokens_equal_to_the_mask_id_stay(run, lab):
    target = lab.make_target(1)
    proposer = drafter_of(lab, target)
    seen = 0
    for prompt in lab.random_prompts(6, 12, 1):
        text = lab.answer(target, prompt, 24)
        seen += text.count(MASK)
        assert run(target, proposer(), prompt, 24).tokens == text
        assert run(target, reciter(prompt, text), prompt, 24).tokens == text
    assert seen, "the answers hold the mask id"


def test_the_drafter_is_given_every_state_once_and_in_order(run, target, texts):
    prompt, text = long_text(texts)
    given, recite = [], reciter(prompt, text)
    turns = iter(range(100))

    def propose(taps, start, anchor):
        given.append((taps, start))
        drafts = recite(taps, start, anchor)
        keep = next(turns) % BLOCK  # right for 0..3 drafts in turn, then wrong
        return [draft if k < keep else (draft + 1) % 12 for k, draft in enumerate(drafts)]

    decoded = run(target, propose, prompt, 25)
    assert decoded.tokens == text[:25]
    assert len(set(lengths(decoded))) > 2
    recorded, _ = target.record(torch.tensor([prompt + text]), torch.tensor([len(prompt) + len(text)]), TAPS)
    begin = 0
    for taps, start in given:
        assert begin + len(taps) == start
        wanted = recorded[:, 0, begin:start].transpose(0, 1).flatten(1)  # [m, Lt*H]
        torch.testing.assert_close(taps, wanted, atol=1e-4, rtol=1e-4)
        begin = start


def test_a_long_prompt_is_read_in_chunks(run, lab, target, monkeypatch):
    prompt = lab.random_prompts(1, 12, 5)[0] * 4
    whole = lab.answer(target, prompt, 10)
    assert len(prompt) < PROMPT_CHUNK
    monkeypatch.setattr("dflash_offline.train.evaluate.target.PROMPT_CHUNK", 3)
    assert lab.answer(target, prompt, 10) == whole
    assert run(target, reciter(prompt, whole), prompt, 10).tokens == whole


def test_tap_dtype_decides_what_the_drafter_sees(lab, target, texts):
    prompt, _ = long_text(texts)
    proposer = drafter_of(lab, target)
    session = target.open(TAPS)
    _, taps = session.forward(torch.tensor(prompt))
    rounded = taps.to(torch.bfloat16).float()
    assert not torch.equal(rounded, taps)
    held = {}
    for name, states in (("store", taps), ("float32", taps), ("rounded", rounded)):
        propose = proposer("float32" if name == "rounded" else name)
        propose.propose({0: Draft(states, len(prompt), 3)})
        held[name] = propose.context.context(0)[0][:, : len(prompt)].clone()
    assert torch.equal(held["store"], held["rounded"])
    assert not torch.equal(held["store"], held["float32"])


def test_a_drafter_fitted_to_one_text_gains_almost_whole_blocks(run, lab, make_exam):
    exam = make_exam(BLOCK, seed=2, count=4, max_new_tokens=24)
    i = max(range(4), key=lambda i: len(set(exam.answers[i])))
    lab.fit(exam.drafter, exam.embedding, exam.head, [exam.sample(i)], 150)
    propose = DrafterProposer(exam.drafter, exam.embedding, exam.head, "store")
    decoded = run(exam.target, propose, exam.prompts[i], 24)
    assert decoded.tokens == exam.answers[i]
    assert len(decoded.tokens) > 12
    assert lengths(decoded)[:-1] == [BLOCK] * (len(decoded.cycles) - 1)


def decoded_as(tokens, produced=()):
    """An answer of these tokens, from cycles that produced so many each."""
    cycles = tuple(Cycle(accepted=count - 1, produced=count, is_refused=count < BLOCK) for count in produced)
    return Decoded(list(tokens), cycles, 0.0, 0.0)


def test_a_difference_is_shown_with_its_gap_on_both_paths(target, texts):
    prompt, text = long_text(texts)

    def opened():
        return target.open(TAPS)

    plain, produced = decoded_as(text), [3, 1, 4, 4, 2]
    assert first_difference(opened, prompt, decoded_as(text), plain, BLOCK) is None
    for place in (0, 1, 3, 4, 7, 8):  # first and last tokens of cycles, and inside
        other = [*text[:place], (text[place] + 1) % 12, *text[place + 1 :]]
        found = first_difference(opened, prompt, decoded_as(other, produced), plain, BLOCK)
        assert found is not None
        assert (found.position, found.plain_token, found.speculative_token) == (place, text[place], other[place])
        logits = target.model(torch.tensor([prompt + text[:place]])).logits[0, -1]
        gap = float(logits[text[place]] - logits[other[place]])
        assert gap > 0
        assert found.logit_gap == pytest.approx(gap, abs=1e-4)
        assert found.verify_gap == pytest.approx(gap, abs=1e-4)
        assert not found.is_exact_tie
    cut = first_difference(opened, prompt, decoded_as(text[:5]), plain, BLOCK)
    assert cut is not None
    assert (cut.position, cut.plain_token, cut.speculative_token, cut.logit_gap) == (5, text[5], None, None)
    assert not cut.is_exact_tie


def test_equal_logits_are_an_exact_tie(lab, target, texts):
    """Two tokens whose rows of the head are the same have one logit, whatever is computed how."""
    twins = lab.make_target(2)
    with torch.no_grad():
        twins.model.lm_head.weight[11] = twins.model.lm_head.weight[7]
    prompt, _ = long_text(texts)
    text = lab.answer(twins, prompt, 24)
    place = next(i for i, token in enumerate(text) if token == 7)
    other = [*text[:place], 11, *text[place + 1 :]]
    found = first_difference(lambda: twins.open(TAPS), prompt, decoded_as(other, [BLOCK] * 6), decoded_as(text), BLOCK)
    assert found is not None
    assert (found.logit_gap, found.verify_gap) == (0.0, 0.0)
    assert found.is_exact_tie
    assert Mismatch(3, 7, 11, 1e-6, 0.0).is_exact_tie, "the check of the drafts saw a tie, plain decoding did not"
    assert not Mismatch(3, 7, 11, 1e-6, -1e-6).is_exact_tie


def test_times_cover_the_whole_answer(run, target, texts):
    prompt, text = long_text(texts)
    for decoded in (
        run(target, reciter(prompt, text), prompt, 10),
        decode_plain(target.open(TAPS), prompt, max_new_tokens=10, stop_ids=()),
    ):
        assert 0 < decoded.prompt_s < decoded.wall_s
