"""The offline walk against real decoding, and against one block at a time through the inference cache."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from dflash_offline import UserError
from dflash_offline.store.samples import recorded_range
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.evaluate.decode import decode
from dflash_offline.train.evaluate.drafting import DrafterProposer
from dflash_offline.train.evaluate.walk import HeldOutSample, spans, walk
from dflash_offline.train.kinds import AttentionKind
from dflash_offline.train.slot import RowShape, block_stride
from dflash_offline.train.slot_counts import SlotCounts

EOS, MASK, TAPS = 1, 2, (0, 2)


def slow_leading(exam, sample, anchor):
    """Leading right drafts of one block."""
    count = 0
    for draft, token in zip(slow_drafts(exam, sample, anchor), sample.ids[anchor + 1 :].tolist()):
        if draft != token:
            break
        count += 1
    return count


def slow_drafts(exam, sample, anchor):
    """The drafts of one block, through the cache that decoding uses."""
    drafter, spec = exam.drafter, exam.drafter.spec
    cache = drafter.new_cache()
    planes = torch.from_numpy(sample.taps.view(np.int16)).view(torch.bfloat16).float()
    drafter.extend(cache, planes[:, :anchor].transpose(0, 1).flatten(1), torch.arange(anchor))
    ids = torch.full((spec.block_size,), MASK)
    ids[0] = int(sample.ids[anchor])
    hidden = drafter.propose(cache, exam.embedding[ids], torch.arange(anchor, anchor + spec.block_size))
    return (hidden[1:] @ exam.head.T).argmax(-1).tolist()


def slow_walk(exam, sample):
    """Produced tokens of each cycle of each answer, drafting only where the walk stands."""
    size, answers = exam.drafter.spec.block_size, []
    mask = sample.loss_mask.tolist()
    for first in [i for i in range(len(mask)) if mask[i] and (i == 0 or not mask[i - 1])]:
        last = first
        while last + 1 < len(mask) and mask[last + 1]:
            last += 1
        lengths, start = [], first
        while start < last:
            lengths.append(min(slow_leading(exam, sample, start) + 1, last - start, size))
            start += lengths[-1]
        answers.append(lengths)
    return answers


def run_walk(exam, samples, row_tokens=256, units=4, forward=None, slots=None):
    size = exam.drafter.spec.block_size
    anchors = units * 128 // block_stride(size)
    shape = RowShape(row_tokens=row_tokens, anchors=anchors, block_size=size)
    return walk(exam.drafter, exam.embedding, exam.head, samples, shape, forward=forward, slots=slots)


@pytest.fixture(scope="module", params=[(4, 1, 60), (8, 2, 120), (6, 3, 60)], ids=["block4", "block8", "block6"])
def exam(request, make_exam):
    """Drafters that are sometimes right; block 6 has padded slots in its stride."""
    size, seed, steps = request.param
    return make_exam(size, seed=seed, steps=steps)


def test_the_walk_counts_the_cycles_of_decoding(exam):
    acceptance = run_walk(exam, [exam.sample(i) for i in range(len(exam.answers))])
    assert len(acceptance.answers) == len(exam.answers)
    seen = set()
    for i, walked in enumerate(acceptance.answers):
        decoded = decode(
            exam.target.open(TAPS),
            DrafterProposer(exam.drafter, exam.embedding, exam.head, "store"),
            exam.prompts[i],
            block_size=acceptance.block_size,
            max_new_tokens=exam.max_new_tokens,
            stop_ids=(EOS,),
        )
        assert decoded.tokens == exam.answers[i]
        assert walked.cycles == decoded.cycles
        seen |= set(walked.lengths)
    assert len(seen) >= min(4, acceptance.block_size), "cycles of many lengths were compared"
    assert any(len(text) == exam.max_new_tokens for text in exam.answers), "an answer that was cut"
    assert any(text[-1] == EOS and len(text) > 1 for text in exam.answers), "an answer that ended"


def test_the_walk_equals_one_block_at_a_time(exam):
    samples = [exam.sample(i) for i in range(6)]
    walked = run_walk(exam, samples).answers
    assert [answer.lengths for answer in walked] == [lengths for s in samples for lengths in slow_walk(exam, s)]


def conversation(lab, exam):
    """Two answers in one text, a supervised token between them, unsupervised text around."""
    ids, mask = [], []
    for prompt, text in zip(exam.prompts[:3], ([*exam.answers[3], *exam.answers[4]][:50], [5], exam.answers[7])):
        ids += prompt + text
        mask += [False] * len(prompt) + [True] * len(text)
    ids += [4, 4, 4]
    mask += [False] * 3
    return lab.record(exam.target, ids, np.array(mask), task="chat")


def test_slots_are_counted_at_every_anchor_that_training_could_draw(lab, exam):
    """Draft by draft through the cache of decoding, over two answers with a gap between them."""
    samples = [exam.sample(i) for i in range(2)]
    samples.append(with_gap(exam.sample(2)))
    size = exam.drafter.spec.block_size
    right, labelled, survived = ([0] * (size - 1) for _ in range(3))
    blocks = 0
    for sample in samples:
        mask, length = sample.loss_mask, len(sample.ids)
        for anchor in [a for a in range(length - 1) if mask[a] and mask[a + 1]]:
            drafts = slow_drafts(exam, sample, anchor)
            blocks += 1
            alive = True
            for k in range(1, size):
                if anchor + k >= length or not mask[anchor + 1 : anchor + k + 1].all():
                    break
                hit = drafts[k - 1] == sample.ids[anchor + k]
                alive = alive and hit
                labelled[k - 1] += 1
                right[k - 1] += int(hit)
                survived[k - 1] += int(alive)
    counts = SlotCounts(size)
    run_walk(exam, samples, slots=counts)
    assert counts.blocks == blocks
    assert counts.right.tolist() == right
    assert counts.labelled.tolist() == labelled
    assert counts.survived.tolist() == survived
    numbers = counts.numbers("held_out_")
    assert numbers["held_out_accuracy"] == sum(right) / sum(labelled)
    assert numbers[f"held_out_survival_slot_{size - 1}"] == survived[-1] / blocks
    half = SlotCounts(size)
    run_walk(exam, samples[:1], slots=half)
    rest = SlotCounts(size)
    run_walk(exam, samples[1:], slots=rest)
    half.merge(rest)
    assert half.numbers("") == counts.numbers("")
    assert SlotCounts(size).numbers("") == {}


def with_gap(sample):
    """The same answer, with a user's turn of two tokens in its middle."""
    mask = sample.loss_mask.copy()
    middle = int(np.flatnonzero(mask).mean())
    mask[middle : middle + 2] = False
    return replace(sample, loss_mask=mask)


