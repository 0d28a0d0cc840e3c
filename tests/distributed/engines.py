"""One small model, its data, and the ways torch divides a model or its batch over processes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from heads.attentions import FusedAttention, SeparateAttention

WIDTH, HEADS, EXAMPLES, TOKENS, LAYERS = 12, 4, 12, 5, 2


class Layer(nn.Module):
    """Attention and a projection, as a user writes a layer."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        self.attention = SeparateAttention(width=WIDTH, **sizes)
        self.feed = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        return x + self.feed(torch.tanh(x + self.attention(x, key_padding_mask)))


class Model(nn.Module):
    """Some layers."""

    def __init__(self, layers: int = LAYERS, **sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(**sizes) for _ in range(layers))

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, key_padding_mask)
        return x


def made(**sizes: int) -> Model:
    """The model, the same in every process."""
    torch.manual_seed(3)
    return Model(**sizes).double()


def fused() -> nn.Module:
    """A model whose three projections are one parameter."""
    torch.manual_seed(4)
    return FusedAttention(width=WIDTH, key_value_heads=2).double()


def examples(step: int) -> Tensor:
    """All examples of one step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(EXAMPLES, TOKENS, WIDTH, generator=generator, dtype=torch.float64)


def own(every: Tensor) -> Tensor:
    """The examples of this process, where a batch is divided."""
    return every.chunk(dist.get_world_size())[dist.get_rank()]


def as_it_is(model: nn.Module) -> nn.Module:
    """One process."""
    return model


def ddp(model: nn.Module) -> nn.Module:
    """Whole models, divided batches."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def fsdp(model: nn.Module, place: Callable[[nn.Parameter], Shard | None] | None = None) -> nn.Module:
    """Divided parameters: rows, torch's own choice, unless `place` says otherwise."""
    for layer in getattr(model, "layers", ()):
        fully_shard(layer, shard_placement_fn=place)
    fully_shard(model, shard_placement_fn=place)
    return model


def columns(parameter: nn.Parameter) -> Shard:
    """Shard(1) for matrices."""
    return Shard(1) if parameter.dim() == 2 else Shard(0)


def fsdp_columns(model: nn.Module) -> nn.Module:
    """Divided columns."""
    return fsdp(model, columns)


def tensor_parallel(model: nn.Module, *, output: bool = True) -> nn.Module:
    """Divided heads; `output` says whether W_O is divided too (an aggregator is not)."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {f"{name}_proj": ColwiseParallel() for name in "qkv"} | ({"o_proj": RowwiseParallel()} if output else {})
    for layer in model.layers:
        parallelize_module(layer.attention, mesh, plan)
        # as torch's tutorial does: the module computes with the heads it has here
        layer.attention.num_heads //= mesh.size()
    return model


ENGINES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": ddp,
    "FSDP2 rows": fsdp,
    "FSDP2 columns": fsdp_columns,
    "tensor parallel": tensor_parallel,
}


def batch(engine: str, step: int) -> Tensor:
    """What this process is given of a step's examples."""
    return examples(step) if engine in ("alone", "tensor parallel") else own(examples(step))


def gathered(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, whole, by the names they have in one process."""
    return {
        name.removeprefix("module."): (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }
