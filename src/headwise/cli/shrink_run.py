"""What `headwise shrink`, `prune` and `merge` do: cut a model, train it again, and write its folder and a page.

And `headwise budget`: score key/value heads, and write a budget and its map.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from headwise.atomic import name_write_errors, new_folder, seal_folder, write_whole
from headwise.caching.budget import kv_budget
from headwise.cli.extensions import find_stock_folder
from headwise.cli.output import asked_output, say, standard_console
from headwise.cli.settings import Budget, Merge, Plan, Prune, Shrink
from headwise.cli.shrink_subject import Subject, open_subject, open_whole
from headwise.errors import DataError
from headwise.heads.ablation import ablate, importance
from headwise.heads.find import find_heads
from headwise.heads.heads import Heads
from headwise.input_files import encode_json
from headwise.plots.heads import budget_map
from headwise.plots.style import to_png
from headwise.plots.sweeps import sweep
from headwise.report.html import Page
from headwise.report.measure import measure
from headwise.report.tables import stack_tables
from headwise.routing.save import save
from headwise.shrinking.distill import is_causal
from headwise.shrinking.merge import merge
from headwise.shrinking.neurons import zeroed
from headwise.shrinking.prune import choose_heads, prune
from headwise.shrinking.shrink import Mix, ShrinkPlan, list_units, shrink
from headwise.texts.pretrained import open_tokenizer, quietly
from headwise.texts.progress import make_bars
from headwise.texts.tables import Columns
from headwise.texts.transformer import open_folder

PAGE, RECORD = "shrinking.html", "shrinking.json"
WHOLE, CUT, RECOVERED = "before", "after", "trained again"
EXACT, FIRST, RANDOM = "removed one by one", "first order", "random"
# What --by takes.
WAYS = {"exact": EXACT, "first-order": FIRST, "random": RANDOM}
SHARES = (0.75, 0.5, 0.25)
DRAWS = 3
# What rows and columns of the tables say.
CHOICES = (
    "removed one by one: by the exact cost of each head alone. first order: by the mean absolute derivative of each "
    "line's loss (of random directions of the states, where no loss is known). random: the mean of three draws."
)
STEPS = (
    "lost: what the whole model has more. error of outputs: of what attentions put out on the calibration lines, as a "
    "share of its square. Averaged as they are with W_O refitted is the control: what the refit saves by itself."
)
MIXES = (
    "left: query heads and hidden neurons of all layers. of the layers: the share of the parameters of attentions and "
    "MLPs; fewer where heads alone leave no other size. The plan is the mix of the best score on the lines that it was "
    "chosen by. free: other counts in each layer. random: as many heads and neurons of each layer, the mean of three "
    "draws."
)
BOTH, SIZE = "heads and neurons", "share of the layers' parameters"
SIZES = (0.9, 0.8, 0.7)
# What each head is worth, by the name of its attention.
Worth = Mapping[str, Tensor]
# The scores of the runs of each way, by the share of heads kept.
Curves = dict[str, dict[float, list[float]]]


@dataclass(frozen=True)
class Shrunk:
    """What was done to a model, and what was measured in each state: before, after, and trained again.

    `details` is what was printed of the cut, `loading` how the folder is loaded; pruning has `curves` and a `verdict`
    on its choice, merging `steps`; heads and neurons together have `mixes` and their curves over the size.
    """

    title: str
    command: str
    score: str
    states: dict[str, dict[str, float]]
    details: str
    loading: str
    curves: Curves = field(default_factory=dict)
    steps: tuple[tuple[str, float, float], ...] = ()
    mixes: tuple[tuple[str, float, float], ...] = ()
    verdict: str = ""

    @property
    def unit(self) -> str:
        """The score and its unit, in few words."""
        return self.score.partition(" (")[0]

    @property
    def headline(self) -> str:
        """What came of it, in one sentence, and how good the choice was."""
        scores = [f"{state['score']:.4f} {name}" for name, state in self.states.items()]
        return f"{self.title}: {self.unit} {', '.join(scores)}. {self.verdict}".rstrip()

    @property
    def legend(self) -> str:
        """What the words of the tables mean."""
        cache = any("cache" in what for what in self.states[WHOLE])
        return (
            f"Heads are those of all layers. The score is the {self.score}, on held-out lines; the larger the better. "
            "Milliseconds are medians of rounds in which the models took turns on this machine"
            f"{'; the cache is of one token in all layers' if cache else ''}."
        )

    def record(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            **{name: getattr(self, name) for name in ("title", "command", "score", "states")},
            "curves": {way: {f"{share:g}": runs for share, runs in each.items()} for way, each in self.curves.items()},
            "steps": [{"way": way, "score": score, "error of outputs": error} for way, score, error in self.steps],
            "mixes": [{"what": what, "parameters": share, "score": score} for what, share, score in self.mixes],
            "loading": self.loading,
        }

    @property
    def shares(self) -> list[float]:
        """The shares of heads kept in the curves, largest first."""
        return sorted({share for each in self.curves.values() for share in each}, reverse=True)

    def list_tables(self) -> list[tuple[list[str], list[list[str]]]]:
        """Return header and rows of the tables of the states, the ways to choose heads, and the ways to merge."""
        first, *_, last = self.states.values()
        states = []
        for what, before in first.items():
            form = ".4f" if what == "score" else ".2f" if what.startswith("ms") else ",.0f"
            cells = [f"{state[what]:{form}}" if what in state else "" for state in self.states.values()]
            compared = what in last and before > 0 and what != "score"
            states.append(
                [self.unit if what == "score" else what, *cells, f"{last[what] / before:.2f}x" if compared else ""]
            )
        curves = [
            [way, *(f"{fmean(each[share]):.4f}" if share in each else "" for share in self.shares)]
            for way, each in ({} if self.mixes else self.curves).items()
        ]
        whole = first["score"]
        mixes = [[what, f"{share:.1%}", f"{score:.4f}", f"{whole - score:+.4f}"] for what, share, score in self.mixes]
        steps = [
            [way, f"{score:.4f}", f"{self.steps[0][1] - score:+.4f}", f"{error:.4f}"]
            for way, score, error in self.steps
        ]
        return [
            (["", *self.states, "after / before"], states),
            (["chosen by", *(f"{share:.0%} kept" for share in self.shares)], curves),
            (["way", self.unit, "lost", "error of outputs"], steps),
            (["left", "of the layers", self.unit, "lost"], mixes),
        ]

    def show(self, out: Path) -> None:
        """Print the tables of what was written to a folder."""
        console = standard_console()
        console.print(self.headline)
        titles = (
            *("", f"{self.unit}, by how heads are chosen, before any training", f"{self.unit}, step by step"),
            f"{self.unit}, by what is left, before any training",
        )
        notes = (self.legend, CHOICES, STEPS, MIXES)
        for title, (header, rows), note in zip(titles, self.list_tables(), notes, strict=True):
            if rows:
                console.print(stack_tables(header, rows, title=title))
                console.print(note)
        console.print(self.loading, soft_wrap=True, markup=False)
        console.print(f"written to {out}; the page is {out / PAGE}", soft_wrap=True, markup=False)

    def make_page(self) -> Page:
        """Make the page."""
        page = Page(self.title)
        page.paragraph(self.headline, kind="lead")
        states, curves, steps, mixes = self.list_tables()
        page.heading("Before and after")
        page.table(*states)
        page.paragraph(self.legend, kind="note")
        page.paragraph(self.loading)
        if self.mixes:
            page.heading("Heads and neurons")
            page.table(*mixes, caption=f"{self.score}, before any training")
            page.figure(
                to_png(sweep(self.curves, setting=SIZE, measure=self.score, reference=BOTH)),
                caption="Score over the size, with the same counts in every layer: of heads and neurons together, of "
                "each alone, and of random choices.",
                alt="Curves of the score over the share of the layers' parameters, one for each way to reach a size.",
            )
            page.paragraph(MIXES, kind="note")
        elif self.curves:
            page.heading("Ways to choose the heads")
            page.table(*curves, caption=f"{self.score}, before any training")
            figure = sweep(
                self.curves, setting="share of heads kept", measure=self.score, reference="removed one by one"
            )
            figure.axes[0].set_xticks(self.shares[::-1])
            page.figure(
                to_png(figure),
                caption="Score over the share of heads kept, for each way to choose them; of random choices each draw.",
                alt="Curves of the score over the share of heads kept, one for each way to choose heads.",
            )
            page.paragraph(CHOICES, kind="note")
        if self.steps:
            page.heading("Ways to merge")
            page.table(*steps, caption=self.score)
            page.paragraph(STEPS, kind="note")
        page.heading("What was cut")
        page.code(f"$ {self.command}\n\n{self.details}")
        return page


def prune_model(given: Prune) -> Shrunk:
    """Prune a model to a share of its heads, chosen one way, and compare the ways to choose."""
    with _shrinking(given.shrink) as (subject, whole, before, place, bars):
        bar = bars.add_task("forwards without a head", total=None)
        ways = weigh_heads(subject, lambda done, total: bars.update(bar, completed=done, total=total))
        way = WAYS[given.by]
        curves = draw_curves(subject, ways, given.keep)
        pruning = prune(subject.heads, keep=given.keep, importance=ways[way][0], inputs=subject.held_out[0].inputs)
        states = _compare(subject, whole, before, given.shrink, bars)
        kept, held = (int(states[name]["query heads"]) for name in (CUT, WHOLE))
        title = f"{subject.name} with {kept} of its {held} heads"
        chosen, drawn = curves[way][given.keep][0], curves[RANDOM][given.keep]
        against = f"{chosen:.4f} against {', '.join(f'{score:.4f}' for score in drawn)} before any training."
        better = "better" if chosen > max(drawn) else "not better"
        verdict = "" if way == RANDOM else f"Choosing heads by {given.by} is {better} than at random: {against}"
        return _write(
            subject, place, given.shrink.out, title, states, str(pruning), pruning.stock, curves=curves, verdict=verdict
        )


def merge_model(given: Merge) -> Shrunk:
    """Merge the key/value heads of a model, and tell what each step of that costs."""
    with _shrinking(given.shrink) as (subject, whole, before, place, bars):
        bars.add_task("merging", total=None)
        batches = [batch.inputs for batch in subject.chosen]
        merging = merge(subject.heads, given.kv_heads, batches=batches, score=subject.score)
        states = _compare(subject, whole, before, given.shrink, bars)
        title = f"{subject.name} with {given.kv_heads} key/value heads in each attention"
        # the page has a table of the steps
        details = str(replace(merging, steps=()))
        steps = tuple((step.way, float(step.score or 0), float(step.error or 0)) for step in merging.steps)
        return _write(subject, place, given.shrink.out, title, states, details, merging.stock, steps=steps)


@contextmanager
def _shrinking(given: Shrink) -> Iterator[tuple[Subject, nn.Module, dict[str, float], Path, Any]]:
    """Yield the model and its text, the whole model and its numbers, the folder to fill, and the bars."""
    with new_folder(given.out) as place, make_bars(console=standard_console()) as bars:
        with quietly():
            subject = open_subject(given)
        yield subject, copy.deepcopy(subject.model).eval(), _count(subject), place, bars


def weigh_heads(subject: Subject, advance: Callable[[int, int], None]) -> dict[str, list[Worth]]:
    """Return what each head is worth in each way; of random choices several draws."""
    heads = subject.heads
    report = measure(
        heads,
        subject.chosen,
        score=subject.score_measured(),
        forward=subject.run,
        advance=advance,
    )
    found: dict[str, list[Worth]] = {
        EXACT: [{layer.site: torch.tensor([drop.value for drop in layer.drops]) for layer in report.layers}],
        FIRST: [importance(heads, subject.estimate, method="first_order").drops],
    }
    generator = torch.Generator().manual_seed(0)
    found[RANDOM] = [
        {site.name: torch.rand(site.num_heads, generator=generator) for site in heads} for _ in range(DRAWS)
    ]
    return found


def score_without(subject: Subject, removed: Mapping[str, Sequence[int]]) -> float:
    """Return the score with heads ablated, which is that of the pruned model."""
    heads = subject.heads
    with ExitStack() as stack:
        for site in heads:
            if site.name in removed:
                stack.enter_context(
                    ablate(Heads(heads.model, (site,), heads.projections, heads.found), removed[site.name])
                )
        return subject.score()


def draw_curves(
    subject: Subject, ways: Mapping[str, Sequence[Worth]], keep: float
) -> dict[str, dict[float, list[float]]]:
    """Return the scores of each way over the share of heads kept, the one wanted among them."""
    heads, whole = subject.heads, subject.score()
    shares = sorted({*SHARES, keep}, reverse=True)
    curves: dict[str, dict[float, list[float]]] = {}
    for way, draws in ways.items():
        curves[way] = {1.0: [whole]}
        for share in shares:
            chosen = [choose_heads(heads, share, worth) for worth in draws]
            curves[way][share] = [score_without(subject, removed) for removed in chosen]
    return curves


def _count(subject: Subject) -> dict[str, float]:
    heads, parameters = subject.heads, list(subject.model.parameters())
    # keys and values of one token in all attentions
    cached = sum(
        part.heads * part.head_size * part.parts[0].parameter.element_size()
        for site in heads
        for part in site.slices
        if part.projection in ("key", "value")
    )
    return {
        "query heads": float(sum(site.num_heads for site in heads)),
        "key/value heads": float(sum(site.key_value_heads for site in heads)),
        "parameters": float(sum(parameter.numel() for parameter in parameters)),
        "bytes of parameters": float(sum(parameter.numel() * parameter.element_size() for parameter in parameters)),
        **({"bytes of cache per token": float(cached)} if subject.causal else {}),
        "score": subject.score(),
    }


def _compare(
    subject: Subject, whole: nn.Module, before: dict[str, float], given: Shrink, bars: Any
) -> dict[str, dict[str, float]]:
    """Return the numbers of the model before and after, and train it again where that is wanted."""
    times = subject.time({WHOLE: whole, CUT: subject.model})
    states = {WHOLE: before, CUT: _count(subject)}
    if given.recover:
        bar = bars.add_task("training", total=given.recover)
        subject.recover(whole, given, partial(bars.advance, bar))
        states[RECOVERED] = states[CUT] | {"score": subject.score()}
    for name, numbers in states.items():
        score = numbers.pop("score")
        numbers |= {f"ms per {what}": value for what, value in times[CUT if name == RECOVERED else name].items()}
        numbers["score"] = score
    return states


def _write(
    subject: Subject,
    place: Path,
    out: Path,
    title: str,
    states: dict[str, dict[str, float]],
    details: str,
    stock: str | None,
    **tables: Any,
) -> Shrunk:
    """Write model, tokenizer, numbers and page into a temporary folder, which becomes `out`."""
    model: Any = subject.model
    kind = "AutoModelForCausalLM" if subject.causal else type(model).__name__
    loading = f"The folder is loaded by transformers alone: {kind}.from_pretrained(folder)."
    if stock is not None:
        loading = f"The folder is loaded by headwise.load(folder); transformers refuses it, as {stock}."
    loading = f"{loading} {subject.blank}".rstrip()
    shrunk = Shrunk(title, asked_output().command, subject.score_name, states, details, loading, **tables)
    page = shrunk.make_page()
    with name_write_errors(out), quietly():
        (model.save_pretrained if hasattr(model, "save_pretrained") else partial(save, model))(place)
        subject.tokenizer.save_pretrained(place)
        (place / RECORD).write_text(encode_json(shrunk.record(), indent=1) + "\n", encoding="utf-8")
        page.write(place / PAGE)
        seal_folder(place)
    return shrunk


def find_budget(given: Budget) -> Path:
    """Write the budget of a model and a picture of its map; return the file.

    Raises:
        DataError: The folder holds no model that generates, or the text is shorter than the window.
    """
    folder, trusted = find_stock_folder(given.model), given.trust_remote_code
    if given.out.exists():
        raise DataError(f"{given.out} exists; expected a new file for the budget.")
    with quietly():
        frozen = open_folder(folder, trust_remote_code=trusted)
        tokenizer = open_tokenizer(folder, trust_remote_code=trusted)
        model: Any = open_whole(folder, frozen.model, trust_remote_code=trusted)
    if not is_causal(type(model).__name__):
        raise DataError(
            f"{folder} holds a {type(model).__name__}; expected a causal language model, which has a cache."
        )
    text = "\n".join(map(str, frozen.read_text(given.text, Columns(given.text_column))))
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    length = min(2 * (given.sink + given.window), most or 2 * (given.sink + given.window))
    with quietly():
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.long)
    rows = min(given.rows, len(ids) // length)
    if not rows:
        raise DataError(
            f"{given.text} has {len(ids)} tokens; expected at least {length}, so that a row is longer than the window; "
            "give more text, or a smaller --window."
        )
    batches = list(ids[: rows * length].view(rows, 1, length))
    model = model.to(next(frozen.model.parameters()).device).eval()
    budget = kv_budget(find_heads(model), batches, keep=given.keep, sink=given.sink, window=given.window)
    picture = given.out.with_suffix(".png")
    write_whole(picture, to_png(budget_map(budget)))
    budget.save(given.out)
    say(str(budget))
    say(f"written to {given.out}, the map to {picture}; headwise.shrinking.KVBudget.load reads it.")
    return given.out


def shrink_model(given: Plan) -> Shrunk:
    """Remove heads and neurons of a model until a share of its layers is left."""
    with _shrinking(given.shrink) as (subject, whole, before, place, bars):
        bars.add_task("ranking heads and neurons", total=None)
        choose = make_score(subject)
        plan = shrink(
            subject.heads,
            subject.estimate,
            params=given.params,
            time=given.time,
            score=choose,
            inputs=subject.held_out[0].inputs,
        )
        bar = bars.add_task("scores of other mixes", total=len(plan.mixes) + 4 * len(SIZES) + DRAWS)
        advance = partial(bars.advance, bar)
        mixes, verdict = compare_mixes(subject, plan, advance)
        curves = draw_sizes(subject, plan, choose, before["score"], advance)
        chosen = plan.chosen
        pruning = plan.apply()
        states = _compare(subject, whole, before, given.shrink, bars)
        counts = {WHOLE: plan.whole.neurons, CUT: chosen.neurons, RECOVERED: chosen.neurons}
        states = {name: {"hidden neurons": float(counts[name]), **numbers} for name, numbers in states.items()}
        title = (
            f"{subject.name} with {chosen.heads} of its {plan.whole.heads} heads and {chosen.neurons:,} of its "
            f"{plan.whole.neurons:,} neurons"
        )
        details = f"{plan}\n\n{pruning}"
        return _write(
            subject,
            place,
            given.shrink.out,
            title,
            states,
            details,
            pruning.stock,
            curves=curves,
            mixes=mixes,
            verdict=verdict,
        )


def make_score(subject: Subject) -> Callable[[], float]:
    """Return the score of a model on the lines that a mix is chosen by."""
    if subject.causal:
        return replace(subject, held_out=subject.chosen).score
    with torch.no_grad():
        states = {batch.number: subject.run(subject.model, batch) for batch in subject.chosen}
    return replace(subject, held_out=subject.chosen, states=states).score


def score_mix(subject: Subject, mix: Mix) -> float:
    """Return the held-out score without heads and neurons, which is that of the smaller model."""
    with zeroed(mix.removed, mix.gone):
        return subject.score()


def compare_mixes(
    subject: Subject, plan: ShrinkPlan, advance: Callable[[], None]
) -> tuple[tuple[tuple[str, float, float], ...], str]:
    """Return what is left, size and held-out score of each mix and of random choices, and a verdict on the plan."""
    rows = []
    for mix in plan.mixes:
        shown = f"{mix.heads:,} heads, {mix.neurons:,} neurons{'' if mix.even else ', free'}"
        rows.append((f"{shown} (the plan)" if mix is plan.chosen else shown, mix.parameters, score_mix(subject, mix)))
        advance()
    chosen = next(score for mix, (_, _, score) in zip(plan.mixes, rows, strict=True) if mix is plan.chosen)
    drawn = []
    for seed in range(DRAWS):
        drawn.append(score_mix(subject, draw_mix(plan.chosen, seed)))
        advance()
    rows.append((RANDOM, plan.chosen.parameters, fmean(drawn)))
    better = "better" if chosen > max(drawn) else "not better"
    against = f"{chosen:.4f} against {', '.join(f'{score:.4f}' for score in drawn)} before any training."
    return tuple(rows), f"Choosing by first order is {better} than at random: {against}"


def draw_mix(mix: Mix, seed: int) -> Mix:
    """Return a mix with as many heads and neurons of each layer, drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    removed = {}
    for site, gone in mix.removed.items():
        units = list_units(site)
        order = torch.randperm(len(units), generator=generator).tolist()
        taken = [head for place in order[: len(gone) // len(units[0])] for head in units[place]]
        removed[site] = tuple(sorted(taken))
    neurons = {
        mlp: tuple(sorted(torch.randperm(mlp.neurons, generator=generator)[: len(gone)].tolist()))
        for mlp, gone in mix.gone.items()
    }
    return replace(mix, removed=removed, gone=neurons)


def draw_sizes(
    subject: Subject, plan: ShrinkPlan, choose: Callable[[], float], whole: float, advance: Callable[[], None]
) -> Curves:
    """Return held-out scores over the size: of the best mix, of neurons and heads alone, and of random choices."""
    curves: Curves = {way: {1.0: [whole]} for way in (BOTH, "neurons alone", "heads alone", RANDOM)}
    for size in SIZES:
        found = plan.list_mixes(size)
        scores = []
        for mix in found:
            with torch.no_grad(), zeroed(mix.removed, mix.gone):
                scores.append(choose())
        if not found:
            continue
        best = found[scores.index(max(scores))]
        ways = {BOTH: best, RANDOM: draw_mix(best, 0)}
        alone = {"neurons alone": lambda mix: not mix.removed, "heads alone": lambda mix: not any(mix.gone.values())}
        ways |= {way: mix for way, only in alone.items() for mix in found if only(mix)}
        for way, mix in ways.items():
            curves[way][round(mix.parameters, 4)] = [score_mix(subject, mix)]
            advance()
    return {way: each for way, each in curves.items() if len(each) > 1}
