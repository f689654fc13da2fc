"""Which samples are run a second time, alone, while a store is filled.

A pure function of the samples: neither the number of workers nor what was done before moves it. Knows numbers only.
"""

import numpy as np

SHARE = 0.005  # of all tokens that the target is run on


def chosen_again(content: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """True for the samples of a plan to check again [N] bool, at most `SHARE` of all its tokens.

    `content` [N] u64 is the start of each sample's sha256, `lengths` [N] the tokens of its forward. Taken in the order
    of content's last bytes, as a plan lies in the order of its first ones: so the choice is spread over the store.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    budget = int(SHARE * int(sizes.sum()))
    order = np.argsort(np.asarray(content, dtype=np.uint64).byteswap(), kind="stable")
    order = order[sizes[order] <= budget]
    is_chosen = np.zeros(len(sizes), dtype=bool)
    is_chosen[order[np.cumsum(sizes[order]) <= budget]] = True
    return is_chosen
