"""`headwise write` as a person meets it: graphs of their own through a finished run of the graph-to-text task."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import threading
from pathlib import Path

import pytest

from cases import Made, cases, tiers
from headwise.errors import DataError, SettingError
from headwise_lab.data.line_streams import LONGEST_LINE, read_lines
from headwise_lab.experiment import run_folder
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.tasks.graph2text import decoding
from headwise_lab.tasks.graph2text.data import test_graphs as graphs_of_test
from headwise_lab.tasks.graph2text.writer import open_writer, read_requests, write_lines
from headwise_lab.training.train import train_run
from lab.sealing import seal_again
from lab.streamed import answered, started
from lab.tasks.graph2text.graph_sets import write_triples
from lab.tasks.graph2text.test_graph2text_task import TOY

pytest.importorskip("nltk")

SCALE = dataclasses.replace(TOY, epochs=4, learning_rate=1e-2, dropout=0.0, length_penalty=0.6, no_repeat=3)
ARMS = {"plain": "plain", "routed": "em:layers=0,capsules=8", "blind": "no-graph"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Finished runs by name, and "mine": the file they learned from."""
    place = tmp_path_factory.mktemp("runs")
    mine = write_triples(place / "mine.tsv", 100)

    def train(name: str) -> Path:
        train_run(RunSettings("graph2text", SCALE, parse_arm(ARMS[name]), seed=2, data=mine, cache=None), place / name)
        return place / name

    found = Made(train)
    found["mine"] = mine
    return found


def asked(trained: dict[str, Path]) -> list[str]:
    """The lines of the test graphs, in their order."""
    lines = trained["mine"].read_text().splitlines()
    return [lines[graph.line - 1] for graph in graphs_of_test(trained["mine"])]


def predicted(run: Path) -> list[str]:
    return (run / "predictions.txt").read_text().splitlines()


def lines_of(run: Path, given: bytes, window: int = 4, **changes) -> tuple[list[str], list[str]]:
    """Lines of output and warnings, without another process."""
    output, said = io.BytesIO(), []
    graphs = read_requests(read_lines(io.BytesIO(given), "text"), "text")
    write_lines(open_writer(run, **changes), graphs, output, window=window, warn=said.append)
    return output.getvalue().decode().split("\n")[:-1], said


@tiers("name", ["routed"], ["plain", "blind"])
def test_a_run_writes_about_its_test_graphs_what_it_wrote_when_it_was_tested(trained, name):
    expected = predicted(trained[name])
    assert len(set(expected)) > 3
    given = "".join(f"{line}\n" for line in asked(trained)).encode()
    assert lines_of(trained[name], given) == (expected, [])
    if name == "routed":
        assert answered("write", given, str(trained[name]), "--window", "5") == (0, expected, "")


def test_the_text_of_a_line_is_not_used_and_may_be_left_out(trained):
    lines = asked(trained)
    bare = "".join("\t".join(line.split("\t")[:2]) + "\r\n" for line in lines).encode()
    other = "".join("\t".join([*line.split("\t")[:2], "other words"]) + "\n" for line in lines).encode()
    assert lines_of(trained["plain"], bare)[0] == lines_of(trained["plain"], other)[0] == predicted(trained["plain"])


def test_what_is_written_depends_on_the_graph(trained):
    title, triples, _ = asked(trained)[0].split("\t")
    others = triples.replace("parsing", "translation").replace("<task>", "<method>").split(" ; ")[0]
    given = f"{title}\t{triples}\n{title}\t{others}\n".encode()
    one, two = lines_of(trained["plain"], given)[0]
    assert one != two


@pytest.mark.full
def test_the_first_texts_come_before_the_input_ends_and_whoever_reads_them_may_go(trained):
    lines, expected = asked(trained), predicted(trained["plain"])
    with started("write", str(trained["plain"]), "--window", "3") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        for window in (slice(0, 3), slice(3, 6)):
            process.stdin.write("".join(f"{line}\n" for line in lines[window]).encode())
            process.stdin.flush()
            # a line that does not come ends the process, and the read with it
            late = threading.Timer(200, process.kill)
            late.start()
            found = [process.stdout.readline().decode().rstrip("\n") for _ in lines[window]]
            late.cancel()
            assert found == expected[window]
        assert process.poll() is None
        process.stdout.close()
        process.stdin.write(f"{lines[6]}\n".encode() * 20)
        process.stdin.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_blank_lines_are_kept_and_a_title_may_be_empty(trained):
    one, two = asked(trained)[:2]
    expected = predicted(trained["plain"])
    given = f"\ufeff{one}\r\n\r\n \t \n{two}\n\n{one}".encode()
    for window in (1, 2, 5):
        found, said = lines_of(trained["plain"], given, window)
        assert found == [expected[0], "", "", expected[1], "", expected[0]]
        assert said == []
    (graph,) = read_requests(read_lines(io.BytesIO(f"\ufeff{one}\n".encode()), "text"), "text")
    assert graph is not None
    assert graph.title[0] == "on"
    untitled, _ = lines_of(trained["plain"], b"\tlda <method>\n")
    assert len(untitled) == 1
    assert untitled[0]
    assert lines_of(trained["plain"], b"") == ([], [])


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
def test_a_line_that_does_not_fit_is_named_after_those_before_it(trained, line, said):
    one = asked(trained)[0]
    output = io.BytesIO()
    graphs = read_requests(read_lines(io.BytesIO(f"{one}\n\n".encode() + line + b"\nmore"), "text"), "text")
    with pytest.raises(DataError) as refusal:
        write_lines(open_writer(trained["plain"]), graphs, output, window=10)
    assert str(refusal.value).startswith("text, line 3: ")
    assert said in str(refusal.value)
    assert len(str(refusal.value)) < 300
    assert output.getvalue().decode() == predicted(trained["plain"])[0] + "\n\n"


