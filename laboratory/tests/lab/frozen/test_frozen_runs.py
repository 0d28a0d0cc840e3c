"""Finished runs and folders read again: their states, heads, roles and the cache of encoded sentences."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import headwise as hw
from cases import cases, tiers
from headwise.errors import DataError, LayoutError
from headwise.texts.batching import Encoded
from headwise.texts.frozen import Agreement, Fidelity, Frozen
from headwise_lab.data.subwords import END, read_subwords
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.frozen.open import open_frozen
from headwise_lab.frozen.vectors import Shape, encodings, find_shape, fingerprint
from headwise_lab.tasks.classification.scales import CLASSIFICATION_SCALES
from headwise_lab.tasks.translation.data import TOKENIZER
from headwise_lab.training.train import train_run
from headwise_lab.training.trained import Trained, load_trained
from lab.cli.tiny_models import write_models
from lab.command import call, refused
from lab.sealing import seal_again
from lab.tasks.classification.probing_toy import write_bert, write_gpt2
from lab.tasks.graph2text.graph_sets import line
from lab.tasks.sentence.sentence_sets import sentence, write_texts
from lab.tasks.toys import toy_run

spacy = pytest.importorskip("spacy")
TASKS = ("logic", "classification", "sentence", "pairs", "pretraining", "glue", "graph2text", "translation")
QUICK = ("logic", "classification", "sentence")
FORMULAS = ["( a ( and b ) )", "c", "( not ( a ( or ( not d ) ) ) )"]
SENTENCES = [sentence(number, str(number % 2)) for number in range(40, 46)]


def split(*tasks: str) -> tuple[list[str], list[str]]:
    """Those for a quick test, and those for a full one."""
    return [task for task in tasks if task in QUICK], [task for task in tasks if task not in QUICK]


def settings_of(task: str, place: Path) -> RunSettings:
    """A run of a second or two, whose data is written to `place`."""
    sizes = {"classification": {"min_count": 1, "train_examples": None}, "glue": {"keep_model": True}}.get(task, {})
    settings = toy_run(task, place, seed=1, **sizes)
    # data whose words are those of the lines that are read
    if task == "classification":
        return dataclasses.replace(settings, data=write_texts(place / "texts.tsv", 120))
    if task == "translation":
        return dataclasses.replace(settings, data=write_corpus(place / "pairs"))
    return dataclasses.replace(settings, data=place / "glue" / "CoLA") if task == "glue" else settings


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, RunSettings]]:
    """Gives the folder of a finished run of a task, and its settings."""
    done: dict[str, tuple[Path, RunSettings]] = {}

    def made(task: str) -> tuple[Path, RunSettings]:
        if task not in done:
            place = tmp_path_factory.mktemp(task)
            settings = settings_of(task, place)
            train_run(settings, place / "plain" / "seed-1")
            done[task] = place / "plain" / "seed-1", settings
        return done[task]

    return made


def write_corpus(folder: Path) -> Path:
    """Pairs whose sides are the same words."""
    folder.mkdir()
    for name, first in (("train", 0), ("val", 60), ("test_2016_flickr", 80)):
        lines = "".join(f"{sentence(number, str(number % 2))}\n" for number in range(first, first + 20))
        for language in ("en", "de"):
            (folder / f"{name}.{language}").write_text(lines)
    return folder


def text_of(task: str, place: Path) -> Path:
    lines = {"logic": FORMULAS, "graph2text": ["\t".join(line(n).split("\t")[:2]) for n in (3, 7)]}.get(task, SENTENCES)
    (place / "text.txt").write_text("".join(f"{one}\n" for one in lines))
    return place / "text.txt"


def expected(task: str, trained: Trained, index: int, lines: list) -> Tensor:
    """What the task's own model computes for one line, encoded by the task's own data."""
    model, data = trained.model, trained.data
    device = next(model.parameters()).device
    if task == "logic":
        ids = [data.vocabulary.index(token) for token in FORMULAS[index].split()]
        return model.encoder(torch.tensor([ids], device=device), torch.zeros(1, len(ids), dtype=torch.bool).to(device))
    if task == "classification":
        ids = [2, *(data.vocabulary.index(word) for word in SENTENCES[index].split()), 3]
        tokens = torch.tensor([ids], device=device)
        return model.encoder(tokens, tokens == 0)
    if task in ("sentence", "pairs"):
        known = {word: place for place, word in enumerate(data.vocabulary)}
        tokens = torch.tensor([[known.get(word, 1) for word in SENTENCES[index].split()]], device=device)
        return model.attend(tokens)[0] if task == "pairs" else model(tokens)["logits"]
    if task == "translation":
        ids = [*read_subwords(lines[-1] / TOKENIZER).encode(SENTENCES[index]), END]
        return model.get_encoder()(input_ids=torch.tensor([ids], device=device)).last_hidden_state
    if task in ("pretraining", "glue"):
        network = model.discriminator if task == "pretraining" else model.network
        ids = lines[index]
        return network.base_model(torch.tensor([ids], device=device)).last_hidden_state
    seen: list[Tensor] = []
    handle = model.encoder.register_forward_hook(lambda _module, _given, states: seen.append(states))
    batch = trained.task.collate([data.coder.encode(lines[index])])
    names = ("title", "entities", "nodes", "neighbors", "types")
    model.read(*(batch[name].to(device) for name in names))
    handle.remove()
    return seen[0]


@tiers("task", *split("classification", "sentence", "pretraining", "glue", "translation"))
def test_a_line_that_is_cut_is_known_and_one_that_just_fits_is_not(task, run_of):
    frozen = open_frozen(run_of(task)[0])

    def read(words: int) -> tuple[int, int]:
        (batch,) = frozen.read([" ".join(["man"] * words)])
        return len(batch.tokens[0]), batch.cut

    longest, of = frozen.longest.split()
    assert of in ("words", "tokens", "subwords")
    (one, _), (two, _) = read(1), read(2)
    known = set()
    for words in range(1, 2 * int(longest), 3):
        tokens, cut = read(words)
        assert cut == (tokens < one + (words - 1) * (two - one))
        known.add(cut)
    assert known == {0, 1}


@tiers("task", *split(*TASKS))
def test_a_run_says_of_lines_what_its_own_model_says(task, run_of, tmp_path):
    folder, settings = run_of(task)
    frozen = open_frozen(folder)
    assert frozen.name == "plain-seed-1"
    lines = frozen.lines(text_of(task, tmp_path))
    trained = load_trained(settings, folder)
    seen = set()
    with torch.no_grad():
        for batch in frozen.read(lines):
            output = frozen.run(batch)
            for row, place in enumerate(batch.places):
                seen.add(place)
                keep = batch.keep[row]
                ids = batch.inputs["input_ids"][row][keep].tolist() if "input_ids" in batch.inputs else None
                given = {place: ids} if task in ("pretraining", "glue") else [*lines, folder]
                own = output[row] if output.dim() == 2 else output[row][keep]
                torch.testing.assert_close(own, expected(task, trained, place, given)[0], atol=1e-5, rtol=1e-4)
                assert len(batch.tokens[row]) == int(keep.sum())
    assert seen == set(range(len(lines)))


@tiers("task", *split(*TASKS))
def test_the_heads_of_a_run_are_measured_and_shown(task, run_of, tmp_path):
    folder, _ = run_of(task)
    out = tmp_path / "out"
    assert call("inspect", str(folder), "--text", str(text_of(task, tmp_path)), "--out", str(out)) == 0
    report = hw.report.load_report(out / "report.json")
    assert report.whole.value == pytest.approx(1.0)
    assert report.score == ("agreement" if task == "sentence" else "fidelity")
    drops = [drop.value for layer in report.layers for drop in layer.drops]
    assert all(drop > 0 for drop in drops)
    assert all(layer.entropy for layer in report.layers)
    page = (out / "heads.html").read_text()
    data = json.loads(page.split('id="inspection-data">')[1].split("</script>")[0])
    assert len(data["sentences"]) == {"logic": 3, "graph2text": 2}.get(task, 6)
    assert all(one["weights"][0] for one in data["sentences"])


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline whose parses are drawn, so that no role follows from the words alone."""
    nlp = spacy.blank("en")
    parser = nlp.add_pipe("parser")
    for label in ("ROOT", "nsubj", "amod", "punct"):
        parser.add_label(label)
    nlp.initialize()
    folder = tmp_path_factory.mktemp("pipeline") / "drawn"
    nlp.to_disk(folder)
    return folder


