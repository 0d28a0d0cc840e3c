"""What belongs to a model prints a few lines, not the model."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch
from torch import nn

import headwise as hw
from architecture.source import FILES, module_name
from cases import cases
from headwise.heads.heads import LINES, shorten
from headwise.heads.view import read_projection

LAYERS = 50


@pytest.fixture(scope="module")
def deep() -> nn.TransformerEncoder:
    """A model of more layers than a screen has lines."""
    layer = nn.TransformerEncoderLayer(12, 3, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)


def test_a_deep_model_is_shown_without_its_middle(deep: nn.Module):
    heads = hw.find_heads(deep)
    lines = str(heads).splitlines()
    assert len(lines) == LINES == 40
    shown = [int(line.split()[2]) for line in lines[1:-1] if line.startswith("layers.")]
    assert shown == [*range(19), *range(32, 50)]
    assert lines[20] == "... 13 more sites ..."
    assert lines[-1] == "150 heads in 50 sites; projections: query, key, value"
    assert len(str(heads.layers(*range(38))).splitlines()) == 40
    assert "more sites" not in str(heads.layers(*range(38)))
    assert str(heads.layer(2)).splitlines()[-1] == "3 heads in 1 site; projections: query, key, value"


def test_what_keeps_repulsion_from_a_deep_model_is_printed_within_the_limit(deep: nn.Module):
    heads = hw.find_heads(deep)
    told = [
        dataclasses.replace(
            site, slices=tuple(dataclasses.replace(part, obstacle=f"is strange {i}") for part in site.slices)
        )
        for i, site in enumerate(heads)
    ]
    lines = str(dataclasses.replace(heads, sites=tuple(told))).splitlines()
    assert len(lines) == 40
    assert lines[-8].startswith("no repulsion, for example in layers.49")
    assert sum(line.startswith("no repulsion") for line in lines) == 8


@cases("count", [0, 1, 5, 6, 7, 30])
def test_a_shortened_list_has_its_limit_and_loses_nothing(count: int):
    first, left_out, last = shorten(list(range(count)), 6)
    assert len(first) + len(last) + (left_out > 0) == min(count, 6)
    assert len(first) + left_out + len(last) == count
    assert [*first, *last] == [i for i in range(count) if i < len(first) or i >= count - len(last)]


def test_everything_a_user_holds_is_printed_in_a_few_lines(deep: nn.Module):
    heads = hw.find_heads(deep)
    x = torch.randn(2, 5, 12)
    mask = hw.roles.Roles(hw.roles.Window(3))([hw.roles.WordTable.split("a b c d e")] * 2, num_heads=3)
    taps = hw.Taps(heads, outputs=True, weights=True)
    bias, function = hw.bias_heads(heads, torch.zeros(1, 3, 1, 5)), hw.bias_heads(heads, lambda _site, _call: None)
    ablation = hw.ablate(heads.layers(0, 1), [0, 2])
    penalty = hw.Disagreement(heads, hw.similarity.Output())
    guidance = hw.guide(heads.layer(3), mask)
    repulsion = hw.repel(heads, hw.SVGD(), torch.optim.SGD(deep.parameters(), lr=0.1))
    deep(x)
    (capture, *_) = captures = taps.read()
    penalty()
    handles = [taps, bias, function, ablation, penalty, guidance, repulsion]
    site = heads.sites[0]
    replaced = hw.aggregate(heads.layers(*range(2, LAYERS)), hw.routing.Gate())
    held = [
        *handles, heads, site, *site.slices, site.output, site.output_projection, capture, replaced,
        replaced.replaced[0], read_projection(site.output.owner), repulsion.groups[0],
    ]  # fmt: skip
    for thing in held:
        lines = repr(thing).splitlines()
        assert len(lines) <= LINES, type(thing)
        assert max(map(len, lines)) <= 700, type(thing)
        assert "(out_proj)" not in repr(thing), type(thing)
    assert repr(taps) == "Taps(outputs, weights of 50 sites, 0 calls to read)"
    assert repr(bias) == "HeadBias(tensor (1, 3, 1, 5) on 50 sites)"
    assert repr(function) == "HeadBias(function on 50 sites)"
    assert repr(ablation) == "Ablation(heads 0, 2 of each of 2 sites)"
    assert repr(capture) == "Capture(layers.0.self_attn: outputs [2, 5, 3, 4], weights [2, 3, 5, 5])"
    assert len(repr(captures)) < 100 * LAYERS
    assert "name='layers.0.self_attn', kind='self', layer=0" in repr(site)
    assert "attribute='in_proj_weight', heads=3, head_size=4, start=12" in repr(site.slices[1])
    assert repr(replaced).splitlines()[20] == "  ... 10 more attentions ..."
    for handle in handles[:-1]:
        handle.remove()
    assert repr(ablation) == "Ablation(heads 0, 2 of each of 2 sites; removed)"
    replaced.remove()


def dataclasses_of_headwise() -> list[type]:
    """The dataclasses of the library, without the laboratory's."""
    found = []
    for path in FILES:
        if path.startswith("headwise_lab/") or path in ("headwise/__main__.py", "headwise/routing/em_triton.py"):
            continue
        module = importlib.import_module(module_name(path))
        own = (
            thing for thing in vars(module).values() if isinstance(thing, type) and thing.__module__ == module.__name__
        )
        found += [cls for cls in own if dataclasses.is_dataclass(cls)]
    return found


def test_no_dataclass_prints_a_module_it_holds():
    classes = dataclasses_of_headwise()
    assert hw.heads.Site in classes
    assert len(classes) > 60
    for cls in classes:
        # dataclasses wrap the one they write against recursion
        generated = hasattr(cls.__repr__, "__wrapped__")
        held = (field for field in dataclasses.fields(cls) if "Callable" not in str(field.type))
        shown = [field.name for field in held if field.repr and "Module" in str(field.type)]
        assert not (generated and shown), f"{cls.__name__} prints {shown}; give them field(repr=False)"
