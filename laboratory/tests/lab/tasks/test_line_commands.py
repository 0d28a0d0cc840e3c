"""`headwise translate` and `headwise write` as a person meets them: a process, its streams, and the run it is given."""

from __future__ import annotations

import dataclasses
import io
import json
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cases import Made, cases, find_unrefused, tiers
from headwise.errors import DataError, SettingError
from headwise_lab.data.line_streams import LONGEST_LINE, read_lines
from headwise_lab.data.subwords import END
from headwise_lab.experiment import run_folder
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.frozen.open import open_frozen
from headwise_lab.frozen.vectors import encodings
from headwise_lab.tasks.graph2text import decoding as graph_decoding
from headwise_lab.tasks.graph2text.data import test_graphs as graphs_of_test
from headwise_lab.tasks.graph2text.writer import open_writer, read_requests, write_lines
from headwise_lab.tasks.translation import decoding
from headwise_lab.tasks.translation.decoding import EXTRA, LONGER
from headwise_lab.tasks.translation.translator import open_translator, translate_lines
from headwise_lab.training.train import train_run
from lab.sealing import seal_again
from lab.streamed import answered, started
from lab.tasks.graph2text.graph_sets import write_triples
from lab.tasks.toys import GRAPHS
from lab.tasks.translation.translation_toy import TOY, WORDS

pytest.importorskip("nltk")

TRANSLATION = dataclasses.replace(
    TOY, width=32, epochs=6, learning_rate=1e-2, train_examples=200, dropout=0.0, beams=3, length_penalty=0.7
)
WRITING = dataclasses.replace(GRAPHS, epochs=4, learning_rate=1e-2, dropout=0.0, length_penalty=0.6, no_repeat=3)
PUSHED = "svgd:kinds=self,projections=query+output:kinds=self,kind_weights=1/0.5/0.5"
# By name: the scale and the arm of a run.
RUNS: dict[str, tuple[Any, str]] = {
    "translation": (TRANSLATION, f"{PUSHED}+em:capsules=4,kinds=self,votes=per-head"),
    "drophead": (TRANSLATION, "drophead+trunk:layers=0,kinds=cross"),
    "marian": (dataclasses.replace(TRANSLATION, model="marian"), "simple:layers=0,kinds=decoder,capsules=8"),
    "graph2text": (WRITING, "em:layers=0,capsules=8"),
    "plain": (WRITING, "plain"),
    "blind": (WRITING, "no-graph"),
}
COMMANDS = {"translation": "translate", "graph2text": "write"}