@tiers("task", *split("classification", "translation", "pretraining", "glue"))
def test_roles_are_looked_for_in_runs(task, run_of, pipeline, tmp_path):
    folder, _ = run_of(task)
    text, out = text_of(task, tmp_path), tmp_path / "out"
    assert call("inspect", str(folder), "--text", str(text), "--pipeline", str(pipeline), "--out", str(out)) == 0
    report = hw.report.load_report(out / "report.json")
    role = report.roles.index("separator")
    frozen = open_frozen(folder)
    mass, queries = torch.zeros(report.layers[0].heads), 0
    with torch.no_grad(), hw.Taps(frozen.heads, weights=True) as taps:
        for batch in frozen.read(SENTENCES):
            frozen.run(batch)
            weights = taps.read()[0].weights
            encoded = getattr(batch.encoding, "encodings", batch.encoding)
            for row, (place, one) in enumerate(zip(batch.places, encoded, strict=True)):
                size = int(batch.keep[row].sum())
                spans = [*zip(one.offsets[:size], one.special_tokens_mask, strict=False)]
                assert sum(special for _, special in spans) == (1 if task == "translation" else 2)
                whole = "".join(SENTENCES[place][slice(*span)] for span, special in spans if not special)
                assert whole.replace(" ", "") == SENTENCES[place].replace(" ", "")
                for shown, (span, special) in zip(batch.tokens[row], spans, strict=True):
                    unknown = shown[:1] in "<["
                    assert special or unknown or shown.strip("# ").lower() in SENTENCES[place][slice(*span)].lower()
                found = [bool(special) or SENTENCES[place][slice(*span)].strip() == "." for span, special in spans]
                marks = torch.tensor(found)
                mass += weights[row, :, :size, :size].cpu()[..., marks].sum((1, 2))
                queries += size
    assert report.layers[0].roles[role] == pytest.approx((mass / queries).tolist(), abs=1e-5)


