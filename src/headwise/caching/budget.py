"""Budgets for the cache: which key/value heads need all positions, by the integrated gradient of a gate.

Heads that do not need them keep the first positions and the last, so that the cache is smaller (`budget_cache`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.atomic import write_whole
from headwise.errors import DataError, HeadwiseError, LayoutError, SettingError, require_integer, require_range
from headwise.heads.heads import LINES, Heads, Site, align, require_heads, shorten
from headwise.heads.record import evaluating
from headwise.input_files import encode_json, parse_json, read_whole
from headwise.nn.hooks import uncompiled
from headwise.settings import Count, Natural, check_fields

if TYPE_CHECKING:
    from headwise.caching.budget_cache import BudgetCache

FORMAT = "headwise key/value budget 1"
# Values of the gate over which gradients are integrated, the middles of four equal parts.
GATES = (0.125, 0.375, 0.625, 0.875)
# Tokens of a copied text beyond the window, so that what is copied lies outside it.
BEYOND = 64
# Gates of layers, or gradients or scores of their heads, [G].
ByLayer = dict[int, Tensor]


@dataclass(frozen=True)
class KVBudget:
    """Which key/value heads keep all positions in the cache; returned by `hw.kv_budget`.

    `dataclasses.replace(budget, keep=0.5)` is the budget for another share, of the same scores.

    Attributes:
        scores: For each layer, what each of its key/value heads needs all positions for: its share of what all heads
            gain by them, mean over the kinds of calibration. Layers without an entry are as the model has them.
        windows: The window of each layer of the model, None where it attends to all positions.
        keep: The share of the heads that keep all positions, those of the largest scores.
        sink, window: The first and the last positions that the others keep.
    """

    scores: dict[int, tuple[float, ...]] = field(repr=False)
    windows: tuple[int | None, ...] = field(repr=False)
    keep: Annotated[float, partial(require_range, low=0.0, high=1.0)] = 0.25
    sink: Natural = 4
    window: Count = 256

    __post_init__ = check_fields

    @property
    def full(self) -> dict[int, tuple[int, ...]]:
        """The heads of each layer that keep all positions."""
        ranked = sorted(
            ((-score, layer, head) for layer, scores in self.scores.items() for head, score in enumerate(scores))
        )
        chosen = {(layer, head) for _, layer, head in ranked[: round(self.keep * len(ranked))]}
        return {
            layer: tuple(head for head in range(len(scores)) if (layer, head) in chosen)
            for layer, scores in self.scores.items()
        }

    def cache(self, max_length: int | None = None) -> BudgetCache:
        """Return an empty cache: `model.generate(..., cache=budget.cache())`, one for each call.

        In older versions of transformers the argument is `past_key_values`.

        Args:
            max_length: The most tokens of a row, those of the prompt and of the answer together. The cache then has a
                fixed size and is written in place, so that calls with one token compile (`torch.compile(model)`), as
                with the StaticCache of transformers. None lets it grow.

        Raises:
            SettingError: In `crop`, streaming heads have dropped what they would see again (see
                `activate_past_recording` of transformers, which assisted generation calls), or the size is fixed; there
                are more tokens than `max_length`.
            LayoutError: The size is fixed, and a layer with a budget has a window of its own. In a call, it is used
                with another model or attention implementation, or heads have taps, a bias, or are paired or mixed.
        """
        from headwise.caching import budget_cache, static_cache

        if max_length is not None:
            require_integer("max_length", max_length, low=1)
        layers, chosen = [], self.full
        for layer, sliding in enumerate(self.windows):
            heads, full = len(self.scores.get(layer, ())), chosen.get(layer, ())
            if max_length is None and heads:
                layers.append(budget_cache.BudgetLayer(heads, full, self.sink, self.window, sliding))
            elif max_length is None:
                layers.append(budget_cache.stock_layer(sliding))
            elif not heads:
                layers.append(static_cache.stock_layer(sliding, max_length))
            elif sliding is None:
                layers.append(static_cache.StaticBudgetLayer(heads, full, self.sink, self.window, max_length))
            else:
                raise LayoutError(
                    f"layer {layer} has a window of its own ({sliding} positions), which a budget of a fixed size does "
                    "not keep; leave max_length out, or such layers out of the budget (heads.where(...))."
                )
        return budget_cache.BudgetCache(layers)

    def save(self, path: str | Path) -> None:
        """Write it as JSON, atomically; `DataError` where it cannot be written."""
        content = {"format": FORMAT, **asdict(self), "full": self.full}
        write_whole(Path(path), encode_json(content, indent=1).encode())

    @staticmethod
    def load(path: str | Path) -> KVBudget:
        """Read a file of `save`; `DataError` where it is missing or holds something else."""
        try:
            content = parse_json(read_whole(Path(path)))
            if content["format"] != FORMAT:
                raise DataError(f"format {str(content['format'])[:60]!r}; this version of headwise reads {FORMAT}")
            scores = {int(layer): tuple(map(float, heads)) for layer, heads in content["scores"].items()}
            windows = tuple(None if one is None else int(one) for one in content["windows"])
            if not all(0 <= layer < len(windows) for layer in scores):
                raise DataError("scores of layers that the model does not have")
            return KVBudget(scores, windows, content["keep"], content["sink"], content["window"])
        except (ValueError, KeyError, TypeError, AttributeError, DataError) as error:
            reason = str(error).removesuffix(".")[:200]
            raise DataError(f"{path} holds no budget ({reason}); expected a file written by KVBudget.save.") from None

    def __str__(self) -> str:
        full = self.full
        kept, total = (sum(map(len, one.values())) for one in (full, self.scores))
        rows = align(
            [
                (f"  layer {layer}", " ".join("#" if head in full[layer] else "." for head in range(len(scores))))
                for layer, scores in self.scores.items()
            ]
        )
        first, left_out, last = shorten(rows, LINES)
        between = [f"  ... {left_out} layers ..."] if left_out else []
        title = (
            f"{kept} of {total} key/value heads (#) keep all positions, the others the first {self.sink} and the last "
            f"{self.window}"
        )
        return "\n".join([title, *first, *between, *last])


def kv_budget(
    heads: Heads,
    batches: Iterable[Tensor | Mapping[str, Tensor]] | None = None,
    *,
    keep: float = 0.25,
    sink: int = 4,
    window: int = 256,
    copies: int = 1,
    seed: int = 0,
) -> KVBudget:
    """Find the key/value heads that need the whole cache; the others keep the first positions and the last.

    Head g gives a_g O_g + (1 - a_g) S_g, where O_g attends to all positions and S_g to the first `sink` and the last
    `window` (the gate of DuoAttention, Xiao et al. 2024). Its score is what the loss L gains along a_g = a from 0 to 1,

    I_g = -integral of dL/da_g over a, and sum_g I_g = L(all streaming) - L(all full),

    by the middles of four equal parts: four backward passes for each batch, and no training. Scores of a calibration
    are divided by the sum of |I_g|, and averaged over the user's text and a text that is copied: random tokens, and the
    same again.

    The cache is exact: `generate` and calls of the model compute what a mask over a whole cache would give, up to
    rounding, also with padding, prompts in pieces, beams and `crop`. A short call proves it for the model. Layers whose
    own window is no longer than `window` stay as they are. The model is left as it is.

    Args:
        heads: The sites, all or some layers, of a causal model of transformers.
        batches: Text of the kind the model is used on, token ids [B, T] or mappings with `input_ids` and perhaps
            `attention_mask`; rows longer than `sink + window`. None scores by copying alone.
        keep: Share of the heads that keep all positions.
        sink: First positions that the others keep.
        window: Last positions that they keep, the query's own among them.
        copies: Number of copied texts, of twice window + 64 tokens; 0 scores by `batches` alone.
        seed: Of their random tokens.

    Returns:
        The budget. `print` draws a map, `headwise.plots.budget_map` a figure; `budget.cache()` is for `generate`, and
        `budget.save(path)` and `headwise.shrinking.KVBudget.load(path)` keep it.

    Raises:
        SettingError: A setting is outside its range, there is no text longer than the window, or the model has no
            layer or too few positions beyond it.
        LayoutError: The model is not causal, is no decoder of transformers whose attention calls the interface, or has
            layers without keys and values of their own; or the cache would not be exact.
        HeadwiseError: A gradient is not finite.

    Example:
        >>> import headwise as hw
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=61, num_key_value_heads=2, **sizes)).eval()
        >>> texts = [torch.randint(61, (2, 48))]
        >>> budget = hw.kv_budget(hw.find_heads(model), texts, keep=0.25, sink=2, window=8)
        >>> print(str(budget).splitlines()[0])
        1 of 4 key/value heads (#) keep all positions, the others the first 2 and the last 8
        >>> cache = budget.cache()
        >>> model.generate(texts[0], cache=cache, max_new_tokens=4, do_sample=False).shape
        torch.Size([2, 52])
    """
    require_heads(heads)
    budget = KVBudget({}, (), keep, sink, window)
    require_integer("copies", copies, low=0)
    sites, windows = _find_layers(heads, window)
    model: Any = heads.model
    config = model.config.get_text_config(decoder=True)
    texts = [settle_ids(batch) for batch in batches or ()]
    beyond = sink + window
    if texts and max(batch["input_ids"].shape[1] for batch in texts) <= beyond:
        raise SettingError(
            f"no text of the batches has more than {beyond} tokens, so that streaming heads see all of them; give "
            f"longer texts, or a window below {window}."
        )
    calibrations = [texts] if texts else []
    most = getattr(config, "max_position_embeddings", None) or 2 * (window + BEYOND)
    length = min(window + BEYOND, most // 2)
    if copies and length > window:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(config.vocab_size, (copies, length), generator=generator).repeat(1, 2)
        calibrations.append([{"input_ids": row[None], "from": torch.tensor(length)} for row in ids])
    if not calibrations:
        raise SettingError(
            f"there is nothing to score heads by: no batches, and {copies} copies of a text of {length} tokens, where "
            f"{most} positions are known; expected texts, or at least one copy and a window below {most // 2}."
        )
    with uncompiled(), evaluating(model), _frozen(model):
        _prove(model, replace(budget, scores=_start(sites), windows=windows))
        totals = {layer: torch.zeros(site.key_value_heads, dtype=torch.float64) for layer, site in sites.items()}
        for calibration in calibrations:
            found = _integrate(model, calibration, totals, budget, windows)
            size = float(sum(one.abs().sum() for one in found.values())) or 1.0
            totals = {layer: totals[layer] + found[layer] / size / len(calibrations) for layer in totals}
    return replace(budget, scores={layer: tuple(one.tolist()) for layer, one in totals.items()}, windows=windows)


def _start(sites: Mapping[int, Site]) -> dict[int, tuple[float, ...]]:
    """Return scores by which every second head keeps all positions, where half of them do."""
    return {
        layer: tuple(float((layer + head) % 2) for head in range(site.key_value_heads)) for layer, site in sites.items()
    }


def _find_layers(heads: Heads, window: int) -> tuple[dict[int, Site], tuple[int | None, ...]]:
    """Return the site of each layer that has a budget, and the windows of all layers; refuse what has no such cache."""
    model: Any = heads.model
    name = type(model).__name__
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config") or not hasattr(model, "generate"):
        raise LayoutError(
            f"{name} is no model of transformers that generates; expected one with a cache of keys and values, such as "
            "AutoModelForCausalLM.from_pretrained returns."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise LayoutError(f"{name} is an encoder-decoder; expected a decoder alone, whose cache grows with the text.")
    from headwise.caching.budget_cache import list_windows
    from headwise.heads.scores.huggingface import calls_interface

    windows = tuple(list_windows(config.get_text_config(decoder=True)))
    sites: dict[int, Site] = {}
    for site in heads:
        layer = getattr(site.module, "layer_idx", -1)
        placed = site.kind == "self" and 0 <= layer < len(windows) and layer not in sites
        reasons = {
            "is no self-attention with a place of its own in the cache": not placed,
            "does not call the attention interface of transformers": not calls_interface(site.module),
            "has heads that are divided over processes": site.divided,
            "has groups of query heads that are not neighbors": site.tiled,
        }
        reason = next((reason for reason, found in reasons.items() if found), None)
        if reason is not None:
            raise LayoutError(
                f"{site.label} ({type(site.module).__name__}) {reason}, so that a budget for its heads cannot be kept "
                "exactly; leave it out (heads.where(...)), or generate without a budget."
            )
        own = windows[layer]
        if own is None or own > window:
            sites[layer] = site
    if not sites:
        raise SettingError(
            f"no layer of the heads given to kv_budget attends beyond a window of {window}; give a smaller window."
        )
    return dict(sorted(sites.items())), windows


def settle_ids(batch: Any) -> dict[str, Tensor]:
    """Return a batch as a mapping."""
    found = {"input_ids": batch} if isinstance(batch, Tensor) else dict(batch) if isinstance(batch, Mapping) else {}
    ids = found.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
        raise SettingError(
            f"a batch is a {type(batch).__name__}; expected token ids [B, T], or a mapping with input_ids [B, T]."
        )
    return {name: found[name] for name in ("input_ids", "attention_mask") if name in found}


@contextmanager
def _frozen(model: torch.nn.Module) -> Iterator[None]:
    """Have the parameters take no gradients."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def _run(model: Any, inputs: Mapping[str, Tensor], cache: Any) -> Tensor:
    """Return the logits [B, T, V] of a call with a cache."""
    names = inspect.signature(model.forward).parameters
    # older versions of transformers name it otherwise
    name = "cache" if "cache" in names else "past_key_values"
    device = next(model.parameters()).device
    given = {key: tensor.to(device) for key, tensor in inputs.items() if key != "from"}
    try:
        output = model(**given, **{name: cache}, use_cache=True)
    except HeadwiseError:
        raise
    except Exception as error:
        raise LayoutError(
            f"{type(model).__name__} could not be run on token ids with a cache ({type(error).__name__}: "
            f"{str(error)[:200]}); expected a causal language model of transformers, and token ids of its vocabulary."
        ) from error
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.shape[:2] != given["input_ids"].shape:
        raise LayoutError(
            f"{type(model).__name__} returns no logits for each token; expected a causal language model, such as "
            "AutoModelForCausalLM.from_pretrained returns."
        )
    return logits


def _integrate(
    model: Any, batches: Sequence[Mapping[str, Tensor]], like: ByLayer, budget: KVBudget, windows: Sequence[int | None]
) -> ByLayer:
    """Return I_g of each head, in nats per token that is predicted."""
    from headwise.caching.budget_cache import mixing_cache

    device = next(model.parameters()).device
    totals, count = {layer: torch.zeros_like(one) for layer, one in like.items()}, 0
    for batch in batches:
        ids = batch["input_ids"].to(device)
        start = int(batch["from"]) if "from" in batch else 1
        keep = torch.ones_like(ids) if "attention_mask" not in batch else batch["attention_mask"].to(device)
        keep = keep[:, start:].bool() & keep[:, start - 1 : -1].bool()
        count += int(keep.sum())
        for value in GATES:
            gates = {
                layer: torch.full((len(one),), value, device=device, requires_grad=True) for layer, one in like.items()
            }
            with torch.enable_grad():
                logits = _run(model, batch, mixing_cache(gates, budget.sink, budget.window, windows))
                predicted = logits[:, start - 1 : -1][keep].float()
                loss = F.cross_entropy(predicted, ids[:, start:][keep], reduction="sum")
                gradients = torch.autograd.grad(loss, list(gates.values()), allow_unused=True)
            for layer, gradient in zip(gates, gradients, strict=True):
                if gradient is None or not bool(gradient.isfinite().all()):
                    raise HeadwiseError(
                        f"the gradient of the key/value heads of layer {layer} is not finite, or the loss does not "
                        "depend on them; give text on which the model's loss is finite."
                    )
                totals[layer] -= gradient.double().cpu() / len(GATES)
    return {layer: one / max(count, 1) for layer, one in totals.items()}


@torch.no_grad()
def _prove(model: Any, budget: KVBudget) -> None:
    """Refuse a model that is not causal, or for which the cache is not exact, by calls on a few tokens."""
    from headwise.caching.budget_cache import mixing_cache

    budget = replace(budget, keep=0.5, sink=1, window=3)
    size = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(size, (2, 12), generator=torch.Generator().manual_seed(0))
    full, device = budget.full, next(model.parameters()).device
    gates = {
        layer: torch.tensor([float(head in full[layer]) for head in range(len(scores))], device=device)
        for layer, scores in budget.scores.items()
    }

    def mix(part: Tensor) -> Tensor:
        return _run(model, {"input_ids": part}, mixing_cache(gates, budget.sink, budget.window, budget.windows))

    whole, cache = mix(ids), budget.cache()
    close = 1e3 * torch.finfo(whole.dtype).eps * float(whole.abs().max())
    name = type(model).__name__
    if not float((mix(ids[:, :7]) - whole[:, :7]).abs().max()) <= close:
        raise LayoutError(
            f"{name} is not causal: what it computes for a token depends on later ones; expected a decoder."
        )
    pieces = torch.cat([_run(model, {"input_ids": part}, cache) for part in ids.split([7, 3, 1, 1], 1)], 1)
    if not float((pieces - whole).abs().max()) <= close:
        raise LayoutError(
            f"{name} computes something else with the cache of a budget than with the same mask over a whole cache "
            f"(difference {float((pieces - whole).abs().max()):.2g} in a call on 12 tokens); generate without a budget."
        )
