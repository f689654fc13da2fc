"""Nemotron-H: Mamba-2, attention and MLP blocks, each of which counts as a layer."""

from .adapter import Adapter

ADAPTER = Adapter(norm="norm_f")
