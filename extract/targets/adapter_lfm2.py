"""LFM2: short convolutions and attention; its final norm is called after the embedding."""

from .adapter import Adapter

ADAPTER = Adapter(norm="embedding_norm")
