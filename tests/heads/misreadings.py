"""Every way to read a site wrongly that its weights allow, for the tests of `verify`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

import headwise as hw
from headwise.heads.heads import Heads, Site
from headwise.heads.view import HeadView


def misreadings(site: Site) -> Iterator[tuple[str, Site]]:
    """Wrong rows for a rightly read site: label and site."""
    if site.num_heads % 2 == 0 and site.key_value_heads % 2 == 0:
        yield "half the heads", _resized(site, 0.5)
    factor = next(p for p in (2, 3, 5, 7) if all(head_slice.head_size % p == 0 for head_slice in site.slices))
    yield f"{factor} times the heads", _resized(site, factor)
    if len(site.slices) < 3:
        # of keys that it holds, their number tells
        for groups in (1, 2, 4) if site.borrows else ():
            if groups != site.key_value_heads:
                yield f"{groups} groups", replace(site, key_value_heads=groups)
        return
    query, key, value = site.slices
    yield "keys and values swapped", replace(site, slices=(query, *_swapped(key, value)))
    if query.heads == key.heads:
        yield "queries and keys swapped", replace(site, slices=(*_swapped(query, key), value))
        yield "queries and values swapped", _queries_and_values_swapped(site)
    fused = [head_slice for head_slice in site.slices if head_slice.owner is value.owner]
    if len(fused) > 1 and query.heads == key.heads:
        apart = any(head_slice.stride > head_slice.head_size for head_slice in fused)
        label = "alternating heads read as blocks" if apart else "blocks read as alternating heads"
        together = sum(head_slice.head_size for head_slice in fused)
        read, start = {}, 0
        for head_slice in fused:
            read[head_slice.projection] = replace(
                head_slice,
                start=start,
                stride=head_slice.head_size if apart else together,
                bias_start=start if head_slice.bias_owner is None else 0,
            )
            start += head_slice.head_size * (head_slice.heads if apart else 1)
        yield (
            label,
            replace(site, slices=tuple(read.get(head_slice.projection, head_slice) for head_slice in site.slices)),
        )


def reordered(heads: Heads, site: Site, how: str) -> Heads:
    """The heads of a copy of the model in which the queries of one site really lie in another order."""
    twin = copy.deepcopy(heads.model)
    (found,) = hw.find_heads(twin).where(site.name or "").sites
    head_slice = found.slices[0]
    count = head_slice.heads * head_slice.head_size
    order = torch.arange(count).view(head_slice.head_size, head_slice.heads).T.flatten()
    if how == "random":
        order = torch.randperm(count, generator=torch.Generator().manual_seed(5))

    def reorder(_module: nn.Module, _args: tuple, output: Tensor) -> Tensor:
        output = output.clone()
        features = head_slice.features(output)
        features.copy_(features.flatten(-2)[..., order].unflatten(-1, features.shape[-2:]))
        return output

    assert head_slice.module is not None
    head_slice.module.register_forward_hook(reorder)
    return Heads(twin, (found,))


def _resized(site: Site, factor: float) -> Site:
    def resized(head_slice: HeadView) -> HeadView:
        heads, size = round(head_slice.heads * factor), round(head_slice.head_size / factor)
        # heads that alternate start inside the first of them, blocks where the block does
        start = head_slice.start if head_slice.stride == head_slice.head_size else round(head_slice.start / factor)
        strides = {"stride": round(head_slice.stride / factor), "bias_stride": round(head_slice.bias_stride / factor)}
        return replace(head_slice, heads=heads, head_size=size, start=start, **strides)

    return replace(
        site,
        slices=tuple(resized(head_slice) for head_slice in site.slices),
        output=None if site.output is None else resized(site.output),
        num_heads=round(site.num_heads * factor),
        key_value_heads=round(site.key_value_heads * factor),
        head_size=round(site.head_size / factor),
    )


def _swapped(first: HeadView, second: HeadView) -> tuple[HeadView, HeadView]:
    return replace(second, projection=first.projection), replace(first, projection=second.projection)


def _queries_and_values_swapped(site: Site) -> Site:
    query, key, value = site.slices
    query, value = _swapped(query, value)
    return replace(site, slices=(query, key, value))
