"""Masks of roles: of an encoder, held against a forward by hand, and of an arm, held against the library's."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor

import headwise as hw
from cases import cases
from headwise.errors import DataError, MaskError, SettingError
from headwise.roles.build import Roles
from headwise.roles.idf import idf
from headwise.roles.roles import Dependency, Major, Rare, Separator, Window
from headwise_lab.experiment.arm import PARSED, ROLES, Guided
from headwise_lab.experiment.seeding import initialize_parameters
from headwise_lab.role_masks.encoder import MaskFunction, mask_encoder
from headwise_lab.role_masks.sentences import Donors
from headwise_lab.tasks.classification.scales import CLASSIFICATION_SCALES
from headwise_lab.tasks.classification.task import ClassificationTask
from headwise_lab.tasks.translation.model import END, START, Marian, Seq2Seq, Seq2SeqConfig
from headwise_lab.texts.data import collate
from lab.sentences import parse_without_spacy, parsed, write_sentences

SOURCE = torch.tensor([[4, 5, 6, 7, 9, 2], [8, 3, 2, 0, 0, 0], [9, 9, 3, 2, 0, 0]])
REAL = SOURCE != 0
HEADS, LONGEST = 4, 7


def built(kind: str, seed: int = 6, **changes) -> Seq2Seq | Marian:
    sizes = {"vocab_size": 11, "width": 16, "hidden": 24, "heads": HEADS, "encoder_layers": 2, "decoder_layers": 2}
    config = Seq2SeqConfig(**sizes, **changes)
    model = Seq2Seq(config) if kind == "seq2seq" else Marian(config)
    initialize_parameters(model, seed)
    scale = 1.0 if kind == "seq2seq" else 8.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "position" in name or parameter.dim() < 2:
                continue
            # what is decoded follows from the source, and no two continuations are nearly as likely
            crossing = "cross_attention" in name or "encoder_attn" in name
            parameter.mul_(scale * (12.0 if crossing else 0.5 if "embed" in name or "shared" in name else 1.0))
    return model.double().eval()


def roles(ids: Tensor) -> Tensor:
    """Role 0 sees a window of 3; role 1 sees even ids but the end, which is padding alone in one source."""
    places = torch.arange(ids.shape[1])
    window = ((places[:, None] - places[None]).abs() <= 1).expand(len(ids), -1, -1)
    even = ((ids % 2 == 0) & (ids != 2))[:, None].expand_as(window)
    return torch.stack([window, even], dim=1)


def masks(heads: tuple[int, ...] = (0, 1)) -> MaskFunction:
    return lambda ids, real: hw.roles.HeadMask(roles(ids), real, num_heads=HEADS, heads=heads)


def allowed(guided: tuple[int, ...] = (0, 1)) -> Tensor:
    """What each head may see, padding included, written out cell by cell."""
    role, batch, length = roles(SOURCE), *SOURCE.shape
    found = torch.zeros(batch, HEADS, length, length, dtype=torch.bool)
    for b in range(batch):
        for head in range(HEADS):
            for query in range(length):
                real = [key for key in range(length) if REAL[b, key]]
                seen = [key for key in real if head not in guided or role[b, guided.index(head), query, key]]
                for key in seen or real:
                    found[b, head, query, key] = True
    return found


def states_by_hand(model: Seq2Seq, may: Tensor) -> Tensor:
    """The encoder of `Seq2Seq`, head by head."""
    batch, length = SOURCE.shape
    width, size = model.config.width, model.config.width // HEADS
    place = torch.arange(length, dtype=torch.float64)[:, None] / 10_000 ** (
        torch.arange(0, width, 2, dtype=torch.float64) / width
    )
    positions = torch.zeros(length, width, dtype=torch.float64)  # the model's own are of single precision
    positions[:, 0::2], positions[:, 1::2] = place.sin(), place.cos()
    states = model.embedding.weight[SOURCE] * math.sqrt(width) + positions
    for layer in model.encoder.layers:
        x = layer.attention_norm(states) if model.config.norm_first else states
        rows = (x @ layer.attention.in_proj_weight.T + layer.attention.in_proj_bias).split(width, dim=-1)
        q, k, v = (part.view(batch, length, HEADS, size) for part in rows)
        heads = torch.zeros(batch, length, HEADS, size, dtype=torch.float64)
        for b in range(batch):
            for h in range(HEADS):
                for i in range(length):
                    keys = may[b, h, i].nonzero().flatten()
                    scores = torch.stack([q[b, i, h] @ k[b, j, h] for j in keys]) / math.sqrt(size)
                    weights = scores.exp() / scores.exp().sum()
                    heads[b, i, h] = sum(w * v[b, j, h] for w, j in zip(weights, keys, strict=True))
        output = layer.attention.out_proj(heads.flatten(2))
        if model.config.norm_first:
            states = states + output
            states = states + layer.feed_forward(layer.feed_forward_norm(states))
        else:
            states = layer.attention_norm(states + output)
            states = layer.feed_forward_norm(states + layer.feed_forward(states))
    return model.encoder.norm(states)


def states_of_marian(model: Marian, may: Tensor) -> Tensor:
    """Marian's own encoder under its own kind of mask for each head."""
    model.set_attn_implementation("eager")
    bias = torch.where(may, 0.0, -1e30).double()
    states = model.get_encoder()(input_ids=SOURCE, attention_mask=bias).last_hidden_state
    model.set_attn_implementation("sdpa")
    return states


