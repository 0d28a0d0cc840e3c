"""Roles that define where a head may attend: words, parses, masks, and guiding a model."""

from headwise.masks.head_mask import HeadMask
from headwise.roles.build import Roles
from headwise.roles.collator import ROLE_MASK, RoleCollator
from headwise.roles.conllu import read_conllu
from headwise.roles.guide import Guidance, guide
from headwise.roles.idf import IDF, idf
from headwise.roles.roles import Dependency, Major, Rare, Role, RoleSetting, Separator, Window
from headwise.roles.word_table import (
    AlignedRow,
    Alignment,
    Sentence,
    WordTable,
    align,
    tokens_as_words,
    words_of_tokens,
)

__all__ = [
    "IDF",
    "ROLE_MASK",
    "AlignedRow",
    "Alignment",
    "Dependency",
    "Guidance",
    "HeadMask",
    "Major",
    "Rare",
    "Role",
    "RoleCollator",
    "RoleSetting",
    "Roles",
    "Sentence",
    "Separator",
    "Window",
    "WordTable",
    "align",
    "guide",
    "idf",
    "read_conllu",
    "tokens_as_words",
    "words_of_tokens",
]
