"""What each head of a causal language model does: induction, the previous token, the first one, or nothing."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.atomic import write_whole
from headwise.caching.budget import settle_ids
from headwise.errors import (
    DataError,
    HeadwiseError,
    LayoutError,
    SettingError,
    require_choice,
    require_integer,
    require_range,
)
from headwise.functional.tokens import accumulation_dtype
from headwise.heads.capture import Capture
from headwise.heads.heads import LINES, Heads, Site, require_heads, shorten
from headwise.heads.record import evaluating
from headwise.heads.taps import Taps
from headwise.input_files import encode_json, parse_json, read_whole
from headwise.metrics.patterns import induction_weights, sum_first_weights, weights_back
from headwise.nn.hooks import uncompiled
from headwise.report.direct_effect import DirectEffect
from headwise.report.measure import group_readable
from headwise.report.tables import format_plain_table, format_signed

FORMAT = "headwise roles 1"
MEASURES = ("induction", "previous", "duplicate", "first", "learned_sink", "distance", "local", "output", "direct")
# Roles, with what a sentence says of one head and of several that have them.
ROLES = {
    "induction": ("is an induction head", "are induction heads"),
    "first": ("mostly reads the first token", "mostly read the first token"),
    "previous": ("mostly reads the previous token", "mostly read the previous token"),
    "duplicate": ("mostly reads the same token before", "mostly read the same token before"),
    "inactive": ("is inactive", "are inactive"),
}
# Heads of a role that are named in a row of the table.
NAMED = 4
# More attention than this on later tokens is none of rounding.
FUTURE = 1e-4
Run = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class HeadRoles:
    """What each head does; returned by `hw.roles_of`, which has the equations.

    Attributes:
        model: Class of the model.
        layers: Index of the layer of each attention module, by its name.
        scores: For each measure and each module, one number per head: "induction", "previous", "duplicate", "first",
            "learned_sink" and "local" are shares of attention, "distance" is in tokens, "output" relative to the mean
            of the module, "direct" in logits. What could not be measured is left out.
        read: What was read, as a sentence.
        threshold: A head has a role where its share is above this.
        inactive: A head is inactive where its output is below this.
        notes: What was left out, and other remarks.
    """

    model: str
    layers: dict[str, int] = field(repr=False)
    scores: dict[str, dict[str, tuple[float, ...]]] = field(repr=False)
    read: str = ""
    threshold: float = 0.5
    inactive: float = 0.1
    notes: tuple[str, ...] = ()

    def of(self, role: str) -> dict[str, tuple[int, ...]]:
        """Return the heads of each module that have a role; `SettingError` where there is no such role.

        Roles are "induction", "previous", "duplicate", "first" and "inactive". Modules without such heads are left out.
        """
        require_choice("role", role, ROLES)
        measure = "output" if role == "inactive" else role
        found = {
            site: tuple(head for head, score in enumerate(scores) if self._has(role, site, head, score))
            for site, scores in self.scores.get(measure, {}).items()
        }
        return {site: heads for site, heads in found.items() if heads}

    def _has(self, role: str, site: str, head: int, score: float) -> bool:
        if role == "inactive":
            return score < self.inactive
        learned = self.scores.get("learned_sink", {}).get(site) if role == "first" else None
        return score + (0.0 if learned is None else learned[head]) > self.threshold

    @property
    def _sizes(self) -> dict[str, int]:
        return {site: len(heads) for scores in self.scores.values() for site, heads in scores.items()}

    @property
    def heads(self) -> int:
        """Number of heads."""
        return sum(self._sizes.values())

    @property
    def summary(self) -> str:
        """How many heads have each role, in one sentence."""
        counts = {role: sum(map(len, self.of(role).values())) for role in ROLES}
        said = [f"{count} {ROLES[role][count > 1]}" for role, count in counts.items() if count]
        return f"{self.model}: of {self.heads} heads, {', '.join(said) or 'none has one of the roles'}."

    @property
    def rows(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows of a table with one row per attention module: the heads of each role."""
        columns = {"layer": [str(layer) for layer in self.layers.values()]}
        for role in ROLES:
            found = self.of(role)
            columns["first token" if role == "first" else role] = [
                _name_heads(found.get(site, ())) for site in self.layers
            ]
        direct = self.scores.get("direct", {})
        columns["direct effect"] = [_name_largest(direct.get(site, ())) for site in self.layers]
        return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]

    def __str__(self) -> str:
        header, rows = self.rows
        first, left_out, last = shorten(rows, LINES)
        lines = format_plain_table(header, [*first, *last]).splitlines()
        if left_out:
            lines.insert(1 + len(first), f"... {left_out} layers ...")
        share, output = f"{self.threshold:g}", f"{self.inactive:g}"
        legend = [
            f"Numbers are heads. A head has one of the first four roles with more than {share} of its attention",
            "(induction) on what followed the same token before, (first token) on that or a learned sink,",
            "(previous) on the token just before, (duplicate) on the same token before.",
            f"inactive: its outputs are shorter than {output} of the mean of the layer.",
            "direct effect: the head that adds most to the logit of the right next token, and how much.",
        ]
        return "\n".join([self.summary, *lines, *legend, self.read, *self.notes])

    def to_frame(self) -> Any:
        """Return a `pandas.DataFrame` with one row per head; `HeadwiseError` where pandas is missing."""
        try:
            from pandas import DataFrame
        except ImportError:
            raise HeadwiseError("to_frame() needs pandas, which is not installed: pip install pandas.") from None
        return DataFrame(
            [
                {"site": site, "layer": self.layers[site], "head": head}
                | {name: scores[site][head] for name, scores in self.scores.items() if site in scores}
                for site, heads in self._sizes.items()
                for head in range(heads)
            ]
        )

    def save(self, path: str | Path) -> None:
        """Write it as JSON, atomically; `DataError` where it cannot be written."""
        write_whole(Path(path), (encode_json({"format": FORMAT, **asdict(self)}, indent=1) + "\n").encode())

    @staticmethod
    def load(path: str | Path) -> HeadRoles:
        """Read a file of `save`; `DataError` where it is missing or holds something else."""
        try:
            content = parse_json(read_whole(Path(path)))
            if content["format"] != FORMAT:
                raise DataError(f"format {str(content['format'])[:60]!r}; this version of headwise reads {FORMAT}")
            layers = {str(site): int(layer) for site, layer in content["layers"].items()}
            scores = {
                str(name): {str(site): tuple(map(float, heads)) for site, heads in sites.items()}
                for name, sites in content["scores"].items()
            }
            sizes: dict[str, int] = {}
            for name, sites in scores.items():
                require_choice("measure", name, MEASURES)
                for site, heads in sites.items():
                    if site not in layers or sizes.setdefault(site, len(heads)) != len(heads):
                        raise DataError(f"scores of {site!r}, which has other heads or no layer")
                    if not all(map(isfinite, heads)):
                        raise DataError(f"a score of {site!r} is not finite")
            return HeadRoles(
                str(content["model"]),
                layers,
                scores,
                str(content["read"]),
                float(content["threshold"]),
                float(content["inactive"]),
                tuple(map(str, content["notes"])),
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, HeadwiseError) as error:
            reason = str(error).removesuffix(".")[:200]
            raise DataError(f"{path} holds no roles ({reason}); expected a file written by HeadRoles.save.") from None


