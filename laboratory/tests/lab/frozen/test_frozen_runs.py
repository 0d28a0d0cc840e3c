"""A finished run of each task read again from its folder: what it puts out for lines of text is what the task's model
puts out, its heads are measured, and what has no heads or no words is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import headwise as hw
from cases import tiers
from headwise.errors import DataError
from headwise.texts.batching import Encoded
from headwise.texts.frozen import Agreement, Fidelity
from headwise_lab.data.subwords import END, read_subwords
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.frozen.open import open_frozen
from headwise_lab.frozen.vectors import encodings
from headwise_lab.tasks.classification.scales import CLASSIFICATION_SCALES
from headwise_lab.tasks.glue.scales import GLUE_SCALES
from headwise_lab.tasks.graph2text.scales import GRAPH_SCALES
from headwise_lab.tasks.sentence.scales import SENTENCE_SCALES
from headwise_lab.tasks.translation.data import TOKENIZER
from headwise_lab.training.train import train_run
from headwise_lab.training.trained import Trained, load_trained
from lab.command import call, refused
from lab.sealing import seal_again
from lab.tasks.glue import glue_toy
from lab.tasks.graph2text.graph_sets import line, write_triples
from lab.tasks.logic import logic_toy
from lab.tasks.pretraining import pretraining_toy
from lab.tasks.sentence.sentence_sets import sentence, write_pairs, write_texts
from lab.tasks.translation.translation_toy import SMALLEST

spacy = pytest.importorskip("spacy")

TASKS = ("logic", "classification", "sentence", "pairs", "pretraining", "glue", "graph2text", "translation")
QUICK = ("logic", "classification", "sentence")
FORMULAS = ["( a ( and b ) )", "c", "( not ( a ( or ( not d ) ) ) )"]
SENTENCES = [sentence(number, str(number % 2)) for number in range(40, 46)]
WORDS = {"width": 8, "heads": 4, "epochs": 1, "warmup_steps": 1, "batch_size": 16, "min_count": 1}


def split(*tasks: str) -> tuple[list[str], list[str]]:
    """Those for a quick test, and those for a full one."""
    return [task for task in tasks if task in QUICK], [task for task in tasks if task not in QUICK]


def settings_of(task: str, place: Path) -> RunSettings:
    """A run of a second or two, whose data is written to `place`."""
    if task == "logic":
        scale, data = logic_toy.TOY, None
    elif task == "classification":
        scale = dataclasses.replace(CLASSIFICATION_SCALES["demo"], **WORDS, head_size=2, hidden=8, train_examples=None)
        data = write_texts(place / "mine.tsv", 120)
    elif task in ("sentence", "pairs"):
        sizes = {"units": 6, "attention": 5, "hidden": 10, "train_examples": 64}
        scale = dataclasses.replace(SENTENCE_SCALES["demo"], **WORDS, **sizes)
        data = write_texts(place / "mine.tsv", 120) if task == "sentence" else write_pairs(place / "pairs", 64)
    elif task == "pretraining":
        scale, data = pretraining_toy.TOY, pretraining_toy.write_jsonl(place / "docs.jsonl.gz", 60)
    elif task == "glue":
        sizes = {"epochs": 1, "batch_size": 16, "warmup_share": 0.1, "length": 32, "train_examples": None}
        model = glue_toy.write_model(place / "model")
        scale = dataclasses.replace(GLUE_SCALES["demo"], **sizes, keep_model=True, pretrained=model)
        data = glue_toy.write_glue(place / "glue") / "CoLA"
    elif task == "translation":
        scale, data = SMALLEST, write_corpus(place / "corpus")
    else:
        sizes = {"width": 16, "epochs": 1, "tokens": 128, "min_count": 1, "longest": 16, "dev_examples": None}
        scale = dataclasses.replace(GRAPH_SCALES["demo"], **sizes, train_examples=None, test_examples=None)
        data = write_triples(place / "mine.tsv", 40)
    name = "sentence" if task == "pairs" else task
    return RunSettings(name, scale, parse_arm("plain"), seed=1, data=data, cache=place / "cache")


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
    assert report.whole is not None
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
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A pipeline whose parses are drawn: what a role is of words does not follow from them."""
    nlp = spacy.blank("en")
    parser = nlp.add_pipe("parser")
    for label in ("ROOT", "nsubj", "punct"):
        parser.add_label(label)
    nlp.initialize()
    folder = tmp_path_factory.mktemp("pipeline") / "drawn"
    nlp.to_disk(folder)
    return str(folder)


@tiers("task", *split("classification", "translation", "pretraining", "glue"))
def test_roles_are_looked_for_in_runs(task, run_of, pipeline, tmp_path):
    folder, _ = run_of(task)
    text, out = text_of(task, tmp_path), tmp_path / "out"
    assert call("inspect", str(folder), "--text", str(text), "--pipeline", pipeline, "--out", str(out)) == 0
    report = hw.report.load_report(out / "report.json")
    role = report.roles.index("separator")
    frozen = open_frozen(folder)
    mass, queries = torch.zeros(report.layers[0].heads), 0
    with torch.no_grad(), hw.Taps(frozen.heads, weights=True) as taps:
        for batch in frozen.read(SENTENCES):
            frozen.run(batch)
            weights = taps.read()[0].weights
            assert weights is not None
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
    assert call("inspect", str(folder), "--text", str(text), "--pipeline", pipeline, "--out", str(out)) == 0
    report = hw.report.load_report(out / "report.json")
    assert report.layers[0].roles == ()
    assert any("one query" in note for note in report.notes)


def test_what_has_no_words_or_no_sentences_is_refused(run_of, pipeline, tmp_path, capsys):
    text = text_of("logic", tmp_path)
    folder = str(run_of("logic")[0])
    assert "omit --pipeline" in refused(capsys, "inspect", folder, "--text", str(text), "--pipeline", pipeline)
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
