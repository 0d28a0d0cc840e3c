"""ELECTRA against a slow form, what its networks share, and what the released code repelled in the place of heads."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import headwise as hw
from headwise.errors import SettingError
from headwise.repulsion.rules import SVGD, update
from headwise_lab.experiment.scale import Recipe
from headwise_lab.experiment.seeding import initialize_parameters
from headwise_lab.models.electra import ElectraPretraining, ElectraSizes, _sample
from headwise_lab.training.optimizer import build_optimizer

SIZES = ElectraSizes(
    vocabulary=23,
    width=16,
    hidden=24,
    layers=2,
    heads=4,
    embedding=6,
    generator=0.5,
    generator_weight=1.5,
    discriminator_weight=30.0,
)
MASK = 4


@pytest.fixture
def model() -> ElectraPretraining:
    built = ElectraPretraining(SIZES).double()
    initialize_parameters(built, seed=7)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.mul_(8.0)  # far from the flat start, where every token is as likely as any other
    return built.eval()


def batch() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    original = torch.randint(5, 23, (3, 9), generator=draw)
    positions = torch.tensor([[1, 4, 7], [2, 3, 5], [1, 6, 8]])
    labels = original.gather(1, positions)
    types = torch.tensor([[0] * 4 + [1] * 5] * 3)
    return {
        "input_ids": original.scatter(1, positions, MASK),
        "positions": positions,
        "labels": labels,
        "token_type_ids": types,
    }


def test_the_losses_are_those_of_the_equations_token_by_token(model):
    given = batch()
    model.requires_grad_(False)
    rows, columns = given["input_ids"].shape
    everywhere = model.generator(input_ids=given["input_ids"], token_type_ids=given["token_type_ids"]).logits
    uniform = torch.rand(9, 1, generator=torch.Generator().manual_seed(3)).flatten().tolist()

    def sampled(logits: torch.Tensor, number: float) -> int:
        passed = 0.0
        for token, p in enumerate(logits.softmax(dim=-1).tolist()):
            passed += p
            if number < passed:
                return token
        raise AssertionError("probabilities sum to less than the number")

    # one sample is the right token
    given["labels"][0, 0] = sampled(everywhere[0, 1], uniform[0])
    found = model(**given, sampling_seed=3)
    filled, corrupted, original = [], given["input_ids"].clone(), given["input_ids"].clone()
    for row in range(rows):
        for place in range(3):
            position, token = int(given["positions"][row, place]), int(given["labels"][row, place])
            p = torch.softmax(everywhere[row, position], dim=-1)
            filled.append(-math.log(float(p[token])))
            corrupted[row, position] = sampled(everywhere[row, position], uniform[3 * row + place])
            original[row, position] = token
    judged = model.discriminator(input_ids=corrupted, token_type_ids=given["token_type_ids"]).logits
    losses, replaced = [], 0
    for row in range(rows):
        for column in range(columns):
            wrong = bool(corrupted[row, column] != original[row, column])
            replaced += wrong
            p = 1 / (1 + math.exp(-float(judged[row, column])))
            losses.append(-math.log(p if wrong else 1 - p))
    assert 0 < replaced < 9, "the test needs a sample that is right and one that is not"
    assert float(found["generator_loss"]) == pytest.approx(sum(filled) / 9, rel=1e-6)
    assert float(found["discriminator_loss"]) == pytest.approx(sum(losses) / (rows * columns), rel=1e-6)
    wanted = 1.5 * sum(filled) / 9 + 30.0 * sum(losses) / (rows * columns)
    assert float(found["loss"]) == pytest.approx(wanted, rel=1e-6)
    assert int(found["replaced"].sum()) == replaced


def test_replacements_follow_the_generators_probabilities():
    logits = torch.randn(23, generator=torch.Generator().manual_seed(4))
    wanted = torch.softmax(logits, dim=-1)
    shares = torch.bincount(_sample(logits.expand(4000, -1), seed=11), minlength=23) / 4000
    assert torch.allclose(shares, wanted, atol=4 * (0.25 / 4000) ** 0.5)


def test_a_token_of_probability_zero_is_not_sampled(monkeypatch):
    logits = torch.full((2, 4), -math.inf)
    logits[:, 1], logits[:, 2] = 0.3, -0.4
    for number, wanted in ((0.0, 1), (1.0, 2)):
        # 1.0 stands for what rounding makes of the largest number below it
        monkeypatch.setattr(torch, "rand", lambda *size, number=number, **_: torch.full(size, number))
        assert _sample(logits, seed=None).tolist() == [wanted] * 2


def test_of_logits_that_are_no_numbers_some_token_is_sampled():
    assert all(0 <= token < 23 for token in _sample(torch.full((2, 23), math.nan), seed=3).tolist())


def test_no_gradient_of_the_discriminator_reaches_the_generator_but_through_the_embeddings(model):
    model(**batch(), sampling_seed=3)["discriminator_loss"].backward()
    inside = [p for n, p in model.generator.named_parameters() if "embeddings." not in n and "lm_head.weight" not in n]
    assert inside
    assert all(parameter.grad is None for parameter in inside)


def test_the_networks_share_one_embedding_and_the_generator_is_a_quarter():
    model = ElectraPretraining(ElectraSizes(vocabulary=50))
    word = model.discriminator.electra.embeddings.word_embeddings.weight
    assert model.generator.generator_lm_head.weight is word
    assert model.generator.electra.embeddings is model.discriminator.electra.embeddings
    one, other = model.discriminator.config, model.generator.config
    assert (one.hidden_size, one.num_attention_heads, one.intermediate_size, one.num_hidden_layers) == (
        256,
        4,
        1024,
        12,
    )
    assert (other.hidden_size, other.num_attention_heads, other.intermediate_size) == (64, 1, 256)
    assert (model.sizes.generator_weight, model.sizes.discriminator_weight) == (1.0, 50.0)


def test_electra_small_has_14_million_parameters():
    with torch.device("meta"):
        discriminator = ElectraPretraining(ElectraSizes()).discriminator
    # "14M" in the paper's table 3
    assert 13.0e6 < sum(parameter.numel() for parameter in discriminator.parameters()) < 14.5e6


def test_parameters_are_drawn_as_bert_draws_them_and_the_same_for_a_seed():
    one, other = ElectraPretraining(SIZES), ElectraPretraining(SIZES)
    initialize_parameters(one, seed=5)
    initialize_parameters(other, seed=5)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert one.generator.generator_lm_head.weight is one.discriminator.electra.embeddings.word_embeddings.weight
    assert float(
        one.discriminator.electra.encoder.layer[0].attention.self.query.weight.detach().std()
    ) == pytest.approx(0.02, rel=0.2)
    assert not one.generator.generator_lm_head.bias.any()


def test_a_deviation_of_ones_own_holds_in_both_networks_and_in_what_is_saved():
    model = ElectraPretraining(dataclasses.replace(SIZES, width=64, hidden=64, embedding=32, deviation=0.3))
    initialize_parameters(model, seed=5)
    for network in (model.discriminator, model.generator):
        drawn = network.electra.encoder.layer[1].intermediate.dense
        assert float(drawn.weight.detach().std()) == pytest.approx(0.3, rel=0.1)
        assert not drawn.bias.any()
        assert network.config.initializer_range == 0.3
    words = model.discriminator.electra.embeddings.word_embeddings.weight.detach()
    assert float(words[1:].std()) == pytest.approx(0.3, rel=0.2)


def test_positions_that_begin_as_sinusoids_know_distances_and_are_trained():
    model = ElectraPretraining(dataclasses.replace(SIZES, embedding=32, deviation=0.3, sinusoids=True))
    initialize_parameters(model, seed=5)
    table = model.discriminator.electra.embeddings.position_embeddings.weight
    assert float((table.detach() ** 2).mean()) == pytest.approx(0.3**2, rel=1e-3)
    likeness = table.detach() @ table.detach().T
    for distance in (0, 1, 5):
        along = likeness.diagonal(distance)
        assert torch.allclose(along, along[0].expand_as(along), rtol=1e-3, atol=1e-3), distance
    assert likeness[0, 0] > likeness[0, 1] > likeness[0, 5]
    model(**batch(), sampling_seed=3)["loss"].backward()
    assert table.grad[:9].any()


def test_biases_and_norms_are_not_decayed(model):
    optimizer = build_optimizer(model, 0.5, Recipe(0.5, 1, 0, weight_decay=0.1))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    named = dict(model.named_parameters())
    assert len(decay) == len(named)
    for name, parameter in named.items():
        assert decay[id(parameter)] == (0.0 if name.endswith("bias") or "LayerNorm" in name else 0.1), name


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(SettingError, match=r"the generator's width 11 cannot be divided among 2 heads"):
        ElectraSizes(width=20, heads=4, generator=0.55)
    with pytest.raises(SettingError, match=r"generator is 0\.0; expected a share"):
        ElectraSizes(generator=0.0)
    with pytest.raises(SettingError, match=r"embedding is 5; sinusoids for positions need an even width"):
        ElectraSizes(embedding=5, sinusoids=True)
    with pytest.raises(SettingError, match=r"deviation is 0\.0"):
        ElectraSizes(deviation=0.0)


# What follows is about the released code of An et al. 2020 (facts in laboratory/papers/repulsive/DEVIATIONS.md).


def released_particles(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Particles as the released ELECTRA code makes them from a kernel [d_in, heads * size], ours transposed."""
    kernel = weight.T
    return kernel.reshape(-1, heads).T


