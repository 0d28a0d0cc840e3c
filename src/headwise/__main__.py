"""`python -m headwise` is the `headwise` command: what torchrun and `accelerate launch` start."""

from headwise.lab.cli.main import main

if __name__ == "__main__":
    main()
