"""The commands of graph2text: write texts about graphs, make a rating form for two runs, and count ratings."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from headwise.cli.output import say, standard_console
from headwise.cli.stopping import stoppable
from headwise_lab.options import Beams, LengthPenalty
from headwise_lab.streams import STANDARD_INPUT, choose_window, standard_streams

# Graphs per window: sorting by size inside it is faster, and the first text does not wait long.
WINDOW = 128


def write(
    run: Annotated[Path, Argument(metavar="RUN_DIR", help="Folder of a finished run of graph2text.")],
    beams: Beams = None,
    length_penalty: LengthPenalty = None,
    window: Annotated[
        int | None, Option(help=f"Lines read before the first is written (default: {WINDOW}, or 1 from a terminal).")
    ] = None,
) -> None:
    """Write a text for each line of standard input: a title, a tab and triples (head | relation | tail ; ...)."""
    with stoppable("stopped."):
        from headwise_lab.tasks.graph2text.writer import open_writer, read_requests, write_lines

        writer = open_writer(run, beams=beams, length_penalty=length_penalty)
        window = choose_window(WINDOW) if window is None else window
        with standard_streams("texts written") as (lines, output, done, warn):
            write_lines(writer, read_requests(lines, STANDARD_INPUT), output, window=window, warn=warn, done=done)


def rate(
    run: Annotated[Path, Argument(metavar="RUN", help="Folder of the run to rate, OUT/ARM/seed-N.")],
    against: Annotated[Path, Argument(metavar="AGAINST", help="Folder of the run to compare it with.")],
    data: Annotated[Path, Option(help="The graphs that both were tested on.")],
    out: Annotated[Path, Option(help="Folder for the form, its key and the texts.")] = Path("runs/rating"),
    items: Annotated[int, Option(help="Number of texts on the form.")] = 50,
    seed: Annotated[int, Option(help="Seed for the choice, order and sides of texts.")] = 0,
) -> None:
    """Write a form on which raters compare the texts of two runs, and a page of all texts."""
    if run.resolve() == against.resolve():
        raise typer.BadParameter(f"RUN and AGAINST are both {run}; expected two runs to compare.")
    with stoppable("stopped.", [out]):
        from headwise_lab.tasks.graph2text.ratings import OUTPUTS, make_outputs_page, read_items, write_rating

        found = read_items(run, against, data)
        names = (_name(run), _name(against))
        outputs = make_outputs_page(found, names, title="Texts of two runs")
        form, key = write_rating(out, found, (run, against), names, count=items, seed=seed, outputs=outputs)
    say(f"form: {form}, for the raters: each saves a file")
    say(f"key: {key}, not for the raters: headwise ratings {key} FILE...")
    say(f"texts with names: {out / OUTPUTS}")


def ratings(
    key: Annotated[Path, Argument(metavar="KEY", help="rating-key.json, next to the form.")],
    files: Annotated[list[Path], Argument(metavar="FILE...", help="Files that the raters saved.")],
    record: Annotated[
        bool, Option("--record", help="Save the result with the run, for headwise reproduce repulsive/table-5.")
    ] = False,
) -> None:
    """Count the wins, losses and ties that raters gave."""
    from headwise_lab.tasks.graph2text.ratings import draw_ratings, read_ratings, record_ratings

    found = read_ratings(key, files)
    standard_console().print(draw_ratings(found))
    if record:
        say(f"saved: {record_ratings(found)}")


def _name(run: Path) -> str:
    folder = run.resolve()
    return f"{folder.parent.name} {folder.name}"


COMMANDS = (rate, ratings, write)