def _name_heads(heads: Sequence[int]) -> str:
    named, more = " ".join(map(str, heads[:NAMED])), len(heads) - NAMED
    return f"{named} +{more}" if more > 0 else named


def _name_largest(effects: Sequence[float]) -> str:
    best = max(effects, default=0.0)
    return f"{effects.index(best)} ({format_signed(best, 2)})" if best >= 0.005 else ""


@torch.no_grad()
def roles_of(
    heads: Heads,
    batches: Iterable[Tensor | Mapping[str, Tensor]] | None = None,
    *,
    tokenizer: Any = None,
    vocabulary: int | None = None,
    tokens: int = 64,
    rows: int = 4,
    window: int = 8,
    threshold: float = 0.5,
    inactive: float = 0.1,
    forward: Run | None = None,
    seed: int = 0,
) -> HeadRoles:
    """Return what each head of a causal language model does, from one forward pass, and one per batch of text.

    The first pass is on random sequences [start] r_1 .. r_P r_1 .. r_P of P different tokens, in which nothing but the
    repeat can be predicted. With A_qk the attention of a head and s the place of the first r_1, means over sequences
    and over queries q are

    induction = mean A[q, q - P + 1] over the second r_1 .. r_{P-1}: what followed the same token before (Olsson et al.
    2022); duplicate = mean A[q, q - P] over the second r_1 .. r_P: the same token before (Wang et al. 2023); previous =
    mean A[q, q - 1] over q >= 2.

    The others are on the text of `batches`, or without it on the random sequences, over queries with at least `window`
    real tokens before them:

    first = mean A[q, first] over queries that see the first token (Gu et al. 2025); learned_sink = mean 1 - Σ_k A_qk,
    what goes to a sink beside the tokens, as in GPT-OSS; distance = Σ A_qk (q - k) / Σ A_qk; local = mean Σ A_qk over
    q - window < k <= q; output = mean |W_O,h o_hq| over the mean of that of the heads of the module, which is small for
    inactive heads (Sandoval-Segura et al. 2025, arXiv 2504.03889).

    direct = mean u_y . N_q(W_O,h o_hq) over queries whose next token y is known: what the head adds to the logit of the
    right next token, less the mean logit, with the scale of the final norm N_q frozen (Elhage et al. 2021). On random
    sequences over the second r_1 .. r_{P-1}. It holds what the head adds to the residual stream, not what later layers
    make of it. Models whose layers normalize or scale that, and models without a final norm and an unembedding that are
    modules, have none: a note says why.

    A threshold makes a role of a share. Weights of all layers are in memory at once, [B, H, T, T] each: give long texts
    in small batches.

    Args:
        heads: The heads of a causal model, self-attention, all or some layers.
        batches: Text of the kind the model is used on: token ids [B, T], or mappings with `input_ids` and perhaps
            `attention_mask`. None takes the random sequences.
        tokenizer: The model's tokenizer, whose special tokens are not drawn and whose first token is the start. Without
            it, the special tokens and the start are those of the configuration, if it has any.
        vocabulary: Number of token ids, where no configuration tells it.
        tokens: P, the different tokens that are repeated; fewer where the model has too few positions.
        rows: Number of random sequences.
        window: Of `local`; also how many tokens are before the queries that count.
        threshold: A head has the role induction, previous, duplicate or first where the share is above this.
        inactive: A head is inactive where its output is below this.
        forward: Runs the model on a mapping with `input_ids` and returns its output, logits [B, T, V] or something that
            holds them; by default the model is called with it.
        seed: Of the random tokens.

    Returns:
        `HeadRoles`: print it, `of("induction")`, `save` it, `to_frame()`.

    Raises:
        LayoutError: The model is not causal, or no attention weights of it can be read.
        SettingError: A setting is outside its range; the vocabulary is unknown or has too few tokens; texts are too
            short; the model cannot be run on token ids.

    Example:
        >>> import headwise as hw
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=99, num_key_value_heads=2, **sizes))
        >>> roles = hw.roles_of(hw.find_heads(model))
        >>> roles.heads, roles.of("induction")
        (8, {})
    """
    _require_settings(heads, tokens, rows, window, threshold, inactive)
    model: Any = heads.model
    ids, start, period = _draw(model, tokenizer, vocabulary, tokens, rows, window, seed)
    run = forward or _call
    texts = None if batches is None else [settle_ids(batch) for batch in batches]
    if texts is not None and not any(_place(batch)[1].ge(window).any() for batch in texts):
        raise SettingError(
            f"no text has a token with {window} before it; give longer texts, a smaller window, or no batches."
        )
    device = next(model.parameters()).device
    with uncompiled(), evaluating(model), heads.exposed():
        groups, notes = group_readable(heads)
        if not any("weights" in found for found in groups):
            raise LayoutError(
                f"no attention weights of {type(model).__name__} can be read, which roles are made of; "
                "see print(hw.find_heads(model))."
            )
        notes = [note for note in notes if not note.startswith("values")]
        direct, sums = DirectEffect(heads), _Sums(window)
        for number, batch in enumerate([{"input_ids": ids}, *(texts or ())]):
            given = {name: tensor.to(device) for name, tensor in batch.items()}
            with ExitStack() as attached:
                taps = [
                    attached.enter_context(Taps(sites, weights="weights" in found, outputs="outputs" in found))
                    for found, sites in groups.items()
                    if {"weights", "outputs"} & {*found}
                ]
                with direct.reading(proving=number == 0):
                    output = _run(run, model, given)
                captures = [capture for tap in taps for capture in tap.read()]
            if number == 0:
                _require_causal(model, captures)
                notes += _count_calls(captures) + sums.add_repeats(captures, period, start)
            if number or texts is None:
                later = start + period if number == 0 else 0
                sums.add_text(captures, given, later, direct.differentiate(output, given["input_ids"]))
    notes += [] if direct.reason is None else [f"the direct effect was left out: {direct.reason}."]
    shown = f"Read: {rows} sequences of {period} random tokens, repeated"
    text = sum(int(_place(batch)[0].sum()) for batch in texts or ())
    shown += (
        "; first token, inactive and direct effect on the same." if texts is None else f", and {text:,} tokens of text."
    )
    return HeadRoles(
        type(model).__name__,
        {site.name: site.layer for site in heads},
        sums.finish(heads),
        shown,
        threshold,
        inactive,
        tuple(dict.fromkeys(notes)),
    )


