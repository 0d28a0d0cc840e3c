"""Probing frozen models: vectors against slow ones, classifiers, chance, and the command."""

from __future__ import annotations

import dataclasses
import json
import shutil
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from sklearn.linear_model import LogisticRegression
from transformers import BertModel

from cases import cases
from headwise.errors import DataError, SettingError
from headwise_lab.cli.commands import probe
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.frozen import vectors
from headwise_lab.frozen.open import open_frozen
from headwise_lab.frozen.vectors import encodings, fingerprint
from headwise_lab.models.text_classifiers import masked_mean
from headwise_lab.probing import fit as fitting
from headwise_lab.probing import request, run, softmax_regression
from headwise_lab.probing.figures import make_heads_grid, make_layers_grid
from headwise_lab.probing.fit import FORM, PENALTIES, Classifier, Fitted, Split, fit
from headwise_lab.probing.probe import ProbedTask, choose_sentences, judge_probes
from headwise_lab.probing.request import parse_heads, parse_layers
from headwise_lab.probing.softmax_regression import SoftmaxRegression
from headwise_lab.tasks.classification.probing import ProbingTask, load_probing
from headwise_lab.tasks.classification.scales import PROBING_SCALES
from headwise_lab.tasks.sentence.scales import SENTENCE_SCALES
from headwise_lab.training.train import train_run
from headwise_lab.training.trained import load_trained
from lab.command import call, refused
from lab.tasks.classification.probing_toy import FILLERS, WORDS, write_bert, write_probing