@pytest.mark.full
def test_one_query_a_text_has_no_pairs_of_roles(run_of, pipeline, tmp_path):
    text, out = text_of("sentence", tmp_path), tmp_path / "out"
    folder, _ = run_of("sentence")
    assert call("inspect", str(folder), "--text", str(text), "--pipeline", str(pipeline), "--out", str(out)) == 0
    report = hw.report.load_report(out / "report.json")
    assert report.layers[0].roles == ()
    assert any("one query" in note for note in report.notes)


def test_what_has_no_words_or_no_sentences_is_refused(run_of, pipeline, tmp_path, capsys):
    text = text_of("logic", tmp_path)
    folder = str(run_of("logic")[0])
    assert "omit --pipeline" in refused(capsys, "inspect", folder, "--text", str(text), "--pipeline", str(pipeline))
    text.write_text("a\n\n( a ( and b )\n")
    assert "line 3: 1 bracket is not closed" in refused(capsys, "inspect", folder, "--text", str(text))
    text.write_text("a\n\n( a ( xor b ) )\n")
    assert "line 3: 'xor' is not one of the run's tokens" in refused(capsys, "inspect", folder, "--text", str(text))
    with pytest.raises(DataError, match=r"reads no sentences; expected .* sentence, pretraining, lm or glue"):
        encodings(open_frozen(run_of("logic")[0]), SENTENCES, tmp_path / "cache", model="m")


@pytest.mark.full
def test_a_graph_without_its_fields_and_a_run_without_its_model_are_refused(run_of, tmp_path, capsys):
    text, folder = tmp_path / "text.txt", run_of("graph2text")[0]
    text.write_text("a title\ta | knows | b\na title alone\n")
    assert "line 2: 1 field" in refused(capsys, "inspect", str(folder), "--text", str(text))
    with pytest.raises(DataError, match=r"reads no sentences; expected .* sentence, pretraining, lm or glue"):
        encodings(open_frozen(folder), SENTENCES, tmp_path / "cache", model="m")
    bare = Path(shutil.copytree(run_of("glue")[0], tmp_path / "bare"))
    shutil.rmtree(bare / "model")
    with pytest.raises(DataError, match="keep_model=true"):
        open_frozen(bare)


