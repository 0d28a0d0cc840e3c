"""The commands of the library; whatever is slow to import is imported inside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from typer import BadParameter

from headwise.cli.options import command, require_known
from headwise.cli.output import print_file, print_record, printing_record
from headwise.cli.settings import Budget, Inspect, Merge, Plan, Prune, ShowRoles, Shrink
from headwise.cli.stopping import stoppable

if TYPE_CHECKING:
    from headwise.cli.shrink_run import Shrunk

STOPPED = "stopped; nothing was written."
RUNS = Path("runs")


@printing_record
@command
def prune(given: Prune) -> None:
    """Remove heads from the weights of a model, and compare the ways to choose them."""
    from headwise.cli.shrink_run import WAYS, prune_model

    require_known("--by", given.by, WAYS)
    _shrink(given.shrink, lambda: prune_model(given))


@printing_record
@command
def merge(given: Merge) -> None:
    """Merge key/value heads into fewer ones, so that the cache is smaller, and tell what each step costs."""
    from headwise.cli.shrink_run import merge_model

    _shrink(given.shrink, lambda: merge_model(given))


@printing_record
@command
def shrink(given: Plan) -> None:
    """Remove heads and neurons together until a share of the layers is left, and compare ways to reach that size."""
    from headwise.cli.shrink_run import shrink_model

    if (given.params is None) is (given.time is None):
        raise BadParameter("expected either --params or --time, such as --params 0.8.")
    _shrink(given.shrink, lambda: shrink_model(given))


def _shrink(given: Shrink, shrink: Callable[[], Shrunk]) -> None:
    from headwise.cli.shrink_subject import SOURCES

    require_known("--recover-from", given.recover_from, SOURCES)
    with stoppable(STOPPED, [given.out]):
        shrunk = shrink()
    shrunk.show(given.out)
    print_record(shrunk.record())


@printing_record
@command
def budget(given: Budget) -> None:
    """Find the key/value heads that need the whole cache, and write a budget that generation keeps."""
    from headwise.cli.shrink_run import find_budget

    with stoppable(STOPPED, [given.out]):
        print_file(find_budget(given))


@command
def roles(given: ShowRoles) -> None:
    """Show where each role lets the words of a sentence attend: in the terminal, as a picture and as a page."""
    from headwise.cli.roles import show

    with stoppable("stopped.", [given.out or RUNS]):
        show(given)


@printing_record
@command
def inspect(given: Inspect) -> None:
    """Show what the heads of a model do on a text and what each contributes: in the terminal and as a page."""
    from headwise.cli.inspection import inspect_models

    with stoppable(STOPPED, [given.out or RUNS]):
        print_file(inspect_models(given))


COMMANDS = (inspect, roles, shrink, prune, merge, budget)
