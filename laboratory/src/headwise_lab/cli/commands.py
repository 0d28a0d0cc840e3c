"""The commands and their options; whatever is slow to import is imported inside them."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from headwise.atomic import hold
from headwise.cli.commands import RUNS
from headwise.cli.options import TextColumn, TrustRemoteCode, require_known
from headwise.cli.output import print_record, printing_record, say, standard_console
from headwise.cli.stopping import stoppable
from headwise.texts.tables import Columns
from headwise_lab.experiment.registry import named_task
from headwise_lab.experiment.scale import ScaleOptions
from headwise_lab.options import (
    DataFolder,
    Embeddings,
    Folds,
    LabelColumn,
    Lora,
    OutOfDomain,
    Pipeline,
    Pretrained,
    ScaleName,
    Sizes,
    TaskName,
    TunedFolder,
    Workers,
    choose_scale,
    end_with,
    parse_lora,
    require_task,
)


@printing_record
def tune(
    task: TaskName,
    arms: Annotated[str, typer.Argument(metavar="ARMS", help="Arms; settings given in them are fixed.")],
    draws: Annotated[int, typer.Option(help="Number of draws, the same for all arms in a folder.")] = 10,
    seeds: Annotated[int, typer.Option(help="Number of runs of each draw; its score is their mean.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the draws and the first run; compare takes 0, 1, ...")] = 1000,
    scale: ScaleName = "demo",
    data: DataFolder = None,
    pipeline: Pipeline = None,
    embeddings: Embeddings = None,
    pretrained: Pretrained = None,
    lora: Lora = None,
    trust_remote_code: TrustRemoteCode = False,
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    sizes: Sizes = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the draws (default: runs/tune-TASK-SCALE).")] = None,
    workers: Workers = None,
) -> None:
    """Search the settings of arms at random, score each draw on dev, and print the best of each as an arm."""
    require_task(task)
    from headwise_lab.experiment.arm_text import parse_arms
    from headwise_lab.jobs.pool import count_workers
    from headwise_lab.tune import Tuning
    from headwise_lab.tune import tune as run

    options = ScaleOptions(
        scale,
        pipeline,
        embeddings,
        sizes=(*(sizes or ()), *parse_lora(task, lora)),
        pretrained=pretrained,
        trust_remote_code=trust_remote_code,
        columns=Columns(tuple(text_column or ()), label_column),
    )
    chosen = choose_scale(task, options)
    if getattr(chosen, "folds", None) is not None:
        chosen = choose_scale(task, replace(options, folds=1))
        say(
            f"scale {scale} is a cross-validation, and an arm is tuned on one split: judge it there too (--folds 1), "
            "because the dev texts of that split are test texts of some fold."
        )
    folder = out or Path("runs") / f"tune-{task}-{chosen.name}"
    parallel = count_workers() if workers is None else workers
    failures, records = [], []
    for arm in parse_arms(arms):
        tuning = Tuning(task, arm.name, draws, seed, chosen, folder, data, parallel, seeds)
        with stoppable(folders=[folder]), hold(folder):
            tuned = run(tuning, standard_console())
        say(f"dev {100 * tuned.dev_score:.1f} with")
        say(tuned.arm.name)
        records.append({"arm": tuned.arm.name, "dev_score": tuned.dev_score, "expected": list(tuned.expected)})
        failures += tuned.failures
    print_record(records[0] if len(records) == 1 else records)
    end_with(failures)


@printing_record
def data(
    task: TaskName,
    folder: DataFolder = None,
    scale: ScaleName = "demo",
    pipeline: Pipeline = None,
    embeddings: Embeddings = None,
    pretrained: Pretrained = None,
    trust_remote_code: TrustRemoteCode = False,
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    sizes: Sizes = None,
) -> None:
    """Show the statistics of a task's data: splits, labels, vocabulary, and what was left out; nothing is trained."""
    require_task(task)
    options = ScaleOptions(
        scale,
        pipeline,
        embeddings,
        sizes=tuple(sizes or ()),
        pretrained=pretrained,
        trust_remote_code=trust_remote_code,
        columns=Columns(tuple(text_column or ()), label_column),
    )
    chosen = choose_scale(task, options)
    with stoppable("stopped."), TemporaryDirectory() as cache:
        found = named_task(task).load(folder, chosen, Path(cache), progress=standard_console().is_terminal)
    say(found.summary())
    print_record({"task": task, "scale": chosen.name, "summary": found.summary(), "digest": found.fingerprint})