def task_of(name: str) -> str:
    return "graph2text" if RUNS[name][0] is WRITING else "translation"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Finished runs by name, and the data of each task as "TASK data"."""
    place = tmp_path_factory.mktemp("runs")
    (place / "corpus").mkdir()
    draw = random.Random(5)
    for split, size in (("train", 200), ("val", 20), ("test_2016_flickr", 30)):
        source = [draw.choices(list(WORDS), k=draw.randint(2, 12)) for _ in range(size)]
        (place / "corpus" / f"{split}.en").write_text("".join(" ".join(line) + "\n" for line in source))
        target = [" ".join(WORDS[word] for word in line) + "\n" for line in source]
        (place / "corpus" / f"{split}.de").write_text("".join(target))
    data = {"translation": place / "corpus", "graph2text": write_triples(place / "mine.tsv", 100)}

    def train(name: str) -> Path:
        if name.endswith(" data"):
            return data[name.removesuffix(" data")]
        scale, arm = RUNS[name]
        task = task_of(name)
        settings = RunSettings(task, scale, parse_arm(arm), seed=3, data=data[task], cache=place / "cache")
        train_run(settings, place / name)
        return place / name

    return Made(train)


def asked(trained: dict[str, Path], task: str) -> list[str]:
    """The lines of the test set, in their order."""
    if task == "translation":
        return (trained["translation data"] / "test_2016_flickr.en").read_text().splitlines()[: TOY.test_examples]
    lines = trained["graph2text data"].read_text().splitlines()
    return [lines[graph.line - 1] for graph in graphs_of_test(trained["graph2text data"])]


def joined(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def predicted(run: Path) -> list[str]:
    return (run / "predictions.txt").read_text().split("\n")[:-1]


def lines_of(run: Path, given: bytes, window: int = 7, **changes: Any) -> tuple[list[str], list[str]]:
    """Lines of output and warnings, without another process."""
    output, said, lines = io.BytesIO(), [], read_lines(io.BytesIO(given), "text")
    if json.loads((run / "settings.json").read_text())["task"] == "translation":
        translate_lines(open_translator(run, **changes), lines, output, window=window, warn=said.append)
    else:
        write_lines(open_writer(run, **changes), read_requests(lines, "text"), output, window=window, warn=said.append)
    return output.getvalue().decode().split("\n")[:-1], said


@tiers("name", ["translation"], ["graph2text", "drophead", "marian", "plain", "blind"])
def test_a_run_answers_its_test_set_as_it_did_when_it_was_tested(trained, name):
    expected, given = predicted(trained[name]), joined(asked(trained, task_of(name)))
    assert len(set(expected)) > 3
    changes = {} if task_of(name) == "graph2text" else {"batch": 5}
    assert lines_of(trained[name], given, **changes) == (expected, [])
    if name in ("translation", "graph2text"):
        command = COMMANDS[task_of(name)]
        assert answered(command, given, str(trained[name]), "--window", "5") == (0, expected, "")


@pytest.mark.full
@cases("task", COMMANDS)
def test_the_first_lines_come_before_the_input_ends_and_whoever_reads_them_may_go(trained, task):
    lines, expected = asked(trained, task), predicted(trained[task])
    with started(COMMANDS[task], str(trained[task]), "--window", "3") as process:
        for window in (slice(0, 3), slice(3, 6)):
            process.stdin.write(joined(lines[window]))
            process.stdin.flush()
            # a line that does not come ends the process, and the read with it
            late = threading.Timer(200, process.kill)
            late.start()
            found = [process.stdout.readline().decode().rstrip("\n") for _ in lines[window]]
            late.cancel()
            assert found == expected[window]
        assert process.poll() is None
        process.stdout.close()
        process.stdin.write(joined(lines[6:7]) * 20)
        process.stdin.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@tiers("name", ["graph2text"], ["marian"])
def test_empty_and_blank_lines_are_kept_whatever_ends_the_lines(trained, name):
    run = trained[name]
    one, two = asked(trained, task_of(name))[:2]
    first, second = predicted(run)[:2]
    given = f"\ufeff{one}\r\n\r\n \t \n{two}\n\n{one}".encode()
    for window in (1, 2, 5):
        assert lines_of(run, given, window) == ([first, "", "", second, "", first], [])
    assert lines_of(run, b"") == ([], [])
    assert lines_of(run, b"\n\n") == (["", ""], [])


@cases(("task", "line", "said"), [("translation", b"gr\xfcn", "not UTF-8"), ("graph2text", b"a title", "1 field; exp")])
def test_a_refusal_is_one_sentence_and_the_lines_before_it_are_written(trained, task, line, said):
    one = asked(trained, task)[0]
    code, found, error = answered(
        COMMANDS[task], f"{one}\n\n".encode() + line + b"\n" + one.encode(), str(trained[task])
    )
    assert (code, found) == (2, [predicted(trained[task])[0], ""])
    assert error.startswith(f"headwise: standard input, line 3: {said}")
    assert error.count("\n") == 1


@pytest.mark.full
@cases("name", ["translation", "graph2text"])
def test_beams_and_length_penalty_are_those_asked_for(trained, name):
    run, task = trained[name], task_of(name)
    given, opened = joined(asked(trained, task)), open_translator if task == "translation" else open_writer
    scale = RUNS[name][0]
    assert (opened(run).scale.beams, opened(run).scale.length_penalty) == (scale.beams, scale.length_penalty)
    greedy, _ = lines_of(run, given, beams=1, length_penalty=0.3)
    assert answered(COMMANDS[task], given, str(run), "--beams", "1", "--length-penalty", "0.3") == (0, greedy, "")
    assert greedy != predicted(run)
    short, long = (lines_of(run, given, beams=6, length_penalty=penalty)[0] for penalty in (-8.0, 8.0))
    assert sum(map(len, short)) < sum(map(len, long))
    wrong = [{"beams": 0}, {"length_penalty": float("nan")}, *([{"batch": 0}] if task == "translation" else [])]
    assert not find_unrefused((lambda bad=bad: opened(run, **bad), SettingError, next(iter(bad))) for bad in wrong)
    with pytest.raises(SettingError, match="window is 0"):
        lines_of(run, given, window=0)


@cases("task", COMMANDS)
def test_a_folder_that_is_no_finished_run_is_refused_in_one_sentence(trained, tmp_path, task):
    run, opened = trained[task], open_translator if task == "translation" else open_writer

    def refused(folder: Path) -> str:
        with pytest.raises(DataError) as refusal:
            opened(folder)
        return str(refusal.value)

    assert f"does not exist; expected the folder of a finished run of headwise compare {task}" in (
        refused(tmp_path / "none")
    )
    assert "is a file" in refused(run / "settings.json")
    assert "holds no run (it has no settings.json); expected" in refused(tmp_path)
    comparison = tmp_path / "comparison"
    shutil.copytree(run, comparison / "plain" / "seed-0")
    (comparison / "comparison.json").write_text("{}")
    assert f"holds a comparison (it has no settings.json); name one of its runs, such as {comparison}/plain/seed-0" in (
        refused(comparison)
    )
    own = "tokenizer.json" if task == "translation" else "vocabulary.json"
    for name in (run_folder.WEIGHTS, own):
        folder = Path(shutil.copytree(run, tmp_path / name))
        (folder / name).write_bytes((folder / name).read_bytes()[:500])
        assert str(folder / name) in refused(folder)
        (folder / name).unlink()
        assert f"{folder / name} is missing" in refused(folder)
    folder = Path(shutil.copytree(run, tmp_path / "changed"))
    (folder / run_folder.RESULT).unlink()
    assert "is not finished; give the command that began it again" in refused(folder)
    run_folder.write_result(folder, {"task": task})

    def changed(name: str, record: object) -> str:
        before = (folder / name).read_text()
        (folder / name).write_text(json.dumps(record))
        seal_again(folder)
        said = refused(folder)
        (folder / name).write_text(before)
        return said

    whole = json.loads((run / "settings.json").read_text())
    unseeded = {name: value for name, value in whole.items() if name != "seed"}
    baseline = {name: value for name, value in whole.items() if name != "arm"} | {"baseline": "copy"}
    for record, said in (
        ({**whole, "task": "logic"}, f"holds a run of logic; expected one of {task}"),
        ({**whole, "scale": {"name": "x"}}, "does not say the sizes of the model"),
        ({**whole, "arm": {}}, "does not say what its arm is"),
        ({**whole, "arm": {**whole["arm"], "methods": [{"kind": "Other"}]}}, "does not say what its arm is"),
        ({**whole, "arm": {**whole["arm"], "methods": []}}, "does not hold the weights of this run"),
        (unseeded, "settings.json has no seed; was it changed"),
        (baseline, "holds the baseline 'copy', which has no model"),
    ):
        assert said in changed("settings.json", record), said
    if task == "graph2text":
        kept = json.loads((run / "vocabulary.json").read_text())
        words = kept["vocabulary"]
        assert "does not hold the weights" in changed("vocabulary.json", {**kept, "vocabulary": [*words, "more"]})
        for record in ({**kept, "vocabulary": words[1:]}, {**kept, "types": 10_000}, {**kept, "relations": 3}, []):
            assert "does not hold a vocabulary" in changed("vocabulary.json", record)


def test_a_stream_without_ends_of_lines_is_read_in_pieces():
    text = "é" * LONGEST_LINE
    stream = io.BytesIO(f"{text}\r\nnext\n{text[: LONGEST_LINE // 2]}\n".encode())
    lines = list(read_lines(stream, "text"))
    assert [(line.number, line.cut) for line in lines] == [(1, True), (2, False), (3, False)]
    assert lines[0].text == "é" * (LONGEST_LINE // 2)
    assert lines[1].text == "next"
    assert len(lines[2].text) == LONGEST_LINE // 2


@pytest.mark.full
@cases("name", ["translation", "marian"])
def test_the_encoder_of_a_translation_can_be_probed(trained, tmp_path, name):
    frozen, texts = open_frozen(trained[name]), asked(trained, "translation")
    found = encodings(frozen, texts, tmp_path, model="m")
    (batch,) = frozen.read(texts[:1])
    with torch.no_grad():
        top = frozen.model(**batch.inputs).last_hidden_state
    np.testing.assert_allclose(found.layers[-1, 0], top[0].mean(0).cpu(), atol=1e-5)
    assert len(found.layers) == 1 + len(found.heads) == 1 + TOY.encoder_layers
    assert all(array.shape == (len(texts), found.layers.shape[2]) for array in found.heads)


def test_what_routes_heads_in_a_run_routes_them_when_it_translates(trained):
    module = open_translator(trained["translation"]).model.encoder.layers[0].attention.out_proj
    assert type(module.setting.votes).__name__ == "PerHead"
    assert module.setting.capsules == 4


@pytest.mark.full
def test_what_routes_heads_in_one_layer_alone_routes_them_there_when_it_translates(trained):
    modules = open_translator(trained["drophead"]).model.decoder.layers[0]
    assert type(modules.cross_attention.out_proj.setting).__name__ == "Trunk"
    assert not hasattr(modules.attention.out_proj, "setting")


@tiers("name", ["translation"], ["marian"])
def test_a_source_too_long_is_cut_and_named(trained, name, monkeypatch):
    translator = open_translator(trained[name], beams=1)
    assert translator.longest == {"translation": 1023, "marian": 511}[name]
    # the longest that memory allows takes a minute on a model that never ends
    monkeypatch.setattr(decoding, "LONGEST", 40)
    line = "red dog runs two small sees " * 30
    (ids,) = translator.encode([line.strip()])
    assert len(ids) > 45
    assert translator.longest == 39
    found, said = lines_of(trained[name], f"red dog\n{line}\nred dog\n".encode(), beams=1)
    assert said == [
        f"line 2 has {len(ids):,} subwords; its first 39 subwords are translated: give one sentence a line."
    ]
    (short,) = translator.encode(["red dog"])
    assert found == translator.translate([short, ids[:39], short])


@pytest.mark.full
def test_the_positions_of_marian_are_enough_for_its_longest_line(trained):
    translator = open_translator(trained["marian"], beams=1)
    source = translator.encode(["red dog runs two small sees " * 200])[0]
    assert len(source) > 600
    # a model that never ends by itself
    translator.model.final_logits_bias[:, END] = -1e4
    (found,) = translator.translate([source])
    assert len(translator.encode([found])[0]) > 400
    assert found == translator.translate([source[:511]])[0]


def test_a_translation_is_one_line_and_does_not_depend_on_the_lines_beside_it(trained, monkeypatch):
    translator = open_translator(trained["translation"], beams=3)
    ids = translator.encode(["sees dog", "red " * 20, "small"])
    together = translator.translate(ids)
    assert together == [translator.translate([one])[0] for one in ids]
    # the bound is on the tokens: of a model that knows no end it is reached
    long = translator.encode(together)
    assert all(len(line) <= LONGER * (len(one) + 1) + EXTRA for line, one in zip(long, ids, strict=True))
    newline = translator.encode(["a\nb\rc"])[0]
    assert translator.subwords.decode(newline) == "a\nb\rc"
    monkeypatch.setattr(type(translator.model), "generate", lambda _self, **_: torch.tensor([[1, *newline, 2]]))
    assert translator.translate([[5, 6]]) == ["a b c"]


def test_the_text_of_a_graph_is_not_used_and_may_be_left_out_and_its_title_may_be_empty(trained):
    run, lines = trained["graph2text"], asked(trained, "graph2text")
    bare = "".join("\t".join(line.split("\t")[:2]) + "\r\n" for line in lines).encode()
    other = "".join("\t".join([*line.split("\t")[:2], "other words"]) + "\n" for line in lines).encode()
    assert lines_of(run, bare)[0] == lines_of(run, other)[0] == predicted(run)
    title, triples, _ = lines[0].split("\t")
    others = triples.replace("parsing", "translation").replace("<task>", "<method>").split(" ; ")[0]
    one, two = lines_of(run, f"{title}\t{triples}\n{title}\t{others}\n".encode())[0]
    assert one != two, "what is written depends on the graph"
    assert all(lines_of(run, b"\tlda <method>\n")[0])
    (graph,) = read_requests(read_lines(io.BytesIO(f"\ufeff{lines[0]}\n".encode()), "text"), "text")
    assert graph.title[0] == "on"


@pytest.mark.full
@cases(
    ("line", "said"),
    [
        (b"a title", "1 field; expected a title and triples"),
        (b"a title\tlda\ttext\tmore", "4 fields; expected a title and triples"),
        (b"a title\t", "''; expected head | relation | tail"),
        (b"a title\tlda | used", "'lda | used'; expected head"),
        (b"a title\tlda | used | ...... ; | |", "'| |'; expected head"),
        (b"gr\xfcn\tlda", "not UTF-8 (invalid start byte)"),
        (b"a title\t" + b"a | b | c ; " * LONGEST_LINE, f"over {LONGEST_LINE:,} bytes"),
        (b"a title\t" + b" ; ".join([b"lda | for | text"] * 499), "a graph of 1,001 nodes, 2 entities and 499 triples"),
        (b"a title\t" + b"word " * 101, "a title or entity of 101 words; expected at most 100"),
        (b"word " * 101 + b"\tlda", "a title or entity of 101 words; expected at most 100"),
    ],
)
def test_a_graph_that_does_not_fit_is_named(trained, line, said):
    with pytest.raises(DataError) as refusal:
        lines_of(trained["graph2text"], f"{asked(trained, 'graph2text')[0]}\n\n".encode() + line + b"\nmore", window=10)
    assert str(refusal.value).startswith("text, line 3: ")
    assert said in str(refusal.value)
    assert len(str(refusal.value)) < 300


def test_what_the_run_knows_nothing_of_is_told_once(trained):
    line = "new\tlda <method> | USED-FOR | text <plant> ; lda | EATS | text ; em | USED-FOR | alone\n"
    found, said = lines_of(trained["graph2text"], (line * 3).encode(), 2)
    assert len(found) == 3
    assert said == [
        f"line 1: {one} was in no training graph; the run knows nothing of it."
        for one in ("relation 'EATS'", "type <plant>")
    ]
    many = "".join(f"new\tlda | R{number} | text\n" for number in range(50))
    assert len(lines_of(trained["graph2text"], many.encode(), 8)[1]) == 20


def test_a_text_does_not_depend_on_the_graphs_beside_it_however_large(trained, monkeypatch):
    lines = asked(trained, "graph2text")
    large = "much\t" + " ; ".join(f"lda {number} | USED-FOR | parsing" for number in range(40))
    given = joined([*lines[:2], large, lines[2]])
    together = lines_of(trained["graph2text"], given, 10)[0]
    sizes: list[int] = []
    search: Callable[..., Any] = graph_decoding.search

    def counted(model, made, **rest):
        sizes.append(len(made["nodes"]))
        return search(model, made, **rest)

    # 121 pairs each of the small graphs
    monkeypatch.setattr(graph_decoding, "PAIRS", 250)
    monkeypatch.setattr(graph_decoding, "search", counted)
    assert lines_of(trained["graph2text"], given, 10)[0] == together
    assert sorted(sizes) == [1, 1, 2]