def test_each_answer_of_a_conversation_is_walked_by_itself(lab, exam):
    sample = conversation(lab, exam)
    walked = run_walk(exam, [sample]).answers
    assert [answer.lengths for answer in walked] == slow_walk(exam, sample)
    assert len(walked) == 3
    assert walked[1].lengths == [], "an answer of one token has no cycle"
    assert {answer.task for answer in walked} == {"chat"}
    lengths = [last - first for first, last in spans(sample.loss_mask)]
    assert [sum(answer.lengths) for answer in walked] == lengths


@pytest.mark.parametrize("row_tokens, units", [(256, 1), (128, 5), (384, 3)])
def test_packing_and_chunking_change_nothing(lab, exam, row_tokens, units):
    samples = [exam.sample(i) for i in range(8)] + [conversation(lab, exam)]
    assert run_walk(exam, samples, row_tokens, units) == run_walk(exam, samples)
    alone = [answer for sample in samples for answer in run_walk(exam, [sample]).answers]
    assert alone == list(run_walk(exam, samples).answers)


def with_attention(exam, *kinds):
    """The same weights in a drafter whose two layers see other things."""
    other = replace(exam, drafter=Drafter(replace(exam.drafter.spec, attention=kinds)))
    other.drafter.load_state_dict(exam.drafter.state_dict())
    return other


