"""Attentions that people write themselves are read as they are, by the row that the refusal prints, or refused."""

from __future__ import annotations

import copy
import inspect
import re

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from cases import cases, thin, tiers
from heads.attentions import SeparateAttention
from heads.written import GROUPS, HEADS, WIDTH, WRITTEN, Core, Written, capture, find

pytestmark = pytest.mark.usefixtures("without_gradients")
READ = [form for form in WRITTEN if not form.refused]


@pytest.fixture
def without_gradients():
    # a form that keeps its weights could not be copied
    with torch.no_grad():
        yield


def first(returned: Tensor | tuple[Tensor, ...]) -> Tensor:
    return returned if isinstance(returned, Tensor) else returned[0]


@tiers("form", *thin(READ, 8))
def test_what_people_write_is_found_proved_and_read(form: Written):
    # one of two layers: what is printed is for all
    model, inputs = form.build(), form.inputs()
    heads = find(form, model)
    (site,) = heads
    assert site.num_heads == HEADS
    assert hw.verify(heads, inputs).sites == (site.name,)
    require_products(form, site, capture(heads, model, inputs), model)
    before = first(model(*inputs))
    if not (site.output_projection is not None or site.gives("outputs") or site.output is None):
        with pytest.raises(hw.errors.LayoutError, match="W_O is the parameter"):
            hw.ablate(heads, 0)
        return
    if site.output is not None:
        for head in range(HEADS):
            zeroed = copy.deepcopy(model)
            weight = zeroed.get_parameter(site.output.name)
            with torch.no_grad():
                own = weight.data[head] if weight.dim() == 3 else weight.data.chunk(HEADS, 1)[head]
                own.zero_()
            with hw.ablate(heads, head):
                assert torch.allclose(first(model(*inputs)), first(zeroed(*inputs)), atol=1e-10)
            assert not torch.allclose(first(zeroed(*inputs)), before, atol=1e-6)
    assert torch.equal(first(model(*inputs)), before)


def require_products(form: Written, site: hw.heads.Site, seen: hw.heads.Capture | None, model: nn.Module) -> None:
    """Weights that are reached times values are outputs."""
    if seen is None:
        # written out, or the model would have to be called otherwise
        assert "scaled_dot_product_attention" not in inspect.getsource(type(model).forward) or form.name.endswith(
            "slow"
        )
        return
    weights, values, outputs = seen.weights, seen.values, seen.outputs
    assert torch.allclose(weights.sum(-1), torch.ones_like(weights[..., 0]))
    own = [group for head in range(HEADS) for group in range(GROUPS) if head in site.list_members(group)]
    values = values if values.shape[2] == HEADS else values[:, :, own]
    if form.tokens_first:
        values, outputs = values.transpose(0, 1), outputs.transpose(0, 1)
    assert torch.allclose(torch.einsum("bhqk,bkhe->bqhe", weights, values), outputs, atol=1e-10)


@cases("form", [form for form in WRITTEN if form.refused])
def test_what_no_row_reads_is_refused_with_the_reason(form: Written):
    with pytest.raises(hw.errors.LayoutError, match=re.escape(form.refused)):
        hw.find_heads(form.build())


def test_a_row_that_cannot_be_tried_goes_by_names_and_has_places_to_fill_in():
    class Placed(nn.Module):
        """Takes positions besides tokens; its number of heads is written into its code."""

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, WIDTH)
            self.back, self.v_map, self.q_map, self.k_map = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x: Tensor, places: Tensor) -> Tensor:
            x = x + self.table(places)
            q, k, v = (
                part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q_map, self.k_map, self.v_map)
            )
            return self.back(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))

    model = Placed().eval()
    with pytest.raises(
        hw.errors.LayoutError, match=r"(?s)calling it with tokens raises .*in the place of \.\.\."
    ) as refusal:
        hw.find_heads(model)
    (call,) = re.findall(r"^ +(hw\.find_heads\(.*)$", str(refusal.value), re.MULTILINE)
    with pytest.raises(hw.errors.SettingError, match=r"num_heads is \.\.\., a place to fill in"):
        eval(call, {"hw": hw, "model": model})
    heads = eval(call.replace("num_heads=...", f"num_heads={HEADS}"), {"hw": hw, "model": model})
    assert hw.verify(heads, (torch.randn(2, 5, WIDTH), torch.arange(5).expand(2, 5))).sites == ("",)


