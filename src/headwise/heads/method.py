"""Methods as values: what can be done to the heads of a model, and where."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from headwise.errors import SettingError, require_choice, require_integer
from headwise.heads.heads import KINDS, Heads
from headwise.nn.hooks import Handle
from headwise.settings import check_fields

Stage = Literal["build", "forward", "step"]


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """What can be done to heads; a subclass is a frozen dataclass of its settings, and `attach` does it.

    Attributes:
        layers: Layers it acts on, from 0, in each kind of attention; None for all.
        kinds: Kinds of attention it acts on, of self, decoder, cross and pooling; None for all.
        stage: When it is attached: "build" adds modules to the model, before it has an optimizer; "forward" acts in
            forward passes; "step" acts in the steps of an optimizer, and needs one.

    Raises:
        SettingError: A layer is no integer from 0, or a kind is unknown.

    Example:
        >>> import torch
        >>> import headwise as hw
        >>> @dataclass(frozen=True)
        ... class Scale(hw.Method):
        ...     factor: float = 0.5
        ...     def attach(self, heads):
        ...         handle = hw.nn.Handle()
        ...         for site in self.select(heads):
        ...             output = site.expose().module
        ...             handle.hook_before(output, lambda _, args, kwargs: ((args[0] * self.factor,), kwargs))
        ...         return handle
        >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        >>> with hw.attach(hw.find_heads(model), Scale(layers=(1,))):
        ...     _ = model(torch.randn(3, 5, 8))
    """

    layers: tuple[int, ...] | None = None
    kinds: tuple[str, ...] | None = None
    stage: ClassVar[Stage] = "forward"

    def __post_init__(self) -> None:
        check_fields(self)
        require_tuple("layers", self.layers, "(0, 1)")
        require_tuple("kinds", self.kinds, "('self',)")
        for layer in self.layers or ():
            require_integer("layers", layer)
        for kind in self.kinds or ():
            require_choice("kinds", kind, KINDS)

    @abstractmethod
    def attach(self, heads: Heads) -> Handle:
        """Act on the selected ones of these heads until the handle that is returned is removed.

        Where the stage is "step", the method is given optimizers and a seed too: (heads, optimizers, seed).
        """

    def select(self, heads: Heads) -> Heads:
        """Return the heads that it acts on: of its kinds, in its layers of each kind.

        Raises:
            LayoutError: There is no attention of that kind or in that layer.

        Example:
            >>> import headwise as hw
            >>> from torch import nn
            >>> heads = hw.find_heads(nn.Transformer(8, 2, 2, 2, 16, batch_first=True))
            >>> [site.name for site in hw.MixHeads(layers=(0,), kinds=("self", "cross")).select(heads)]
            ['encoder.layers.0.self_attn', 'decoder.layers.0.multihead_attn']
        """
        chosen = heads if self.kinds is None else heads.kind(*self.kinds)
        if self.layers is None:
            return chosen
        # the layers of each stack and kind are counted from 0
        every = dict.fromkeys(site.kind for site in chosen)
        return replace(chosen, sites=tuple(s for kind in every for s in chosen.kind(kind).layers(*self.layers)))


def require_tuple(name: str, value: object, example: str) -> None:
    """Raise `SettingError` unless a value is a tuple or None.

    >>> require_tuple("layers", (0, 1), "(0, 1)")
    """
    if value is not None and not isinstance(value, tuple):
        raise SettingError(f"{name} is {value!r}; expected a tuple such as {example}, or None for all.")
