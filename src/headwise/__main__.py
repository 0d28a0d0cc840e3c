"""The `headwise` command, also as `python -m headwise`; it says what to install where a package is missing."""

import os
import sys
from contextlib import suppress
from typing import NoReturn

# What is to be installed for a package; all others come with the laboratory.
CLI = "'headwise[cli]'"
SOURCES = {
    **dict.fromkeys(("jinja2", "matplotlib", "numpy", "rich", "tokenizers", "tqdm", "transformers", "typer"), CLI),
    "spacy": "'headwise[spacy]'",
    "ray": "'headwise-lab[ray]'",
    "submitit": "'headwise-lab[slurm]'",
}


def main() -> None:
    """Run the command; see `headwise.cli.main`."""
    try:
        from headwise.cli.main import main as run

        run()
    except SystemExit as ended:
        if isinstance(ended.code, int) and ended.code > 128:
            # it was stopped, and an interpreter with torch takes seconds to end
            _leave(ended.code)
        raise
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in ("", "headwise", "headwise_lab"):
            raise
        _end(f"{name} is not installed, and the command needs it: pip install {SOURCES.get(name, 'headwise-lab')}.", 2)
    except KeyboardInterrupt:
        # while modules are imported
        sys.stderr.write("headwise: stopped; nothing was done.\n")
        _leave(130)


def _leave(code: int) -> NoReturn:
    from headwise.cli.stopping import end_children

    end_children()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _end(sentence: str, code: int) -> NoReturn:
    sys.stderr.write(f"headwise: {sentence}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
