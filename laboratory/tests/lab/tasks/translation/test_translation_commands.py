"""Fetching and preparing a corpus by a command."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from headwise_lab.data.downloads import Download
from headwise_lab.data.subwords import learn_subwords
from headwise_lab.tasks.translation import corpora
from headwise_lab.tasks.translation.data import open_prepared
from headwise_lab.tasks.translation.scales import TRANSLATION_SCALES
from headwise_lab.tasks.translation.task import TranslationTask
from lab.command import call, refused
from lab.published import DATA, needs
from lab.tasks.translation.translation_text import TARGET_WORDS, lines, write_corpus

PUBLISHED = DATA / "mt"
PAIRS = 120


def content(name: str) -> bytes:
    """Made text in the form that a file of that name has."""
    text = lines(PAIRS, len(name.partition(".")[0]), TARGET_WORDS)
    if name.endswith((".sgm", ".xml")):
        text = [f'<seg id="{number}"> {line} </seg>' for number, line in enumerate(text, start=1)]
    return "".join(f"{line}\n" for line in text).encode()


def archive(download: Download) -> bytes:
    """A file such as the recipe's: the members it takes out, and one more that it leaves."""
    if not download.members:
        return gzip.compress(content(download.name))
    packed, names = io.BytesIO(), ["README", *(name for name, _ in download.members)]
    if download.name.endswith(".zip"):
        with zipfile.ZipFile(packed, "w") as files:
            for name in names:
                files.writestr(name, content(name))
    else:
        with tarfile.open(fileobj=packed, mode="w:gz") as files:
            for name in names:
                member = tarfile.TarInfo(name)
                member.size = len(content(name))
                files.addfile(member, io.BytesIO(content(name)))
    return packed.getvalue()