@printing_record
def reproduce(
    identifier: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="A table or figure of a paper, e.g. diversify/figure-4.")
    ] = None,
    list_all: Annotated[
        bool, typer.Option("--list", help="List the reproductions and their runs (default without ID).")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the runs of ID without doing them.")] = False,
    parts: Annotated[
        list[str] | None, typer.Option("--part", help="Only this part of ID, as --dry-run names it; repeatable.")
    ] = None,
    tables: Annotated[
        Path | None, typer.Option("--tables", help="TOML file with tables of your own, to list and to run.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Number of seeds per arm (default: 5, the least for a verdict; 2 at scale demo).")
    ] = None,
    scale: Annotated[
        str, typer.Option("--scale", help="Preset: demo (minutes), cpu (hours), gpu (minutes per run), paper.")
    ] = "cpu",
    data: DataFolder = None,
    pipeline: Pipeline = None,
    embeddings: Embeddings = None,
    pretrained: Pretrained = None,
    trust_remote_code: TrustRemoteCode = False,
    out_of_domain: OutOfDomain = None,
    folds: Folds = None,
    sizes: Sizes = None,
    tuned: TunedFolder = None,
    out: Annotated[Path, typer.Option(help="Folder for runs, shared by all reproductions, and pages.")] = Path(
        "runs/reproductions"
    ),
    record: Annotated[
        Path | None, typer.Option(help="Folder of the paper's notes; writes its results/ and RESULTS.md.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Take over the runs that the record in --record has; do only the others.")
    ] = False,
    kept: Annotated[
        Path | None, typer.Option("--from", help="Folder of a paper's notes: train nothing, use the runs kept there.")
    ] = None,
    workers: Workers = None,
) -> None:
    """Run the experiments of a paper's table or figure, and test each of its claims."""
    from headwise_lab.jobs.pool import count_workers
    from headwise_lab.papers import run as lists
    from headwise_lab.papers import run as reproducing
    from headwise_lab.papers.data import require_data, with_data
    from headwise_lab.papers.declarations import REPRODUCTIONS, read_file
    from headwise_lab.papers.pages import record_claims
    from headwise_lab.papers.recomputed import extend_seeds, find_record, list_runs, recompute, restore_runs

    REPRODUCTIONS.update({} if tables is None else read_file(tables, taken=REPRODUCTIONS))
    if list_all or identifier is None:
        lists.show_list(out, scale, standard_console())
        return
    require_known("reproduction", identifier, REPRODUCTIONS)
    reproduction = REPRODUCTIONS[identifier]
    require_known("scale", scale, reproduction.scales)
    if kept is not None:
        given: dict[str, object] = {"--part": parts or None, "--record": record, "--data": data, "--tuned": tuned}
        given |= {"--seeds": seeds, "--set": sizes or None, "--folds": folds, "--workers": workers}
        given |= {"--pretrained": pretrained, "--pipeline": pipeline, "--embeddings": embeddings}
        given |= {"--out-of-domain": out_of_domain, "--resume": resume or None, "--dry-run": dry_run or None}
        given |= {"--trust-remote-code": trust_remote_code or None}
        if idle := [name for name, value in given.items() if value is not None]:
            raise typer.BadParameter(f"--from trains nothing; leave out {', '.join(idle)}.")
        with stoppable("stopped.", [out]), hold(out), TemporaryDirectory() as place:
            found = recompute(find_record(kept, identifier, scale), Path(place))
            reproducing.show(found, out, standard_console(), f"headwise reproduce {identifier} --from {kept}")
            print_record({"id": identifier, "scale": scale, "claims": record_claims(found.judged)})
        return
    if resume and record is None:
        raise typer.BadParameter("--resume takes over the runs of a record; name its folder with --record.")
    is_tuned = tuned is not None
    before = find_record(record, identifier, scale, tuned=is_tuned) if resume and record is not None else None
    recorded = list_runs(before)
    whole = with_data(reproduction, scale, data)
    # a part that is not asked for stays in the record
    reproduction = with_data(reproduction.only((*parts, *recorded) if parts else (), scale), scale, data)
    seeds = reproducing.choose_seeds(scale) if seeds is None else seeds
    if seeds < 1:
        raise typer.BadParameter(f"--seeds is {seeds}; expected at least 1.")
    workers = count_workers() if workers is None else workers
    options = ScaleOptions(
        scale, pipeline, embeddings, folds, tuple(sizes or ()), out_of_domain, pretrained, trust_remote_code
    )
    seeds_of = extend_seeds(reproduction, scale, parts or (), seeds, recorded)
    plans = reproducing.make_plans(
        reproduction, scale, seeds=seeds_of, data=data, out=out, workers=workers, options=options, tuned=tuned
    )
    if dry_run:
        for plan in (*plans[0].before, *plans):
            require_data(plan.comparison.task, plan.comparison.data, plan.comparison.scale)
        reproducing.require_analysable(reproduction, plans)
        lists.show_plans(reproduction, plans, standard_console(), recorded)
        return
    # the record is for others, whose folders have other names
    more = ("" if data is None else " --data FOLDER") + ("" if tuned is None else " --tuned TUNING")
    command = reproducing.write_commands(whole, scale, plans, shlex.join(options.words(for_others=True)), more)
    with stoppable(folders=[out] if record is None else [out, record]), hold(out), hold(record or out):
        if before is not None:
            say(f"taken over from the record: {restore_runs(before, plans)} runs")
        failures = reproducing.do_plans(reproduction, plans, standard_console())
        if any(plan.finished for plan in plans):
            found = reproducing.report(reproduction, scale, plans, out, record, standard_console(), command)
            print_record({"id": identifier, "scale": scale, "claims": record_claims(found.judged)})
    end_with(failures)


