"""What makes two runs comparable: each draw has its own seed, and shared parameters start from the same bits."""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from headwise.errors import SettingError
from headwise.input_files import encode_json


def derive_key(*parts: int | str) -> int:
    """Return a seed in [0, 2^63) that depends on all of `parts`, their order and their types, on any machine.

    The first 63 bits of SHA-256. Keys with different names are independent, so that a method which draws does not shift
    what another one draws.

    >>> derive_key(1, "data") == derive_key(1, "data"), derive_key(1, "data") == derive_key("1", "data")
    (True, False)
    """
    digest = hashlib.sha256(encode_json(parts).encode("ascii")).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def initialize_parameters(model: nn.Module, seed: int) -> None:
    """Draw every parameter of `model` anew, each module's under a generator seeded by (seed, the module's name).

    A module with the same name in two models therefore starts from the same bits in both, whatever else the models
    hold: an arm differs from plain by its method, not by its start. Each module's own reset is called; the global
    generators stay as they were.

    Args:
        model: Every module that owns parameters must have `reset_parameters()`, or torch's `_reset_parameters()`.
        seed: Seed of the run.

    Raises:
        SettingError: A module owns parameters and has no reset; nothing has been drawn then.

    Example:
        >>> plain, wider = nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 9))
        >>> initialize_parameters(plain, seed=4), initialize_parameters(wider, seed=4)
        (None, None)
        >>> torch.equal(plain[0].weight, wider[0].weight)
        True
    """
    resets = [(name, _reset_of(name, module)) for name, module in model.named_modules() if _owns(module)]
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type != "cpu"}
    # torch.manual_seed asks after every kind of device there may be, which for a module takes longer than its draw
    manual_seed = torch.manual_seed if devices else torch.default_generator.manual_seed
    cuda_devices = sorted((device for device in devices if device.type == "cuda"), key=str)
    with torch.random.fork_rng(devices=cuda_devices), torch.no_grad():
        for name, reset in resets:
            manual_seed(derive_key(seed, name))
            reset()
        for module in model.modules():
            # torch's attention starts this bias at zero, but its output projection was reset after it
            if isinstance(module, nn.MultiheadAttention) and isinstance(module.out_proj, nn.Linear):
                _zero(module.out_proj.bias)


def _owns(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _reset_of(name: str, module: nn.Module) -> Callable[[], object]:
    reset = getattr(module, "reset_parameters", None)
    if reset is None and isinstance(module, nn.MultiheadAttention):
        return lambda: _reset_attention(module)
    reset = reset or getattr(module, "_reset_parameters", None)
    if not callable(reset):
        raise SettingError(
            f"module {name or '(the model itself)'} ({type(module).__name__}) owns parameters but has no "
            "reset_parameters(); give its class one that draws them."
        )
    return reset


def _reset_attention(module: nn.MultiheadAttention) -> None:
    # torch's own reset reaches for out_proj.bias, which an aggregator in that place does not have
    packed = module.in_proj_weight
    for weight in (
        (packed,) if packed is not None else (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    ):
        nn.init.xavier_uniform_(weight)
    _zero(module.in_proj_bias)
    for bias in (module.bias_k, module.bias_v):
        if bias is not None:
            nn.init.xavier_normal_(bias)


def _zero(bias: Tensor | None) -> None:
    if bias is not None:
        nn.init.zeros_(bias)
