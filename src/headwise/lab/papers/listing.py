"""What reproductions there are and what running them takes, before anything is run."""

import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from headwise.lab.compare import find_run_folder, read_train_seconds
from headwise.lab.experiment import run_folder as runs
from headwise.lab.experiment.arm import escape_arm_name
from headwise.lab.experiment.registry import named_task
from headwise.lab.papers.index import REPRODUCTIONS
from headwise.lab.papers.reproduction import Reproduction
from headwise.lab.papers.run import Plan, choose_seeds
from headwise.lab.papers.sizes import resize_scale
from headwise.lab.results.cells import NONE
from headwise.lab.results.runs import COMPARISON


def show_list(out: Path, scale: str, console: Console) -> None:
    """Show every reproduction in a line: its id, its runs at a scale, the hours if finished runs tell, its title."""
    rows = [(one, *_count_runs(out, one, scale)) for one in REPRODUCTIONS.values()]
    known = any(hours for _, _, hours in rows)
    lines = [["id", "runs", *(["hours"] if known else []), "what it shows"]]
    lines += [[one.id, arms or NONE, *([hours] if known else []), one.title] for one, arms, hours in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    console.print(f"reproductions at scale {scale}", style="bold", highlight=False, markup=False)
    for place, line in enumerate(lines):
        text = Text("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        # one line each: the end of a long title is left out
        text.truncate(console.width, overflow="ellipsis")
        console.print(text, style="" if place else "dim", highlight=False)
    notes = "runs: arms x seeds."
    notes += f" hours: training alone, one run after the other, as finished runs below {out} tell." if known else ""
    notes += " `headwise reproduce ID --dry-run` lists the runs."
    console.print(notes, style="dim", highlight=False, markup=False)


def _count_runs(out: Path, reproduction: Reproduction, scale: str) -> tuple[str, str]:
    """Return the arms x seeds of a reproduction at a scale, and the hours they take; "" for what is not known."""
    if scale not in reproduction.scales:
        return "", ""
    scales, seeds = named_task(reproduction.task).scales, choose_seeds(scale)
    arms = sum(len(names) for names in reproduction.arms_at(scale, scales).values())
    seconds = _estimate_seconds(out, reproduction, scale)
    return f"{arms} x {seeds}", "" if seconds is None else f"{seeds * seconds / 3600:.1f}"


def show_plans(
    reproduction: Reproduction,
    plans: Sequence[Plan],
    console: Console,
    recorded: Mapping[str, Collection[tuple[str, int]]] | None = None,
) -> None:
    """Show the runs of a reproduction, which of them are finished and what the others may cost; nothing is done.

    `recorded` are the runs, by part, that a record has: arm and seed of each. They count as finished.
    """
    shown = RichTable("part", "arm", "seeds", "finished", title=f"{reproduction.id}: {reproduction.title}")
    shown.add_column("folder", overflow="fold")
    left, seconds = 0, []
    for plan in (*plans[0].before, *plans):
        comparison, open_runs = plan.comparison, 0
        # a record has no runs of the reproduction before
        kept = (recorded or {}).get(plan.part.name, ()) if plan in plans else ()
        for arm in comparison.arms:
            done = sum(
                (arm.name, seed) in kept or runs.is_finished(find_run_folder(comparison.out, arm.folder, seed))
                for seed in comparison.seeds
            )
            open_runs += len(comparison.seeds) - done
            seeds = f"0 to {max(comparison.seeds)}" if len(comparison.seeds) > 1 else "0"
            cells = Text(plan.part.name or NONE), Text(arm.name), seeds, str(done)
            shown.add_row(*cells, Text(str(comparison.out / arm.folder)))
        left += open_runs
        seconds.append(_estimate_cost(plan.finished, open_runs))
    console.print(shown)
    total = None if any(cost is None for cost in seconds) else sum(cost or 0.0 for cost in seconds)
    cost = "no run of each size has finished, so what they cost is not known"
    if total is not None:
        cost = f"about {total / 3600:.1f} hours of training, one run after the other"
    console.print(f"{left} runs to do: {cost}.", highlight=False, markup=False)
    if reproduction.lack:
        console.print(reproduction.lack, highlight=False, markup=False, soft_wrap=True)


def _estimate_cost(finished: Sequence[Path], left: int) -> float | None:
    """Return the seconds of training that `left` runs take if they are as long as the finished ones."""
    if left == 0:
        return 0.0
    past = [seconds for folder in finished if (seconds := read_train_seconds(folder)) is not None]
    return left * statistics.fmean(past) if past else None


def _estimate_seconds(out: Path, reproduction: Reproduction, scale: str) -> float | None:
    """Return the seconds that one seed of every arm took, as far as runs below `out` tell."""
    scales, total = named_task(reproduction.task).scales, 0.0
    for part in reproduction.parts_at(scale):
        arms = reproduction.arms_at(scale, scales)[part.name]
        stem = f"{reproduction.task}-{resize_scale(part.sizes[scale], scales).name}"
        folders = [place for place in (out / stem, *out.glob(f"{stem}-*")) if (place / COMPARISON).exists()]
        same = [place for place in folders if _find_scale(place) == resize_scale(part.sizes[scale], scales).name]
        past = [
            seconds
            for place in same
            for arm in arms
            for folder in (place / escape_arm_name(arm)).glob("seed-*")
            if (seconds := read_train_seconds(folder)) is not None
        ]
        if not past:
            return None
        total += len(arms) * statistics.fmean(past)
    return total


def _find_scale(comparison: Path) -> str | None:
    record = runs.read_json(comparison / COMPARISON)
    return record.get("scale") if isinstance(record, dict) else None
