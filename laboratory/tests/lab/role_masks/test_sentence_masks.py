"""Masks of an arm's roles: they are the library's, and their controls differ from them in one thing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from headwise.errors import DataError, SettingError
from headwise.roles.build import Roles
from headwise.roles.idf import idf
from headwise.roles.roles import Dependency, Major, Rare, Separator, Window
from headwise_lab.experiment.arm import PARSED, ROLES, Guided
from headwise_lab.role_masks.sentences import Donors
from headwise_lab.tasks.classification.scales import CLASSIFICATION_SCALES
from headwise_lab.tasks.classification.task import ClassificationTask
from headwise_lab.texts.data import collate
from lab.sentences import parse_without_spacy, parsed, write_sentences

TASK = ClassificationTask()
PLACES = {role: head for head, role in enumerate(ROLES)}


@pytest.fixture
def scale(tmp_path, monkeypatch):
    parse_without_spacy(monkeypatch)
    return dataclasses.replace(CLASSIFICATION_SCALES["demo"], heads=7, pipeline=tmp_path)


@pytest.fixture
def data(scale, tmp_path):
    return TASK.load(write_sentences(tmp_path / "a.tsv", 150), scale, None)


def batch(data, *places: int):
    return collate([data.train[place] for place in places])


def masks(data, scale, guided: Guided, seed: int = 4):
    return TASK.role_masks(guided, data, scale, seed)


def allowed(mask, role: str) -> torch.Tensor:
    """The cells of one role's head, [B, L, L]."""
    return mask.allowed()[:, PLACES[role]]


def real(tokens: torch.Tensor) -> torch.Tensor:
    """True where query and key are real tokens, [B, L, L]."""
    keep = tokens != 0
    return keep[:, :, None] & keep[:, None, :]


@pytest.mark.parametrize("released", [False, True])
def test_the_masks_are_the_roles_of_the_library_with_the_rarity_of_training(data, scale, released):
    some = batch(data, 3, 9, 40)
    mask = masks(data, scale, Guided(released=released))(some)
    tables = [data.texts.table(number) for number in some["numbers"].tolist()]
    rarity = idf([data.texts.table(number).words for number in data.train.numbers.tolist()])
    roles = (
        Roles.released(idf=rarity)
        if released
        else Roles(Rare(), Separator(), Dependency(), Major(), Window(3), idf=rarity)
    )
    expected = roles(tables, num_heads=7, before=1, after=1)
    assert mask.names == ROLES
    assert torch.equal(mask.allowed(), expected.allowed())
    assert not mask.allowed()[:, PLACES["window"]].all()
    # heads without a role see all that is no padding
    assert torch.equal(mask.allowed()[:, 6], (some["tokens"] != 0)[:, None, :].expand(-1, some["tokens"].shape[1], -1))


def test_what_a_sentence_gets_does_not_depend_on_its_batch_or_on_what_came_before(data, scale):
    guided = Guided(random=("rare", "window"), shuffled=("major",))
    one, other = masks(data, scale, guided), masks(data, scale, guided)
    other(batch(data, 5, 6, 7))
    alone, together = one(batch(data, 6)), other(batch(data, 20, 6, 5))
    size = alone.tokens
    assert torch.equal(alone.allowed()[0, :, :size, :size], together.allowed()[1, :, :size, :size])


def test_a_random_mask_has_as_many_allowed_cells_in_each_row_and_is_not_the_role(data, scale):
    some = batch(data, *range(40))
    role_mask, inside = masks(data, scale, Guided())(some), real(some["tokens"])
    for role in ROLES:
        random, again = (masks(data, scale, Guided(random=(role,)), seed=seed)(some) for seed in (4, 5))
        one, other = (allowed(mask, role) & inside for mask in (role_mask, random))
        assert torch.equal(one.sum(-1), other.sum(-1)), role
        assert not torch.equal(one, other), role
        assert not torch.equal(allowed(again, role) & inside, other), role
        for untouched in set(ROLES) - {role}:
            assert torch.equal(allowed(role_mask, untouched), allowed(random, untouched)), role