def test_the_released_code_repelled_every_fourth_column_and_no_head(model):
    heads = hw.find_heads(model.discriminator).layer(0)
    assert hw.verify(heads, (batch()["input_ids"],)).sites
    for head_slice in heads.slices():
        weight = head_slice.parameter.detach()
        size = weight.shape[0] // 4
        # ours are the rows that one head's queries, keys or values come from
        for head in range(4):
            assert torch.equal(head_slice.of(weight)[head].flatten(), weight[head * size : (head + 1) * size].flatten())
        # theirs take one row of each head
        changed = weight.clone()
        changed[:size] += 1.0  # of head 0 alone
        ours = (head_slice.of(changed) != head_slice.of(weight)).flatten(1).any(dim=1)
        theirs = (released_particles(changed, 4) != released_particles(weight, 4)).any(dim=1)
        assert ours.tolist() == [True, False, False, False]
        assert theirs.tolist() == [True, True, True, True]
        columns = released_particles(torch.arange(16.0)[:, None].expand(16, 3), 4)
        assert columns[1].unique().tolist() == [1.0, 5.0, 9.0, 13.0]


def test_so_the_released_step_is_another_one(model):
    rule = SVGD(alpha=0.1, step_size=0.01)
    (head_slice, *_) = hw.find_heads(model.discriminator).layer(0).slices()
    weight = head_slice.parameter.detach()
    gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(2), dtype=weight.dtype)
    ours = update(rule, weight.view(4, -1), gradient.view(4, -1)).gradient.view_as(weight)
    theirs = update(rule, released_particles(weight, 4), released_particles(gradient, 4)).gradient
    back = theirs.T.reshape(weight.shape[1], weight.shape[0]).T
    assert torch.allclose(released_particles(back, 4), theirs)
    assert float((ours - back).norm() / ours.norm()) > 0.1
