"""The graph-to-text task at toy size: its data, mentions and neighbors, arms, scores and refusals."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cases import cases
from fuzz.mutate import read_in_time
from headwise.errors import DataError, NotFired, SettingError
from headwise_lab.compare import Comparison, compare
from headwise_lab.experiment.arm_text import parse_arm, parse_arms
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.tasks.graph2text.data import END, START, UNKNOWN, EncodedGraph, collate, load_graphs
from headwise_lab.tasks.graph2text.files import Graph, find_mentions, parse_triples, read_graphs, read_triples
from headwise_lab.tasks.graph2text.scales import GRAPH_SCALES
from headwise_lab.tasks.graph2text.scores import coverage, repeated_clauses, scores
from headwise_lab.tasks.graph2text.task import Graph2TextTask, fill_in, find_nearest_texts
from headwise_lab.training.attach import attach_arm
from headwise_lab.training.optimizer import build_optimizer
from headwise_lab.training.train import train_run
from lab.published import DATA, needs
from lab.tasks.graph2text.graph_sets import agenda_line, write_agenda, write_triples
from lab.tasks.toys import GRAPHS as TOY

pytest.importorskip("nltk")
TASK = Graph2TextTask()


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_triples(tmp_path_factory.mktemp("data") / "mine.tsv", 60)


@cases("arm", ["differential", "paired", "wider"])
def test_arms_that_rebuild_the_blocks_read_graphs_beside_others_as_alone(arm, mine):
    data = TASK.load(mine, TOY, None)
    model, _ = attach_arm(TASK, parse_arm(arm), data, TOY, seed=1)
    examples = [data.train[number] for number in range(4)]
    with torch.no_grad():
        together = model.eval()(**collate(examples))["losses"]
        alone = torch.cat([model(**collate([one]))["losses"] for one in examples])
    torch.testing.assert_close(together, alone)


def test_wider_blocks_have_the_parameters_of_gates(mine):
    data = TASK.load(mine, TOY, None)
    plain, wider = (attach_arm(TASK, parse_arm(arm), data, TOY, seed=1)[0].encoder for arm in ("plain", "wider"))
    more = sum(one.numel() for one in wider.parameters()) - sum(one.numel() for one in plain.parameters())
    # eight units, each of two rows of 16, a bias and a slope
    assert more == len(plain.blocks) * 8 * (2 * 16 + 2) == len(plain.blocks) * (16 + 1) * 16


def test_the_regularization_is_the_gradient_of_a_mean_cosine_in_the_six_blocks_and_released_has_none(mine):
    data = TASK.load(mine, TOY, None)
    batch = collate([data.train[number] for number in range(4)])
    scale = dataclasses.replace(TOY, dropout=0.0)

    def gradients(arm: str | None) -> dict[str, torch.Tensor]:
        model, methods = attach_arm(TASK, parse_arm(arm or "plain"), data, scale, seed=1)
        methods.repel(torch.optim.SGD(model.parameters(), lr=0.1))
        loss = model(**batch)["loss"]
        if arm is None:
            for block in model.encoder.blocks:
                for matrix in block.attention.in_proj_weight.chunk(3):
                    heads = torch.nn.functional.normalize(matrix.view(scale.heads, -1), dim=1)
                    # each head's mean cosine, all heads together: (1/2M) sum_ij cos has (1/M) sum_j grad_i cos
                    loss = loss + 0.5 * (heads @ heads.T).sum() / (2 * scale.heads)
        loss.backward()
        methods.apply_repulsion()
        return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}

    plain, rule, penalty, released = (
        gradients(arm)
        for arm in ("plain", "cosine-penalty:alpha=0.5,step_size=1", None, "cosine-penalty:alpha=0,step_size=1")
    )
    assert all(torch.allclose(rule[name], penalty[name], atol=1e-6) for name in plain)
    changed = {name for name in plain if not torch.allclose(rule[name], plain[name], atol=1e-7)}
    assert changed == {f"encoder.blocks.{block}.attention.in_proj_weight" for block in range(scale.layers)}
    assert all(torch.equal(released[name], plain[name]) for name in plain)


@pytest.mark.full
@pytest.mark.usefixtures("inline")
def test_the_released_regularization_is_plain_and_a_table_refuses_it(mine, tmp_path):
    arms = tuple(parse_arms("plain,cosine-penalty:alpha=0,step_size=1"))
    with pytest.raises(NotFired, match="its method did not act"):
        compare(Comparison("graph2text", arms, (0,), TOY, tmp_path, mine), Console(record=True))


def test_the_nearest_text_is_filled_in_by_type_and_order():
    source = Graph(
        ("parsing",), (("lda",), ("text",), ("em",)), ("method", "data", "method"), (), (2, "on", 1, "or", 0, 2), 1
    )
    other = Graph(("speech",), (("hmms",),), ("method",), (), ("speech",), 2)
    asked = Graph(("parsing",), (("a",), ("b",), ("c",)), ("method", "method", "task"), (), (), 3)
    assert find_nearest_texts([other, source], [asked]) == ["a on a or b a"]
    assert fill_in(source, dataclasses.replace(asked, types=("data", "data", "data"))) == "a on a or b a"


def test_scores_at_both_ends_and_between():
    reference = "we apply beam search to parsing . it works well here ."
    same = scores([reference], [reference], [["beam search", "lda"]])
    assert same["BLEU-4"] == pytest.approx(100)
    assert same["ROUGE-L"] == pytest.approx(100)
    assert (same["coverage"], same["repeated"]) == (50, 0)
    stemmed = scores(["we applies beam searches"], [reference], [["lda"]])
    assert stemmed["METEOR"] > scores(["we xx beam yy"], [reference], [["lda"]])["METEOR"]
    assert stemmed["ROUGE-1"] == pytest.approx(100 * 2 * 2 / (4 + 12))
    assert stemmed["ROUGE-1 recall"] == pytest.approx(100 * 2 / 12)
    assert coverage("a lda b", ["ld", "lda"]) == 0.5
    assert repeated_clauses("it is so , it is") == 0
    assert repeated_clauses("it is so here , it is so here ; it is so here") == pytest.approx(2 / 3)


def test_losses_are_those_of_the_model_and_bins_are_triples(mine):
    data = TASK.load(mine, TOY, None)
    model = TASK.model(data, TOY).eval()
    with torch.no_grad():
        losses = TASK.losses(model, data)
        batch = collate([data.test[number] for number in range(len(data.test))])
        assert losses[:, 0].sum() / losses[:, 1].sum() == pytest.approx(float(model(**batch)["loss"]), rel=1e-5)
        assert TASK.greedy(model, data).shape == (6, 10)
    assert TASK.difficulties(data).tolist() == [2] * 6


def test_the_papers_optimizer_is_sgd_with_momentum_and_the_record_of_old_runs_is_as_it_was():
    recipe = GRAPH_SCALES["paper"].recipe
    made = build_optimizer(torch.nn.Linear(2, 2), 0.1, recipe)
    assert isinstance(made, torch.optim.SGD)
    assert made.defaults["momentum"] == 0.9
    settings = RunSettings("graph2text", GRAPH_SCALES["paper"], parse_arm("plain"), seed=0)
    assert "optimizer" not in settings.record()["recipe"]
    assert settings.record()["scale"]["optimizer"] == "sgd"


def test_missing_data_and_sizes_that_do_not_fit_are_refused():
    with pytest.raises(SettingError, match="even multiple"):
        dataclasses.replace(TOY, width=18)
    with pytest.raises(SettingError, match="tokens is 16; expected more than longest"):
        dataclasses.replace(TOY, tokens=16)


@pytest.mark.full
@needs("agenda")
def test_a_model_learns_from_agenda(tmp_path):
    sizes = {"train_examples": 60, "dev_examples": 2, "test_examples": 8, "epochs": 2, "warmup_steps": 4}
    scale = dataclasses.replace(GRAPH_SCALES["demo"], name="toy", longest=40, tokens=512, width=32, **sizes)
    settings = RunSettings("graph2text", scale, parse_arm("plain"), seed=1, data=DATA / "agenda")
    train_run(settings, tmp_path)
    epochs = [json.loads(line) for line in (tmp_path / "epochs.jsonl").read_text().splitlines()]
    assert epochs[1]["train_loss"] < epochs[0]["train_loss"] - 0.3
    assert np.load(tmp_path / "predictions.npz")["statistics"].shape == (8, 10)


def test_agenda_without_its_training_file_trains_on_validation_and_says_so(tmp_path):
    data = load_graphs(write_agenda(tmp_path / "agenda", "val", "test"), TOY)
    assert [len(split) for split in (data.train, data.dev, data.test)] == [18, 2, 20]
    assert "without its training file" in data.summary()
    graph = data.test.graphs[0]
    assert graph.entities == (("beam", "search"), ("parsing",), ("lda",))
    assert graph.triples == ((0, "COMPARE", 1), (2, "USED-FOR", 1))
    assert graph.reference == "we use beam search for parsing , not lda , in run 100 ."


def test_agenda_with_its_training_file_has_its_own_splits_but_for_graphs_of_a_later_one(tmp_path):
    folder = write_agenda(tmp_path / "agenda", "train", "val", "test")
    with (folder / "preprocessed.train.tsv").open("a", encoding="utf-8") as stream:
        stream.write(agenda_line(200) + "\n")
    data = load_graphs(folder, TOY)
    assert [len(split) for split in (data.train, data.dev, data.test)] == [20, 20, 20]
    assert data.dropped == 1


def test_a_file_of_ones_own_has_its_mentions_found(tmp_path):
    path = tmp_path / "mine.tsv"
    path.write_text(
        "Fast Parsing\tbeam search <method> | used for | parsing <task> ; search\tBeam search, or search: for parsing.",
        encoding="utf-8",
    )
    (graph,) = read_triples(path)
    path.write_text("\ufeff" + path.read_text(encoding="utf-8"), encoding="utf-8")
    assert read_triples(path) == [graph]
    assert graph.title == ("fast", "parsing")
    assert graph.entities == (("beam", "search"), ("parsing",), ("search",))
    assert graph.types == ("method", "task", "entity")
    assert graph.triples == ((0, "used for", 1),)
    assert graph.text == (0, ",", "or", 2, ":", "for", 1, ".")


def test_a_file_of_ones_own_is_cut_into_tenths(tmp_path):
    data = load_graphs(write_triples(tmp_path / "mine.tsv", 40), TOY)
    assert [len(split) for split in (data.train, data.dev, data.test)] == [32, 4, 4]
    assert data.coder.vocabulary[:7] == ("<pad>", "<unk>", "<s>", "</s>", "<method>", "<task>", ",")


@cases(
    ("line", "said"),
    [
        ("a title\tone | two | three", "line 2: 2 fields; expected a title"),
        ("a title\tone | two\ta text", "line 2: 'one | two'; expected head | relation | tail"),
        ("a title\tone | | three\ta text", r"line 2: 'one | | three'; expected head"),
        ("a title\tone | r | <task>\ta text", None),
        ("a title\t\ta text", "line 2: ''; expected head"),
        ("a title\tone | two | three\t", "line 2: the text is empty"),
        ("a title\tone ; \ta text", "line 2: ''; expected head"),
    ],
)
def test_a_line_of_ones_own_that_does_not_fit_is_named(line, said, tmp_path):
    path = tmp_path / "mine.tsv"
    path.write_text(f"good\tone | two | three\ta text\n{line}\n", encoding="utf-8")
    if said is None:
        assert read_triples(path)[1].entities[1] == ("<", "task", ">")
        return
    with pytest.raises(DataError) as caught:
        read_triples(path)
    assert str(caught.value).startswith(f"{path}, {said}")


@cases(
    ("changed", "said"),
    [
        ({"types": "<method> <task>"}, "3 entities and 2 types"),
        ({"triples": "0 1"}, "triple '0 1'; expected three numbers"),
        ({"triples": "0 x 1"}, "triple '0 x 1'; expected three numbers"),
        ({"triples": "0 2 1"}, "expected entities below 3 and a relation below 2"),
        ({"triples": "0 1 3"}, "expected entities below 3"),
        ({"text": "we use <method_1> ."}, "mentions <method_1>; expected the number and type"),
        ({"text": "we use <method_3> ."}, "mentions <method_3>"),
        ({"text": f"we use <method_{'1' * 5000}> ."}, f"mentions <method_{'1' * 52}; expected the number"),
        ({"triples": f"0 {'1' * 5000} 1"}, "expected three numbers"),
        ({"triples": "0 -1 1"}, "triple '0 -1 1'; expected three numbers"),
        ({"text": " "}, "the text is empty"),
        ({"entities": "beam search ;  ; lda"}, "an entity is empty"),
    ],
)
def test_a_line_of_agenda_that_does_not_fit_is_named(changed, said, tmp_path):
    folder = write_agenda(tmp_path / "agenda", "val", "test")
    path = folder / "preprocessed.val.tsv"
    path.write_text(agenda_line(1) + "\n" + agenda_line(2, **changed) + "\n", encoding="utf-8")
    with pytest.raises(DataError) as caught:
        read_graphs(folder)
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert said in str(caught.value)


def test_places_without_a_set_are_refused(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read_graphs(tmp_path / "nowhere")
    with pytest.raises(DataError, match="neither AGENDA"):
        read_graphs(tmp_path)
    with pytest.raises(DataError, match="lacks"):
        read_graphs(write_agenda(tmp_path / "agenda", "val"))
    (tmp_path / "empty.tsv").write_text("\n", encoding="utf-8")
    with pytest.raises(DataError, match="has no lines"):
        read_graphs(tmp_path / "empty.tsv")


def test_mentions_are_ids_behind_the_vocabulary_and_are_read_as_types(tmp_path):
    data = load_graphs(write_agenda(tmp_path / "agenda", "val", "test"), dataclasses.replace(TOY, longest=6))
    coder = data.coder
    size, one = len(coder.vocabulary), data.dev[0]
    assert [word - size for word in one["text"] if word >= size] == [0, 1, 2]
    assert one["text"][-1] == END
    # the number of the run, next to the last, is in few texts and may have no id
    assert coder.decode(one["text"])[:-2] == list(data.dev.graphs[0].text[:-2])
    batch = collate([one])
    assert batch["inputs"][0, 0] == START
    assert coder.vocabulary[batch["inputs"][0, 3]] == "<method>"
    # a training text that is cut has no end
    assert len(data.train[0]["text"]) == 7
    assert END not in data.train[0]["text"]
    strange = dataclasses.replace(data.dev.graphs[0], types=("x", "task", "method"), triples=((0, "NEW", 1),))
    assert coder.encode(strange)["types"][0] == UNKNOWN
    assert coder.encode(strange)["triples"] == [(0, 2, 1)]


def test_neighbors_are_those_of_the_paper():
    large = EncodedGraph(title=[5], entities=[[6], [7], [8]], types=[4, 4, 4], triples=[(0, 4, 2)], text=[3], words=9)
    small = EncodedGraph(title=[5, 6], entities=[[6, 6]], types=[4], triples=[], text=[9, 3], words=9)
    batch = collate([large, small])
    assert batch["nodes"].tolist() == [[1, -1, -2, -3, 4, 5], [1, -4, 0, 0, 0, 0]]
    root, a, b, c, forward, inverse = range(6)
    edges = {(root, n) for n in (a, b, c)} | {(n, root) for n in (a, b, c)} | {(n, n) for n in range(6)}
    edges |= {(forward, a), (c, forward), (inverse, c), (a, inverse)}
    assert {tuple(edge) for edge in batch["neighbors"][0].nonzero().tolist()} == edges
    assert batch["neighbors"][1].nonzero().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert batch["labels"].tolist() == [[3, -100], [9, 3]]


@needs("agenda")
def test_the_published_files_are_read_whole():
    data = load_graphs(DATA / "agenda", dataclasses.replace(GRAPH_SCALES["cpu"], dev_examples=None))
    assert [len(split) for split in (data.train, data.dev, data.test)] == [900, 100, 1000]
    assert len(data.coder.relations) == 7
    assert sum(len(graph.triples) for graph in data.test.graphs) > 4000


WORDS = st.lists(st.sampled_from("abc"), min_size=1, max_size=5).map(tuple)


def by_comparison(words: Sequence[str], entities: Sequence[tuple[str, ...]]) -> Iterator[str | int]:
    longest_first = sorted(range(len(entities)), key=lambda number: -len(entities[number]))
    place = 0
    while place < len(words):
        for number in longest_first:
            if tuple(words[place : place + len(entities[number])]) == entities[number]:
                yield number
                place += len(entities[number])
                break
        else:
            yield words[place]
            place += 1


@given(st.lists(st.sampled_from("abcd"), max_size=30), st.lists(WORDS, max_size=6, unique=True))
def test_mentions_are_those_of_comparing_every_entity_at_every_word(words: list[str], entities: list[tuple[str, ...]]):
    assert list(find_mentions(words, entities)) == list(by_comparison(words, entities))


ENTITIES = [f"entity {number}" for number in range(8000)]
LINES = {
    # took 38 s
    "8,000 entities": "\t".join(["title", " ; ".join(ENTITIES), "a text of " + " , ".join(ENTITIES)]),
    "8,000 triples": "\t".join(["title", " ; ".join(f"{one} | of | {one} x" for one in ENTITIES), "a text"]),
    "one long entity": "\t".join(["title", "a " * 100_000 + "b", "a " * 200_000]),
    "entities within one another": "\t".join(["title", " ; ".join("a " * n + "b" for n in range(600)), "a " * 100_000]),
}


@cases("name", LINES)
def test_a_line_of_many_entities_or_of_long_ones_is_read_in_time(name: str):
    read_in_time(lambda: parse_triples(LINES[name], "a.tsv", 1))