def test_what_is_no_model_with_heads_is_refused(run_of, tmp_path):
    copy = Path(shutil.copytree(run_of("sentence")[0], tmp_path / "copy"))
    record = json.loads((copy / "settings.json").read_text())
    other = {**record["arm"], "methods": [{"kind": "OtherModel", "model": "cnn"}]}
    (copy / "settings.json").write_text(json.dumps({**record, "arm": other}))
    with pytest.raises(DataError, match=r"settings\.json was changed since it was written"):
        open_frozen(copy)
    seal_again(copy)
    with pytest.raises(DataError, match="its model cnn has no attention"):
        open_frozen(copy)
    (copy / "settings.json").write_text(json.dumps({name: record[name] for name in record if name != "arm"}))
    seal_again(copy)
    with pytest.raises(DataError, match="which has no model"):
        open_frozen(copy)
    (copy / "settings.json").write_text(json.dumps(record))
    (copy / "vocabulary.json").write_text("{}")
    seal_again(copy)
    with pytest.raises(DataError, match="does not have the run's words"):
        open_frozen(copy)
    (copy / "result.json").unlink()
    with pytest.raises(DataError, match="holds a run that is not finished"):
        open_frozen(copy)


def test_both_scores_are_those_of_numpy():
    keep = torch.tensor([[True, True, False], [True, False, False]])
    batch = Encoded(0, (0, 1), {}, keep, ((), ()))
    whole = torch.tensor([[[1.0, 0.0], [0.0, 2.0], [9.0, 9.0]], [[3.0, 4.0], [1.0, 1.0], [1.0, 1.0]]])
    moved = torch.tensor([[[1.0, 1.0], [0.0, 5.0], [-9.0, 0.0]], [[-3.0, -4.0], [1.0, 1.0], [1.0, 1.0]]])
    fidelity = Fidelity()
    assert fidelity(whole, batch).tolist() == pytest.approx([1.0, 1.0])
    assert fidelity(moved, batch).tolist() == pytest.approx([(0.5**0.5 + 1) / 2, -1.0])
    assert Fidelity()(whole[:, 0], batch).tolist() == pytest.approx([1.0, 1.0])
    agreement = Agreement()
    assert agreement(torch.tensor([[0.0, math.log(3)]]), batch).tolist() == pytest.approx([1.0])
    # a quarter and three quarters against three quarters and a quarter
    assert agreement(torch.tensor([[math.log(3), 0.0]]), batch).tolist() == pytest.approx([0.5])
    # another batch is compared with its own first output
    assert agreement(torch.tensor([[5.0, 0.0]]), dataclasses.replace(batch, number=1)).tolist() == pytest.approx([1.0])


SIZES = {"width": 12, "heads": 6, "head_size": 3, "hidden": 8, "epochs": 1, "warmup_steps": 1, "batch_size": 16}
COUNT = 120
ARMS = {
    "roles": "guided",
    "dropped": "em:layers=0,capsules=4+guided:roles=window/major/separator,drop=major",
    "unparsed": "guided:roles=rare/window",
    "random": "random-mask",
    "shuffled": "shuffled-parse",
    "plain": "plain",
}
Run = Callable[..., tuple[Path, RunSettings]]


def lines_of(attached: bool) -> list[str]:
    """Texts with three commas, and marks that stand apart from words or not."""
    lines = [sentence(number, str(number % 2)).replace(" the ", " the , ") for number in range(COUNT)]
    return [line.replace(" ,", ",").replace(" .", ".") for line in lines] if attached else lines


