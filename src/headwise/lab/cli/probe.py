"""What is typed to probe a model; everything slow is imported inside."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from headwise.lab.cli.options import Workers, require_known, standard_console, stoppable

GOES_ON = (
    "stopped; finished tasks are kept, of the one under way its encoded sentences at most; give the same command again "
    "to go on."
)


def probe(
    model: Annotated[
        Path,
        typer.Argument(help="A folder of save_pretrained(), or a finished run of headwise compare."),
    ],
    data: Annotated[Path, typer.Option(help="Folder of probing files (past_present.txt, ...), or one file.")],
    task: Annotated[str, typer.Option(help="all, or names of files: past_present,tree_depth.")] = "all",
    layers: Annotated[str, typer.Option(help="all, none, or layers: emb,0,5; emb is what goes into layer 0.")] = "all",
    heads: Annotated[
        str, typer.Option(help="all, none, or LAYER.HEAD, sets with a plus: 3.5,3.5+4.0; outputs before W_O.")
    ] = "all",
    classifier: Annotated[str, typer.Option(help="regression (logistic) or mlp (one hidden layer).")] = "regression",
    sentences: Annotated[
        int, typer.Option(help="Sentences of a task: 6 tenths train, 1 dev, 3 test; 0 for all.", min=0)
    ] = 10_000,
    seed: Annotated[int, typer.Option(help="Seed of the mlp's draws.")] = 0,
    pipeline: Annotated[
        Path | None, typer.Option(help="The pipeline that parsed a run with roles; where it lay then by default.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of results and figures; runs/probe/... by default.")] = None,
    cache: Annotated[Path, typer.Option(help="Folder of encoded sentences, shared by all probes.")] = Path(
        "runs/probe/cache"
    ),
    workers: Workers = None,
) -> None:
    """Show what the layers and heads of a frozen model tell of sentences (SentEval's probing tasks)."""
    from headwise.errors import require_integer
    from headwise.lab.frozen.open import open_frozen
    from headwise.lab.jobs.pool import default_workers
    from headwise.lab.probing.fit import Classifier
    from headwise.lab.probing.request import Asked, task_files
    from headwise.lab.probing.run import probe_model
    from headwise.lab.tasks.probing.files import PROBES

    if workers is not None:
        require_integer("--workers", workers, low=1)
    names = [name.strip() for name in task.split(",")]
    for name in names:
        require_known("probing task", name, ("all", *PROBES))
    asked = Asked(layers, heads, Classifier(classifier, seed=seed), sentences or None)
    words = ["headwise", "probe", model.name, "--data", "FOLDER", "--task", task, "--layers", layers, "--heads", heads]
    words += ["--classifier", classifier, "--sentences", str(sentences), "--seed", str(seed)]
    with stoppable(GOES_ON):
        files = task_files(data, names)
        probe_model(
            open_frozen(model, pipeline),
            files,
            asked,
            out,
            cache,
            default_workers() if workers is None else workers,
            standard_console(),
            shlex.join(words),
        )
