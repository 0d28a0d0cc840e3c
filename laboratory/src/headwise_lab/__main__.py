"""The `headwise` command with the laboratory, also where that is on Python's path and not installed."""

from headwise.__main__ import main
from headwise.cli.extensions import add_extension
from headwise_lab import extension

if __name__ == "__main__":
    add_extension(extension)
    main()
