"""Whether two runs of a sweep would be one and the same, with every default filled in.

`choices` compares what runs set; here are those that differ in it and in nothing else: 0.02 beside a default of 0.02.
Imports torch, as the check of a run does.
"""

import json
from typing import Any

from ...settings_text import as_dict
from ..config import TrainConfig
from ..facts import HARMLESS, RunFacts
from ..optim import peak_of
from ..slot_weights import default_gamma
from .choices import OWN_FIELDS, dotted


def run_key(config: TrainConfig, facts: RunFacts) -> str:
    """Equal for two runs of one store that train the same weights, by settings that nobody tells apart."""
    known: dict[str, Any] = facts.identity()
    known["optim.lr"] = peak_of(config.optim)
    if config.loss.weights == "decay":
        known["loss.gamma"] = config.loss.gamma or default_gamma(facts.spec.block_size)
    set_apart = dotted(as_dict(config))  # settings that change no weights may be what a sweep looks at
    known |= {name: set_apart[name] for name in HARMLESS if name not in OWN_FIELDS}
    return json.dumps(known, sort_keys=True)
