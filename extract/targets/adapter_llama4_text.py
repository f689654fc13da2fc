"""Llama 4's text model: transformers 5.24 answers `get_decoder` with the whole causal model.

Delete this when it answers with the decoder.
"""

from typing import Any

from .adapter import Adapter, decoder_of


def decoder(model: Any) -> Any:
    """The decoder, of the text model alone or inside the multimodal wrapper."""
    found = decoder_of(model)
    return getattr(found, "model", found)


ADAPTER = Adapter(decoder=decoder)
