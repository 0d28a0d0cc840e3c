"""The commands around rating texts: make the pages of two runs, and count what raters saved.

Owns their options and what they say on the terminal. Everything slow is imported inside.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headwise.lab.cli.options import standard_console, stoppable


def rate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run that is judged, OUT/ARM/seed-N.")],
    against: Annotated[Path, typer.Argument(metavar="AGAINST", help="Folder of the run it is judged against.")],
    data: Annotated[Path, typer.Option(help="The graphs both were tested on.")],
    out: Annotated[Path, typer.Option(help="Folder for the form, its key and a page of texts.")] = Path("runs/rating"),
    items: Annotated[int, typer.Option(help="Texts on the form.")] = 50,
    seed: Annotated[int, typer.Option(help="Seed of which texts, their order and their sides.")] = 0,
) -> None:
    """Write a form on which raters say which of two runs writes better, and a page of the texts of both."""
    with stoppable("stopped."):
        from headwise.lab.experiment.run_folder import prepare_folder
        from headwise.lab.tasks.graph2text.rating import outputs_page, read_items, write_rating

        found = read_items(run, against, data)
        names = (_called(run), _called(against))
        prepare_folder(out)
        form, key = write_rating(out, found, (run, against), names, count=items, seed=seed)
        outputs_page(found[:items], names, title="Texts of two runs").write(out / "outputs.html")
    typer.echo(f"form: {form}, for the raters: each saves a file")
    typer.echo(f"key: {key}, not for them: headwise ratings {key} FILE...")
    typer.echo(f"texts with names: {out / 'outputs.html'}")


def ratings(
    key: Annotated[Path, typer.Argument(metavar="KEY", help="rating-key.json beside the form.")],
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="What the raters saved, a file each.")],
    record: Annotated[
        bool, typer.Option("--record", help="Keep the result beside the run, for headwise reproduce repulsive/table-5.")
    ] = False,
) -> None:
    """Count wins, losses and ties of the texts that raters compared."""
    from headwise.lab.tasks.graph2text.rating_results import ratings_grid, read_ratings, record_ratings

    found = read_ratings(key, files)
    standard_console().print(ratings_grid(found))
    if record:
        typer.echo(f"kept: {record_ratings(found)}")


def _called(run: Path) -> str:
    folder = run.resolve()
    return f"{folder.parent.name} {folder.name}"
