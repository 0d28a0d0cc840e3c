"""The families of models headwise is tested on: one table, used by the tests and by docs/any-model.md.

Each is a tiny random model of the real class, built without a download, with inputs it takes and the attention
sites it really has. Head counts, head sizes and layer counts differ from one another wherever the family lets them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

from torch import Tensor, nn

import headwise as hw
from cases import tiers
from heads.family import Family
from heads.image_and_sound_families import IMAGE_AND_SOUND, UNUSUAL_IMAGE_AND_SOUND
from heads.language_families import LANGUAGE, UNUSUAL_LANGUAGE

FAMILIES = (*LANGUAGE, *IMAGE_AND_SOUND, *UNUSUAL_LANGUAGE, *UNUSUAL_IMAGE_AND_SOUND)
BY_NAME = {family.name: family for family in FAMILIES}
# families that write their softmax out; other such families turn the values of a token by its place
WRITTEN = ("DeBERTa", "DeBERTa-v2", "DeBERTa-v3", "Bloom", "MPT", "XGLM", "CANINE", "Funnel")
CALLING = (*WRITTEN, "Falcon, 40B and 180B")
REACHED = [
    family
    for family in FAMILIES
    if family.interface or family.name.startswith(("torch", "timm")) or family.name in CALLING
]
# these span the layouts
CORE = (
    *("BERT", "ALBERT", "DeBERTa-v3", "GPT-2", "GPT-NeoX", "Llama", "DeepSeek-V3", "GPT-OSS", "T5", "ViT", "Perceiver"),
    "torch.nn.Transformer",
)
# and these the ways to attend
FEW = ("BERT", "DeBERTa-v3", "Llama", "T5", "torch.nn.Transformer")


@cache
def found(family: Family) -> hw.Heads:
    """Heads of a model that no test changes."""
    return hw.find_heads(family.build())


def bed(family: Family, *, padded: bool = False) -> tuple[nn.Module, dict[str, Tensor], hw.Heads]:
    """A model that a test may change, inputs, and its heads."""
    model = family.build()
    return model, family.inputs(padded=padded), hw.find_heads(model)


def sweep(
    families: Iterable[Family], quick: tuple[str, ...] = FEW
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test on each family: a quick test has those named `quick`, and a full one the others."""
    listed = [*families]
    named = [family for family in listed if family.name in quick]
    return tiers("family", named, [family for family in listed if family not in named])