def _require_settings(heads: Heads, tokens: int, rows: int, window: int, threshold: float, inactive: float) -> None:
    require_heads(heads)
    for name, value, low in (("tokens", tokens, 2), ("rows", rows, 1), ("window", window, 1)):
        require_integer(name, value, low=low)
    for name, value in (("threshold", threshold), ("inactive", inactive)):
        require_range(name, value, low=0.0, high=1.0)
    other = next((site for site in heads if site.kind != "self"), None)
    if other is not None:
        raise LayoutError(
            f"{other.label} is attention of kind {other.kind!r}; roles are those of self-attention in a causal model "
            "that reads token ids alone, such as AutoModelForCausalLM.from_pretrained returns."
        )


def _draw(
    model: Any, tokenizer: Any, vocabulary: int | None, tokens: int, rows: int, window: int, seed: int
) -> tuple[Tensor, int, int]:
    """Return sequences of repeated tokens [rows, start + 2 P], how many tokens start them, and P."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    size = getattr(config, "vocab_size", None) if vocabulary is None else vocabulary
    if size is None:
        raise SettingError(
            f"{type(model).__name__} has no configuration that tells its vocabulary; give vocabulary=, the number of "
            "its token ids."
        )
    require_integer("vocabulary", size, low=1)
    special = _find_special(config) | _find_special(getattr(model, "generation_config", None))
    starts = [getattr(tokenizer, "bos_token_id", None), getattr(config, "bos_token_id", None)]
    if tokenizer is not None:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special |= {*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}
        # a vocabulary may be padded with ids that no text has
        size = min(size, len(tokenizer))
    start = next((one for one in starts if isinstance(one, int) and 0 <= one < size), None)
    ordinary = torch.tensor([number for number in range(size) if number not in special])
    begun = int(start is not None)
    most = getattr(config, "max_position_embeddings", None)
    period = tokens if most is None else min(tokens, (most - begun) // 2)
    if len(ordinary) < period:
        raise SettingError(
            f"the vocabulary has {len(ordinary)} tokens that are not special; expected at least tokens={tokens} "
            f"different ones to repeat. Give tokens={max(len(ordinary), 2)} or fewer."
        )
    if period < 2 or begun + 2 * period <= window:
        raise SettingError(
            f"a sequence has {begun + 2 * max(period, 0)} tokens (tokens={tokens}, positions of the model: {most}), "
            f"and queries count after window={window}; expected a longer sequence or a smaller window."
        )
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.stack([ordinary[torch.randperm(len(ordinary), generator=generator)[:period]] for _ in range(rows)])
    first = torch.full((rows, begun), -1 if start is None else start)
    return torch.cat([first, drawn, drawn], 1), begun, period


def _find_special(config: Any) -> set[int]:
    """Return the ids of the special tokens that a configuration names."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id")
    found = [getattr(config, name, None) for name in names]
    listed = [one for value in found for one in (value if isinstance(value, list | tuple) else [value])]
    return {one for one in listed if isinstance(one, int)}