def test_a_refusal_is_one_sentence_and_the_lines_before_it_are_written(trained):
    one = asked(trained)[0]
    code, found, said = answered("write", f"{one}\na title\n".encode(), str(trained["plain"]))
    assert (code, found) == (2, predicted(trained["plain"])[:1])
    assert said.startswith("headwise: standard input, line 2: 1 field; expected a title and triples (head |")
    assert said.count("\n") == 1


def test_what_the_run_knows_nothing_of_is_told_once(trained):
    line = "new\tlda <method> | USED-FOR | text <plant> ; lda | EATS | text ; em | USED-FOR | alone\n"
    found, said = lines_of(trained["plain"], (line * 3).encode(), 2)
    assert len(found) == 3
    assert said == [
        f"line 1: {one} was in no training graph; the run knows nothing of it."
        for one in ("relation 'EATS'", "type <plant>")
    ]
    many = "".join(f"new\tlda | R{number} | text\n" for number in range(50))
    assert len(lines_of(trained["plain"], many.encode(), 8)[1]) == 20


def test_a_text_does_not_depend_on_the_graphs_beside_it_however_large(trained, monkeypatch):
    large = "much\t" + " ; ".join(f"lda {number} | USED-FOR | parsing" for number in range(40))
    given = "".join(f"{line}\n" for line in [*asked(trained)[:2], large, asked(trained)[2]]).encode()
    together = lines_of(trained["plain"], given, 10)[0]
    sizes: list[int] = []
    searched = decoding.search

    def counted(model, made, **rest):
        sizes.append(len(made["nodes"]))
        return searched(model, made, **rest)

    # 121 pairs each of the small graphs
    monkeypatch.setattr(decoding, "PAIRS", 250)
    monkeypatch.setattr(decoding, "search", counted)
    assert lines_of(trained["plain"], given, 10)[0] == together
    assert sorted(sizes) == [1, 1, 2]


def test_beams_and_length_penalty_are_those_asked_for(trained):
    run = trained["plain"]
    given = "".join(f"{line}\n" for line in asked(trained)).encode()
    assert (open_writer(run).scale.beams, open_writer(run).scale.length_penalty) == (2, 0.6)
    greedy, _ = lines_of(run, given, beams=1)
    assert answered("write", given, str(run), "--beams", "1") == (0, greedy, "")
    assert greedy != predicted(run)
    short, long = (lines_of(run, given, beams=6, length_penalty=p)[0] for p in (-8.0, 8.0))
    assert sum(map(len, short)) < sum(map(len, long))
    for bad in ({"beams": 0}, {"length_penalty": float("nan")}):
        with pytest.raises(SettingError):
            open_writer(run, **bad)
    with pytest.raises(SettingError, match="window is 0"):
        lines_of(run, given, window=0)


def test_a_folder_that_is_no_finished_run_is_refused_in_one_sentence(trained, tmp_path):
    run = trained["routed"]

    def refused(folder: Path) -> str:
        with pytest.raises(DataError) as refusal:
            open_writer(folder)
        return str(refusal.value)

    assert "does not exist; expected the folder of a finished run of headwise compare graph2text" in (
        refused(tmp_path / "none")
    )
    for name in (run_folder.WEIGHTS, "vocabulary.json"):
        folder = Path(shutil.copytree(run, tmp_path / name))
        (folder / name).write_bytes((folder / name).read_bytes()[:500])
        assert str(folder / name) in refused(folder)
        (folder / name).unlink()
        assert f"{folder / name} is missing" in refused(folder)
    folder = Path(shutil.copytree(run, tmp_path / "changed"))
    run_folder.write_result(folder, {"task": "graph2text"})
    vocabulary = json.loads((run / "vocabulary.json").read_text())
    for changes, expected in (
        ({"vocabulary": vocabulary["vocabulary"][1:]}, "does not hold a vocabulary"),
        ({"types": 10_000}, "does not hold a vocabulary"),
        ({"relations": 3}, "does not hold a vocabulary"),
        ({"vocabulary": [*vocabulary["vocabulary"], "more"]}, "does not hold the weights of this run"),
    ):
        (folder / "vocabulary.json").write_text(json.dumps({**vocabulary, **changes}))
        seal_again(folder)
        assert expected in refused(folder)
    (folder / "vocabulary.json").write_text("[]")
    seal_again(folder)
    assert "does not hold a vocabulary" in refused(folder)
    (folder / "vocabulary.json").write_text(json.dumps(vocabulary))
    whole = json.loads((run / "settings.json").read_text())
    for changes, expected in (
        ({"task": "translation"}, "holds a run of translation; expected one of graph2text"),
        ({"scale": {"name": "x"}}, "does not say the sizes of the model"),
        ({"arm": {**whole["arm"], "methods": []}}, "does not hold the weights of this run"),
    ):
        (folder / "settings.json").write_text(json.dumps({**whole, **changes}))
        seal_again(folder)
        assert expected in refused(folder)
