"""What tokens are drawn from, and the rule that accepts drafts, against tables, transformers and the target itself.

Every statistic is a chi-square whose bound follows from the number of samples; the rules that are nearly right (accept
where p >= q, accept always, a replacement drawn from p) fail the very same ones.
"""

import copy
import math

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.train.evaluate import sampling
from dflash_offline.train.evaluate.config import EvaluateConfig
from dflash_offline.train.evaluate.drafting import DrafterProposer
from dflash_offline.train.evaluate.lockstep import OneByOne, Together, serve
from dflash_offline.train.evaluate.sampling import PLAIN, SPECULATIVE, Sampling, draw, probabilities, settle
from dflash_offline.train.evaluate.steps import plain, speculative
from dflash_offline.train.evaluate.target import read_prompt

TAPS, BLOCK, V = (0, 2), 4, 12
BOUND = 5.0  # standard deviations of a chi-square: by chance once in a million
BIASED = {
    "accepts only p >= q": ("is_accepted", lambda p, q, drafts, numbers: at(p, drafts) >= at(q, drafts)),
    "accepts always": ("is_accepted", lambda p, q, drafts, numbers: torch.ones_like(drafts, dtype=torch.bool)),
    "replaces by p": ("residual", lambda p, q: p),
}


def at(table, ids):
    return table.gather(-1, ids[..., None])[..., 0]


def deviations(counts, expected):
    """How many standard deviations a chi-square of counts [n] lies above its mean; `expected` [n] adds up to the same.

    Cells of less than 5 are put together. Wilson and Hilferty's approximation, good to a few per cent of the bound.
    """
    order = expected.argsort(descending=True)
    counts, expected = counts[order].double(), expected[order].double()
    num_large = max(1, int((expected >= 5).sum()))
    counts = torch.cat([counts[:num_large], counts[num_large:].sum()[None]])
    expected = torch.cat([expected[:num_large], expected[num_large:].sum()[None]])
    if expected[-1] < 5:
        assert counts[-1] <= 5 + BOUND * math.sqrt(5), "tokens that hardly ever occur"
        counts, expected = counts[:-1], expected[:-1]
    freedom = len(counts) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def random_table(seed, *shape, sharp=2.0):
    return torch.softmax(sharp * torch.randn(shape, generator=torch.Generator().manual_seed(seed)), -1).double()


def counted(sequences, num_tokens):
    """How often each sequence [n, k] of ids below num_tokens occurs: [num_tokens ** k]."""
    number = torch.zeros(len(sequences), dtype=torch.long)
    for k in range(sequences.shape[1]):
        number = number * num_tokens + sequences[:, k]
    return torch.bincount(number, minlength=num_tokens ** sequences.shape[1])


def emitted(p, q, count, seed=0):
    """Sequences [count, 3] by blocks of two drafts for tables p [3, V], q [2, V]; what is behind is drawn from p."""
    rng = torch.Generator().manual_seed(seed)

    def uniform(*shape):
        return torch.rand(shape, generator=rng, dtype=torch.float64)

    rows = p.expand(count, -1, -1)
    drafts = draw(q.expand(count, -1, -1), uniform(count, 2))  # [count, 2]
    leading, token = settle(rows, q.expand(count, -1, -1), drafts, uniform(count, 2), uniform(count))
    rest = draw(rows, uniform(count, 3))  # [count, 3]
    places = torch.arange(3)
    known = torch.where(places == leading[:, None], token[:, None], torch.cat([drafts, drafts[:, :1]], dim=1))
    return torch.where(places <= leading[:, None], known, rest), leading


TABLES = {
    "far": (random_table(1, 3, 6), random_table(2, 2, 6)),
    "near": (random_table(1, 3, 6, sharp=0.5), random_table(2, 2, 6, sharp=0.5)),
    "disjoint": (torch.tensor([[0.5, 0.5, 0.0, 0.0]] * 3).double(), torch.tensor([[0.0, 0.0, 0.3, 0.7]] * 2).double()),
    "sure and wrong": (random_table(3, 3, 5), torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0]] * 2).double()),
}


def table_deviations(p, q, count=100_000):
    sequences, _ = emitted(p, q, count)
    joint = (p[0][:, None, None] * p[1][None, :, None] * p[2][None, None]).flatten()
    return deviations(counted(sequences, p.shape[-1]), joint * count)


@pytest.mark.parametrize("name", TABLES)
def test_a_block_gives_what_the_target_would(name):
    assert table_deviations(*TABLES[name]) < BOUND


@pytest.mark.parametrize("rule", BIASED)
def test_a_biased_rule_would_be_seen_on_tables(monkeypatch, rule):
    monkeypatch.setattr(sampling, *BIASED[rule])
    assert table_deviations(*TABLES["far"]) > 10 * BOUND


