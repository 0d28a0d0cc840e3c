"""What differs between the versions of transformers that the library supports."""

from __future__ import annotations

import inspect

from transformers import LlamaModel
from transformers.cache_utils import Cache
from transformers.models.gptj import modeling_gptj

# since transformers 5.24; before, the two computed attention themselves, and a cache was `past_key_values`
CODEGEN_AND_GPTJ_USE_THE_INTERFACE = hasattr(modeling_gptj, "eager_attention_forward")
CACHE = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"


def given_cache(cache: Cache) -> dict[str, Cache]:
    """The keyword argument that gives a cache to a model."""
    return {CACHE: cache}