@pytest.fixture(scope="module")
def guided_run(tmp_path_factory: pytest.TempPathFactory, pipeline: Path) -> Run:
    """Gives the folder of a finished run of an arm, and its settings."""
    done: dict[tuple[str, bool, bool], tuple[Path, RunSettings]] = {}

    def made(name: str, *, attached: bool = False, parsed: bool = True) -> tuple[Path, RunSettings]:
        if (name, attached, parsed) not in done:
            place = tmp_path_factory.mktemp(name)
            texts = "".join(f"{number % 2}\t{line}\n" for number, line in enumerate(lines_of(attached)))
            (place / "mine.tsv").write_text(texts)
            scale = dataclasses.replace(CLASSIFICATION_SCALES["demo"], **SIZES, min_count=1, train_examples=None)
            scale = dataclasses.replace(scale, max_words=9, pipeline=pipeline if parsed else None)
            arm = parse_arm(ARMS[name])
            settings = RunSettings("classification", scale, arm, 3, data=place / "mine.tsv", cache=place / "cache")
            train_run(settings, place / "arm" / "seed-3")
            done[name, attached, parsed] = place / "arm" / "seed-3", settings
        return done[name, attached, parsed]

    return made


def states_of(trained: Trained, numbers: list[int]) -> dict[int, Tensor]:
    """What the encoder of a trained model makes of texts of its data."""
    seen: list[Tensor] = []
    handle = trained.model.encoder.register_forward_hook(lambda _module, _given, states: seen.append(states))
    data, device = trained.data, next(trained.model.parameters()).device
    known = {word: place for place, word in enumerate(data.vocabulary)}
    for number in numbers:
        words = [data.texts.types[word].lower() for word in data.texts.words[0][number]]
        tokens = torch.tensor([[2, *(known.get(word, 1) for word in words), 3]], device=device)
        trained.model(tokens=tokens, numbers=torch.tensor([number]))
    handle.remove()
    return dict(zip(numbers, (one[0] for one in seen), strict=True))


def said_of(frozen: Any, lines: list[str]) -> dict[int, Tensor]:
    found = {}
    for batch in frozen.read(lines):
        output = frozen.run(batch)
        found |= {place: output[row][batch.keep[row]] for row, place in enumerate(batch.places)}
    return found


@pytest.mark.full
@cases(
    ("name", "given"),
    [
        ("roles", {}),
        ("roles", {"attached": True}),
        ("dropped", {}),
        ("unparsed", {"parsed": False}),
        ("unparsed", {"attached": True}),
        ("plain", {"attached": True, "parsed": False}),
    ],
)
def test_lines_have_the_states_that_the_texts_of_the_data_had(name, given, guided_run):
    folder, settings = guided_run(name, **given)
    lines, numbers = lines_of(given.get("attached", False)), list(range(0, COUNT, 3))
    trained = load_trained(settings, folder)
    with torch.no_grad():
        expected = states_of(trained, numbers)
        found = said_of(open_frozen(folder), [lines[number] for number in numbers])
    for place, number in enumerate(numbers):
        torch.testing.assert_close(found[place], expected[number], atol=1e-5, rtol=1e-4)


@pytest.mark.full
def test_a_guided_run_is_probed_with_its_roles(guided_run, tmp_path):
    folder, settings = guided_run("roles")
    lines = lines_of(False)[:40]
    frozen, trained = open_frozen(folder), load_trained(settings, folder)
    found = encodings(frozen, lines, tmp_path / "cache", model=fingerprint(frozen))
    with torch.no_grad():
        expected = states_of(trained, list(range(40)))
    for number in (0, 17, 39):
        last = torch.tensor(found.layers[-1][number])
        torch.testing.assert_close(last, expected[number].mean(0), atol=1e-5, rtol=1e-4)
    counts = folder / "idf.json"
    before = fingerprint(frozen)
    counts.write_text(counts.read_text() + "\n")
    with pytest.raises(DataError, match=r"idf\.json was changed since it was written"):
        open_frozen(folder)
    seal_again(folder)
    assert fingerprint(open_frozen(folder)) != before
    counts.write_text(counts.read_text()[:-1])
    seal_again(folder)