def states_of(model: Seq2Seq | Marian, may: Tensor) -> Tensor:
    return states_by_hand(model, may) if isinstance(model, Seq2Seq) else states_of_marian(model, may)


def searched(model: Seq2Seq | Marian, states: Tensor, row: int, beams: int, length_penalty: float) -> list[int]:
    """Beam search over one source that runs the decoder anew over every prefix."""
    real = REAL[row].nonzero().flatten()
    memory, keep = states[row : row + 1, real], torch.ones(1, len(real), dtype=torch.int64)
    running, finished = [(0.0, [START])], []
    for step in range(1, LONGEST + 1):
        candidates = []
        for total, prefix in running:
            ids = torch.tensor([prefix])
            logits = model(decoder_input_ids=ids, encoder_outputs=(memory,), attention_mask=keep).logits[0, -1]
            logarithms = logits.log_softmax(-1)
            candidates += [(total + float(logarithms[token]), [*prefix, token]) for token in range(2, 11)]
        candidates.sort(key=lambda candidate: -candidate[0])
        going_on = []
        for rank, (total, tokens) in enumerate(candidates[: 2 * beams]):
            if tokens[-1] != END and step < LONGEST:
                going_on.append((total, tokens))
            elif rank < beams:
                finished.append((total / step**length_penalty, tokens))
        finished = sorted(finished, key=lambda candidate: -candidate[0])[:beams]
        running = going_on[:beams]
        if len(finished) == beams:
            break
    return finished[0][1]


def generated(model: Seq2Seq | Marian, beams: int, length_penalty: float, **changes) -> list[list[int]]:
    searching = {"length_penalty": length_penalty, "early_stopping": True} if beams > 1 else {}
    found = model.generate(
        input_ids=SOURCE,
        attention_mask=REAL.long(),
        num_beams=beams,
        do_sample=False,
        max_new_tokens=LONGEST,
        suppress_tokens=[0, START],
        **searching,
        **changes,
    ).tolist()
    return [row[: row.index(END) + 1] if END in row else [token for token in row if token != 0] for row in found]


KINDS = [("seq2seq", {"norm_first": True}), ("seq2seq", {"norm_first": False, "seed": 5}), ("marian", {})]


