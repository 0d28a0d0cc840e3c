"""The commands and their options; whatever is slow to import is imported inside them."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from typer import Argument, Option

from headwise.atomic import hold
from headwise.cli.commands import RUNS
from headwise.cli.options import UNWRITTEN, TrustRemoteCode, Without, command, list_options, require_known
from headwise.cli.output import asked_output, print_record, printing_record, say, standard_console
from headwise.cli.stopping import stoppable
from headwise_lab.experiment.registry import named_task
from headwise_lab.options import Sized, TaskName, TunedFolder, Workers, choose_scale, end_with, require_task


@dataclass(frozen=True, kw_only=True)
class Tune:
    """What `headwise tune` is given."""

    task: TaskName
    arms: Annotated[str, Argument(metavar="ARMS", help="Arms; settings given in them are fixed.")]
    draws: Annotated[int, Option(help="Number of draws, the same for all arms in a folder.")] = 10
    seeds: Annotated[int, Option(help="Number of runs of each draw; its score is their mean.")] = 1
    seed: Annotated[int, Option(help="Seed of the draws and the first run; compare takes 0, 1, ...")] = 1000
    sized: Annotated[Sized, Without("folds out_of_domain")]
    out: Annotated[Path | None, Option(help="Folder for the draws (default: runs/tune-TASK-SCALE).")] = None
    workers: Workers = None


@printing_record
@command
def tune(given: Tune) -> None:
    """Search the settings of arms at random, score each draw on dev, and print the best of each as an arm."""
    require_task(given.task)
    from headwise_lab.experiment.arm_text import parse_arms
    from headwise_lab.jobs.pool import count_workers
    from headwise_lab.tune import Tuning
    from headwise_lab.tune import tune as run

    options = given.sized.options(given.task)
    chosen = choose_scale(given.task, options)
    if getattr(chosen, "folds", None) is not None:
        chosen = choose_scale(given.task, replace(options, folds=1))
        say(
            f"scale {options.scale} is a cross-validation, and an arm is tuned on one split: judge it there too "
            "(--folds 1), because the dev texts of that split are test texts of some fold."
        )
    folder = given.out or RUNS / f"tune-{given.task}-{chosen.name}"
    workers = count_workers() if given.workers is None else given.workers
    failures, records = [], []
    for arm in parse_arms(given.arms):
        tuning = Tuning(
            given.task, arm.name, given.draws, given.seed, chosen, folder, given.sized.data, workers, given.seeds
        )
        with stoppable(folders=[folder]), hold(folder):
            tuned = run(tuning, standard_console())
        say(f"dev {100 * tuned.dev_score:.1f} with")
        say(tuned.arm.name)
        records.append({"arm": tuned.arm.name, "dev_score": tuned.dev_score, "expected": list(tuned.expected)})
        failures += tuned.failures
    words = ["headwise", "compare", given.task, "--arms", given.arms, "--tuned", str(folder), *options.words()]
    words += [] if given.sized.data is None else ["--data", str(given.sized.data)]
    say(f"next, with the best settings: {shlex.join(words)} --seeds 5")
    print_record(records[0] if len(records) == 1 else records)
    end_with(failures)


@dataclass(frozen=True, kw_only=True)
class Data:
    """What `headwise data` is given."""

    task: TaskName
    sized: Annotated[Sized, Without("lora folds out_of_domain")]


@printing_record
@command
def data(given: Data) -> None:
    """Show the statistics of a task's data: splits, labels, vocabulary, and what was left out; nothing is trained."""
    require_task(given.task)
    chosen, console = choose_scale(given.task, given.sized.options(given.task)), standard_console()
    with stoppable("stopped."), TemporaryDirectory() as cache:
        found = named_task(given.task).load(given.sized.data, chosen, Path(cache), progress=console.is_terminal)
    say(found.summary())
    print_record({"task": given.task, "scale": chosen.name, "summary": found.summary(), "digest": found.fingerprint})


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """What `headwise reproduce` is given."""

    identifier: Annotated[
        str | None, Argument(metavar="[ID]", help="A table or figure of a paper, e.g. diversify/figure-4.")
    ] = None
    list_all: Annotated[bool, Option("--list", help="List the reproductions and their runs (default without ID).")] = (
        False
    )
    dry_run: Annotated[bool, Option("--dry-run", help="Show the runs of ID without doing them.")] = False
    parts: Annotated[
        tuple[str, ...], Option("--part", help="Only this part of ID, as --dry-run names it; repeatable.")
    ] = ()
    tables: Annotated[Path | None, Option(help="TOML file with tables of your own, to list and to run.")] = None
    seeds: Annotated[
        int | None, Option(help="Number of seeds per arm (default: 5, the least for a verdict; 2 at scale demo).")
    ] = None
    scale: Annotated[str, Option(help="Preset: demo (minutes), cpu (hours), gpu (minutes per run), paper.")] = "cpu"
    sized: Annotated[Sized, Without("scale lora text_column label_column")]
    tuned: TunedFolder = None
    out: Annotated[Path, Option(help="Folder for runs, shared by all reproductions, and pages.")] = Path(
        "runs/reproductions"
    )
    record: Annotated[Path | None, Option(help="Folder of the paper's notes; writes its results/ and RESULTS.md.")] = (
        None
    )
    resume: Annotated[
        bool, Option("--resume", help="Take over the runs that the record in --record has; do only the others.")
    ] = False
    kept: Annotated[
        Path | None, Option("--from", help="Folder of a paper's notes: train nothing, use the runs kept there.")
    ] = None
    workers: Workers = None