class Channels(nn.Module):
    """Features of a head attend to one another; a token's value changes what this token gets alone."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.num_heads, self.names = HEADS, names
        for name in names:
            setattr(self, name, nn.Linear(WIDTH, 3 * WIDTH // len(names)))
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([getattr(self, name)(x) for name in self.names], -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).permute(0, 2, 3, 1) for part in joined.chunk(3, -1))
        return self.proj(((q @ k.mT).softmax(-1) @ v).permute(0, 3, 1, 2).flatten(2))


@tiers("names", [("qkv",)], [("q_proj", "k_proj", "v_proj")])
def test_no_row_is_printed_that_takes_the_values_of_channels_for_queries(names: tuple[str, ...]):
    assert "No row was found" in (printed := refuse(Channels(*names).eval()))
    assert "    hw.find_heads(" not in printed


def test_a_row_of_heads_that_are_not_seen_to_attend_says_so():
    class Recurrent(Core):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (
                part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.left, self.middle, self.right)
            )
            return ((q @ k.mT).tril() @ v).transpose(1, 2).flatten(2)

    assert "though its heads were not seen to attend" in refuse(Recurrent().eval())


def test_a_row_that_goes_by_names_is_one_that_is_taken():
    class GatedAttention(nn.Module):
        """No attention, and made for nine tokens."""

        def __init__(self) -> None:
            super().__init__()
            self.num_heads = HEADS
            self.first, self.second, self.tokens = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(9, 9)

        def forward(self, x: Tensor) -> Tensor:
            left, right = self.first(x).chunk(2, -1)
            return self.second(left * self.tokens(right.mT).mT)

    printed = refuse(GatedAttention().eval())
    assert "No row can be tried" in printed
    assert "    hw.find_heads(" not in printed


def test_heads_that_are_not_projected_are_told_apart_all_the_same():
    model = Core().eval()
    (call,) = re.findall(r"^ +(hw\.find_heads\(.*)$", refuse(model), re.MULTILINE)
    (site,) = eval(call, {"hw": hw, "model": model})
    assert [part.owner for part in site.slices] == [model.right, model.middle, model.left]
    assert site.output_projection is None


def refuse(model: nn.Module) -> str:
    with pytest.raises(hw.errors.LayoutError) as refusal:
        hw.find_heads(model)
    return str(refusal.value)


def test_a_row_is_printed_for_each_kind_beside_attention_that_is_read():
    class OneAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.q_map, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (
                part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q_map, self.third, self.first)
            )
            return self.second(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))

    class OtherAttention(OneAttention):
        def __init__(self) -> None:
            super().__init__()
            self.number = HEADS
            self.v_map, self.second = self.second, self.first
            del self.first

        def forward(self, x: Tensor) -> Tensor:
            self.__dict__["first"] = self.v_map
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(OneAttention(), OtherAttention(), SeparateAttention(WIDTH), OneAttention()).eval()
    with pytest.raises(hw.errors.LayoutError, match="3 modules of Sequential look like attention") as refusal:
        hw.find_heads(model)
    (call,) = re.findall(r"^ +(hw\.find_heads\(.*)$", str(refusal.value), re.MULTILINE)
    heads = eval(call, {"hw": hw, "model": model})
    assert [site.name for site in heads] == ["0", "1", "2", "3"]
    assert len(hw.verify(heads, (torch.randn(2, 5, WIDTH),)).sites) == 4
