"""The commands of translation: download a corpus, and translate with a run."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from headwise.atomic import hold
from headwise.cli.options import require_known
from headwise.cli.output import say
from headwise.cli.stopping import stoppable
from headwise_lab.options import Beams, LengthPenalty
from headwise_lab.streams import choose_window, standard_streams

# Batches per window: sorting by length inside it is faster, and the first line does not wait long.
WINDOW_BATCHES = 8


def translate(
    run: Annotated[Path, Argument(metavar="RUN_DIR", help="Folder of a finished run of translation.")],
    beams: Beams = None,
    length_penalty: LengthPenalty = None,
    batch: Annotated[int, Option(help="Decoding batch size.")] = 32,
    pipeline: Annotated[
        Path | None, Option(help="spaCy pipeline of a run with roles (default: the path used in training).")
    ] = None,
    window: Annotated[
        int | None, Option(help="Lines read before the first is written (default: 8 batches, or 1 from a terminal).")
    ] = None,
) -> None:
    """Translate standard input to standard output, line by line."""
    with stoppable("stopped."):
        from headwise.errors import DataError
        from headwise_lab.tasks.translation.translator import open_translator, translate_lines

        translator = open_translator(run, beams=beams, length_penalty=length_penalty, batch=batch, pipeline=pipeline)
        if pipeline is not None and not translator.parsed:
            raise DataError(f"the sources of {run} were not parsed; leave --pipeline out.")
        window = choose_window(WINDOW_BATCHES * batch) if window is None else window
        with standard_streams("lines translated") as (lines, output, done, warn):
            translate_lines(translator, lines, output, window=window, warn=warn, done=done)


def download(
    corpus: Annotated[str, Argument(help="multi30k, iwslt14, wmt14, wmt16 or wmt17.")],
    out: Annotated[Path, Option(help="Folder for its files; existing files are kept.")],
) -> None:
    """Download a corpus for translation; files are pinned, verified and unpacked."""
    from headwise_lab.tasks.translation.corpora import CORPORA, fetch_corpus

    require_known("corpus", corpus, CORPORA)
    with stoppable("stopped; give the same command again to resume.", [out]), hold(out):
        fetch_corpus(CORPORA[corpus], out, progress=True)
    say(f"{corpus} is in {out}, for headwise compare translation --data {out}")


COMMANDS = (download, translate)
