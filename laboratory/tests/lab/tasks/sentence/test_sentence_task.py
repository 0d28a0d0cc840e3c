"""The sentence task: its sets, the classifiers of sentences, arms, scores, analyses and refusals."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn import metrics

import headwise as hw
from fuzz.mutate import read_in_time
from headwise.errors import DataError, SettingError, ShapeError
from headwise.nn.multihead import MultiheadAttention
from headwise.repulsion.rules import SVGD, CosineRepulsion, update
from headwise_lab.analyses.force_directions import measure_directions, radial_share
from headwise_lab.analyses.registry import AnalysisSettings, analyze, is_analyzed
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.scale import ScaleOptions, with_options
from headwise_lab.experiment.seeding import initialize_parameters
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.models.bag_of_words import naive_bayes_regression
from headwise_lab.models.encoder import EncoderLayer, SizedAttention
from headwise_lab.models.text_classifiers import SentenceCNN, SentenceLSTM, SentenceTransformer, WordVectors
from headwise_lab.tasks.classification.scales import CLASSIFICATION_SCALES
from headwise_lab.tasks.logic.scales import LOGIC_SCALES
from headwise_lab.tasks.sentence.analyses import measure_attention, measure_entropy, measure_reliability
from headwise_lab.tasks.sentence.model import HeadGate, SelfAttentive
from headwise_lab.tasks.sentence.scales import SENTENCE_SCALES, SentenceScale
from headwise_lab.tasks.sentence.task import SentenceTask, load_sentences, probabilities, scores
from headwise_lab.texts import words
from headwise_lab.texts.data import collate
from headwise_lab.texts.sets import read_set
from headwise_lab.training.attach import attach_arm
from headwise_lab.training.train import train_run
from lab.published import DATA, needs
from lab.tasks.sentence.sentence_sets import sentence, write_pairs, write_profiles, write_texts
from lab.tasks.toys import SENTENCE as TOY

pytest.importorskip("spacy")
TASK = SentenceTask()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("data") / "mine.tsv", 160)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("data") / "pairs", 96)


def settings_of(arm: str, data: Path, cache: Path, scale: SentenceScale = TOY, seed: int = 3) -> RunSettings:
    return RunSettings("sentence", scale, parse_arm(arm), seed=seed, data=data, cache=cache)


def test_an_answer_depends_on_the_words_alone_and_losses_are_the_models(texts, pairs):
    for place in (texts, pairs):
        data = TASK.load(place, TOY, None)
        model = TASK.model(data, TOY).double().eval()
        examples = [data.train[number] for number in range(6)]
        together = model(**{n: v for n, v in collate(examples).items() if n != "labels"})["logits"]
        alone = [model(**{n: v for n, v in collate([one]).items() if n != "labels"})["logits"] for one in examples]
        assert torch.allclose(together, torch.cat(alone), rtol=1e-10)
        # padding never receives attention
        tokens = collate([data.train[number] for number in range(8)])["tokens"]
        weights = model.attend(tokens)[1]
        assert (tokens == 0).any()
        assert not weights.masked_select((tokens == 0).unsqueeze(1)).any()
        assert torch.allclose(weights.sum(-1), torch.ones(8, TOY.heads, dtype=torch.float64))
        with torch.no_grad():
            losses = TASK.losses(model, data)
            wanted = float(model(**collate([data.test[number] for number in range(len(data.test))]))["loss"])
            assert losses[:, 0].mean() == pytest.approx(wanted, rel=1e-5)
            right = probabilities(model, data.test).argmax(1) == data.test.labels
            assert np.array_equal(TASK.greedy(model, data), right)
        with pytest.raises(ShapeError, match="text 1 of the batch is padding alone"):
            model.attend(torch.tensor([[2, 3], [0, 0]]))


def test_the_gate_is_lins_head_by_head():
    torch.manual_seed(0)
    gate = HeadGate(3, 4)
    one, other = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    found = gate(one, other)
    for b in range(2):
        for h in range(3):
            wanted = (one[b, h] @ gate.first[h]) * (other[b, h] @ gate.second[h])
            assert torch.allclose(found[b, h], wanted, atol=1e-6)
    assert float(gate.first.detach().std()) == pytest.approx((1 / 4) ** 0.5, rel=0.3)


def test_both_texts_of_a_pair_reach_the_answer_and_the_penalty(pairs):
    data = TASK.load(pairs, TOY, None)
    model, methods = attach_arm(TASK, parse_arm("frobenius"), data, TOY, seed=1)
    assert isinstance(model, SelfAttentive)
    batch = collate([data.train[number] for number in range(4)])
    changed = {**batch, "second": batch["second"].flip(0)}
    model.eval()
    assert not torch.allclose(model(**batch)["logits"], model(**changed)["logits"])
    model.train()
    model.words.dropout = 0.0
    outputs = model(**batch)
    value = float(methods.penalty().detach())
    both = []
    for tokens in (batch["tokens"], batch["second"]):
        a = model.attend(tokens)[1]
        both += [(one @ one.T - torch.eye(TOY.heads)).square().sum() for one in a]
    methods.penalty.taps.read()
    assert value == pytest.approx(float(torch.stack(both).mean().detach()), rel=1e-4)
    assert outputs["loss"].requires_grad
    with pytest.raises(ShapeError, match="got no second text"):
        model(batch["tokens"])


def test_repulsion_of_a_pair_acts_once_a_step(pairs):
    data = TASK.load(pairs, TOY, None)
    model, methods = attach_arm(TASK, parse_arm("svgd:alpha=0.5"), data, TOY, seed=1)
    methods.repel(torch.optim.SGD(model.parameters(), lr=0.1))
    model(**collate([data.train[number] for number in range(4)]))["loss"].backward()
    weight = model.attention.score.weight
    wanted = update(SVGD(alpha=0.5), weight, weight.grad).gradient
    methods.apply_repulsion()
    assert torch.allclose(weight.grad, wanted, rtol=1e-4, atol=1e-7)


def test_scores_are_scikit_learns_and_errors_add_up():
    generator = np.random.default_rng(0)
    positive = generator.uniform(size=50)
    labels = (generator.uniform(size=50) < positive).astype(np.int64)
    found = scores(np.stack([1 - positive, positive], axis=1), labels)
    assert found["AUC-PR"] == pytest.approx(metrics.average_precision_score(labels, positive))
    assert found["AUC-ROC"] == pytest.approx(metrics.roc_auc_score(labels, positive))
    assert found["MCC"] == pytest.approx(metrics.matthews_corrcoef(labels, positive > 0.5))
    assert found["F1"] == pytest.approx(metrics.f1_score(labels, positive > 0.5))
    assert found["NLL"] == pytest.approx(metrics.log_loss(labels, positive))
    assert found["error"] == pytest.approx(100 * np.mean((positive > 0.5) != labels))
    assert set(scores(np.full((4, 3), 1 / 3), np.array([0, 1, 2, 0]))) == {"error", "NLL", "ECE", "OE"}


def test_naive_bayes_regression_of_three_classes_finds_the_telling_words():
    train = [[word, "the"] for word in ("red", "green", "blue") for _ in range(4)]
    found = naive_bayes_regression(train, [["green"], ["blue", "the"]], np.repeat([0, 1, 2], 4), seed=0)
    assert found.argmax(axis=1).tolist() == [1, 2]
    assert np.allclose(found.sum(axis=1), 1.0)


def test_the_analyses_of_a_trained_run(texts, tmp_path):
    other = write_texts(tmp_path / "other.tsv", 30)
    scale = dataclasses.replace(TOY, out_of_domain=other)
    settings = settings_of("svgd:kernel=cosine", texts, tmp_path / "cache", scale)
    train_run(settings, tmp_path / "run")
    sure = measure_reliability(settings, tmp_path / "run")
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    assert sure["numbers"]["test_ECE"] == pytest.approx(record["answers"]["ECE"])
    assert sum(sure["bins"]["counts"]) == 16
    unsure = measure_entropy(settings, tmp_path / "run")
    assert len(unsure["entropies"]) == 30
    assert 0 < unsure["numbers"]["other_entropy"] <= math.log(2)
    assert unsure["text"] == "30 of other.tsv"
    lines = [line.split("\t")[1] for line in other.read_text().splitlines()]
    asked = AnalysisSettings("predictive-entropy", settings)
    for content, count in (("\n".join(lines), 30), ("\n".join(f"0\t{line}" for line in lines[:20]), 20)):
        # whatever its labels, and another file of that name is another question
        other.write_text(content + "\n")
        assert not is_analyzed(asked, tmp_path / "run")
        analyze(asked, tmp_path / "run")
        assert is_analyzed(asked, tmp_path / "run")
        kept = json.loads((tmp_path / "run" / "analysis-predictive-entropy.json").read_text())
        assert (kept["text"], len(kept["entropies"])) == (f"{count} of other.tsv", count)
        assert kept["entropies"] == pytest.approx(unsure["entropies"][:count], abs=1e-6)
    pushed = measure_directions(settings, tmp_path / "run")["numbers"]
    assert 0 < pushed["radial_share_at_start"] <= 1
    with pytest.raises(DataError, match="no test text has 20 to 40 words"):
        measure_attention(settings, tmp_path / "run")
    bare = dataclasses.replace(settings, scale=TOY)
    with pytest.raises(SettingError, match="--out-of-domain"):
        measure_entropy(bare, tmp_path / "run")


def test_attention_maps_hold_whole_texts_of_the_class_next_to_the_last(tmp_path):
    path = tmp_path / "long.tsv"
    lines = [f"{n % 3}\t" + " ".join(f"word{(n + place) % 30}" for place in range(24)) + f" n{n}" for n in range(90)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    settings = settings_of("plain", path, tmp_path / "cache")
    train_run(settings, tmp_path / "run")
    found = measure_attention(settings, tmp_path / "run")
    assert [one["label"] for one in found["maps"]].count("1") >= 1
    assert found["maps"][0]["label"] == "1"
    weights = np.array(found["maps"][0]["weights"])
    assert weights.shape == (TOY.heads, len(found["maps"][0]["words"])) == (4, 25)
    assert np.allclose(weights.sum(axis=1), 1.0)
    assert 1 / TOY.heads <= found["numbers"]["heads_on_one_word"] <= 1


def test_the_radial_share_is_one_for_growth_and_nothing_without_repulsion():
    nearly_orthogonal = torch.eye(3) + 0.01
    assert radial_share(CosineRepulsion(alpha=1.0), nearly_orthogonal) > 0.9
    assert radial_share(SVGD(alpha=0.0), nearly_orthogonal) is None


def test_options_and_missing_data_are_refused(texts):
    scale = with_options(TOY, ScaleOptions("demo", out_of_domain=texts), "sentence")
    assert (scale.name, scale.out_of_domain) == ("toy", texts)
    with pytest.raises(SettingError, match="takes no --out-of-domain"):
        with_options(LOGIC_SCALES["demo"], ScaleOptions("demo", out_of_domain=texts), "logic")


@pytest.mark.slow
@needs("snli")
def test_sick_is_learned_beyond_the_most_frequent_class(tmp_path):
    scale = dataclasses.replace(
        SENTENCE_SCALES["cpu"], name="short", units=24, attention=16, heads=8, hidden=64, width=40, epochs=2
    )
    settings = settings_of("plain", DATA / "snli", tmp_path / "cache", scale)
    train_run(settings, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["dev_score"] > 0.58


CLASSIFYING = dataclasses.replace(CLASSIFICATION_SCALES["demo"], width=10, heads=3, head_size=4, hidden=14, dropout=0.3)
MODELS = [SentenceTransformer, SentenceLSTM, SentenceCNN]


def vectors(known: int = 0) -> WordVectors:
    ids = np.arange(5, 5 + known)
    return WordVectors(20, 10, dropout=0.3, ids=ids, known=np.full((known, 10), 3.0, dtype=np.float32))


def model(kind, seed: int = 3):
    made = kind(vectors(), 3, *([CLASSIFYING] if kind is SentenceTransformer else []))
    initialize_parameters(made, seed)
    return made


def test_padding_and_other_sentences_change_nothing_and_the_order_of_the_words_does():
    alone = torch.tensor([[2, 7, 8, 9, 3]])
    padded = torch.tensor([[2, 7, 8, 9, 3, 0, 0, 0], [2, 11, 12, 13, 14, 15, 16, 3]])
    for kind in MODELS:
        classifier = model(kind).eval()
        one, both = classifier(alone)["logits"], classifier(padded)["logits"]
        torch.testing.assert_close(one[0], both[0])
        assert not torch.allclose(both[0], both[1])
        # a text that lost all its words still has its two special tokens
        assert torch.isfinite(classifier(torch.tensor([[2, 3]]))["logits"]).all()
        assert not torch.allclose(one, classifier(torch.tensor([[2, 9, 8, 7, 3]]))["logits"])
        numbered = classifier(alone, labels=torch.tensor([2]), numbers=torch.tensor([77]))
        assert torch.equal(numbered["logits"], one)
        torch.testing.assert_close(numbered["loss"], -one.log_softmax(-1)[0, 2])


def test_heads_of_any_size_are_found_and_proved():
    classifier = model(SentenceTransformer)
    heads = hw.find_heads(classifier)
    assert [(site.num_heads, site.head_size, site.width) for site in heads] == [(3, 4, 10)] * 2
    assert len(hw.verify(heads, [torch.tensor([[2, 7, 8, 9, 3], [2, 5, 3, 0, 0]])]).sites) == 2


def test_attention_with_heads_of_a_size_is_the_equation():
    attention = SizedAttention(10, 3, head_size=4).double()
    states = torch.randn(2, 5, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    found = attention(states, states, states, key_padding_mask=padding, need_weights=False)[0]
    heads = []
    for head in range(3):
        rows = slice(4 * head, 4 * head + 4)
        q, k, v = (
            states @ weight[rows].T
            for weight in (attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight)
        )
        scores = (q @ k.mT / 2.0).masked_fill(padding[:, None, :], -torch.inf)
        heads.append(scores.softmax(-1) @ v)
    torch.testing.assert_close(found, torch.cat(heads, -1) @ attention.out_proj.weight.T)


def test_heads_that_share_the_width_are_the_module_they_were():
    one, other = SizedAttention(12, 3), MultiheadAttention(12, 3, bias=False, batch_first=True)
    assert one.state_dict().keys() == other.state_dict().keys()
    initialize_parameters(one, 7)
    initialize_parameters(other, 7)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    layer = EncoderLayer(12, heads=3, norm_first=True, dropout=0.0)
    assert layer.feed_forward[0].out_features == 24


def test_known_vectors_start_as_given_the_others_as_large_and_padding_stays_zero():
    table = vectors(known=2)
    initialize_parameters(table, 5)
    assert torch.equal(table.weight[0], torch.zeros(10))
    torch.testing.assert_close(table.weight[5:7], torch.full((2, 10), 3.0))
    drawn = vectors()
    initialize_parameters(drawn, 5)
    assert torch.equal(drawn.weight[0], torch.zeros(10))
    torch.testing.assert_close(table.weight[7:], drawn.weight[7:] * 15.0)
    assert 0.15 < float(drawn.weight[1:].detach().std()) < 0.25
    # word dropout acts in training alone
    table = vectors()
    tokens = torch.tensor([[5, 6, 7]])
    assert (table.train()(tokens) == 0).any()
    assert torch.equal(table.eval()(tokens), table.weight[tokens])


def test_shapes_and_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ShapeError, match=r"tokens has shape \(3,\); expected \(B, L\)"):
        model(SentenceTransformer)(torch.tensor([2, 5, 3]))
    with pytest.raises(SettingError, match="num_labels is 1"):
        SentenceLSTM(vectors(), 1)
    with pytest.raises(SettingError, match="width is 11; expected an even number"):
        dataclasses.replace(CLASSIFYING, width=11)


spacy = pytest.importorskip("spacy")
SCALE = dataclasses.replace(SENTENCE_SCALES["demo"], name="toy", train_examples=None, min_count=1)


def scale(**changes: object) -> SentenceScale:
    return dataclasses.replace(SCALE, **changes)


def texts_of(data, split: str) -> list[str]:
    return [" ".join(words) for words in data.words(getattr(data, split))]


def test_a_file_of_ones_own_is_cut_by_its_texts_and_encoded(tmp_path):
    path = write_texts(tmp_path / "mine.tsv", 100)
    data = load_sentences(path, SCALE, tmp_path / "cache")
    assert [len(data.train), len(data.dev), len(data.test)] == [80, 10, 10]
    again = load_sentences(path, SCALE, tmp_path / "cache")
    assert again.fingerprint == data.fingerprint
    assert again.train.texts[0].values.tolist() == data.train.texts[0].values.tolist()
    one = data.train[3]
    known = [data.vocabulary[token] for token in one["tokens"]]
    assert " ".join(known) == texts_of(data, "train")[3]
    assert data.labels[one["label"]] == ("1" if {"awful", "dirty"} & {*known} else "0")
    # a word of test that training does not have is unknown
    assert all(token < len(data.vocabulary) for text in data.test.texts for token in text.values)
    assert data.counts()["test_words_unknown"] > 0


def test_words_are_those_of_spacys_tokenizer_in_lower_case_and_cut(tmp_path):
    path = tmp_path / "mine.tsv"
    path.write_text("".join(f"{n % 2}\tIt Didn't  work, #{n} $5!\n" for n in range(40)), encoding="utf-8")
    data = load_sentences(path, scale(max_words=5), None)
    assert texts_of(data, "train")[0] == "it did n't work ,"
    assert data.texts.cut == 40


def test_a_word_of_any_length_is_cut_in_time_and_lines_share_a_tokenizer(monkeypatch):
    made: list[str] = []
    blank = spacy.blank
    monkeypatch.setattr(spacy, "blank", lambda name: made.append(name) or blank(name))
    words._make_tokenizer.cache_clear()
    assert [*words.tokenize(["It didn't.", "It did."])] == [["it", "did", "n't", "."], ["it", "did", "."]]
    # a hundred thousand brackets took minutes
    text = f"It didn't {'(' * 100_000} end, {'x' * 1_000} {'y' * 1_050}."
    found = []
    read_in_time(lambda: found.extend(next(words.locate_words([text]))))
    assert all(text[start:end].lower() == word for word, (start, end) in found)
    others = [word for word, _ in found if word != "("]
    assert others == ["it", "did", "n't", "end", ",", "x" * 1_000, *["y" * 100] * 10, "y" * 50, "."]
    assert len(found) == len(others) + 100_000
    assert made == ["en"]


def test_a_premise_or_an_author_is_in_one_split_alone(tmp_path):
    pairs = tmp_path / "pairs.tsv"
    lines = [f"{n % 2}\tpremise {n // 3} here\thypothesis {n}" for n in range(90)]
    pairs.write_text("\n".join(lines) + "\n", encoding="utf-8")
    data = load_sentences(pairs, SCALE, None)
    assert data.pairs
    assert len(data.train[0]["second"]) == 2
    found = [{text.split()[1] for text in texts_of(data, split)} for split in ("train", "dev", "test")]
    assert all(found)
    assert not found[0] & found[1]
    assert not found[0] & found[2]
    tweets = load_sentences(write_profiles(tmp_path / "pan"), SCALE, None)
    authors = [{text.split()[3] for text in texts_of(tweets, split)} for split in ("train", "dev", "test")]
    assert sum(map(len, authors)) == len(set.union(*authors)) == 12


def test_pans_markup_is_taken_off_and_its_ages_are_the_labels(tmp_path):
    folder = write_profiles(tmp_path, authors=2, tweets=1)
    found = read_set(folder)
    assert [(one.label, one.texts, one.group) for one in found.splits["all"]] == [
        ("18-24", ("tweet 0 of 0 & friends",), "a0"),
        ("25-34", ("tweet 0 of 1 & friends",), "a1"),
    ]
    for text, read in (
        ("<documents><document><![CDATA[<p class='x'>a < b > c <br/>d</p>]]></document></documents>", "a < b > c d"),
        (f"<document>one <b>two</b> &amp;#{'9' * 5000}; <![CDATA[three]]></document>", "one two \ufffd three"),
    ):
        (folder / "a0.xml").write_text(f"<author>{text}</author>", encoding="utf-8")
        assert read_set(folder).splits["all"][0].texts == (read,)
    # an author whose age is not known is left out
    write_profiles(folder, authors=3, tweets=2)
    (folder / "truth.txt").write_text("a0:::f:::18-24\na1:::m:::XX-XX\na2:::f:::25-34\n", encoding="utf-8")
    found = read_set(folder)
    assert {(one.group, one.label) for one in found.splits["all"]} == {("a0", "18-24"), ("a2", "25-34")}
    assert found.description == "tweets by their author's age (1 authors of unknown age left out)"
    assert [path.name for path in found.paths] == ["a0.xml", "a2.xml"]


def test_a_profile_that_does_not_fit_is_refused_by_its_file(tmp_path):
    for number, (name, content, message) in enumerate(
        (
            ("truth.txt", "a0:::female:::18-24\nnobody", "line 2: 'nobody'; expected author:::gender:::age"),
            ("truth.txt", "a0:::female:::18-24", "no line for author 'a1'"),
            ("truth.txt", "a0:::f:::18-24\na1:::f:::25-34\na9:::f:::25-34", "names author 'a9'"),
            ("truth.txt", "a0:::f:::18-24\na0:::f:::25-34", "line 2: author 'a0' occurs a second time"),
            ("truth.txt", "a0:::f:::XX-XX\na1:::f:::XX-XX", "knows the age of no author"),
            ("a0.xml", "<author>", "a0.xml, line 1: no XML that can be read"),
            ("a0.xml", "<author>\n<document>&x;</document></author>", "a0.xml, line 2: no XML .*undefined entity"),
            (
                "a0.xml",
                '<?xml version="1.0" encoding="nothing"?><author/>',
                "a0.xml, line 1: no XML .*unknown encoding",
            ),
            ("a0.xml", '<?xml version="1.0" encoding="utf-7"?><author/>', "a0.xml, line 1: .*multi-byte encodings"),
            ("a0.xml", '<?xml version="1.0" encoding="idna"?><author/>', "a0.xml, line 1: no XML .*: convert the file"),
        )
    ):
        folder = write_profiles(tmp_path / str(number), authors=2)
        (folder / name).write_text(content, encoding="utf-8")
        with pytest.raises(DataError, match=message):
            read_set(folder)


def test_yelps_own_file_and_its_parts_are_read(tmp_path):
    reviews = tmp_path / "own" / "review.json.gz"
    reviews.parent.mkdir()
    lines = [json.dumps({"stars": 1.0 + n % 5, "text": f"review\n{n}"}) for n in range(60)]
    reviews.write_bytes(gzip.compress("\n".join(lines).encode()))
    found = read_set(reviews.parent).splits["all"]
    assert (found[6].label, found[6].texts) == ("2", ("review 6",))
    deep, huge = '{"stars":' * 100_000, "9" * 5000
    for line in (
        *(deep, f'{{"stars": {huge}, "text": ""}}', '{"stars": true, "text": ""}', '{"stars": 2.5, "text": ""}'),
        *('{"stars": 2.0}', '{"stars": 2, "text": "\\ud83d"}', '{"stars": 2, "text": null}', "[]"),
        '{"stars": Infinity, "text": "fine"}',
    ):
        reviews.write_bytes(gzip.compress(f"{lines[0]}\n{line}\n".encode()))
        with pytest.raises(DataError, match=r"line 2: expected a JSON object with stars and text \(.+\); correct or"):
            read_set(reviews.parent)
    for name in ("part1.tsv", "part2.tsv"):
        write_texts(tmp_path / "parts" / name, 30)
    assert len(read_set(tmp_path / "parts").splits["all"]) == 60


def test_snli_without_its_training_file_is_sick(tmp_path):
    folder = tmp_path / "snli"
    (folder / "sick").mkdir(parents=True)
    (folder / "dev.tsv").write_text("neutral\ta\tb\n", encoding="utf-8")
    header = "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\r\n"
    for name in ("train", "trial", "test_annotated"):
        (folder / "sick" / f"SICK_{name}.txt").write_text(
            header + "1\tA dog runs\tA cat sits\t2.5\tNEUTRAL\r\n2\tA dog runs\tIt is a dog\t4\tENTAILMENT\r\n",
            encoding="utf-8",
        )
    found = read_set(folder)
    assert "training file is absent" in found.description
    assert found.splits["dev"][0].texts == ("A dog runs", "A cat sits")
    assert [one.label for one in found.splits["train"]] == ["neutral", "entailment"]


def test_what_stands_in_test_is_left_out_of_training_and_undecided_pairs_are_dropped(tmp_path):
    folder = write_pairs(tmp_path, 40)
    train, test = folder / "train.tsv", folder / "test.tsv"
    first = test.read_text().splitlines()[0]
    train.write_text(train.read_text() + first + "\n-\tnobody\tagreed\n", encoding="utf-8")
    data = load_sentences(folder, SCALE, None)
    assert (len(data.train), data.dropped) == (40, 1)
    assert "1 left out of training or dev" in data.summary()


def test_the_share_of_a_label_is_thinned_by_texts_alone(tmp_path):
    path = write_texts(tmp_path / "mine.tsv", 400)
    data = load_sentences(path, scale(positive=0.2), None)
    for split in (data.train, data.dev, data.test):
        assert split.labels.mean() == pytest.approx(0.2, abs=0.02)
    # order in the file does not matter
    lines = path.read_text().splitlines()
    path.write_text("\n".join(reversed(lines)) + "\n", encoding="utf-8")
    other = load_sentences(path, scale(positive=0.2), None)
    assert {*texts_of(other, "train")} == {*texts_of(data, "train")}
    with pytest.raises(SettingError, match="between 0 and 1"):
        scale(positive=1.0)


def test_what_does_not_fit_is_refused(tmp_path):
    path = write_texts(tmp_path / "mine.tsv", 400)
    other = "".join(f"{'ab'[n % 2]}\t{sentence(n, '1')}\n" for n in range(40))
    for content, changes, message in (
        (path.read_text(), {"positive": 0.7}, "less than 70"),
        (other, {"positive": 0.2}, "needs labels 0 and 1"),
        ("0\tone\ttwo\n1\tone\n", {}, "line 2: 2 fields; expected 3"),
        ("0\tone\ttwo\n\tone\ttwo\n", {}, "line 2: the label is empty"),
        ("0\tone\n0\ttwo\n", {}, "one label"),
    ):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(DataError, match=message):
            load_sentences(path, scale(**changes), None)


def test_a_header_says_what_the_columns_are(tmp_path):
    one, two = ("it is fine",), ("a dog runs", "it moves")
    for header, row, texts in (
        ("sentiment\ttext\tsource", "pos\tit is fine\tweb", one),
        ("target\treview\tauthor", "pos\tit is fine\tann", one),
        ("id\tclass\ttext", "7\tpos\tit is fine", one),
        ("class\tpremise\thypothesis", "pos\ta dog runs\tit moves", two),
        ("category\tsentence1\tsentence2\tgold_label", "fiction\ta dog runs\tit moves\tpos", two),
        ("id\tsentence2\tlabel\tsentence1", "7\tit moves\tpos\ta dog runs", two),
    ):
        other = row.replace("pos", "neg")
        (tmp_path / "mine.tsv").write_text(f"{header}\n{row}\n{other}\n", encoding="utf-8")
        found = [(one.label, one.texts) for one in read_set(tmp_path / "mine.tsv").splits["all"]]
        assert found == [("pos", texts), ("neg", texts)]
    # without one a file of pairs may begin with any label
    (tmp_path / "mine.tsv").write_text("y\ta dog runs\tit moves\nn\ta cat\ta dog\n", encoding="utf-8")
    assert [one.label for one in read_set(tmp_path / "mine.tsv").splits["all"]] == ["y", "n"]


def test_vectors_are_read_and_their_words_kept_however_rare(tmp_path):
    path = write_texts(tmp_path / "mine.tsv", 60)
    vectors = tmp_path / "vectors.txt"
    width = 4
    vectors.write_text("awful 1 2 3 4\nabsent 1 1 1 1\n7 0 0 0 9\n", encoding="utf-8")
    data = load_sentences(path, scale(embeddings=vectors, width=width, min_count=50), tmp_path / "cache")
    ids, known = data.vectors(width)
    assert {data.vocabulary[index] for index in ids} <= {"awful", "7"}
    assert [1.0, 2.0, 3.0, 4.0] in known.tolist()
    assert load_sentences(path, scale(width=width), None).fingerprint != data.fingerprint


@needs("yelp")
def test_the_published_sets_are_read_whole():
    sizes = {
        name: len(next(iter(found.splits.values())))
        for name in ("yelp", "snli", "cyberbullying/twitter.tsv")
        for found in [read_set(DATA / name)]
    }
    assert sizes == {"yelp": 10_000, "snli": 4_500, "cyberbullying/twitter.tsv": 16_848}
    labels = np.unique([one.label for one in read_set(DATA / "yelp").splits["all"]])
    assert labels.tolist() == ["1", "2", "3", "4", "5"]