def _call(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    names = inspect.signature(model.forward).parameters
    if "input_ids" not in names and set(batch) == {"input_ids"}:
        return model(batch["input_ids"])
    return model(**batch, **({"use_cache": False} if "use_cache" in names else {}))


def _run(run: Run, model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    try:
        return run(model, batch)
    except HeadwiseError:
        raise
    except Exception as error:
        raise SettingError(
            f"{type(model).__name__} could not be run on token ids ({type(error).__name__}: {str(error)[:200]}); "
            "expected a causal language model and ids of its vocabulary, or forward=... to run it."
        ) from error


def _require_causal(model: nn.Module, captures: Sequence[Capture]) -> None:
    for capture in captures:
        future = None if capture.weights is None else float(capture.weights.triu(1).sum(-1).mean())
        if future is not None and future > FUTURE:
            raise LayoutError(
                f"{type(model).__name__} is not causal: {capture.site.label} gives {100 * future:.0f} % of its "
                "attention to later tokens; expected a decoder. Of an encoder, hw.measure shows what heads do."
            )


def _count_calls(captures: Sequence[Capture]) -> list[str]:
    passes = Counter(capture.site.label for capture in captures)
    return [
        f"{site} runs {count} times per forward pass; its numbers cover all {count}."
        for site, count in passes.items()
        if count > 1
    ]


def _place(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return which tokens are real, and how many real ones come before each, [B, T]."""
    ids = batch["input_ids"]
    keep = batch["attention_mask"].bool() if "attention_mask" in batch else torch.ones_like(ids, dtype=torch.bool)
    # padding is before no token
    return keep, (keep.cumsum(1) - 1).masked_fill(~keep, -1)


class _Sums:
    """Sums over queries of each measure of each module, and their numbers."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.totals: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}

    def _add(self, measure: str, site: Site, total: Tensor, count: Tensor | int) -> None:
        total, count = total.double().cpu(), torch.as_tensor(count).double().cpu()
        before = self.totals.get((measure, site.name), (0.0, 0.0))
        self.totals[measure, site.name] = total + before[0], count + before[1]

    def add_repeats(self, captures: Sequence[Capture], period: int, start: int) -> list[str]:
        """Add what the sequences of repeated tokens show; return notes."""
        unseen = 0
        for capture in captures:
            if capture.weights is None:
                continue
            found = {
                "induction": induction_weights(capture.weights, period, start),
                "duplicate": weights_back(capture.weights, period, start + period),
                "previous": weights_back(capture.weights, 1, 2),
            }
            # a window that does not reach back gives exactly 0
            unseen += not bool(found["duplicate"].any())
            for name, one in found.items():
                self._add(name, capture.site, one.double().sum((0, 2)), one.shape[0] * one.shape[2])
        reach = f"{unseen} attention modules do not reach back {period} tokens, and show no induction."
        return [reach] if unseen else []

    def add_text(
        self, captures: Sequence[Capture], batch: Mapping[str, Tensor], later: int, gradient: Tensor | None
    ) -> None:
        """Add what a text shows; the direct effect for queries from `later` on, by the `gradient` [B, T - 1, d]."""
        keep, before = _place(batch)
        counted = before >= self.window
        size, device = keep.shape[1], keep.device
        firsts = keep.int().argmax(1, keepdim=True).expand(-1, size)
        places = torch.arange(size, device=device)
        far = (places[:, None] - places).clamp_min(0)
        # the next token is known, and real
        known = counted[:, :-1] & keep[:, 1:] & (places[:-1] >= later)
        for capture in captures:
            site, weights, outputs = capture.site, capture.weights, capture.outputs
            if weights is not None:
                weights = weights.to(accumulation_dtype(weights))
                own = counted.to(weights)[:, None]
                mass = (weights.sum(-1) * own).double().sum((0, 2))
                distance = torch.einsum("bhqk,qk->bhq", weights, far.to(weights)) * own
                near = torch.einsum("bhqk,qk->bhq", weights, (far < self.window).to(weights)) * own
                self._add("first", site, *sum_first_weights(weights, firsts, counted))
                self._add("learned_sink", site, counted.sum() - mass, counted.sum())
                self._add("distance", site, distance.double().sum((0, 2)), mass)
                self._add("local", site, near.double().sum((0, 2)), counted.sum())
            columns = None if outputs is None else site.find_output_weights()
            if outputs is None or columns is None:
                continue
            outputs = outputs.to(accumulation_dtype(outputs))
            columns = columns.to(outputs)
            metric = torch.einsum("hde,hdf->hef", columns, columns)
            squares = torch.einsum("bqhe,hef,bqhf->bqh", outputs, metric, outputs).clamp_min(0)
            self._add("output", site, (squares.sqrt() * counted[..., None]).double().sum((0, 1)), counted.sum())
            if gradient is not None:
                read = torch.einsum("bqd,hde->bqhe", gradient.to(outputs), columns)
                effect = (read * outputs[:, :-1]).sum(-1) * known[..., None]
                self._add("direct", site, effect.double().sum((0, 1)), known.sum())

    def finish(self, heads: Heads) -> dict[str, dict[str, tuple[float, ...]]]:
        """Return the mean of each measure for each module."""
        found: dict[str, dict[str, tuple[float, ...]]] = {}
        for name, site in self._list(heads):
            total, count = self.totals[name, site.name]
            mean = total / count.clamp_min(torch.finfo(torch.float64).tiny)
            if name == "output":
                mean = mean / mean.mean().clamp_min(torch.finfo(torch.float64).tiny)
            if not bool(mean.isfinite().all()):
                raise DataError(
                    f"{site.label}: {name} of its heads is not finite; check the weights of the model for NaN or "
                    "infinity."
                )
            found.setdefault(name, {})[site.name] = tuple(mean.tolist())
        sinks = found.get("learned_sink", {})
        if all(abs(share) < FUTURE for shares in sinks.values() for share in shares):
            found.pop("learned_sink", None)
        return found

    def _list(self, heads: Heads) -> Iterator[tuple[str, Site]]:
        for name in MEASURES:
            yield from ((name, site) for site in heads if (name, site.name) in self.totals)