@printing_record
def probe(
    model: Annotated[
        Path,
        typer.Argument(help="A folder of save_pretrained(), or a finished run of headwise compare."),
    ],
    data: Annotated[Path, typer.Option(help="Folder of probing files (past_present.txt, ...), or one file.")],
    task: Annotated[str, typer.Option(help="all, or file names: past_present,tree_depth.")] = "all",
    layers: Annotated[str, typer.Option(help="all, none, or layers: emb,0,5; emb is the input of layer 0.")] = "all",
    heads: Annotated[
        str, typer.Option(help="all, none, or LAYER.HEAD, joined by plus: 3.5,3.5+4.0; outputs before W_O.")
    ] = "all",
    classifier: Annotated[str, typer.Option(help="regression (logistic) or mlp (one hidden layer).")] = "regression",
    sentences: Annotated[
        int, typer.Option(help="Sentences per task (60 % train, 10 % dev, 30 % test); 0 for all.", min=0)
    ] = 10_000,
    seed: Annotated[int, typer.Option(help="Seed of the mlp.")] = 0,
    pipeline: Annotated[
        Path | None, typer.Option(help="spaCy pipeline of a run with roles (default: the path used in training).")
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    out: Annotated[Path | None, typer.Option(help="Folder for results and figures (default: runs/probe/...).")] = None,
    cache: Annotated[Path, typer.Option(help="Cache of encoded sentences, shared by all probes.")] = Path(
        "runs/probe/cache"
    ),
    workers: Workers = None,
) -> None:
    """Probe the layers and heads of a frozen model for properties of sentences (SentEval)."""
    from headwise.errors import require_integer
    from headwise_lab.data.probing_files import PROBES
    from headwise_lab.frozen.open import open_frozen
    from headwise_lab.jobs.pool import count_workers
    from headwise_lab.probing.fit import Classifier
    from headwise_lab.probing.request import ProbeRequest, find_task_files
    from headwise_lab.probing.run import probe_model

    if workers is not None:
        require_integer("--workers", workers, low=1)
    names = [name.strip() for name in task.split(",")]
    for name in names:
        require_known("probing task", name, ("all", *PROBES))
    request = ProbeRequest(layers, heads, Classifier(classifier, seed=seed), sentences or None)
    words = ["headwise", "probe", str(model), "--data", str(data), "--task", task, "--layers", layers, "--heads", heads]
    words += ["--classifier", classifier, "--sentences", str(sentences), "--seed", str(seed)]
    words += [] if pipeline is None else ["--pipeline", str(pipeline)]
    words += ["--trust-remote-code"] if trust_remote_code else []
    words += [] if out is None else ["--out", str(out)]
    with stoppable(
        "stopped; finished tasks are kept, and of the current one at most its encoded sentences; give the same command "
        "again to resume.",
        [out or RUNS, cache],
    ):
        files = find_task_files(data, names)
        probed = probe_model(
            open_frozen(model, pipeline, trust_remote_code=trust_remote_code),
            files,
            request,
            out,
            cache,
            count_workers() if workers is None else workers,
            standard_console(),
            shlex.join(words),
        )
    print_record({"tasks": [one.record() for one in probed]})


def prepare(
    task: TaskName,
    out: Annotated[Path, typer.Option(help="Folder to write; pass it to compare --data, here or elsewhere.")],
    data: DataFolder = None,
    scale: ScaleName = "demo",
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json to use instead of learning subwords.")
    ] = None,
    pretrained: Pretrained = None,
    text_column: TextColumn = None,
    sizes: Sizes = None,
) -> None:
    """Prepare the data of a task once, in a folder that can be moved to another machine."""
    require_task(task)
    chosen = named_task(task)
    if not chosen.prepares:
        raise typer.BadParameter(f"{task} needs no preparation; give its data to headwise compare {task} --data.")
    if data is None:
        raise typer.BadParameter("prepare needs --data.")
    options = ScaleOptions(
        scale, pretrained=pretrained, sizes=tuple(sizes or ()), columns=Columns(tuple(text_column or ()))
    )
    with stoppable("stopped; nothing was written.", [out]):
        prepared = chosen.prepare(data, choose_scale(task, options), out, tokenizer=tokenizer, progress=True)
    written = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    say(prepared.summary())
    words = shlex.join(["headwise", "compare", task, *options.words(), "--data", str(out)])
    say(f"{out}: {written / 2**20:.1f} MiB, for {words}")


COMMANDS = (tune, data, reproduce, probe, prepare)