@pytest.mark.parametrize(("kind", "changes"), KINDS)
@pytest.mark.parametrize("beams", [pytest.param(1, marks=pytest.mark.full), 3])
def test_a_masked_encoder_is_searched_as_one_computed_by_hand(kind, changes, beams):
    model = built(kind, **changes)
    states = states_of(model, allowed())
    free = generated(model, beams, 0.6)
    with torch.no_grad():
        expected = [searched(model, states, row, beams, 0.6) for row in range(len(SOURCE))]
    with mask_encoder(model, masks()):
        encoder = model.get_encoder()(input_ids=SOURCE, attention_mask=REAL.long())
        torch.testing.assert_close(encoder.last_hidden_state[REAL], states[REAL], rtol=1e-6, atol=1e-6)
        for use_cache in (True, False):
            assert generated(model, beams, 0.6, use_cache=use_cache) == expected
    assert generated(model, beams, 0.6) == free
    assert free != expected


@cases("kind", ["seq2seq", "marian"])
@cases("guided", [(0, 1), (3, 1)])
def test_guided_heads_attend_only_where_they_may_and_the_others_everywhere(kind, guided):
    model = built(kind)
    sites = hw.find_heads(model).kind("self")
    may = allowed(guided)
    with hw.Taps(sites, weights=True) as taps, mask_encoder(model, masks(guided)):
        generated(model, 3, 1.0)
        captures = taps.read()
    assert len(captures) == 2
    for capture in captures:
        seen = capture.weights > 0
        assert torch.equal(seen, may)


def test_only_chosen_layers_are_guided():
    model = built("seq2seq")
    sites = hw.find_heads(model).kind("self")
    with hw.Taps(sites, weights=True) as taps, mask_encoder(model, masks(), sites=sites.layers(1)) as handle:
        generated(model, 2, 1.0)
        first, second = taps.read()
    assert list(handle.guidance.calls) == ["encoder.layers.1.attention"]
    assert bool((first.weights > 0)[0].all())
    assert torch.equal(second.weights > 0, allowed())


@cases("kind", ["seq2seq", "marian"])
def test_gradients_of_a_masked_encoder_are_those_of_its_mask(kind):
    model = built(kind).train()
    labels = torch.tensor([[5, 9, 2], [7, 2, -100], [4, 2, -100]])

    def gradients(**handles) -> list[Tensor]:
        model.zero_grad()
        given = {"input_ids": SOURCE, "attention_mask": REAL.long()}
        if "may" in handles:
            given = {"encoder_outputs": (states_of(model, handles["may"]),), "attention_mask": REAL.long()}
        model(**given, labels=labels).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    with mask_encoder(model, masks()):
        found = gradients()
    expected = gradients(may=allowed())
    assert len(found) == len(expected) > 10
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_without_a_mask_for_padding_the_encoder_goes_by_its_ids():
    model = built("seq2seq")
    with mask_encoder(model, masks()):
        one = model.encoder(SOURCE).last_hidden_state
        other = model.encoder(SOURCE, REAL.long()).last_hidden_state
    assert torch.equal(one, other)


def test_masks_that_do_not_fit_and_heads_that_are_not_there_are_refused():
    model = built("seq2seq")
    heads = hw.find_heads(model)
    with pytest.raises(SettingError, match=r"decoder\.layers\.0\.attention is no self-attention of an encoder"):
        mask_encoder(model, masks(), sites=heads.kind("decoder"))
    good = roles(SOURCE)
    wrong = [
        (lambda *_: good, "the mask is a Tensor; expected a HeadMask"),
        (lambda *_: hw.roles.HeadMask(good, num_heads=3), "is for 3 heads and encoder.layers.0.attention has 4"),
        (lambda *_: hw.roles.HeadMask(good[:2], num_heads=4), "has 2 sentences and the batch 3"),
        (lambda *_: hw.roles.HeadMask(good[..., :5, :5], num_heads=4), "has 5 tokens and this call 6 queries"),
    ]
    for made, message in wrong:
        with pytest.raises(MaskError, match=message), mask_encoder(model, made):
            model.encoder(SOURCE)
        model.encoder(SOURCE)
    with pytest.raises(MaskError, match="no input_ids"), mask_encoder(built("marian"), masks()) as handle:
        handle._read(None, (), {"inputs_embeds": torch.zeros(1, 2, 16)})
    with pytest.raises(hw.errors.NotFired), mask_encoder(model, masks()):
        pass


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


