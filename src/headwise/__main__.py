"""The `headwise` command, also as `python -m headwise`; it says what to install where the laboratory is missing."""

import sys
from typing import NoReturn

# What the extra `lab` does not install.
EXTRAS = {"spacy": "spacy", "ray": "ray", "submitit": "slurm"}


def main() -> None:
    """Run the command; see `headwise.lab.cli.main`."""
    try:
        from headwise.lab.cli.main import main as run

        run()
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in ("", "headwise"):
            raise
        extra = EXTRAS.get(name, "lab")
        _end(
            f"{name} is not installed, and the command needs it; install the extra: pip install 'headwise[{extra}]'.", 2
        )
    except KeyboardInterrupt:
        # while modules are imported
        _end("stopped; nothing was done.", 130)


def _end(sentence: str, code: int) -> NoReturn:
    sys.stderr.write(f"headwise: {sentence}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
