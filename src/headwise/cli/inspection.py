"""The command `headwise inspect`: measures the heads of models on a text, and writes the report and the page."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwise.atomic import new_folder
from headwise.cli.extensions import open_model
from headwise.cli.output import asked_output, standard_console
from headwise.cli.settings import Inspect
from headwise.errors import DataError, HeadwiseError
from headwise.heads.taps import Taps
from headwise.masks.head_mask import HeadMask
from headwise.metrics.intervals import mean_interval
from headwise.report.inspection import Sentence, make_inspection_page
from headwise.report.measure import group_readable, measure
from headwise.report.removal_cost import estimate_removal
from headwise.report.report import Report, require_same_shape
from headwise.texts.batching import Encoded
from headwise.texts.frozen import Fidelity, Frozen
from headwise.texts.labeled_texts import describe_blank
from headwise.texts.progress import make_bars

if TYPE_CHECKING:
    from rich.console import Console

LAST_PASS = "Of a module that runs several times in a forward, the weights over tokens are those of the last."
FIDELITY = "Fidelity is the cosine between the outputs for a token with and without a head; 1 is no change."
ESTIMATED = "Costs are estimated by one backward pass for all heads; --exact removes each head in turn."
# Tokens of a batch with padding, so that memory follows the model and not the text; and tokens shown of a sentence.
TOKENS, SHOWN = 256, 48
REPORT, AGAINST, PAGE = "report.json", "against.json", "heads.html"


def inspect_models(given: Inspect) -> Path:
    """Measure the heads of a model and perhaps of another one, show them, and return the file of the report.

    Raises:
        DataError: A folder holds no model, a file cannot be read or written, or the default folder holds the report of
            another model.
        SettingError: The other model has another shape.
    """
    console, pipeline = standard_console(), given.pipeline
    inspected, lines = _encode(given.model, given)
    other = None if given.against is None else _encode(given.against, given)[0]
    if other is not None:
        require_same_shape(*([(site.name, site.num_heads) for site in one.frozen.heads] for one in (other, inspected)))
    place = given.out or Path("runs") / "inspect" / inspected.frozen.name
    command = shlex.join(["headwise", "inspect", str(given.model), "--text"])
    old = "" if given.out or not (place / PAGE).is_file() else (place / PAGE).read_text("utf-8", errors="replace")
    if old and command not in unescape(old):
        raise DataError(
            f"{place} holds the report of another model, or of this one under another path; choose another folder with "
            "--out."
        )
    roles = None if pipeline is None else _make_roles(pipeline, lines, [inspected, *([other] if other else [])])
    with new_folder(place, replaced=(REPORT, AGAINST, PAGE)) as made:
        report = _measure(inspected, roles, console, exact=given.exact)
        before = None if other is None else _measure(other, roles, console, exact=given.exact)
        sentences, repeated = _read_weights(inspected, given.shown)
        page = make_inspection_page(
            replace(report, notes=(*report.notes, *([LAST_PASS] if repeated else []))),
            sentences,
            title=f"What the heads of {inspected.frozen.name} do",
            before=before,
            settings=f"$ {asked_output().command}",
        )
        if before is not None:
            before.save(made / AGAINST)
        report.save(made / REPORT)
        page.write(made / PAGE)
    console.print(report.layer_table() if given.everything else report)
    if before is not None:
        console.print(report.compare(before))
    console.print(f"written to {place / PAGE} and {place / REPORT}", soft_wrap=True, markup=False)
    return place / REPORT


@dataclass(frozen=True, eq=False)
class Inspected:
    """A frozen model, a text as batches for it, and how many of its lines were blank, as a sentence."""

    frozen: Frozen
    batches: tuple[Encoded, ...]
    blank: str


def _encode(folder: Path, given: Inspect) -> tuple[Inspected, Sequence[Any]]:
    pipeline = None if given.pipeline is None else Path(given.pipeline)
    frozen = open_model(folder, pipeline, trust_remote_code=given.trust_remote_code)
    lines = frozen.read_text(given.text, given.columns)
    # gradients are taken of heads alone
    frozen.model.requires_grad_(False)
    return Inspected(frozen, tuple(_read_small(frozen, lines)), describe_blank(lines)), lines


def _read_small(frozen: Frozen, lines: Sequence[Any]) -> Iterator[Encoded]:
    """Yield the lines in batches of few tokens."""
    number = 0
    for batch in frozen.read(lines):
        rows = max(1, TOKENS // batch.keep.shape[1])
        parts = [batch.places[start : start + rows] for start in range(0, len(batch.places), rows)]
        for places in parts:
            (part,) = [batch] if len(parts) == 1 else frozen.read([lines[place] for place in places])
            own = batch.places if len(parts) == 1 else tuple(places[row] for row in part.places)
            yield replace(part, number=number, places=own)
            number += 1


def _measure(
    inspected: Inspected, roles: Callable[[Encoded], HeadMask] | None, console: Console, *, exact: bool
) -> Report:
    frozen, score, batches = inspected.frozen, inspected.frozen.score(), inspected.batches
    with make_bars(console=console) as bars:
        bar, costs, how = bars.add_task(f"forwards of {frozen.name}", total=None), None, ""
        if not exact and score.name == Fidelity.name:
            bars.update(bar, total=2 * len(batches))
            try:
                costs = estimate_removal(frozen.heads, batches, frozen.run, lambda: bars.advance(bar))
                how = ESTIMATED
            except HeadwiseError as error:
                how = f"Costs are exact, as they cannot be estimated: {error}"
        report = measure(
            frozen.heads,
            batches,
            score=None if costs else score,
            score_name=score.name,
            forward=lambda _model, batch: frozen.run(batch),
            roles=roles,
            advance=lambda done, total: bars.update(
                bar,
                completed=done + len(batches) * (costs is not None),
                total=total + len(batches) * (costs is not None),
            ),
        )
    if costs is not None:
        layers = (
            replace(layer, drops=tuple(mean_interval(drops) for drops in costs.drops[layer.site]))
            for layer in report.layers
        )
        whole = mean_interval(costs.whole)
        report = replace(report, layers=tuple(layers), score=score.name, items=len(costs.whole), whole=whole)
    cut = sum(batch.cut for batch in inspected.batches)
    lines = sum(len(batch.places) for batch in inspected.batches)
    told = f"{cut} of {lines} lines are longer and were read to {frozen.longest}." if cut else ""
    said = (FIDELITY if score.name == Fidelity.name else "", how, frozen.note, told, inspected.blank)
    return replace(report, model=frozen.name, notes=(*report.notes, *filter(None, said)))


def _make_roles(pipeline: str, lines: Sequence[Any], models: Sequence[Inspected]) -> Callable[[Encoded], HeadMask]:
    """Return a function that makes masks of the paper's five roles; rare words are counted in the text itself."""
    from headwise.cli.roles import load_parser
    from headwise.roles.build import Roles
    from headwise.roles.idf import idf

    wordless = next((one for one in models if any(batch.encoding is None for batch in one.batches)), None)
    if wordless is not None:
        raise DataError(
            f"roles need words, and the tokens of {wordless.frozen.name} have no known characters in the text; omit "
            "--pipeline."
        )
    tables = load_parser(pipeline)(list(lines))
    roles = Roles.paper(idf(tables))

    def masks(batch: Encoded) -> HeadMask:
        chosen = [tables[place] for place in batch.places]
        return roles(chosen, num_heads=len(roles.roles), encoding=batch.encoding, length=batch.keep.shape[1])

    return masks