@printing_record
@command
def reproduce(given: Reproduce) -> None:
    """Run the experiments of a paper's table or figure, and test each of its claims."""
    from headwise_lab.jobs.pool import count_workers
    from headwise_lab.papers import run as reproducing
    from headwise_lab.papers.data import require_data, with_data
    from headwise_lab.papers.declarations import REPRODUCTIONS, read_file
    from headwise_lab.papers.pages import record_claims
    from headwise_lab.papers.recomputed import extend_seeds, find_record, list_runs, recompute, restore_runs

    identifier, scale, out, record, tuned = given.identifier, given.scale, given.out, given.record, given.tuned
    folder, console = given.sized.data, standard_console()
    REPRODUCTIONS.update({} if given.tables is None else read_file(given.tables, taken=REPRODUCTIONS))
    if given.list_all or identifier is None:
        reproducing.show_list(out, scale, console)
        return
    require_known("reproduction", identifier, REPRODUCTIONS)
    reproduction = REPRODUCTIONS[identifier]
    require_known("scale", scale, reproduction.scales)
    if given.kept is not None:
        used = ("identifier", "list", "tables", "scale", "out", "from")
        usual = list_options(Reproduce(sized=Sized()))
        if idle := [f"--{k}" for k, value in list_options(given).items() if k not in used and value != usual[k]]:
            raise typer.BadParameter(f"--from trains nothing; leave out {', '.join(idle)}.")
        with stoppable("stopped.", [out]), hold(out), TemporaryDirectory() as place:
            found = recompute(find_record(given.kept, identifier, scale), Path(place))
            reproducing.show(found, out, console, f"headwise reproduce {identifier} --from {given.kept}")
            print_record({"id": identifier, "scale": scale, "claims": record_claims(found.judged)})
        return
    if given.resume and record is None:
        raise typer.BadParameter("--resume takes over the runs of a record; name its folder with --record.")
    before = find_record(record, identifier, scale, tuned=tuned is not None) if given.resume and record else None
    recorded = list_runs(before)
    whole = with_data(reproduction, scale, folder)
    # a part that is not asked for stays in the record
    reproduction = with_data(reproduction.only((*given.parts, *recorded) if given.parts else (), scale), scale, folder)
    seeds = reproducing.choose_seeds(scale) if given.seeds is None else given.seeds
    if seeds < 1:
        raise typer.BadParameter(f"--seeds is {seeds}; expected at least 1.")
    options = replace(given.sized, scale=scale).options(reproduction.task)
    plans = reproducing.make_plans(
        reproduction,
        scale,
        seeds=extend_seeds(reproduction, scale, given.parts, seeds, recorded),
        data=folder,
        out=out,
        workers=count_workers() if given.workers is None else given.workers,
        options=options,
        tuned=tuned,
    )
    if given.dry_run:
        for plan in (*plans[0].before, *plans):
            require_data(plan.comparison.task, plan.comparison.data, plan.comparison.scale)
        reproducing.require_analysable(reproduction, plans)
        reproducing.show_plans(reproduction, plans, console, recorded)
        return
    # the record is for others, whose folders have other names
    more = ("" if folder is None else " --data FOLDER") + ("" if tuned is None else " --tuned TUNING")
    words = reproducing.write_commands(whole, scale, plans, shlex.join(options.words(for_others=True)), more)
    with stoppable(folders=[out] if record is None else [out, record]), hold(out), hold(record or out):
        if before is not None:
            say(f"taken over from the record: {restore_runs(before, plans)} runs")
        failures = reproducing.do_plans(reproduction, plans, console)
        if any(plan.finished for plan in plans):
            found = reproducing.report(reproduction, scale, plans, out, record, console, words)
            print_record({"id": identifier, "scale": scale, "claims": record_claims(found.judged)})
    end_with(failures)


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What `headwise probe` is given."""

    model: Annotated[Path, Argument(help="A folder of save_pretrained(), or a finished run of headwise compare.")]
    data: Annotated[Path, Option(help="Folder of probing files (past_present.txt, ...), or one file.")]
    task: Annotated[str, Option(help="all, or file names: past_present,tree_depth.")] = "all"
    layers: Annotated[str, Option(help="all, none, or layers: emb,0,5; emb is the input of layer 0.")] = "all"
    heads: Annotated[str, Option(help="all, none, or LAYER.HEAD, joined by plus: 3.5,3.5+4.0; outputs before W_O.")] = (
        "all"
    )
    classifier: Annotated[str, Option(help="regression (logistic) or mlp (one hidden layer).")] = "regression"
    sentences: Annotated[
        int, Option(help="Sentences per task (60 % train, 10 % dev, 30 % test); 0 for all.", min=0)
    ] = 10_000
    seed: Annotated[int, Option(help="Seed of the mlp.")] = 0
    pipeline: Annotated[
        Path | None, Option(help="spaCy pipeline of a run with roles (default: the path used in training).")
    ] = None
    trust_remote_code: TrustRemoteCode = False
    out: Annotated[Path | None, Option(help="Folder for results and figures (default: runs/probe/...).")] = None
    cache: Annotated[Path, Option(help="Cache of encoded sentences, shared by all probes."), UNWRITTEN] = Path(
        "runs/probe/cache"
    )
    workers: Annotated[Workers, UNWRITTEN] = None


@printing_record
@command
def probe(given: Probe) -> None:
    """Probe the layers and heads of a frozen model for properties of sentences (SentEval)."""
    from headwise.errors import require_integer
    from headwise_lab.data.probing_files import PROBES
    from headwise_lab.frozen.open import open_frozen
    from headwise_lab.jobs.pool import count_workers
    from headwise_lab.probing.fit import Classifier
    from headwise_lab.probing.request import ProbeRequest, find_task_files
    from headwise_lab.probing.run import probe_model

    if given.workers is not None:
        require_integer("--workers", given.workers, low=1)
    names = [name.strip() for name in given.task.split(",")]
    for name in names:
        require_known("probing task", name, ("all", *PROBES))
    classifier = Classifier(given.classifier, seed=given.seed)
    request = ProbeRequest(given.layers, given.heads, classifier, given.sentences or None)
    with stoppable(
        "stopped; finished tasks are kept, and of the current one at most its encoded sentences; give the same command "
        "again to resume.",
        [given.out or RUNS, given.cache],
    ):
        files = find_task_files(given.data, names)
        probed = probe_model(
            open_frozen(given.model, given.pipeline, trust_remote_code=given.trust_remote_code),
            files,
            request,
            given.out,
            given.cache,
            count_workers() if given.workers is None else given.workers,
            standard_console(),
            asked_output().command,
        )
    print_record({"tasks": [one.record() for one in probed]})


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """What `headwise prepare` is given."""

    task: TaskName
    out: Annotated[Path, Option(help="Folder to write; pass it to compare --data, here or elsewhere.")]
    sized: Annotated[Sized, Without("pipeline embeddings lora trust_remote_code out_of_domain folds label_column")]
    tokenizer: Annotated[Path | None, Option(help="A tokenizer.json to use instead of learning subwords.")] = None


@command
def prepare(given: Prepare) -> None:
    """Prepare the data of a task once, in a folder that can be moved to another machine."""
    task, out, folder = given.task, given.out, given.sized.data
    require_task(task)
    chosen = named_task(task)
    if not chosen.prepares:
        raise typer.BadParameter(f"{task} needs no preparation; give its data to headwise compare {task} --data.")
    if folder is None:
        raise typer.BadParameter("prepare needs --data.")
    options = given.sized.options(task)
    with stoppable("stopped; nothing was written.", [out]):
        prepared = chosen.prepare(folder, choose_scale(task, options), out, tokenizer=given.tokenizer, progress=True)
    written = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    say(prepared.summary())
    words = shlex.join(["headwise", "compare", task, *options.words(), "--data", str(out)])
    say(f"{out}: {written / 2**20:.1f} MiB, for {words}")


COMMANDS = (tune, data, reproduce, probe, prepare)
