"""`headwise prune` and `headwise merge`: a folder of Hugging Face goes in, a smaller one and a page come out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5EncoderModel,
    T5Model,
)

import headwise as hw
from cases import cases
from fuzz.mutate import BYTES, limit_memory
from heads.transformers_versions import CACHE
from headwise.cli.settings import Shrink
from headwise.cli.shrink_run import score_without, weigh_heads
from headwise.cli.shrink_subject import open_subject
from lab.cli.tiny_models import SIZES, WORDS, write_models
from lab.command import call, refused


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("models"))


def name_places(folders: Path, model: str, out: Path) -> list[str]:
    return [str(folders / model), "--text", str(folders / "text.txt"), "--out", str(out)]


def read(out: Path) -> dict[str, Any]:
    return json.loads((out / "shrinking.json").read_text())


@pytest.mark.full
def test_a_decoder_is_pruned_trained_again_and_loaded_by_transformers(folders: Path, tmp_path: Path, capsys):
    out = tmp_path / "small"
    # the whole model is not trained, and nothing to learn the text from
    options = ["--keep", "0.4", "--lines", "20", "--recover", "20", "--rate", "3e-3", "--recover-from", "text"]
    assert call("prune", *name_places(folders, "llama", out), *options) == 0
    # a share that leaves no whole number of heads
    assert read(out)["title"] == "llama with 4 of its 8 heads"
    states = read(out)["states"]
    assert list(states) == ["before", "after", "trained again"]
    assert (states["before"]["query heads"], states["after"]["query heads"]) == (8, 4)
    assert states["after"]["bytes of cache per token"] * 2 == states["before"]["bytes of cache per token"] == 256
    assert states["after"]["score"] != states["before"]["score"]
    assert states["trained again"]["score"] > states["after"]["score"] + 0.1
    assert states["after"]["ms per generated token"] > 0
    model = AutoModelForCausalLM.from_pretrained(out)
    assert [site.num_heads for site in hw.find_heads(model)] == [2, 2]
    curves = read(out)["curves"]
    assert list(curves) == ["removed one by one", "first order", "random"]
    assert {share: len(runs) for share, runs in curves["random"].items()} == {
        "1": 1,
        "0.75": 3,
        "0.5": 3,
        "0.4": 3,
        "0.25": 3,
    }
    assert curves["removed one by one"]["0.4"] == [pytest.approx(states["after"]["score"], abs=1e-5)]
    shown = capsys.readouterr().out
    assert "removed one by one" in shown
    assert "llama with 4 of its 8 heads: log-likelihood per token, nats " in shown
    chosen, drawn = curves["removed one by one"]["0.4"][0], curves["random"]["0.4"]
    better = "better" if chosen > max(drawn) else "not better"
    assert f"heads by exact is {better} than at random: {chosen:.4f} against {drawn[0]:.4f}" in " ".join(shown.split())
    table = shown.split("The folder is loaded")[0]
    assert max(map(len, table.splitlines())) <= 80
    assert "loaded by transformers alone: AutoModelForCausalLM.from_pretrained" in shown.replace("\n", " ")
    page = (out / "shrinking.html").read_text()
    assert "Ways to choose the heads" in page
    assert "data:image/png" in page
    assert "The score is the log-likelihood per token, nats, on held-out lines" in page
    assert "the cache is of one token in all layers" in page


@pytest.mark.full
def test_an_encoder_is_pruned_to_keep_its_states_and_loaded_by_headwise(folders: Path, tmp_path: Path, capsys):
    out = tmp_path / "small"
    options = ["--keep", "0.75", "--by", "first-order", "--recover", "10", "--json"]
    assert call("prune", *name_places(folders, "bert", out), *options) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == read(out)
    states = record["states"]
    assert states["before"]["score"] == pytest.approx(1.0)
    assert states["after"]["score"] < states["trained again"]["score"] < 1.0
    assert "bytes of cache per token" not in states["before"]
    assert "the cache is" not in (out / "shrinking.html").read_text()
    for loaded in (hw.load(out), AutoModel.from_pretrained(out)):
        assert [site.num_heads for site in hw.find_heads(loaded)] == [3, 3]


@pytest.mark.full
def test_a_decoder_is_merged_and_each_step_told(folders: Path, tmp_path: Path):
    out = tmp_path / "small"
    assert call("merge", *name_places(folders, "llama", out), "--kv-heads", "2") == 0
    record = read(out)
    states = record["states"]
    assert states["after"]["bytes of cache per token"] * 2 == states["before"]["bytes of cache per token"]
    assert [step["way"] for step in record["steps"]][:3] == [
        "whole model",
        "averaged as they are, neighbors",
        "averaged as they are, neighbors, W_O refitted",
    ]
    assert record["steps"][-1]["score"] == pytest.approx(states["after"]["score"], abs=1e-5)
    assert AutoModelForCausalLM.from_pretrained(out).config.num_key_value_heads == 2
    page = (out / "shrinking.html").read_text()
    assert "Ways to merge" in page
    # in the table of steps, and not again in what was cut
    assert page.count("averaged as they are, neighbors, W_O refitted") == 1


@cases(
    ["model", "source", "message"],
    [
        ("bert", "text", "which has no loss"),
        ("bert", "logits", "which has no logits"),
        ("llama", "states", "mean text"),
    ],
)
def test_a_recovery_that_a_model_cannot_have_is_refused(
    folders: Path, tmp_path: Path, capsys, model: str, source: str, message: str
):
    options = ["--recover", "1", "--recover-from", source]
    assert message in " ".join(
        refused(capsys, "prune", *name_places(folders, model, tmp_path / "out"), *options).split()
    )


def test_a_finished_run_is_read_from_the_model_that_it_keeps(folders: Path, tmp_path: Path, capsys):
    run = tmp_path / "plain" / "seed-0"
    run.mkdir(parents=True)
    (run / "settings.json").write_text("{}")
    text = ["--text", str(folders / "text.txt"), "--keep", "0.5", "--out", str(tmp_path / "smaller")]
    assert "is a run that keeps no model in the format of Hugging Face" in refused(capsys, "prune", str(run), *text)
    shutil.copytree(folders / "llama", run / "model")
    opened, own = (
        open_subject(Shrink(model=run, text=folders / "text.txt", lines=40, out=Path())),
        open_subject(Shrink(model=folders / "llama", text=folders / "text.txt", lines=40, out=Path())),
    )
    assert opened.score() == own.score()


def test_the_score_without_heads_is_that_of_the_pruned_model_and_ways_differ(folders: Path):
    subject = open_subject(Shrink(model=folders / "bert", text=folders / "text.txt", lines=20, out=Path()))
    removed = {site.name: [0, 2] for site in subject.heads}
    expected = score_without(subject, removed)
    ways = weigh_heads(subject, lambda _done, _total: None)
    assert len(ways["random"]) == 3
    assert len({tuple(next(iter(draws[0].values())).tolist()) for draws in ways.values()}) == 3
    hw.prune(subject.heads, {0: [0, 2], 1: [0, 2]})
    assert subject.score() == pytest.approx(expected, abs=1e-6)


def test_a_budget_is_written_with_its_map_and_a_short_text_refused(folders: Path, tmp_path: Path, capsys):
    out = tmp_path / "budget.json"
    sizes = ["--sink", "1", "--window", "6", "--keep", "0.5"]
    assert call("budget", *name_places(folders, "llama", out), *sizes) == 0
    assert "key/value heads (#) keep all positions, the others the first 1 and the last 6" in capsys.readouterr().out
    budget = hw.shrinking.KVBudget.load(out)
    assert (budget.keep, budget.sink, budget.window, sorted(budget.scores)) == (0.5, 1, 6, [0, 1])
    assert out.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    assert "exists; expected a new file" in refused(capsys, "budget", *name_places(folders, "llama", out))
    other = tmp_path / "other.json"
    assert "causal language model" in refused(capsys, "budget", *name_places(folders, "bert", other))
    long = ["--window", "100000"]
    assert "give longer texts" in refused(capsys, "budget", *name_places(folders, "llama", other), *long)
    model = AutoModelForCausalLM.from_pretrained(folders / "llama")
    options: dict[str, Any] = {CACHE: budget.cache(), "max_new_tokens": 3, "min_new_tokens": 3}
    tokens = model.generate(torch.ones(1, 12, dtype=torch.long), **options)
    assert tokens.shape == (1, 15)


def save(folders: Path, place: Path, model: Any) -> Path:
    """Save a model with the tokenizer of the others."""
    model.save_pretrained(place)
    shutil.copy(folders / "llama" / "tokenizer.json", place)
    shutil.copy(folders / "llama" / "tokenizer_config.json", place)
    return place


def make_t5(kind: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
    return kind(T5Config(vocab_size=len(WORDS), decoder_start_token_id=0, pad_token_id=0, **sizes))


@pytest.mark.full
def test_an_encoder_decoder_is_refused_and_an_encoder_that_was_saved_alone_loads_again(
    folders: Path, tmp_path: Path, capsys
):
    given = ("--text", str(folders / "text.txt"), "--lines", "8", "--out", str(tmp_path / "small"))
    whole = save(folders, tmp_path / "whole", make_t5(T5Model))
    capsys.readouterr()  # of the bar of transformers
    message = "holds an encoder-decoder, of which this command reads the encoder alone; in a script, hw.prune and"
    assert message in refused(capsys, "prune", str(whole), *given)
    config = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps({**config, "architectures": None}))
    assert message in refused(capsys, "merge", str(whole), "--kv-heads", "2", *given)

    encoder = save(folders, tmp_path / "encoder", make_t5(T5EncoderModel))
    assert call("prune", str(encoder), "--keep", "0.75", *given) == 0
    assert "T5EncoderModel.from_pretrained(folder)" in capsys.readouterr().out
    loaded, said = T5EncoderModel.from_pretrained(tmp_path / "small", output_loading_info=True)
    assert [site.num_heads for site in hw.find_heads(loaded)] == [3, 3]
    assert not said["missing_keys"]
    assert not said["unexpected_keys"]


@pytest.mark.full
def test_a_model_keeps_its_head_and_gpt2_is_scored_by_its_loss(folders: Path, tmp_path: Path):
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=len(WORDS), n_embd=16, n_layer=2, n_head=4, n_positions=64))
    torch.nn.init.normal_(gpt2.transformer.wte.weight)
    classifier = BertForSequenceClassification(BertConfig(**SIZES, num_labels=3))
    for name, model in (("gpt2", gpt2.eval()), ("classifier", classifier.eval())):
        out, folder = tmp_path / f"{name}-small", save(folders, tmp_path / name, model)
        given = ("--text", str(folders / "text.txt"), "--lines", "8", "--out", str(out))
        assert call("prune", str(folder), "--keep", "0.75", *given) == 0
        loaded = hw.load(out)
        assert type(loaded) is type(model)
        assert [site.num_heads for site in hw.find_heads(loaded)] == [3, 3]
        score = read(out)["score"]
        assert score.startswith("log-likelihood" if name == "gpt2" else "fidelity")
        # what was pruned is opened as what it was
        assert type(open_subject(Shrink(model=out, text=folders / "text.txt", lines=8, out=Path())).model) is type(
            model
        )
        if name == "classifier":
            torch.testing.assert_close(loaded.classifier.weight, classifier.classifier.weight)
    lines = (folders / "text.txt").read_text().splitlines()
    ids = [torch.tensor([[WORDS.index(word) for word in line.split()]]) for line in lines[::5][:2]]
    with torch.no_grad():
        expected = sum(-float(gpt2(one, labels=one).loss) for one in ids) / 2
    assert read(tmp_path / "gpt2-small")["states"]["before"]["score"] == pytest.approx(expected, abs=1e-5)


def test_a_class_that_transformers_does_not_have_is_refused(folders: Path, tmp_path: Path, capsys):
    shutil.copytree(folders / "bert", tmp_path / "own")
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    (tmp_path / "own" / "config.json").write_text(json.dumps({**config, "architectures": ["OwnClassifier"]}))
    given = ("prune", str(tmp_path / "own"), "--text", str(folders / "text.txt"), "--out", str(tmp_path / "small"))
    assert "holds a model of the class OwnClassifier, which transformers does not have" in refused(capsys, *given)


def test_a_line_of_one_token_is_left_out_alone(folders: Path, tmp_path: Path):
    lines = (folders / "text.txt").read_text().splitlines()
    (tmp_path / "text.txt").write_text("\n".join([*lines[:7], "a", *lines[7:20]]))
    subject = open_subject(Shrink(model=folders / "llama", text=tmp_path / "text.txt", lines=40, out=Path()))
    assert sorted(place for batch in subject.chosen for place in batch.places) == [*range(5), *range(6, 16)]
    for batch in subject.chosen:
        assert {len(tensor) for tensor in (batch.keep, batch.tokens, *batch.inputs.values())} == {len(batch.places)}
        assert [len(tokens) for tokens in batch.tokens] == batch.keep.sum(1).tolist()
        assert int(batch.keep.sum(1).min()) > 1


@cases(("positions", "prompt"), [(64, 13), (24, 8), (16, 0)])
def test_tokens_are_generated_within_the_positions_after_prompts_without_padding(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, positions: int, prompt: int
):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(WORDS), n_embd=16, n_layer=1, n_head=4, n_positions=positions)
    folder = save(folders, tmp_path / "gpt2", GPT2LMHeadModel(config))
    # a folder may ask for anything: each beam needs memory
    (folder / "generation_config.json").write_text(json.dumps({"num_beams": 10**7, "cache_implementation": "static"}))
    subject = open_subject(Shrink(model=folder, text=folders / "text.txt", lines=40, out=Path()))
    given: list[torch.Tensor] = []
    generate = type(subject.model).generate

    def follow(self: Any, ids: torch.Tensor, **options: Any) -> Any:
        given.append(ids)
        assert options["attention_mask"].all()
        return generate(self, ids, **options)

    monkeypatch.setattr(type(subject.model), "generate", follow)
    with limit_memory(BYTES):
        found = subject.time({"whole": subject.model})["whole"]
    assert subject.model.generation_config.num_beams == 10**7
    assert ("generated token" in found) is (prompt > 0)
    assert {ids.shape[1] for ids in given} == ({prompt} if prompt else set())
    # the text has lines of 10 to 14 words, and the first word of the vocabulary is the padding
    assert all(len(ids) and bool((ids > 0).all()) for ids in given)