MIXES = [
    (AttentionKind(9, True), AttentionKind()),
    (AttentionKind(is_causal=True), AttentionKind(5)),
    (AttentionKind(is_causal=True), AttentionKind(is_causal=True)),
]


@pytest.mark.parametrize("kinds", MIXES, ids=lambda kinds: " ".join(map(str, kinds)))
def test_layers_of_several_kinds_are_walked_as_they_decode(exam, kinds):
    mixed = with_attention(exam, *kinds)
    samples = [exam.sample(i) for i in range(6)]
    walked = run_walk(mixed, samples)
    assert [answer.lengths for answer in walked.answers] == [ls for s in samples for ls in slow_walk(mixed, s)]
    assert walked != run_walk(exam, samples), "what the layers see must matter here"


@pytest.mark.parametrize("window", [3, 12])
def test_a_sample_recorded_with_a_window_is_walked_as_the_whole_one(lab, exam, window):
    """A drafter of that window misses nothing; an answer of one token before the first anchor still counts."""
    narrow = with_attention(exam, AttentionKind(window), AttentionKind(max(window - 2, 1), True))
    talk = conversation(lab, exam)
    ids, mask = [*range(3, 12)] * 2 + talk.ids.tolist(), np.concatenate([np.arange(18) == 2, talk.loss_mask])
    early = lab.record(exam.target, ids, mask)
    whole = [*(exam.sample(i) for i in range(6)), talk, early]
    cut = []
    for sample in whole:
        first, n = recorded_range(sample.loss_mask, window)
        assert sample.taps.shape[1] == first + n
        cut.append(HeldOutSample(sample.ids, sample.loss_mask, sample.taps[:, first:].copy(), sample.task, first))
    assert sum(sample.first > 0 for sample in cut) >= (6 if window == 3 else 1)
    walked = run_walk(narrow, cut)
    assert walked == run_walk(narrow, whole)
    assert [answer.lengths for answer in walked.answers] == [ls for s in whole for ls in slow_walk(narrow, s)]
    assert walked.answers[-4].lengths == []


def test_the_live_drafter_is_left_as_it_was(exam):
    exam.drafter.zero_grad()
    before = {name: weight.clone() for name, weight in exam.drafter.state_dict().items()}
    run_walk(exam, iter([exam.sample(0)]))
    assert all(torch.equal(before[name], weight) for name, weight in exam.drafter.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in exam.drafter.parameters())


def test_every_forward_has_one_shape(exam):
    seen = set()

    def forward(*args):
        *tensors, masks = args
        seen.add(tuple(tuple(arg.shape) for arg in (*tensors, *masks)))
        return exam.drafter(*args)

    samples = [exam.sample(i) for i in range(8)]
    acceptance = run_walk(exam, samples, units=1, forward=forward)
    assert len(seen) == 1
    assert acceptance == run_walk(exam, samples)


def test_without_samples_there_is_nothing_to_measure(lab, exam):
    assert run_walk(exam, []).acceptance_length is None
    single = lab.record(exam.target, [4, 5, 6], np.array([False, False, True]))
    assert single.taps.shape[1] == 0
    assert run_walk(exam, [single]).acceptance_length is None


def test_a_sample_longer_than_a_row_is_an_error(lab, exam):
    sample = lab.record(exam.target, [5] * 301, np.array([False] + [True] * 300))
    with pytest.raises(UserError, match="301 tokens of a row of 256"):
        run_walk(exam, [sample])


def test_a_drafter_that_gives_no_numbers_is_refused(exam):
    """Its drafts would all be token 0, and the walk would say 1.0 as of an untrained one."""
    state = exam.drafter.state_dict()
    broken = Drafter(exam.drafter.spec)
    broken.load_state_dict({**state, "norm.weight": torch.full_like(state["norm.weight"], torch.nan)})
    with pytest.raises(UserError, match="output states are not all finite"):
        run_walk(replace(exam, drafter=broken), [exam.sample(0)])