def test_a_dropped_role_leaves_its_head_with_the_padding_mask(data, scale):
    some = batch(data, 1, 2, 3)
    whole, dropped = masks(data, scale, Guided())(some), masks(data, scale, Guided(drop=("separator",)))(some)
    keep = (some["tokens"] != 0)[:, None, :].expand(-1, some["tokens"].shape[1], -1)
    assert torch.equal(allowed(dropped, "separator"), keep)
    assert not torch.equal(allowed(whole, "separator"), keep)
    assert dropped.num_heads == 7
    for role in ROLES:
        if role != "separator":
            assert torch.equal(allowed(whole, role), allowed(dropped, role))


def test_a_shuffled_parse_changes_the_roles_of_a_parse_alone(data, scale):
    some = batch(data, *range(60))
    whole, shuffled = masks(data, scale, Guided())(some), masks(data, scale, Guided(shuffled=PARSED))(some)
    for role in ROLES:
        assert torch.equal(allowed(whole, role), allowed(shuffled, role)) == (role not in PARSED)


def test_another_parse_is_that_of_a_training_sentence_of_as_many_words_and_never_the_own_one(data):
    lengths, pool = data.texts.words[0].lengths, data.train.numbers.tolist()
    donors = Donors(data.texts.table, lengths, pool, seed=8)
    parses = {number: data.texts.table(number).parse() for number in pool}
    from_another = 0
    for number in range(len(lengths)):
        own, other = data.texts.table(number), donors(number)
        assert other.words == own.words
        rivals = [parse for place, parse in parses.items() if lengths[place] == len(own) and parse != own.parse()]
        if rivals:
            from_another += 1
            assert other.parse() in rivals
    assert from_another > 0.9 * len(lengths)
    assert [Donors(data.texts.table, lengths, pool, seed=9)(n).heads for n in range(20)] != [
        donors(n).heads for n in range(20)
    ]


def test_where_no_other_sentence_is_as_long_the_own_words_change_places_in_the_tree():
    tables = [parsed([*"abcdefgh"]), parsed([*"ab"])]
    found = Donors(tables.__getitem__, np.array([8, 2]), [0, 1], seed=3)(0)
    assert found.heads != tables[0].heads
    assert sorted(found.relations) == sorted(tables[0].relations)
    # equal sentences have equal parses, and their own is not another one
    twins = [parsed([*"abcd"]), parsed([*"abcd"])]
    assert Donors(twins.__getitem__, np.array([4, 4]), [0, 1], seed=3)(0).parse() != twins[0].parse()


def test_roles_of_a_parse_without_one_are_refused_and_the_others_are_not(scale, tmp_path):
    plain = dataclasses.replace(scale, pipeline=None)
    data = TASK.load(write_sentences(tmp_path / "b.tsv", 60), plain, None)
    with pytest.raises(
        DataError, match=r"the roles dependency, major need parses; name a spaCy pipeline with a parser"
    ):
        masks(data, plain, Guided())
    with pytest.raises(DataError, match=r"the roles major need parses"):
        masks(data, plain, Guided(drop=("dependency",)))
    with pytest.raises(SettingError, match="5 roles and 4 heads; expected a head for each role"):
        masks(data, dataclasses.replace(plain, heads=4), Guided(drop=PARSED))
    mask = masks(data, plain, Guided(roles=("rare", "separator", "window")))(batch(data, 0))
    assert mask.heads == (0, 1, 2)


def test_settings_that_contradict_each_other_are_refused():
    for settings, message in (
        ({"roles": ()}, "no role is left"),
        ({"drop": ROLES}, "no role is left"),
        ({"roles": ("rare", "rare")}, "roles is rare/rare; name each role once"),
        ({"roles": ("verbs",)}, "roles is 'verbs'; expected one of rare, separator"),
        ({"roles": ("rare",), "drop": ("window",)}, "drop is 'window'; expected one of rare"),
        ({"roles": ("rare",), "random": ("window",)}, "random is window; expected some of the roles rare"),
        ({"drop": ("rare",), "random": ("rare",)}, "role rare is replaced in two ways"),
        ({"shuffled": ("window",)}, "shuffled is 'window'; expected one of dependency, major"),
        ({"roles": ("rare",), "shuffled": PARSED}, "no role of rare needs a parse"),
    ):
        with pytest.raises(SettingError, match=message):
            Guided(**settings)