def _read_weights(inspected: Inspected, count: int) -> tuple[list[Sentence], bool]:
    """Return the first sentences with the (last) attention weights of each layer; and whether one ran repeatedly."""
    frozen, heads = inspected.frozen, inspected.frozen.heads
    with torch.no_grad():
        groups, _ = group_readable(heads, lambda: frozen.run(inspected.batches[0]))
    sites = tuple(site for what, found in groups.items() if "weights" in what for site in found)
    found: dict[int, Sentence] = {}
    repeated = False
    if not sites or count < 1:
        return [], repeated
    with torch.no_grad(), Taps(replace(heads, sites=sites), weights=True) as taps:
        for batch in inspected.batches:
            wanted = [row for row, place in enumerate(batch.places) if place < count]
            if not wanted:
                continue
            frozen.run(batch)
            captures = taps.read()
            captured: dict[str, Any] = {capture.site.name: capture.weights for capture in captures}
            repeated = len(captures) > len(captured)
            for row in wanted:
                weights = [_select_weights(captured.get(site.name), batch, row) for site in heads]
                found[batch.places[row]] = Sentence(batch.tokens[row][:SHOWN], tuple(weights))
    return [found[place] for place in sorted(found)], repeated


def _select_weights(weights: Tensor | None, batch: Encoded, row: int) -> Tensor | None:
    """Return the weights between the real tokens of one sentence, or of the one query if a site has one per text."""
    if weights is None:
        return None
    keep = batch.keep[row]
    own = weights[row][:, :, keep][:, :, :SHOWN]
    # a copy, so that the weights of the batch are freed
    return (own[:, keep][:, :SHOWN] if own.shape[1] == len(keep) else own).clone()