@pytest.mark.full
def test_a_random_mask_is_drawn_by_the_words_alone(guided_run):
    folder, settings = guided_run("random")
    lines = lines_of(False)
    trained = load_trained(settings, folder)
    with torch.no_grad():
        whole = said_of(open_frozen(folder), lines[:40])
        part = said_of(open_frozen(folder), [lines[7], lines[5]])
        # the data has another draw
        assert not torch.allclose(states_of(trained, [5])[5], part[1], atol=1e-4)
    torch.testing.assert_close(part[0], whole[7], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(part[1], whole[5], atol=1e-5, rtol=1e-4)


@pytest.mark.full
def test_guided_heads_are_measured_in_their_roles(guided_run, pipeline, tmp_path):
    folder, _ = guided_run("roles")
    (tmp_path / "text.txt").write_text("".join(f"{line}\n" for line in lines_of(False)[:20]))
    out = tmp_path / "out"
    asked = ["inspect", str(folder), "--text", str(tmp_path / "text.txt"), "--out", str(out)]
    assert call(*asked, "--pipeline", str(pipeline), "--exact") == 0
    report = hw.report.load_report(out / "report.json")
    assert report.whole.value == pytest.approx(1.0)
    assert report.replayed
    for layer in report.layers:
        # the role of a head is where all its attention is; no row of these three is empty
        for name in ("separator", "dependency", "window"):
            role = report.roles.index(name)
            assert layer.roles[role][role] == pytest.approx(1.0, abs=1e-6)
            assert layer.roles[role][5] < 0.9
        assert all(drop.value > 0 for drop in layer.drops)


@pytest.mark.full
def test_a_run_keeps_how_rare_its_training_words_are_and_what_parsed_them(guided_run, pipeline):
    folder, settings = guided_run("roles")
    data = load_trained(settings, folder).data
    kept, counted = hw.roles.IDF.load(folder / "idf.json"), hw.roles.idf(data.words(data.train))
    for word in ("the", "lovely", ".", "never-seen", *map(str, range(30))):
        assert kept(word) == counted(word)
    assert kept("the") < kept("lovely") < kept("never-seen")
    assert json.loads((folder / "roles.json").read_text())["pipeline"] == str(pipeline.resolve())
    for name, given in (("unparsed", {"parsed": False}), ("plain", {})):
        assert (guided_run(name, **given)[0] / "roles.json").is_file() == (name == "unparsed")


@pytest.mark.full
def test_a_run_whose_masks_cannot_be_made_again_is_refused(guided_run, pipeline, tmp_path):
    def refused(folder: Path, *pipeline: Path) -> str:
        seal_again(folder)
        with pytest.raises(DataError) as refusal:
            open_frozen(folder, *pipeline)
        return str(refusal.value)

    assert "roles are from parses of other training sentences" in refused(guided_run("shuffled")[0])
    other, moved = tmp_path / "other", tmp_path / "moved"
    for copy in (other, moved):
        shutil.copytree(pipeline, copy)
    (other / "meta.json").write_text((other / "meta.json").read_text().replace("0.0.0", "0.0.1"))
    run = Path(shutil.copytree(guided_run("roles")[0], tmp_path / "run"))
    assert f"{other} is not the pipeline that parsed the texts of {run}" in refused(run, other)
    assert len(list(open_frozen(run, moved).read(["the food is here ."]))) == 1
    record = json.loads((run / "roles.json").read_text())
    (run / "roles.json").write_text(json.dumps({**record, "pipeline": str(tmp_path / "gone")}))
    assert f"{tmp_path / 'gone'}, the pipeline that parsed the run's texts, does not exist any more" in refused(run)
    assert len(list(open_frozen(run, moved).read(["the food is here ."]))) == 1
    (run / "roles.json").write_text(json.dumps({**record, "pipeline": None}))
    assert "roles.json names no pipeline; name the one that parsed" in refused(run)
    (run / "roles.json").write_text(json.dumps({"pipeline": str(pipeline)}))
    assert "roles.json does not name the pipeline of the run's texts" in refused(run)
    (run / "idf.json").unlink()
    assert f"{run / 'idf.json'} is missing" in refused(run)
    # where nothing was parsed a pipeline is for what is measured
    assert open_frozen(guided_run("unparsed", parsed=False)[0], other).heads


TEXTS = ["the film walked .", "a town", "it sees the stone near the plot here once .", "rain goes"]


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Frozen:
    return open_frozen(write_bert(tmp_path_factory.mktemp("models") / "bert"))


def test_a_sentence_has_its_vectors_whatever_stands_beside_it_though_the_tokenizer_pads_on_the_left(tmp_path):
    gpt2 = open_frozen(write_gpt2(tmp_path / "gpt2"))
    together = encodings(gpt2, TEXTS, tmp_path / "cache", model="m")
    for place, text in enumerate(TEXTS):
        alone = encodings(gpt2, [text], tmp_path / "cache", model="m")
        np.testing.assert_allclose(together.layers[:, place], alone.layers[:, 0], atol=1e-5)
        for one, other in zip(together.heads, alone.heads, strict=True):
            np.testing.assert_allclose(one[place], other[0], atol=1e-5)


def test_layers_and_heads_are_known_before_anything_is_encoded(frozen):
    assert find_shape(frozen) == Shape(2, (3, 3))
    with pytest.raises(DataError, match="bert reads no sentences; expected a folder of Hugging Face, or a run of"):
        find_shape(dataclasses.replace(frozen, lines=lambda _path: []))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def of_fewer(path: Path) -> None:
    np.save(path, np.zeros((len(TEXTS) - 1, 24), dtype=np.float32))


def of_another_width(path: Path) -> None:
    np.save(path, np.zeros((len(TEXTS), 23), dtype=np.float32))


DAMAGES = [
    ("layers.npy", cut),
    ("layers.npy", emptied),
    ("heads-1.npy", Path.unlink),
    ("heads-0.npy", of_fewer),
    ("heads-0.npy", of_another_width),
    ("shapes.json", emptied),
    ("shapes.json", lambda path: path.write_text("3")),
]


def test_a_damaged_cache_is_made_again_and_everybody_may_read_it(frozen, tmp_path):
    first = encodings(frozen, TEXTS, tmp_path, model="m")
    layers, heads = np.array(first.layers), [np.array(one) for one in first.heads]
    (place,) = tmp_path.iterdir()
    assert place.stat().st_mode & 0o555 == 0o555
    for name, damage in DAMAGES:
        damage(place / name)
        again = encodings(frozen, TEXTS, tmp_path, model="m")
        assert np.array_equal(layers, again.layers), name
        assert all(np.array_equal(one, other) for one, other in zip(heads, again.heads, strict=True)), name
        assert [*tmp_path.iterdir()] == [place]


def test_a_tokenizer_without_a_longest_text_and_a_model_without_layers_are_refused(tmp_path):
    folder = write_bert(tmp_path)
    path = folder / "tokenizer_config.json"
    kept = path.read_text()
    for length in ([], "", True, 0, float("inf")):
        path.write_text(json.dumps({**json.loads(kept), "model_max_length": length}))
        with pytest.raises(DataError, match=re.escape(f"{path}: model_max_length is {length!r}; expected a number")):
            open_frozen(folder)
    path.write_text(kept)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 0}))
    with pytest.raises(LayoutError, match=re.escape(f"{folder}: ")):
        open_frozen(folder)


@pytest.mark.full
def test_a_model_that_takes_no_tokens_or_fails_on_a_text_is_refused_by_folder(tmp_path):
    folder = write_models(tmp_path) / "llama"
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "max_position_embeddings": -5}))
    with pytest.raises(DataError, match=re.escape(f"{path}: max_position_embeddings is -5; expected at least 3; copy")):
        open_frozen(folder)
    sliding = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": -(2**63)}
    path.write_text(json.dumps({**config, **sliding}))
    with pytest.raises(DataError, match=re.escape(f"{path}: sliding_window is -{2**63}; expected at least 1, or")):
        open_frozen(folder)
    path.write_text(json.dumps(config))
    frozen = open_frozen(folder)
    frozen.model.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(IndexError("out of range")))
    with pytest.raises(DataError, match=re.escape(f"{folder} holds a model that fails on a text (")):
        frozen.run(next(iter(frozen.read(["a b c"]))))
