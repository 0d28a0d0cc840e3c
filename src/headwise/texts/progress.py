"""Progress bars of long readings on stderr."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn


def make_bars(
    *columns: ProgressColumn, console: Console | None = None, shown: bool = True, transient: bool = True
) -> Progress:
    """Return progress bars: the title, a bar, and `columns` (by default the count and the time remaining)."""
    if console is None:
        console = Console(stderr=True)
        shown = shown and console.is_terminal
    after = columns or (MofNCompleteColumn(), TimeRemainingColumn())
    title = TextColumn("{task.description}", markup=False)
    return Progress(title, BarColumn(), *after, console=console, transient=transient, disable=not shown)