def masks_of(data, scale, guided: Guided, seed: int = 4):
    return TASK.role_masks(guided, data, scale, seed)


def allowed_cells(mask, role: str) -> torch.Tensor:
    """The cells of one role's head, [B, L, L]."""
    return mask.allowed()[:, PLACES[role]]


def real(tokens: torch.Tensor) -> torch.Tensor:
    """True where query and key are real tokens, [B, L, L]."""
    keep = tokens != 0
    return keep[:, :, None] & keep[:, None, :]


@pytest.mark.parametrize("released", [False, True])
def test_the_masks_are_the_roles_of_the_library_with_the_rarity_of_training(data, scale, released):
    some = batch(data, 3, 9, 40)
    mask = masks_of(data, scale, Guided(released=released))(some)
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
    one, other = masks_of(data, scale, guided), masks_of(data, scale, guided)
    other(batch(data, 5, 6, 7))
    alone, together = one(batch(data, 6)), other(batch(data, 20, 6, 5))
    size = alone.tokens
    assert torch.equal(alone.allowed()[0, :, :size, :size], together.allowed()[1, :, :size, :size])


def test_a_random_mask_has_as_many_allowed_cells_in_each_row_and_is_not_the_role(data, scale):
    some = batch(data, *range(40))
    role_mask, inside = masks_of(data, scale, Guided())(some), real(some["tokens"])
    for role in ROLES:
        random, again = (masks_of(data, scale, Guided(random=(role,)), seed=seed)(some) for seed in (4, 5))
        one, other = (allowed_cells(mask, role) & inside for mask in (role_mask, random))
        assert torch.equal(one.sum(-1), other.sum(-1)), role
        assert not torch.equal(one, other), role
        assert not torch.equal(allowed_cells(again, role) & inside, other), role
        for untouched in set(ROLES) - {role}:
            assert torch.equal(allowed_cells(role_mask, untouched), allowed_cells(random, untouched)), role


def test_a_dropped_role_leaves_its_head_with_the_padding_mask(data, scale):
    some = batch(data, 1, 2, 3)
    whole, dropped = (
        masks_of(data, scale, Guided())(some),
        masks_of(data, scale, Guided(drop=("separator",)))(some),
    )
    keep = (some["tokens"] != 0)[:, None, :].expand(-1, some["tokens"].shape[1], -1)
    assert torch.equal(allowed_cells(dropped, "separator"), keep)
    assert not torch.equal(allowed_cells(whole, "separator"), keep)
    assert dropped.num_heads == 7
    for role in ROLES:
        if role != "separator":
            assert torch.equal(allowed_cells(whole, role), allowed_cells(dropped, role))


def test_a_shuffled_parse_changes_the_roles_of_a_parse_alone(data, scale):
    some = batch(data, *range(60))
    whole, shuffled = (
        masks_of(data, scale, Guided())(some),
        masks_of(data, scale, Guided(shuffled=PARSED))(some),
    )
    for role in ROLES:
        assert torch.equal(allowed_cells(whole, role), allowed_cells(shuffled, role)) == (role not in PARSED)


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
        masks_of(data, plain, Guided())
    with pytest.raises(DataError, match=r"the roles major need parses"):
        masks_of(data, plain, Guided(drop=("dependency",)))
    with pytest.raises(SettingError, match="5 roles and 4 heads; expected a head for each role"):
        masks_of(data, dataclasses.replace(plain, heads=4), Guided(drop=PARSED))
    mask = masks_of(data, plain, Guided(roles=("rare", "separator", "window")))(batch(data, 0))
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
