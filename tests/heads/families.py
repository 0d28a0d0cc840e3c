"""The families of models headwise is tested on: one table, used by the tests and by docs/any-model.md.

Each is a tiny random model of the real class, built without a download, with inputs it takes and the attention
sites it really has. Head counts, head sizes and layer counts differ from one another wherever the family lets them.
"""

from __future__ import annotations

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
