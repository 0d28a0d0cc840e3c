"""The families of models headwise is tested on: one table, used by the tests and by docs/any-model.md.

Each is a tiny random model of the real class, built without a download, with inputs it takes and the attention
sites it really has. Head counts, head sizes and layer counts differ from one another wherever the family lets them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
from torch import Tensor, nn

import headwise as hw
from cases import cases
from heads.family import Family
from heads.image_and_sound_families import IMAGE_AND_SOUND, UNUSUAL_IMAGE_AND_SOUND
from heads.language_families import LANGUAGE, UNUSUAL_LANGUAGE

FAMILIES = (*LANGUAGE, *IMAGE_AND_SOUND, *UNUSUAL_LANGUAGE, *UNUSUAL_IMAGE_AND_SOUND)
BY_NAME = {family.name: family for family in FAMILIES}
INTERFACED = [family for family in FAMILIES if family.interface]
# families that write their softmax out; other such families turn the values of a token by its place
WRITTEN = ("DeBERTa", "DeBERTa-v2", "DeBERTa-v3", "Bloom", "MPT", "XGLM", "CANINE", "Funnel")
CALLING = (*WRITTEN, "Falcon, 40B and 180B")
REACHED = [
    family
    for family in FAMILIES
    if family.interface or family.name.startswith(("torch", "timm")) or family.name in CALLING
]
# these span the layouts
CORE = {
    *(
        "BERT",
        "ALBERT",
        "DeBERTa-v3",
        "GPT-2",
        "GPT-NeoX",
        "Llama",
        "Qwen3",
        "Gemma",
        "DeepSeek-V3",
        "GPT-OSS",
        "Bloom",
    ),
    *("T5", "BART", "Whisper", "CANINE", "RoFormer", "ViT", "CLIP", "timm Swin", "WavLM", "Perceiver"),
    "torch.nn.Transformer",
}


@cache
def found(family: Family) -> hw.Heads:
    """Heads of a model that no test changes."""
    return hw.find_heads(family.build())


def bed(family: Family, *, padded: bool = False) -> tuple[nn.Module, dict[str, Tensor], hw.Heads]:
    """A model that a test may change, inputs, and its heads."""
    model = family.build()
    return model, family.inputs(padded=padded), hw.find_heads(model)


def tiers(
    names: str | tuple[str, ...], quick: list, full: list
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `cases`, in a quick test of some of them and a full one of the others."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def run(values: list, **fixtures: Any) -> None:
            cases(names, values)(test)(**fixtures)

        run.__name__, run.__module__, run.__doc__ = test.__name__, test.__module__, test.__doc__
        signature = inspect.signature(test)
        given = [one for name, one in signature.parameters.items() if name not in (names if many else [names])]
        values = inspect.Parameter("values", inspect.Parameter.KEYWORD_ONLY)
        run.__signature__ = signature.replace(parameters=[*given, values])
        run.pytestmark = getattr(test, "pytestmark", [])
        parts = [quick, pytest.param(full, marks=pytest.mark.full)]
        return pytest.mark.parametrize("values", parts, ids=["quick", "full"])(run)

    many = not isinstance(names, str)
    return decorate


def sweep(families: Iterable[Family]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test on each family: a quick test has those that span the layouts, and a full one the others."""
    core = [family for family in families if family.name in CORE]
    return tiers("family", core, [family for family in families if family not in core])
