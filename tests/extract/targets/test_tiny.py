"""The packaged targets still know what their READMEs say: damaged weights or another tokenizer would not."""

import pytest
from dflash_offline.extract.targets.hf import load_target
from dflash_offline.extract.targets.make_tiny import exact_answers
from dflash_offline.extract.targets.tasks import distinct_tasks


@pytest.mark.parametrize("name, layers, fewest", [("tiny", 6, 62), ("tiny-hybrid", 8, 61)])
def test_held_out_prompts_are_answered_exactly(name: str, layers: int, fewest: int) -> None:
    target = load_target(name)
    assert target.facts.num_layers == layers
    assert target.facts.is_recurrent == (name == "tiny-hybrid")
    scores = exact_answers(target.model, target.tokenizer, distinct_tasks(64, 0, held_out=True))
    assert sum(sum(hits) for hits in scores.values()) >= fewest
