"""Uniform noise on the taps of training rows, a pure function of seed, epoch and row. Knows tensors only."""

import numpy as np
import torch
from torch import Tensor

from .order import Place

NOISE_STREAM = 3  # beside those of rows and anchors in packing.py
TOKENS = 1024  # drawn at once; part of what the numbers are


class TapNoise:
    """Adds numbers between -width and width to taps.

    The same (seed, epoch, row) give the same bits on one kind of device, for any number of ranks and after any resume.
    """

    def __init__(self, width: float, seed: int, device: torch.device) -> None:
        self.width, self.seed = width, seed
        self.generator = torch.Generator(device)

    def add(self, taps: Tensor, place: Place) -> None:
        """To taps [T, Lt*H] in place: drawn and added in fp32, rounded once."""
        key = [self.seed % 2**64, place.epoch, place.row, NOISE_STREAM]
        self.generator.manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1)))
        for part in taps.split(TOKENS):  # [<=1024, Lt*H]
            drawn = torch.empty(part.shape, dtype=torch.float32, device=part.device)
            part.add_(drawn.uniform_(-self.width, self.width, generator=self.generator))
