"""Blocks of several texts at once against one text at a time through its own cache."""

import pytest
import torch
from dflash_offline.train import context_rows
from dflash_offline.train.kinds import AttentionKind

BLOCK = 4
LAYOUTS = {
    "full": (AttentionKind(),) * 2,
    "mixed": (AttentionKind(5, True), AttentionKind()),
    "causal and sliding": (AttentionKind(is_causal=True), AttentionKind(3)),
}


class Pair:
    """One text in a row of many, and in a cache of its own."""

    def __init__(self, drafter, rows):
        self.drafter, self.rows = drafter, rows
        self.row, self.cache = rows.add(), drafter.new_cache()

    def taps(self, rng, count):
        found = torch.randn(count, self.drafter.fc.weight.shape[1], generator=rng)
        self.drafter.extend(self.cache, found, torch.arange(self.cache.length, self.cache.length + count))
        return found

    def block(self, embeds):
        return self.drafter.propose(self.cache, embeds, self.cache.length + torch.arange(BLOCK))


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_are_drafted_as_texts_alone(tiny_spec, tiny_drafter, monkeypatch, name):
    monkeypatch.setattr(context_rows, "FIRST_CAPACITY", 4)
    drafter = tiny_drafter(tiny_spec(attention=LAYOUTS[name], block_size=BLOCK))
    rng, rows = torch.Generator().manual_seed(1), drafter.new_rows()
    pairs = [Pair(drafter, rows) for _ in range(3)]
    for turn in range(6):
        if turn == 3:  # a text ends, its row goes to another one
            rows.drop(pairs[1].row)
            pairs[1] = Pair(drafter, rows)
            assert pairs[1].row == 1
        chosen = [pairs[i] for i in torch.randperm(3, generator=rng).tolist()[: 3 - turn % 2]]  # some, in any order
        counts = torch.randint(1, 6, (len(chosen),), generator=rng).tolist()
        numbers = [pair.row for pair in chosen]
        drafter.extend_rows(rows, numbers, [pair.taps(rng, count) for pair, count in zip(chosen, counts)])
        assert [rows.lengths[number] for number in numbers] == [pair.cache.length for pair in chosen]
        embeds = torch.randn(len(chosen), BLOCK, drafter.spec.hidden_size, generator=rng)
        found = drafter.propose_rows(rows, numbers, embeds)
        assert found.shape == embeds.shape
        for pair, one, output in zip(chosen, embeds, found):
            torch.testing.assert_close(output, pair.block(one), rtol=1e-4, atol=1e-5)
    assert rows.capacity > 8