@pytest.mark.parametrize(
    "name", ["multi30k", *(pytest.param(f"wmt{year}", marks=pytest.mark.full) for year in (14, 16, 17))]
)
def test_a_corpus_is_fetched_and_prepared_by_two_commands(name, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "served"
    corpus = corpora.CORPORA[name]
    recipes = []
    for number, download in enumerate(corpus.downloads):
        packed = archive(download)
        (folder / str(number)).mkdir(parents=True)
        (folder / str(number) / download.name).write_bytes(packed)
        sha256 = hashlib.sha256(packed).hexdigest()
        url = (folder / str(number) / download.name).as_uri()
        recipes.append(dataclasses.replace(download, url=url, sha256=sha256, size=len(packed)))
    local = dataclasses.replace(corpus, downloads=tuple(recipes))
    monkeypatch.setitem(corpora.CORPORA, name, local)
    out = tmp_path / "fetched"
    assert call("download", name, "--out", str(out)) == 0
    assert capsys.readouterr().out == f"{name} is in {out}, for headwise compare translation --data {out}\n"
    assert not (out / "README").exists()
    shutil.rmtree(folder)
    # nothing is fetched twice
    assert call("download", name, "--out", str(out)) == 0
    place = tmp_path / "prepared"
    assert call("prepare", "translation", "--data", str(out), "--out", str(place)) == 0
    data = open_prepared(place)
    assert data.record["corpus"] == name
    assert data.record["layout"] == "official"
    assert (data.source_language, data.target_language) == (corpus.source_language, corpus.target_language)
    assert len(data.test) == PAIRS


def test_iwslt14_is_fetched_by_the_commands_that_its_refusal_names(tmp_path, capsys):
    error = refused(capsys, "download", "iwslt14", "--out", str(tmp_path / "out"))
    assert "http://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz" in error
    assert "(tar xzf de-en.tgz --strip-components=1)" in error
    layout = corpora.CORPORA["iwslt14"].layouts[0]
    names = [Path(name).name for part in (*layout.train, *layout.test) for name in (part.source, part.target)]
    with tarfile.open(tmp_path / "de-en.tgz", "w:gz") as files:
        for name in names:
            member = tarfile.TarInfo(f"de-en/{name}")
            member.size = len(content(name))
            files.addfile(member, io.BytesIO(content(name)))
    subprocess.run(["tar", "xzf", "de-en.tgz", "--strip-components=1"], cwd=tmp_path, check=True)
    place = tmp_path / "prepared"
    assert call("prepare", "translation", "--data", str(tmp_path), "--out", str(place)) == 0
    assert "iwslt14, de to en" in capsys.readouterr().out
    data = open_prepared(place)
    assert len(data.dev) == PAIRS // 23
    assert len(data.test) == 5 * PAIRS


def test_a_prepared_folder_is_what_compare_takes_for_its_scale_and_no_other(tmp_path, capsys):
    folder, place = write_corpus(tmp_path / "own"), tmp_path / "prepared"
    arguments = ("prepare", "translation", "--data", f"{folder}:de-en", "--out", str(place))
    assert call(*arguments) == 0
    shown = capsys.readouterr().out
    assert "train: 300 of 300 pairs" in shown
    written = sum(path.stat().st_size for path in place.iterdir())
    assert f"{place}: {written / 2**20:.1f} MiB, for headwise compare translation --scale demo --data {place}" in shown
    demo = TRANSLATION_SCALES["demo"]
    assert len(TranslationTask().load(place, demo, None).train) == 300
    before = {path.name: path.stat().st_mtime_ns for path in place.iterdir()}
    assert call(*arguments) == 0
    assert {path.name: path.stat().st_mtime_ns for path in place.iterdir()} == before
    other = (*arguments[:3], f"{folder}:en-de", *arguments[4:])
    assert f"{place} holds something else; nothing is overwritten" in refused(capsys, *other)
    assert "is prepared already" in refused(capsys, *arguments[:3], str(place), "--out", str(tmp_path / "x"))
    error = refused(
        capsys, "compare", "translation", "--scale", "gpu", "--data", str(place), "--out", str(tmp_path / "runs")
    )
    assert "was prepared with 2,000 subwords but scale gpu has 10,000; prepare it for that scale." in error


def test_a_tokenizer_of_ones_own_serves_every_scale(tmp_path):
    folder, place = write_corpus(tmp_path / "own"), tmp_path / "prepared"
    tokenizer = tmp_path / "mine.json"
    tokenizer.write_text(learn_subwords(["nur ein anderer text"] * 3, 280).to_json(), encoding="utf-8")
    arguments = ("--data", f"{folder}:de-en", "--out", str(place), "--tokenizer", str(tokenizer))
    assert call("prepare", "translation", *arguments) == 0
    data = TranslationTask().load(place, TRANSLATION_SCALES["gpu"], None)
    assert data.whole.tokenizer.to_json() == tokenizer.read_text(encoding="utf-8")


def test_what_cannot_be_fetched_or_prepared_is_refused(tmp_path, capsys):
    assert "did you mean multi30k?" in refused(capsys, "download", "multi30", "--out", "x")
    assert "logic needs no preparation" in refused(capsys, "prepare", "logic", "--out", "x")
    assert "prepare needs --data" in refused(capsys, "prepare", "translation", "--out", "x")
    assert "does not exist" in refused(capsys, "prepare", "translation", "--data", "none", "--out", "x")
    assert "there is no scale 'gpus'" in refused(
        capsys, "prepare", "translation", "--data", "none", "--scale", "gpus", "--out", "x"
    )
    (tmp_path / "file").write_text("")
    folder = write_corpus(tmp_path / "own")
    error = refused(capsys, "prepare", "translation", "--data", f"{folder}:de-en", "--out", f"{tmp_path}/file/x")
    assert "cannot be written" in error
    assert not Path("x").exists()


@pytest.mark.slow
@needs("mt")
def test_the_whole_of_multi30k_prepared_for_a_gpu_is_small_enough_to_carry(tmp_path, capsys):
    place = tmp_path / "prepared"
    data = str(PUBLISHED / "multi30k")
    assert call("prepare", "translation", "--data", data, "--scale", "gpu", "--out", str(place)) == 0
    assert "train: 29,000 of 29,000 pairs" in capsys.readouterr().out
    assert sum(path.stat().st_size for path in place.iterdir()) < 60 * 2**20
    assert len(TranslationTask().load(place, TRANSLATION_SCALES["gpu"], None).train) == 29_000
