"""`headwise translate` as a person meets it: another process, its streams, and the runs of the folder it is given."""

from __future__ import annotations

import dataclasses
import io
import json
import random
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from cases import Made, cases, tiers
from headwise.errors import DataError, SettingError
from headwise_lab.data.line_streams import LONGEST_LINE, read_lines
from headwise_lab.data.subwords import END
from headwise_lab.experiment import run_folder
from headwise_lab.frozen.open import open_frozen
from headwise_lab.frozen.vectors import encodings
from headwise_lab.tasks.translation import decoding
from headwise_lab.tasks.translation.decoding import EXTRA, LONGER
from headwise_lab.tasks.translation.translator import open_translator, translate_lines
from headwise_lab.training.train import train_run
from lab.sealing import seal_again
from lab.streamed import answered, started
from lab.tasks.translation.test_translation_task import ARM, TOY, settings
from lab.tasks.translation.translation_toy import WORDS

TESTED = 12


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Finished runs by name, and "corpus": the folder they learned from."""
    place = tmp_path_factory.mktemp("runs")
    corpus = place / "corpus"
    corpus.mkdir()
    draw = random.Random(5)
    for name, size in (("train", 200), ("val", 20), ("test_2016_flickr", 30)):
        source = [draw.choices(list(WORDS), k=draw.randint(2, 12)) for _ in range(size)]
        (corpus / f"{name}.en").write_text("".join(" ".join(line) + "\n" for line in source))
        (corpus / f"{name}.de").write_text("".join(" ".join(WORDS[w] for w in line) + "\n" for line in source))
    better = {"width": 32, "epochs": 6, "learning_rate": 1e-2, "train_examples": 200, "dropout": 0.0}
    runs = {
        "routed": (f"{ARM[: ARM.index('+em')]}+em:capsules=4,kinds=self,votes=per-head", "seq2seq"),
        "drophead": ("drophead+trunk:layers=0,kinds=cross", "seq2seq"),
        "marian": ("simple:layers=0,kinds=decoder,capsules=8", "marian"),
    }

    def train(name: str) -> Path:
        arm, model = runs[name]
        scale = dataclasses.replace(TOY, model=model, **better, beams=3, length_penalty=0.7)
        train_run(settings(arm, corpus, place / "cache", scale), place / name)
        return place / name

    found = Made(train)
    found["corpus"] = corpus
    return found


@pytest.mark.full
@cases("name", ["routed", "marian"])
def test_the_encoder_of_a_run_can_be_probed(trained, tmp_path, name):
    frozen = open_frozen(trained[name])
    texts = sources(trained)
    found = encodings(frozen, texts, tmp_path, model="m")
    (batch,) = frozen.read(texts[:1])
    with torch.no_grad():
        top = frozen.model(**batch.inputs).last_hidden_state
    np.testing.assert_allclose(found.layers[-1, 0], top[0].mean(0).cpu(), atol=1e-5)
    assert len(found.layers) == 1 + len(found.heads) == 1 + TOY.encoder_layers
    assert all(array.shape == (TESTED, found.layers.shape[2]) for array in found.heads)


def sources(trained: dict[str, Path]) -> list[str]:
    return (trained["corpus"] / "test_2016_flickr.en").read_text().splitlines()[:TESTED]


def lines_of(folder: Path, given: bytes, window: int = 10, **changes) -> list[str]:
    """Lines of output, without another process."""
    output = io.BytesIO()
    translate_lines(open_translator(folder, **changes), read_lines(io.BytesIO(given), "text"), output, window=window)
    return output.getvalue().decode().split("\n")[:-1]


@tiers("name", ["routed"], ["drophead", "marian"])
def test_a_run_translates_its_test_set_as_it_did_when_it_was_tested(trained, name):
    expected = (trained[name] / "predictions.txt").read_text().split("\n")[:-1]
    assert len(set(expected)) > 3
    given = "".join(f"{line}\n" for line in sources(trained)).encode()
    assert lines_of(trained[name], given, 7, batch=5) == expected
    if name == "marian":
        assert answered("translate", given, str(trained[name]), "--batch", "5", "--window", "7") == (0, expected, "")


def test_what_routes_heads_in_a_run_routes_them_when_it_translates(trained):
    module = open_translator(trained["routed"]).model.encoder.layers[0].attention.out_proj
    assert type(module.setting.votes).__name__ == "PerHead"
    assert module.setting.capsules == 4
    modules = open_translator(trained["drophead"]).model.decoder.layers[0]
    assert type(modules.cross_attention.out_proj.setting).__name__ == "Trunk"
    assert not hasattr(modules.attention.out_proj, "setting")


@pytest.mark.full
def test_the_first_translations_come_before_the_input_ends(trained):
    lines = sources(trained)
    expected = (trained["routed"] / "predictions.txt").read_text().split("\n")
    with started("translate", str(trained["routed"]), "--window", "3") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for window in (lines[:3], lines[3:6]):
            process.stdin.write("".join(f"{line}\n" for line in window).encode())
            process.stdin.flush()
            # a line that does not come ends the process, and the read with it
            late = threading.Timer(200, process.kill)
            late.start()
            found = [process.stdout.readline().decode().rstrip("\n") for _ in window]
            late.cancel()
            assert found == [expected[lines.index(line)] for line in window]
        assert process.poll() is None
        rest, said = process.communicate(f"{lines[6]}\n".encode(), timeout=200)
    assert rest.decode() == expected[6] + "\n"
    assert (process.returncode, said) == (0, b"")


@pytest.mark.full
def test_empty_and_blank_lines_are_kept_whatever_ends_the_lines(trained):
    one, two = sources(trained)[:2]
    folder = trained["marian"]
    plain = lines_of(folder, f"{one}\n{two}\n".encode())
    given = f"\ufeff{one}\r\n\r\n \t \n  {two}\u2028\n\n{one}".encode()
    expected = [plain[0], "", "", plain[1], "", plain[0]]
    for window in (1, 2, 5):
        assert lines_of(folder, given, window) == expected
    assert lines_of(folder, b"") == []
    assert lines_of(folder, b"\n\n") == ["", ""]


def test_a_line_that_is_not_utf8_is_named_after_those_before_it(trained):
    one = sources(trained)[0]
    code, found, said = answered(
        "translate", f"{one}\n\n".encode() + b"gr\xfcn\n" + one.encode(), str(trained["routed"])
    )
    assert (code, len(found)) == (2, 2)
    assert found[0] == (trained["routed"] / "predictions.txt").read_text().split("\n")[0]
    assert said == "headwise: standard input, line 3: not UTF-8 (invalid start byte); convert the text.\n"


@pytest.mark.parametrize("name", ["routed", pytest.param("marian", marks=pytest.mark.full)])
def test_a_line_too_long_is_cut_and_named(trained, name, monkeypatch):
    translator = open_translator(trained[name], beams=1)
    assert translator.longest == {"routed": 1023, "marian": 511}[name]
    # the longest that memory allows takes a minute on a model that never ends
    monkeypatch.setattr(decoding, "LONGEST", 40)
    line = "red dog runs two small sees " * 30
    (ids,) = translator.encode([line.strip()])
    assert len(ids) > 45
    assert translator.longest == 39
    said: list[str] = []
    output = io.BytesIO()
    given = f"red dog\n{line}\nred dog\n".encode()
    translate_lines(translator, read_lines(io.BytesIO(given), "text"), output, window=10, warn=said.append)
    assert said == [
        f"line 2 has {len(ids):,} subwords; its first 39 subwords are translated: give one sentence a line."
    ]
    found = output.getvalue().decode().split("\n")
    assert found[:3] == translator.translate(
        [*translator.encode(["red dog"]), ids[:39], *translator.encode(["red dog"])]
    )


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


def test_a_stream_without_ends_of_lines_is_read_in_pieces():
    text = "é" * LONGEST_LINE
    stream = io.BytesIO(f"{text}\r\nnext\n{text[: LONGEST_LINE // 2]}\n".encode())
    lines = list(read_lines(stream, "text"))
    assert [(line.number, line.cut) for line in lines] == [(1, True), (2, False), (3, False)]
    assert lines[0].text == "é" * (LONGEST_LINE // 2)
    assert lines[1].text == "next"
    assert len(lines[2].text) == LONGEST_LINE // 2


def test_a_translation_does_not_depend_on_the_lines_beside_it(trained):
    translator = open_translator(trained["drophead"], beams=3)
    ids = translator.encode(["sees dog", "red " * 20, "small"])
    together = translator.translate(ids)
    assert together == [translator.translate([one])[0] for one in ids]
    # the bound is on the tokens: of a model that knows no end it is reached
    long = translator.encode(together)
    assert all(len(line) <= LONGER * (len(one) + 1) + EXTRA for line, one in zip(long, ids, strict=True))


def test_a_translation_is_one_line_though_the_vocabulary_has_ends_of_lines(trained, monkeypatch):
    translator = open_translator(trained["routed"], beams=1)
    newline = translator.encode(["a\nb\rc"])[0]
    assert translator.subwords.decode(newline) == "a\nb\rc"
    model = type(translator.model)
    import torch

    monkeypatch.setattr(model, "generate", lambda _self, **_given: torch.tensor([[1, *newline, 2]]))
    assert translator.translate([[5, 6]]) == ["a b c"]


@pytest.mark.full
def test_whoever_reads_the_output_may_go(trained):
    with started("translate", str(trained["routed"]), "--window", "1", "--beams", "1") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdin.write(b"red dog\n" * 50)
        process.stdin.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_beams_and_length_penalty_are_those_asked_for(trained):
    lines = sources(trained)
    given = "".join(f"{line}\n" for line in lines).encode()
    folder = trained["drophead"]
    asked = answered("translate", given, str(folder), "--beams", "1", "--length-penalty", "0.3")
    translator = open_translator(folder, beams=1)
    assert asked == (0, translator.translate(translator.encode(lines)), "")
    assert asked[1] != (folder / "predictions.txt").read_text().split("\n")[:-1]
    assert open_translator(folder).scale.beams == 3
    assert open_translator(folder).scale.length_penalty == 0.7
    short, long = (open_translator(folder, beams=6, length_penalty=p) for p in (-8.0, 8.0))
    ids = short.encode(lines)
    assert sum(map(len, short.translate(ids))) < sum(map(len, long.translate(ids)))
    for bad in ({"beams": 0}, {"batch": 0}, {"length_penalty": float("nan")}):
        with pytest.raises(SettingError):
            open_translator(folder, **bad)
    with pytest.raises(SettingError, match="window is 0"):
        translate_lines(translator, [], io.BytesIO(), window=0)


def test_a_folder_that_is_no_finished_run_is_refused_in_one_sentence(trained, tmp_path):
    run = trained["routed"]

    def refused(folder: Path) -> str:
        with pytest.raises(DataError) as refusal:
            open_translator(folder)
        return str(refusal.value)

    assert "does not exist; expected the folder of a finished run" in refused(tmp_path / "none")
    assert "is a file" in refused(run / "settings.json")
    assert "holds no run (it has no settings.json); expected" in refused(tmp_path)
    comparison = tmp_path / "comparison"
    shutil.copytree(run, comparison / "plain" / "seed-0")
    (comparison / "comparison.json").write_text("{}")
    assert f"holds a comparison (it has no settings.json); name one of its runs, such as {comparison}/plain/seed-0" in (
        refused(comparison)
    )
    for name in (run_folder.WEIGHTS, "tokenizer.json"):
        folder = Path(shutil.copytree(run, tmp_path / name))
        (folder / name).write_bytes((folder / name).read_bytes()[:500])
        assert str(folder / name) in refused(folder)
        (folder / name).unlink()
        assert f"{folder / name} is missing" in refused(folder)
    folder = Path(shutil.copytree(run, tmp_path / "changed"))
    (folder / run_folder.RESULT).unlink()
    assert "is not finished; give the command that began it again" in refused(folder)
    whole = json.loads((run / "settings.json").read_text())
    run_folder.write_result(folder, {"task": "translation"})
    for changes, expected in (
        ({"task": "logic"}, "holds a run of logic; expected one of translation"),
        ({"scale": {"name": "x"}}, "does not say the sizes of the model"),
        ({"arm": {}}, "does not say what its arm is"),
        ({"arm": {**whole["arm"], "methods": [{"kind": "Other"}]}}, "does not say what its arm is"),
        ({"arm": {**whole["arm"], "methods": []}}, "does not hold the weights of this run"),
    ):
        (folder / "settings.json").write_text(json.dumps({**whole, **changes}))
        seal_again(folder)
        assert expected in refused(folder)
    del whole["seed"]
    (folder / "settings.json").write_text(json.dumps(whole))
    seal_again(folder)
    assert "settings.json has no seed; was it changed" in refused(folder)
    baseline = {name: value for name, value in whole.items() if name != "arm"} | {"baseline": "copy"}
    (folder / "settings.json").write_text(json.dumps(baseline))
    seal_again(folder)
    assert "holds the baseline 'copy', which has no model" in refused(folder)
