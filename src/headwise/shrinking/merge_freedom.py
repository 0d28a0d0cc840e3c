"""What is free in the heads of an attention, found out by experiment: changes that leave what it computes as it is."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError, SettingError
from headwise.heads.heads import Site
from headwise.heads.replay import RecordedCall, Replay, record_calls
from headwise.shrinking.key_freedom import KeyFreedom
from headwise.shrinking.merge_moments import Batch, read_rows, write_rows
from headwise.shrinking.prune_proof import run

# Largest difference, relative to the largest number: some code rounds to float32 in between.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
# Positions that a call must have so that those that rotate differ from those that do not.
POSITIONS = 3


@dataclass(frozen=True)
class Freedom:
    """What is free in the keys and in the values of one attention; None where nothing was found."""

    key: KeyFreedom | None
    value: KeyFreedom | None

    def __str__(self) -> str:
        return f"keys: {self.key or 'nothing'}; values: {self.value or 'nothing'}"


def find_freedoms(sites: Sequence[Site], batch: Batch) -> dict[Site, Freedom]:
    """Return what is free in each site: the first of a list of candidates under which its heads stay as they are.

    Raises:
        SettingError: The sequences are too short to tell.
        HeadwiseError: An attention could not be called again.
    """
    calls = record_calls(sites[0].model, sites, lambda: run(sites[0].model, batch))
    return {site: _find_freedom(site, call) for site, call in zip(sites, calls, strict=True)}


@torch.no_grad()
def _find_freedom(site: Site, call: RecordedCall) -> Freedom:
    failed = "it computed NaN or infinity"
    for dtype in (torch.float64, torch.float32):
        # some code has float32 written into it
        call.dtype = dtype
        with _converted(call.module, dtype):
            try:
                heads = Replay(site, call).outputs()
            except HeadwiseError:
                raise
            except Exception as error:
                failed = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                continue
            if not bool(heads.isfinite().all()):
                continue
            tokens = 1 if heads.dim() < 3 else heads.shape[-3]
            if tokens < POSITIONS:
                raise SettingError(
                    f"{site.label} was called with sequences of {tokens} tokens; expected at least {POSITIONS}, so "
                    "that positions show."
                )
            experiment = _Experiment(site, call, heads, TOLERANCE[dtype])
            return Freedom(experiment.find_key(), experiment.find_value())
    raise HeadwiseError(
        f"{site.label} ({type(site.module).__name__}) could be called again neither in float64 nor in float32 "
        f"({failed}); give batches without rows that are padding throughout, and merge the heads of the full-precision "
        "original of a quantized model."
    )


@dataclass(frozen=True, eq=False)
class _Experiment:
    site: Site
    call: RecordedCall
    heads: Tensor
    tolerance: float

    def find_key(self) -> KeyFreedom | None:
        size = self.site.slices[1].head_size
        return next((one for one in _list_candidates(self.site, size) if self._keeps_scores(one)), None)

    def find_value(self) -> KeyFreedom | None:
        kinds = (KeyFreedom(0), KeyFreedom(0, kind="rigid"))
        return next((one for one in kinds if self._turns_outputs(one)), None)

    def _keeps_scores(self, freedom: KeyFreedom) -> bool:
        query, key, _ = self.site.slices
        matrices, inverses = self._draw(freedom, key.head_size)
        with _restored(query.parts, key.parts):
            write_rows(key, matrices.mT @ read_rows(key))
            write_rows(query, inverses.repeat_interleave(self._members, 0).mT @ read_rows(query))
            return self._agrees(self.heads)

    def _turns_outputs(self, freedom: KeyFreedom) -> bool:
        value = self.site.slices[2]
        matrices, _ = self._draw(freedom, value.head_size)
        if value.head_size != self.heads.shape[-1]:
            return False
        with _restored(value.parts):
            write_rows(value, matrices.mT @ read_rows(value))
            turned = matrices.repeat_interleave(self._members, 0).to(self.heads)
            return self._agrees((self.heads[..., None, :] @ turned)[..., 0, :])

    def _draw(self, freedom: KeyFreedom, size: int) -> tuple[Tensor, Tensor]:
        device = self.heads.device
        drawn = freedom.draw(self.site.key_value_heads, size, torch.Generator().manual_seed(1))
        return drawn[0].to(device), drawn[1].to(device)

    def _agrees(self, expected: Tensor) -> bool:
        found = Replay(self.site, self.call).outputs()
        return float((found - expected).abs().max()) <= self.tolerance * float(expected.abs().max())

    @property
    def _members(self) -> int:
        return self.site.num_heads // self.site.key_value_heads


def _list_candidates(site: Site, size: int) -> Iterator[KeyFreedom]:
    """Yield freedoms of keys, the largest first."""
    turning = sorted({*(size // part * 2 // 2 for part in (1, 2, 4)), *_read_rotary(site, size)})
    turning = [rotary for rotary in turning if 0 < rotary <= size and rotary % 2 == 0]
    for kind in ("general", "rigid", "signs"):
        yield KeyFreedom(0, kind=kind)
        for rotary in turning:
            for interleaved in (False, True):
                yield KeyFreedom(rotary, interleaved, kind)


def _read_rotary(site: Site, size: int) -> Iterator[int]:
    """Yield the numbers of features that turn according to a module or its configuration."""
    config = getattr(site.module, "config", None)
    for holder in (site.module, config):
        for name in ("rotary_ndims", "rotary_dim"):
            value = getattr(holder, name, None)
            if isinstance(value, int):
                yield value
    parameters = getattr(config, "rope_parameters", None)
    shares = [getattr(config, "partial_rotary_factor", None)]
    shares += [parameters.get("partial_rotary_factor")] if isinstance(parameters, dict) else []
    for share in shares:
        if isinstance(share, int | float):
            yield int(share * size)


@contextmanager
def _restored(*parts: Sequence) -> Iterator[None]:
    """Put the weights and biases of head slices back at the end."""
    own = [
        parameter.data
        for part in (part for group in parts for part in group)
        for parameter in (part.owner._parameters.get(part.attribute), part.bias_parameter)
        if parameter is not None
    ]
    before = [data.clone() for data in own]
    try:
        yield
    finally:
        for data, saved in zip(own, before, strict=True):
            data.copy_(saved)


@contextmanager
def _converted(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Have a module compute in a precision, in evaluation mode, and put all of it back at the end."""
    parameters = [(one, one.data, one.grad) for one in module.parameters()]
    buffers = [(part, dict(part._buffers)) for part in module.modules()]
    modes = [(part, part.training) for part in module.modules()]
    for one, _, _ in parameters:
        one.grad = None
    module.to(dtype).eval()
    try:
        yield
    finally:
        for one, data, gradient in parameters:
            one.data = data
            one.grad = gradient
        for part, held in buffers:
            part._buffers.update(held)
        for part, training in modes:
            part.training = training