def test_drafts_stand_with_the_share_that_both_have():
    p, q = TABLES["far"]
    _, leading = emitted(p, q, 100_000)
    share = torch.minimum(p[:2], q).sum(-1)  # [2]
    expected = torch.stack([1 - share[0], share[0] * (1 - share[1]), share[0] * share[1]])
    assert deviations(torch.bincount(leading, minlength=3), expected * 100_000) < BOUND


def test_equal_distributions_accept_every_draft():
    p = TABLES["far"][0]
    _, leading = emitted(p, p[:2], 10_000)
    assert bool((leading == 2).all())


def test_a_token_of_no_probability_is_never_drawn():
    p = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]], dtype=torch.float64)
    edges = torch.tensor([0.0, 0.25 - 2**-54, 0.25, 1 - 2**-53], dtype=torch.float64)
    assert draw(p.expand(4, -1), edges).tolist() == [1, 1, 3, 3]
    assert draw(3 * p.expand(4, -1), edges).tolist() == [1, 1, 3, 3], "what is drawn from need not add up to 1"


@pytest.mark.parametrize("top_k", [0, 1, 5, 40, 500])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.35, 1e-9])
def test_the_settings_mean_what_they_mean_to_transformers(top_k, top_p):
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = 3 * torch.randn(50, 40, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    ids = torch.LongTensor(50, 0)
    slow = TemperatureLogitsWarper(0.7)(ids, torch.DoubleTensor(logits))
    if top_k:
        slow = TopKLogitsWarper(top_k)(ids, slow)
    slow = TopPLogitsWarper(top_p)(ids, slow)
    found = probabilities(logits, Sampling(temperature=0.7, top_p=top_p, top_k=top_k))
    torch.testing.assert_close(found, slow.softmax(-1))


def test_tokens_that_tie_with_the_kth_stay_and_of_those_at_the_edge_of_top_p_the_first():
    logits = torch.tensor([1.0, 3.0, 3.0, 3.0, 0.0])
    assert probabilities(logits, Sampling(temperature=1.0, top_k=2)).gt(0).tolist() == [False, True, True, True, False]
    assert probabilities(logits, Sampling(temperature=1.0, top_p=0.3)).gt(0).tolist() == [
        False,
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize("temperature", [1e-320, 1e-308, 1e-6])
def test_hardly_any_temperature_is_the_likeliest_token(temperature):
    logits = 50 * torch.randn(20, 40, generator=torch.Generator().manual_seed(4))
    for settings in (Sampling(temperature=temperature), Sampling(temperature=temperature, top_k=5, top_p=0.9)):
        assert probabilities(logits, settings).argmax(-1).tolist() == logits.argmax(-1).tolist()
        assert settings.chooser(0, SPECULATIVE).draft(logits) == logits.argmax(-1).tolist()


def test_what_is_drawn_depends_on_seed_and_number_alone():
    logits = torch.randn(64, 40, generator=torch.Generator().manual_seed(4))
    settings = Sampling(temperature=1.0, seed=5)

    def drawn(number, stream, of=settings):
        chooser = of.chooser(number, stream)
        return [chooser.first(row) for row in logits]

    assert drawn(3, PLAIN) == drawn(3, PLAIN)
    others = [drawn(4, PLAIN), drawn(3, SPECULATIVE), drawn(3, PLAIN, Sampling(temperature=1.0, seed=6))]
    assert all(other != drawn(3, PLAIN) for other in others)


def test_settings_in_words():
    assert str(Sampling()) == "greedy"
    assert str(Sampling(temperature=0.7, top_p=0.9, top_k=20, seed=3)) == "temperature 0.7, top-k 20, top-p 0.9, seed 3"


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": 1.0, "top_p": 0.0},
        {"temperature": 1.0, "top_p": 1.1},
        {"temperature": 1.0, "top_k": -1},
        {"temperature": 1.0, "seed": -1},
        {"batch": 0},
    ],
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(UserError, match=f"^{list(wrong)[-1]} = "):
        EvaluateConfig(**wrong)


@pytest.mark.parametrize("name, value", [("top_p", 0.9), ("top_k", 20), ("seed", 1)])
def test_settings_of_sampling_are_refused_where_nothing_is_drawn(name, value):
    assert getattr(EvaluateConfig(temperature=0.7, **{name: value}), name) == value
    with pytest.raises(UserError, match=f"{name} = {value} does nothing with temperature 0"):
        EvaluateConfig(**{name: value})


class Prompted:
    """The target's side for many answers to one prompt, which is read once."""

    def __init__(self, side, session):
        self.side, self.session, self.read_once = side, session, None

    def read(self, text, prompt):
        if self.read_once is None:
            self.read_once = read_prompt(self.session, prompt)
        self.side.batch.add(text, Copied(self.session))
        return self.read_once

    def forward(self, asked):
        return self.side.forward(asked)

    def close(self, text):
        self.side.close(text)


class Copied:
    """A session as a batch takes it over, with a cache of its own."""

    def __init__(self, session):
        self.length, self.cache = session.length, copy.deepcopy(session.cache)


@pytest.fixture(scope="module")
def wrong_pair(lab):
    """A target, and a drafter that disagrees with it: drafts are accepted and refused often."""
    target = lab.make_target(7)
    return target, lab.make_drafter(target, BLOCK, 3), lab.frozen_ends(target)


def sampled_answers(pair, prompt, settings, count, num_tokens, is_plain=False):
    """Sequences [count, num_tokens] behind the prompt, and all cycles."""
    target, drafter, (embedding, head) = pair
    side = Prompted(Together(lambda: target.open(TAPS), target.open_batch(TAPS)), target.open(TAPS))
    ends = {"max_new_tokens": num_tokens, "stop_ids": ()}
    if is_plain:
        texts = [plain(prompt, settings.chooser(i, PLAIN), **ends) for i in range(count)]
    else:
        texts = [speculative(prompt, settings.chooser(i, SPECULATIVE), block_size=BLOCK, **ends) for i in range(count)]
    answers = serve(texts, side, DrafterProposer(drafter, embedding, head, "store"), 100)
    return torch.tensor([a.tokens for a in answers]), [cycle for a in answers for cycle in a.cycles]


def true_joint(target, prompt, settings, num_tokens):
    """The target's own probability of every sequence of num_tokens behind the prompt, by whole forwards: [V ** n]."""
    joint, texts = torch.ones(1).double(), torch.tensor([prompt])
    for _ in range(num_tokens):
        with torch.no_grad():
            p = probabilities(target.model(texts).logits[:, -1], settings)  # [V ** k, V]
        joint = (joint[:, None] * p).flatten()
        texts = torch.cat([texts.repeat_interleave(V, 0), torch.arange(V).repeat(len(texts))[:, None]], dim=1)
    return joint


def answer_deviations(pair, settings, count, is_plain=False):
    prompt = [5, 9, 4, 7]
    sequences, cycles = sampled_answers(pair, prompt, settings, count, 3, is_plain)
    expected = true_joint(pair[0], prompt, settings, 3) * count
    return deviations(counted(sequences, V), expected), cycles


SETTINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=6),
    Sampling(temperature=0.7, top_p=0.8),
    Sampling(temperature=1.3, top_p=0.9, top_k=9, seed=2),
]


@pytest.mark.parametrize(
    "settings, count",
    [(SETTINGS[0], 1000), *(pytest.param(s, 6_000, marks=pytest.mark.slow) for s in SETTINGS)],
    ids=str,
)
def test_answers_have_the_targets_own_distribution(wrong_pair, settings, count):
    found, cycles = answer_deviations(wrong_pair, settings, count)
    assert found < BOUND
    share = sum(cycle.accepted > 0 for cycle in cycles) / len(cycles)
    assert 0.05 < share < 0.95, f"drafts must be accepted and refused, or nothing is tested: {share}"


@pytest.mark.parametrize("count", [300, pytest.param(6_000, marks=pytest.mark.slow)])
def test_plain_answers_are_drawn_from_the_same_distribution(wrong_pair, count):
    assert answer_deviations(wrong_pair, SETTINGS[3], count, is_plain=True)[0] < BOUND


@pytest.mark.parametrize("rule", [pytest.param(rule, marks=pytest.mark.slow) for rule in BIASED])
def test_a_biased_rule_would_be_seen_in_answers(monkeypatch, wrong_pair, rule):
    monkeypatch.setattr(sampling, *BIASED[rule])
    assert answer_deviations(wrong_pair, SETTINGS[0], 1500)[0] > 2 * BOUND


def test_one_by_one_and_together_draw_the_same_tokens(lab, wrong_pair):
    target, drafter, (embedding, head) = wrong_pair
    settings = Sampling(temperature=0.9, top_p=0.95, seed=8)
    prompts = lab.random_prompts(7, V, 5)

    def answers(numbers, side, batch):
        texts = [
            speculative(
                prompts[i], settings.chooser(i, SPECULATIVE), block_size=BLOCK, max_new_tokens=16, stop_ids=(1,)
            )
            for i in numbers
        ]
        return serve(texts, side, DrafterProposer(drafter, embedding, head, "store"), batch)

    one_by_one = answers(range(7), OneByOne(lambda: target.open(TAPS)), 1)
    backwards = answers(range(6, -1, -1), Together(lambda: target.open(TAPS), target.open_batch(TAPS)), 3)
    assert [(a.tokens, a.cycles) for a in one_by_one] == [(a.tokens, a.cycles) for a in reversed(backwards)]
    assert len({len(a.tokens) for a in one_by_one}) > 1