SENTENCES = ["the film walked .", "a town", "it sees the stone near the plot here once .", "rain goes"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(scope="module")
def probing_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("probing")
    write_probing(folder / "past_present.txt", {"tr": 400, "va": 60, "te": 200})
    # labels that nothing tells
    lines = write_probing(folder / "noise.txt", {"tr": 260, "va": 60, "te": 200}, seed=5).read_text().splitlines()
    draw = np.random.default_rng(2)
    shuffled = [f"{line.split(chr(9))[0]}\t{draw.choice(['I', 'O'])}\t{line.split(chr(9))[-1]}\n" for line in lines]
    (folder / "bigram_shift.txt").write_text("".join(shuffled))
    (folder / "noise.txt").unlink()
    return folder


def test_vectors_are_the_means_over_the_real_tokens_of_each_sentence_alone(bert, tmp_path):
    frozen = open_frozen(bert)
    found = encodings(frozen, SENTENCES, tmp_path / "cache", model="m")
    assert found.counts == (3, 3)
    model = BertModel.from_pretrained(bert, attn_implementation="eager").eval()
    given: list[torch.Tensor] = []
    for layer in model.encoder.layer:
        layer.attention.output.dense.register_forward_pre_hook(lambda _module, args: given.append(args[0]))
    for place, sentence in enumerate(SENTENCES):
        given.clear()
        ids = torch.tensor([[2, *(WORDS.index(word) for word in sentence.split()), 3]])
        with torch.no_grad():
            states = model(ids, output_hidden_states=True).hidden_states
        for layer, state in enumerate(states):
            np.testing.assert_allclose(found.layers[layer, place], state[0].mean(0), atol=1e-5)
        for layer, concatenated in enumerate(given):
            for head in range(3):
                own = concatenated[0, :, 8 * head : 8 * head + 8].mean(0)
                np.testing.assert_allclose(found.head(layer, head)[place], own, atol=1e-5)
    # a set of heads stands side by side
    both = parse_heads("1.2+0.0", found.counts)[0].select(found)
    assert np.array_equal(both, np.concatenate([found.heads[1][:, 16:24], found.heads[0][:, 0:8]], axis=1))
    # sentences are encoded once for a model and a text
    silent = dataclasses.replace(frozen, states=lambda _batch: pytest.fail("encoded again"))
    again = encodings(silent, SENTENCES, tmp_path / "cache", model="m")
    assert np.array_equal(found.layers, again.layers)
    for other in ({"model": "n"}, {"model": "m", "heads": False}):
        with pytest.raises(pytest.fail.Exception, match="encoded again"):
            encodings(silent, SENTENCES, tmp_path / "cache", **other)
    # what an interruption leaves is no cache, and nothing of it stays
    assert len([*(tmp_path / "cache").iterdir()]) == 1


def test_a_model_has_the_name_of_its_folder_and_the_fingerprint_of_its_weights(bert, tmp_path):
    copy = Path(shutil.copytree(bert, tmp_path / "mine" / "model"))
    (copy / "README.md").write_text("what it is")
    assert fingerprint(open_frozen(copy)) == fingerprint(open_frozen(bert))
    assert [open_frozen(place).name for place in (bert, copy)] == ["bert", "mine"]
    model = BertModel.from_pretrained(copy)
    with torch.no_grad():
        model.encoder.layer[1].output.dense.bias += 1e-3
    model.save_pretrained(copy)
    assert fingerprint(open_frozen(copy)) != fingerprint(open_frozen(bert))


@pytest.mark.parametrize("arm", [pytest.param("plain", marks=pytest.mark.full), "em:layers=0"])
def test_the_top_layer_of_a_run_is_what_its_classifier_reads(arm, probing_folder, tmp_path):
    toy = dataclasses.replace(
        PROBING_SCALES["demo"], name="toy", width=12, heads=3, head_size=4, hidden=12, epochs=1, min_count=1
    )
    place = probing_folder / "past_present.txt"
    settings = RunSettings("probing", toy, parse_arm(arm), seed=1, data=place)
    train_run(settings, tmp_path / "arm" / "seed-1")
    frozen = open_frozen(tmp_path / "arm" / "seed-1")
    assert frozen.name == "arm-seed-1"
    task = ProbingTask()
    data = task.load(place, toy, None)
    texts = [data.sentences[number] for number in data.test.numbers]
    found = encodings(frozen, texts, tmp_path / "cache", model=fingerprint(frozen))
    assert found.layers.shape == (3, len(texts), 12)
    assert [array.shape for array in found.heads] == [(len(texts), 12)] * 2
    trained = load_trained(settings, tmp_path / "arm" / "seed-1")
    device = next(trained.model.parameters()).device
    tokens = task.collate([data.test[place] for place in range(len(texts))])["tokens"].to(device)
    with torch.no_grad():
        expected = masked_mean(trained.model.encoder(tokens, tokens == 0), tokens == 0).cpu()
    np.testing.assert_allclose(found.layers[-1], expected, atol=1e-5)


def test_what_cannot_be_probed_is_refused(tmp_path, probing_folder, capsys):
    (tmp_path / "settings.json").write_text('{"task": "chess"}')
    with pytest.raises(DataError, match=r"holds a run of chess; expected one of logic, translation, classification"):
        open_frozen(tmp_path)
    with pytest.raises(DataError, match="absent does not exist"):
        open_frozen(tmp_path / "absent")
    said = refused(capsys, "probe", str(tmp_path), "--data", str(probing_folder), "--task", "tense")
    assert "there is no probing task 'tense'" in said
    (tmp_path / "empty").mkdir()
    assert "holds no probing file" in refused(capsys, "probe", str(tmp_path), "--data", str(tmp_path / "empty"))


def splits(count: int = 400, width: int = 6, signal: float = 1.0, *, classes: int = 2) -> dict[str, Split]:
    draw = np.random.default_rng(1)
    labels = draw.integers(0, classes, count)
    vectors = draw.normal(size=(count, width)) + 5.0
    vectors[:, 0] += signal * labels
    ends = {"train": (0, count // 2), "dev": (count // 2, 3 * count // 4), "test": (3 * count // 4, count)}
    return {name: Split(vectors[a:b], labels[a:b]) for name, (a, b) in ends.items()}


def test_dev_chooses_the_penalty_and_test_chooses_nothing():
    given = splits(signal=1.5)
    found = fit(Classifier(), given)
    wrong = Split(given["test"].vectors, 1 - given["test"].labels)
    turned = fit(Classifier(), {**given, "test": wrong})
    assert (turned.penalty, turned.dev) == (found.penalty, found.dev)
    assert turned.correct == len(wrong.labels) - found.correct
    each = {penalty: fit(Classifier(penalties=(penalty,)), given).dev for penalty in PENALTIES}
    assert found.dev == max(each.values())
    strong = fit(Classifier(penalties=(1e4, 1e-3)), splits(signal=4.0))
    assert strong.penalty == 1e-3


def test_vectors_are_standardised_by_the_training_split():
    given = splits(signal=2.0)
    scale = np.array([1e3, 1e-4, 1.0, 10.0, 0.1, 5.0])
    other = {name: Split(split.vectors * scale - 7.0, split.labels) for name, split in given.items()}
    assert fit(Classifier(), other) == fit(Classifier(), given)
    # a coordinate that is constant in training says nothing, whatever it does elsewhere
    still = {
        name: Split(np.hstack([split.vectors, np.full((len(split.labels), 1), 3.0)]), split.labels)
        for name, split in given.items()
    }
    assert fit(Classifier(), still) == fit(Classifier(), given)


@pytest.mark.full
def test_one_hidden_layer_tells_what_no_line_does():
    draw = np.random.default_rng(3)
    vectors = draw.uniform(-1, 1, size=(1200, 2))
    labels = (np.abs(vectors[:, 0]) > 0.8).astype(np.int64)
    ends = {"train": (0, 800), "dev": (800, 1000), "test": (1000, 1200)}
    given = {name: Split(vectors[a:b], labels[a:b]) for name, (a, b) in ends.items()}
    # under the three strongest penalties it answers one class: two in a row that are no better, and not the end
    assert fit(Classifier("mlp"), given).correct > 190 > fit(Classifier("regression"), given).correct
    with pytest.raises(SettingError, match="classifier"):
        Classifier("forest")


def test_what_is_at_chance_is_told_from_what_is_not():
    layers = parse_layers("all", 2)
    fitted = [
        (layers[0], Fitted(0.5, 510, 0.1, True)),
        (layers[1], Fitted(0.6, 600, 0.1, True)),
        (layers[2], Fitted(0.5, 528, 0.1, True)),
    ]
    found = judge_probes(fitted, test=1000, majority=0.5)
    # 528 of 1000 has p = 0.041 alone, and 0.08 beside two others
    assert [one.at_chance for one in found] == [True, False, True]
    assert not judge_probes(fitted[2:], test=1000, majority=0.5)[0].at_chance
    assert (found[1].low, found[1].high) == (pytest.approx(0.5693, abs=1e-4), pytest.approx(0.6299, abs=1e-4))
    task = ProbedTask("t", "d", "T", 2, 9, 9, 1000, 0.5, "", found)
    grid = make_layers_grid([task])
    assert grid.header == ("task", "classes", "majority", "emb", "0", "1", "±")
    assert grid.rows[0] == ("T", "2", "50.0", "(51.0)", "60.0", "(52.8)", "3.1")
    assert make_heads_grid([task]) is None
    assert ProbedTask.read(json.loads(json.dumps(task.record()))) == task


def test_layers_heads_and_sets_of_heads_are_named_by_number():
    assert [one.heads for one in parse_heads("0.1,1.0+0.2", (3, 1))] == [((0, 1),), ((1, 0), (0, 2))]
    # one set once, in the order of its first name
    assert [str(one) for one in parse_heads("0.1, 0.1,1.0+0.1 + 1.0,0.1+1.0", (3, 1))] == ["0.1", "1.0+0.1"]
    assert parse_heads("none", (3,)) == []
    for parse, text, known, said in (
        (parse_heads, "1.1", (3, 1), r"--heads has '1.1'; expected all, none, or LAYER.HEAD from 0.0 to 1.0"),
        (parse_layers, "2", 2, "--layers has '2'"),
        (parse_layers, "emb,x", 2, "--layers has 'x'"),
    ):
        with pytest.raises(SettingError, match=said):
            parse(text, known)


def test_a_capped_number_of_sentences_keeps_to_its_shares(probing_folder):
    data = load_probing(probing_folder / "past_present", PROBING_SCALES["paper"], None)
    numbers, chosen = choose_sentences(data, 100, probing_folder)
    assert {name: len(places) for name, places in chosen.places.items()} == {"train": 60, "dev": 10, "test": 30}
    assert len(set(numbers)) == 100
    test = set(data.test.numbers.tolist())
    assert {numbers[place] for place in chosen.places["test"]} <= test
    assert not {numbers[place] for place in chosen.places["train"]} & test
    assert chosen.labels["test"].tolist() == [data.texts.classes[numbers[place]] for place in chosen.places["test"]]
    with pytest.raises(DataError, match="no dev sentence is left"):
        choose_sentences(data, 9, probing_folder)


def test_where_the_most_frequent_class_is_not_in_test_guessing_is_the_baseline(bert, tmp_path):
    draw = np.random.default_rng(7)
    lines = [
        f"{part}\t{label}\t{' '.join(draw.choice(FILLERS, 6))}\n"
        for part, labels, count in (("tr", "AABCDE", 90), ("va", "BCDE", 30), ("te", "BCDE", 60))
        for label in draw.choice(list(labels), count)
    ]
    (tmp_path / "tree_depth.txt").write_text("".join(lines))
    words = ["probe", str(bert), "--data", str(tmp_path), "--heads", "none", "--layers", "emb", "--workers", "1"]
    assert call(*words, "--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")) == 0
    record = json.loads((tmp_path / "out" / "tree_depth.json").read_text())
    assert (record["majority"], record["labels"]) == (0.0, 5)
    assert record["found"][0]["p"] > 0.05


def test_the_command_shows_keeps_and_goes_on(bert, probing_folder, tmp_path, capsys, monkeypatch):
    words = ["probe", str(bert), "--data", str(probing_folder), "--sentences", "0", "--workers", "1"]
    words += ["--heads", "0.0,1.2,0.0+1.2", "--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    monkeypatch.setenv("COLUMNS", "140")
    assert call(*words, "--task", "bigram_shift") == 0
    capsys.readouterr()
    done: list[str] = []
    probed = run._probe
    monkeypatch.setattr(run, "_probe", lambda *given: done.append(given[0].task) or probed(*given))
    assert call(*words) == 0
    assert done == ["past_present"]  # the other was there
    shown = capsys.readouterr().out
    assert "accuracy by layer" in shown
    tense, noise = (
        json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in ("past_present", "bigram_shift")
    )
    assert [one["name"] for one in tense["found"]] == ["emb", "0", "1", "0.0", "1.2", "0.0+1.2"]
    # drawn layers lose what the words say
    assert tense["found"][0]["accuracy"] > 0.95
    assert tense["found"][0]["p"] < 0.001
    # chance is not always one side, yet six classifiers on noise stay together in their intervals
    assert all(one["p"] > 0.05 for one in noise["found"])
    text = (tmp_path / "out" / "probe.md").read_text()
    assert "| Tense |" in text
    assert "400 train, 60 dev, 200 test" in text
    assert "(" in next(line for line in text.splitlines() if line.startswith("| BShif"))
    assert (tmp_path / "out" / "layers.png").stat().st_size > 5_000
    assert (tmp_path / "out" / "heads.png").stat().st_size > 5_000
    assert call(*words, "--classifier", "mlp") == 2
    assert "choose another --out" in capsys.readouterr().err


def test_a_small_set_is_fit_with_the_penalty_that_is_named():
    # scikit-learn divides by the batch, which is all of a small set
    for count, batch in ((40, 40), (5_000, fitting.BATCH)):
        layer = fitting._make_hidden_layer(Classifier("mlp"), 0.3, count)
        assert layer.alpha / layer.batch_size == pytest.approx(0.3)
        assert layer.batch_size == batch


def refused_at_last(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The sentence of a call that must end with code 2, behind the progress bar of transformers."""
    assert call(*arguments) == 2
    *_, error = capsys.readouterr().err.strip().splitlines()
    assert error.startswith("headwise: ")
    return error


@pytest.fixture
def words(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command that probes two small tasks, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for number, name in enumerate(("past_present", "tree_depth")):
        write_probing(tmp_path / "data" / f"{name}.txt", {"tr": 60, "va": 20, "te": 30}, seed=number)
    return ["probe", str(bert), "--data", "data", "--workers", "1"]


def test_a_wrong_command_is_refused_before_anything_is_encoded_or_written(words, capsys, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(run, "encodings", lambda *_given, **_named: pytest.fail("encoded"))
        for options, said in (
            (("--layers", "99"), "--layers has '99'; expected all, none, or some of emb, 0, 1"),
            (("--heads", "0.7"), "--heads has '0.7'"),
            (("--layers", "none", "--heads", "none"), "--layers and --heads are both none"),
            (
                ("--task", "all,past_present"),
                "--task is 'all,past_present'; expected all, or names of files without it",
            ),
            (("--task", "word_content"), "word_content does not exist"),
            (("--data", "data/past_present.txt", "--task", "tree_depth"), "and --task is tree_depth; name its folder"),
            (("--workers", "0"), "--workers is 0; expected an integer of at least 1"),
            (("--workers", "-3"), "--workers is -3; expected an integer of at least 1"),
            (("--classifier", "forest"), "classifier is 'forest'"),
            (("--sentences", "5"), "no dev sentence is left; raise --sentences"),
            (("--out", "runs/probe/cache"), "is the folder of --cache, which may be removed"),
        ):
            assert said in refused_at_last(capsys, *words, "--out", "out", *options)
    for name in ("settings", "config", "comparison"):
        write_probing(Path("data") / f"{name}.txt", {"tr": 60, "va": 20, "te": 30})
        said = refused_at_last(capsys, *words[:3], f"data/{name}.txt")
        assert f"its results cannot be called {name}.json; rename the file" in said
    assert [path.name for path in Path("runs/probe").iterdir()] == ["cache"]
    assert not Path("out").exists()


@pytest.mark.full
def test_results_of_other_sentences_are_not_shown_for_those_of_this_file(words, capsys):
    quick = [*words, "--heads", "none", "--layers", "emb", "--out", "out"]
    assert call(*quick, "--task", "tree_depth") == 0
    place = Path("out/tree_depth.json")
    before = place.read_text()
    write_probing(Path("data/tree_depth.txt"), {"tr": 60, "va": 20, "te": 30}, seed=9)
    said = refused_at_last(capsys, *quick)
    record = json.loads(before)
    assert f"{place} is about other sentences (digest {record['data']}) than those of data/tree_depth.txt" in said
    assert "choose another --out" in said
    assert place.read_text() == before
    assert not Path("out/past_present.json").exists()
    assert call(*quick, "--task", "past_present") == 0
    # a result that does not name its data is refused
    place.write_text(json.dumps({name: value for name, value in record.items() if name != "data"}))
    assert "tree_depth.json is not the result of a probe" in refused_at_last(capsys, *quick)


@pytest.mark.full
def test_commands_with_other_options_follow_one_another_in_folders_of_their_own(words, capsys):
    quick = [*words, "--task", "tree_depth"]
    assert call(*quick, "--layers", "none", "--heads", "0.1,0.1+1.0", "--sentences", "0", "--seed", "3") == 0
    # the same layers in other words are the same probe
    for layers in ("emb, 1", "emb,1"):
        assert call(*quick, "--layers", layers, "--heads", "none") == 0
    assert call(*quick, "--data", "data/tree_depth.txt", "--layers", "0", "--heads", "0.0") == 0
    assert sorted(path.name for path in Path("runs/probe").iterdir()) == [
        "bert-layers_0-heads_0.0",
        "bert-layers_emb,1-heads_none",
        "bert-layers_none-heads_0.1,0.1+1.0-sentences_all-seed_3",
        "cache",
    ]
    assert Path("runs/probe/bert-layers_0-heads_0.0/tree_depth.json").is_file()
    settings = Path("runs/probe/bert-layers_emb,1-heads_none/settings.json")
    settings.write_text(settings.read_text().replace(FORM, "fit-1"))
    said = refused_at_last(capsys, *words, "--heads", "none", "--layers", "emb,1")
    assert f"settings.json has form 'fit-1' but '{FORM}' is requested; choose another --out" in said
    assert signature(probe).parameters["sentences"].default == request.SENTENCES


@pytest.mark.full
def test_classifiers_that_did_not_come_to_their_end_are_counted(words, monkeypatch, capsys):
    quick = [*words, "--task", "past_present", "--heads", "none"]
    assert call(*quick, "--out", "whole") == 0
    assert "limit of iterations" not in Path("whole/probe.md").read_text()
    monkeypatch.setattr(fitting, "ITERATIONS", 1)
    assert call(*quick, "--out", "short") == 0
    said = "Tense: 3 of 3 classifiers ended at their limit of iterations."
    assert said in Path("short/probe.md").read_text()
    assert said in capsys.readouterr().out


def test_a_folder_of_something_else_is_not_written_to(words, capsys):
    files = {
        "config.json": "{}",
        "model.safetensors": "{}",
        "comparison.json": "{}",
        "settings.json": '{"task": "logic"}',
    }
    for name, content in files.items():
        place = Path(f"of-{name}")
        place.mkdir()
        (place / name).write_text(content)
        said = refused_at_last(capsys, *words, "--out", str(place))
        assert f"{place} holds a model or runs ({name}); choose another --out" in said
        assert [path.name for path in place.iterdir()] == [name]


@pytest.mark.full
def test_a_run_of_sentence_has_heads_and_no_layers(words, tmp_path, capsys):
    rows = Path("data/past_present.txt").read_text().splitlines()
    Path("own.tsv").write_text("".join("\t".join(row.split("\t")[1::2]) + "\n" for row in rows))
    toy = dataclasses.replace(SENTENCE_SCALES["demo"], name="toy", width=8, epochs=1)
    place = tmp_path / "plain" / "seed-0"
    train_run(RunSettings("sentence", toy, parse_arm("plain"), seed=0, data=Path("own.tsv")), place)
    command = ["probe", str(place), *words[2:], "--task", "tree_depth"]
    assert "have no state in each layer; give --layers none to probe its heads" in refused_at_last(capsys, *command)
    assert call(*command, "--layers", "none") == 0
    record = json.loads(Path("runs/probe/plain-seed-0-layers_none/tree_depth.json").read_text())
    frozen = open_frozen(place)
    (heads,) = vectors.find_shape(frozen).heads
    assert [one["name"] for one in record["found"]] == [f"0.{head}" for head in range(heads)]
    # a head that pools has one vector a text, and the run puts out what its heads pooled
    texts = ["the film walked .", "a town"]
    found = vectors.encodings(frozen, texts, tmp_path / "cache", model="m")
    assert found.layers is None
    assert len(found.heads[0]) == 2
    alone = vectors.encodings(frozen, texts[1:], tmp_path / "cache", model="m")
    assert found.heads[0][1] == pytest.approx(alone.heads[0][0], abs=1e-6)
    assert found.heads[0][1] != pytest.approx(found.heads[0][0], abs=1e-3)


def drawn(classes: int, count: int, width: int = 9) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(4)
    # far apart, negative and not in a row, as labels may be
    labels = draw.permutation(np.arange(count) % classes) * 3 - 7
    middles = draw.normal(size=(classes, width))
    return middles[(labels + 7) // 3] + 0.7 * draw.normal(size=(count, width)) + 0.3, labels


def objective(found: SoftmaxRegression | LogisticRegression, penalty: float, vectors, labels) -> float:
    """What both minimize, in float64."""
    weight = found.coef_.astype(np.float64)
    scores = vectors @ weight.T + found.intercept_
    own = scores[np.arange(len(labels)), np.searchsorted(found.classes_, labels)]
    return float(np.mean(logsumexp(scores, axis=1) - own) + penalty / 2 * np.sum(weight**2))


@pytest.mark.full
def test_it_ends_where_scikit_learn_does_in_float64_from_penalty_to_penalty():
    vectors, labels = drawn(300, 1500)
    found = SoftmaxRegression()
    for penalty, gap in ((1e-2, 1e-6), (1e-3, 5e-6), (1e-4, 1e-4)):
        found.set_params(penalty=penalty).fit(vectors, labels)
        assert found.converged_
        assert 0 < found.n_iter_ < found.max_iter
        slow = LogisticRegression(C=1 / (penalty * len(labels)), tol=1e-6, max_iter=3000).fit(vectors, labels)
        least = objective(slow, penalty, vectors, labels)
        assert objective(found, penalty, vectors, labels) < least * (1 + gap)
        np.testing.assert_allclose(found.coef_, slow.coef_, atol=5e-2)
        assert np.mean(found.predict(vectors) == slow.predict(vectors)) > 0.99


def test_it_goes_on_from_its_end_and_not_from_another_set_of_classes(monkeypatch):
    vectors, labels = drawn(110, 700)
    found = SoftmaxRegression(0.02).fit(vectors, labels)
    first = found.n_iter_
    assert found.fit(vectors, labels).n_iter_ <= 1 < first
    found.set_params(penalty=0.019).fit(vectors, labels)
    assert 0 < found.n_iter_ < first
    fresh = SoftmaxRegression(0.01).fit(vectors, labels * 2)
    assert np.array_equal(found.set_params(penalty=0.01).fit(vectors, labels * 2).coef_, fresh.coef_)
    short = SoftmaxRegression(0.01, max_iter=2).fit(vectors, labels)
    assert (short.n_iter_, short.converged_) == (2, False)
    # a fit that stops before its last iteration need not have come to its end
    given = dict.fromkeys(("train", "dev", "test"), Split(vectors, labels))
    assert fit(Classifier(penalties=(1e-3,)), given).converged
    # the loss is read three times at most
    monkeypatch.setattr(softmax_regression, "EVALUATIONS", 0.03)
    assert not fit(Classifier(penalties=(1e-3,)), given).converged
    with pytest.raises(SettingError, match=r"penalty is 0\.0"):
        SoftmaxRegression(0.0).fit(vectors, labels)
    with pytest.raises(SettingError, match="max_iter is 0"):
        SoftmaxRegression(max_iter=0).fit(vectors, labels)


@cases(("classes", "used"), [(100, "LogisticRegression"), (101, "SoftmaxRegression")])
@cases("kind", ["regression", "mlp"])
def test_a_probe_takes_it_for_more_than_a_hundred_classes(classes, used, kind, monkeypatch):
    vectors, labels = drawn(classes, 6 * classes, width=20)
    if kind == "mlp" and classes == 100:
        used = "MLPClassifier"
    for name in {"LogisticRegression", "SoftmaxRegression", "MLPClassifier"} - {used}:
        monkeypatch.setattr(fitting, name, lambda *_, **__: pytest.fail("another classifier"))
    monkeypatch.setattr(fitting, "EPOCHS", 3)
    cut = 5 * classes
    given = {name: Split(vectors[cut:], labels[cut:]) for name in ("dev", "test")}
    given["train"] = Split(vectors[:cut], labels[:cut])
    found = fit(Classifier(kind, penalties=(0.1, 1e-3)), given)
    if kind == "regression":
        assert found.penalty == 1e-3
        assert found.dev > 0.5
        assert found.correct == round(found.dev * classes)
        monkeypatch.setattr(fitting, "ITERATIONS", 1)
        assert (found.converged, fit(Classifier(kind, penalties=(0.1, 1e-3)), given).converged) == (True, False)
