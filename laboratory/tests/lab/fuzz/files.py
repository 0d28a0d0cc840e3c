"""Files of tasks, roles, runs and commands: each is written whole, read, and changed in its own way."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import spacy
import typer

import headwise as hw
from fuzz.made_files import Reader, lines, mutate_packed, packed, write_json
from fuzz.mutate import Mutation, mutate_bytes, mutate_json, mutate_json_lines, mutate_text
from headwise.errors import SettingError
from headwise.input_files import name_in_errors
from headwise.roles.spacy import Parser
from headwise.texts.batching import read_sentences
from headwise.texts.labeled_texts import Layout, read_labeled, read_texts
from headwise.texts.transformer import open_folder
from headwise_lab.cli.comparing import format_config, merge_sizes, read_config
from headwise_lab.data.documents import find_files, read_pieces
from headwise_lab.data.line_streams import read_lines
from headwise_lab.data.probing_files import drop_repeats, read_probing
from headwise_lab.data.subwords import read_subwords
from headwise_lab.data.word_vectors import pack_vectors
from headwise_lab.experiment import run_folder
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.run_folder import write_result
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.frozen.runs import read_words
from headwise_lab.tasks.classification.probing import load_probing
from headwise_lab.tasks.classification.scales import CLASSIFICATION_SCALES
from headwise_lab.tasks.classification.task import load_data
from headwise_lab.tasks.glue.files import read_split
from headwise_lab.tasks.graph2text.data import SPECIAL, load_graphs
from headwise_lab.tasks.graph2text.ratings import CRITERIA, read_ratings
from headwise_lab.tasks.graph2text.scales import GRAPH_SCALES
from headwise_lab.tasks.graph2text.writer import _read_coder, read_requests
from headwise_lab.tasks.lm.tokens import learn_tokens, read_tokens
from headwise_lab.tasks.logic.data import load_logic
from headwise_lab.tasks.logic.scales import LOGIC_SCALES, LogicScale
from headwise_lab.tasks.pretraining.wordpieces import read_word_pieces
from headwise_lab.tasks.sentence.scales import SENTENCE_SCALES
from headwise_lab.tasks.sentence.task import load_sentences
from headwise_lab.tasks.translation.corpora import CORPORA
from headwise_lab.tasks.translation.data import load_translation, open_prepared
from headwise_lab.tasks.translation.files import read_pairs
from headwise_lab.texts.sets import read_set
from headwise_lab.training.trained import read_arm, read_finished, read_scale
from headwise_lab.tune import TUNED, TUNING, read_tuned
from lab.sealing import resealing
from lab.tasks.classification.probing_toy import write_probing
from lab.tasks.glue.glue_toy import toy_words, write_glue, write_model
from lab.tasks.graph2text.graph_sets import write_agenda, write_triples
from lab.tasks.logic import logic_toy
from lab.tasks.logic.logic_toy import TOY
from lab.tasks.pretraining.pretraining_toy import document, load_text, open_text, small, write_jsonl
from lab.tasks.sentence.sentence_sets import sentence, write_pairs, write_profiles, write_texts
from lab.tasks.translation.translation_toy import write_toy_corpus

CLASSIFICATION = dataclasses.replace(CLASSIFICATION_SCALES["demo"], train_examples=None, pipeline=None, embeddings=None)
SENTENCE = dataclasses.replace(SENTENCE_SCALES["demo"], train_examples=None, positive=None, embeddings=None)
GRAPHS = dataclasses.replace(GRAPH_SCALES["demo"], min_count=1, train_examples=None, dev_examples=None)
LOGIC: LogicScale = dataclasses.replace(TOY, train_operators=1, test_bins=(1,), train_examples=None, dev_examples=None)
Write = Callable[[Path], Path]
Read = Callable[[Path], object]


def pairs_of(source: str, target: str, *texts: tuple[str, str], pack: bool = False) -> Write:
    """Write two files whose lines belong together, and return the first."""

    def write(place: Path) -> Path:
        lines(place / target, *(other for _, other in texts))
        path = lines(place / source, *(one for one, _ in texts))
        return packed(path) if pack else path

    return write


def read_both(source: Path) -> object:
    # a.de, a.de.sgm or train.tags.de-en.de
    start, _, rest = source.name.removesuffix(".gz").rpartition(".de")
    return list(read_pairs(source, source.with_name(f"{start}.en{rest}")))


def segment(number: int, text: str) -> str:
    return f'<seg id="{number}"> {text} &amp; &#x201e; </seg>'


def write_sick(place: Path) -> Path:
    header = "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment"
    for split in ("train", "trial", "test_annotated"):
        rows = [f"{n}\tone {split} {n}\tother {n}\t3.2\t{('NEUTRAL', 'ENTAILMENT')[n % 2]}" for n in range(20)]
        lines(place / f"SICK_{split}.txt", header, *rows)
    return place / "SICK_train.txt"


def write_conllu(place: Path) -> Path:
    rows = ["1-2 du _ _ _ _ _ _ _ _", "1 de de ADP _ _ 3 case _ _", "2 le le DET _ _ 3 det _ _"]
    rows += ["3 film film NOUN _ _ 0 root _ SpaceAfter=No", "3.1 x _ _ _ _ _ _ _ _", "", "# text = a", "1 a" + " _" * 8]
    return lines(place / "some.conllu", *(row.replace(" ", "\t") for row in rows))


def write_rarities(place: Path) -> Path:
    hw.roles.idf([["naïve", "数据"], ["film"], ["a", "film"]]).save(place / "idf.json")
    return place / "idf.json"


def read_parallel(path: Path) -> object:
    with TemporaryDirectory(dir=path.parent) as cache:
        return load_translation(CORPORA["multi30k"], path.parent, cache=Path(cache), vocabulary_size=270)


def prepare_translation(place: Path, sizes: tuple[int, int, int] = (40, 4, 4)) -> Path:
    folder = write_toy_corpus(place, sizes=sizes, longest=6)
    return load_translation(CORPORA["multi30k"], folder, cache=place / "cache", vocabulary_size=270).folder


def prepare_text(place: Path) -> Path:
    return load_text(write_jsonl(place / "a.jsonl.gz", 120), small(), place / "cache").folder


def read_prepared_text(path: Path) -> object:
    data = open_text(path.parent, 8, 8)
    return data.summary(), data.train[0], data.dev[0], data.test[0]


def write_word_pieces(place: Path) -> Path:
    (place / "tokenizer.json").write_text(toy_words().to_json(), encoding="utf-8")
    return place / "tokenizer.json"


def encode_pieces(path: Path) -> object:
    found = read_word_pieces(path)
    with name_in_errors(path):
        return found.continuing, found.encode_batch(["a small bird [SEP]"])


def encode_subwords(path: Path) -> object:
    found = read_subwords(path)
    with name_in_errors(path):
        return found.vocabulary_size, found.decode(found.encode("a small dog </s>"))


def parses(place: Path) -> Reader:
    nlp = spacy.blank("en")
    nlp.add_pipe("parser").add_label("dep")
    nlp.initialize()
    parse = Parser(nlp, place, progress=False)
    parse(["A sentence.", "Another one."])
    (path,) = place.rglob("*.spacy")
    return path, lambda: parse._read(path), mutate_bytes


def write_settings(place: Path) -> Path:
    path = write_json(place / "settings.json", RunSettings("logic", TOY, parse_arm("em"), seed=3).record())
    write_result(place, {"task": "logic"})
    return path


def read_run(path: Path) -> object:
    found = read_finished(path.parent, "logic")
    return read_scale(path.parent, found, LogicScale), read_arm(path.parent, found)


def read_asked(path: Path) -> object:
    with path.open("rb") as stream:
        return list(read_requests(read_lines(stream, path.name), path.name))


def write_rating(file: str) -> Write:
    def write(place: Path) -> Path:
        key = {"names": ["svgd", "plain"], "runs": ["a", "b"], "set": "0f", "sides": {"3": "AB", "5": "BA"}}
        answers = [{"item": item, **{name: "A" for name, _ in CRITERIA}} for item in (3, 5)]
        write_json(place / "rating-key.json", key)
        write_json(place / "one.json", {"rater": "one", "set": "0f", "answers": answers})
        return place / file

    return write


def read_rated(path: Path) -> object:
    return read_ratings(path.parent / "rating-key.json", [path.parent / "one.json"])


def write_options(place: Path) -> Path:
    text = format_config({"task": "logic", "seeds": 3, "set": ["layers=4", "width=8"]})
    (place / "run.toml").write_text(text, encoding="utf-8")
    return place / "run.toml"


def read_options(path: Path) -> object:
    try:
        return read_config(path), merge_sizes(path, ["layers=2"])
    except typer.BadParameter as error:
        raise SettingError(str(error)) from None


def tuning(file: str) -> Callable[[Path], Reader]:
    def make(place: Path) -> Reader:
        arm, scale = parse_arm("em"), LOGIC_SCALES["demo"]
        record = {"task": "logic", "sizes": run_folder.as_record(scale), "draws": 2, "seed": 0, "seeds": 1}
        run_folder.write_json(place / TUNING, record)
        (place / arm.folder).mkdir()
        best = "em:capsules=4,learning_rate=0.01"
        tried = [{"arm": "em", "dev_score": 0.61}, {"arm": best, "dev_score": 0.64}]
        run_folder.write_json(place / arm.folder / TUNED, {"arm": best, "tried": tried, "seeds": 2})
        path = place / TUNING if file == TUNING else place / arm.folder / TUNED
        return path, lambda: read_tuned(place, [arm], "logic", scale), mutate_json

    return make


def write_tokens(file: str) -> Write:
    def write(place: Path) -> Path:
        for name, text in learn_tokens(lambda: [document(number) for number in range(8)], 280).files(32).items():
            (place / name).write_text(text, encoding="utf-8")
        return place / file

    return write


def encode_tokens(path: Path) -> object:
    found = read_tokens(path.parent)
    return found.decode(found.encode_batch(["a small bird"])[0])


def read_file(path: Path) -> object:
    return read_labeled(Layout("all"), {"all": path})


def read_whole_set(path: Path) -> object:
    return read_set(path.parent)


def read_glue(path: Path) -> object:
    return read_split(path.parent, path.stem)


def read_all_pieces(path: Path) -> object:
    return [list(read_pieces(found)) for found in find_files(path.parent)]


DOCUMENTS = [f"{document(number)}\n" for number in range(8)]
OBJECTS = [json.dumps({"id": number, "text": document(number)}) for number in range(8)]
COMMAS = [f'"{sentence(number, str(number % 2))}, ""so""",{number % 2}' for number in range(60)]
REVIEWS = [json.dumps({"stars": 1.0 + n % 5, "text": f"review\n{n}", "useful": 0}) for n in range(60)]
GAPS = [f"{number}\ta\tb\tone {number}?\tand {number}?\t{number % 2}" for number in range(20)]
QQP = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
TITLES = [("<url>x</url>", "<url>x</url>"), ("<title>Titel</title>", "<title>title</title>"), ("ein hund", "a dog")]
SEGMENTS = [(mark, mark) for mark in ('<refset trglang="en">', "<doc>", "</doc>")]
SEGMENTS[2:2] = [(segment(0, "ein hund"), segment(0, "a dog")), (segment(1, "zwei"), segment(1, "two"))]
PARTITIONS = {"tr": 60, "va": 20, "te": 20}
VOCABULARY = {"vocabulary": [*SPECIAL, "<method>", "a"], "types": 1, "relations": ["USED-FOR"]}
LABELS = {"vocabulary": ["a", "b"], "labels": ["0", "1"]}
GLUE = [("CoLA", "train"), ("CoLA", "test"), ("STS-B", "train"), ("RTE", "dev"), ("MNLI", "train")]

# By name: what writes the file below a folder and returns it, what reads it, and how it is changed.
FILES: dict[str, tuple[Write, Read, Mutation]] = {
    "tab-separated": (lambda place: write_texts(place / "a.tsv", 60), read_file, mutate_text),
    "comma-separated": (lambda place: lines(place / "a.csv", "text,label", *COMMAS), read_file, mutate_text),
    "packed texts": (lambda place: packed(write_texts(place / "a.tsv", 60)), read_texts, mutate_packed),
    "classified texts": (
        lambda place: write_texts(place / "a.tsv", 60),
        lambda path: load_data(path, CLASSIFICATION, None),
        mutate_text,
    ),
    "probing": (
        lambda place: write_probing(place / "past_present.txt", PARTITIONS),
        lambda path: drop_repeats(read_probing(path)),
        mutate_text,
    ),
    "probed sentences": (
        lambda place: write_probing(place / "past_present.txt", PARTITIONS),
        lambda path: load_probing(path, CLASSIFICATION, None),
        mutate_text,
    ),
    "word vectors": (
        lambda place: lines(place / "glove.txt", "the 0.1 -2e-3 3", "new york 1 2 3", "film 4 5 6"),
        lambda path: pack_vectors(path, {"the", "film", "new york"}, 3),
        mutate_text,
    ),
    **{
        f"{name} {split}": (
            lambda place, name=name, split=split: (
                write_glue(place / "glue", train=30, judged=12) / name / f"{split}.tsv"
            ),
            read_glue,
            mutate_text,
        )
        for name, split in GLUE
    },
    "glue with gaps": (lambda place: lines(place / "QQP" / "train.tsv", QQP, *GAPS, "21\ta"), read_glue, mutate_text),
    "sentences": (lambda place: write_texts(place / "all.tsv", 60), read_set, mutate_text),
    "sentences as words": (
        lambda place: write_texts(place / "all.tsv", 60),
        lambda path: load_sentences(path, SENTENCE, None),
        mutate_text,
    ),
    "pairs": (lambda place: write_pairs(place / "snli", 40) / "train.tsv", read_whole_set, mutate_text),
    "sick": (write_sick, read_whole_set, mutate_text),
    "reviews": (lambda place: lines(place / "review.json", *REVIEWS), read_whole_set, mutate_json_lines),
    "profile": (lambda place: write_profiles(place / "pan") / "a3.xml", read_whole_set, mutate_text),
    "truth": (lambda place: write_profiles(place / "pan") / "truth.txt", read_whole_set, mutate_text),
    "logic": (
        lambda place: logic_toy.write_pairs(place, 600) / "train1",
        lambda path: load_logic(path.parent, LOGIC, None),
        mutate_text,
    ),
    "plain pairs": (
        pairs_of("a.de", "a.en", ("ein hund", "a dog"), ("", ""), ("zwei", "two")),
        read_both,
        mutate_text,
    ),
    "packed pairs": (
        pairs_of("a.de", "a.en", ("ein hund", "a dog"), ("zwei", "two"), pack=True),
        read_both,
        mutate_packed,
    ),
    "talks": (pairs_of("train.tags.de-en.de", "train.tags.de-en.en", *TITLES), read_both, mutate_text),
    "segments": (pairs_of("a.de.sgm", "a.en.sgm", *SEGMENTS), read_both, mutate_text),
    "parallel text": (
        lambda place: write_toy_corpus(place, sizes=(40, 4, 4), longest=6) / "train.de",
        read_parallel,
        mutate_text,
    ),
    "triples": (
        lambda place: write_triples(place / "mine.tsv", 40),
        lambda path: load_graphs(path, GRAPHS),
        mutate_text,
    ),
    "agenda": (
        lambda place: write_agenda(place / "agenda", "val", "test") / "preprocessed.test.tsv",
        lambda path: load_graphs(path.parent, GRAPHS),
        mutate_text,
    ),
    "relations": (
        lambda place: write_agenda(place / "agenda", "val", "test") / "relations.vocab",
        lambda path: load_graphs(path.parent, GRAPHS),
        mutate_text,
    ),
    "requests": (
        lambda place: lines(place / "standard-input", "Fast\tlda <method> | for | text", "", "On\tlda ; text"),
        read_asked,
        mutate_text,
    ),
    "vocabulary": (lambda place: write_json(place / "vocabulary.json", VOCABULARY), _read_coder, mutate_json),
    "rating key": (write_rating("rating-key.json"), read_rated, mutate_json),
    "ratings": (write_rating("one.json"), read_rated, mutate_json),
    "documents": (lambda place: lines(place / "a.txt", *DOCUMENTS), read_all_pieces, mutate_text),
    "packed documents": (
        lambda place: packed(lines(place / "a.txt", *DOCUMENTS)),
        lambda path: list(read_pieces(path)),
        mutate_packed,
    ),
    "objects": (
        lambda place: lines(place / "a.jsonl", *OBJECTS),
        lambda path: list(read_pieces(path)),
        mutate_json_lines,
    ),
    "word pieces": (write_word_pieces, encode_pieces, mutate_json),
    "subwords": (
        lambda place: prepare_translation(place, (200, 20, 30)) / "tokenizer.json",
        encode_subwords,
        mutate_json,
    ),
    "conllu": (write_conllu, hw.roles.read_conllu, mutate_text),
    "packed conllu": (lambda place: packed(write_conllu(place)), hw.roles.read_conllu, mutate_packed),
    "rarities": (write_rarities, lambda path: hw.roles.IDF.load(path)("film"), mutate_json),
    "text": (lambda place: lines(place / "a.txt", "A sentence.", "", "Another one."), read_sentences, mutate_text),
    "words": (
        lambda place: write_json(place / "vocabulary.json", LABELS),
        lambda path: read_words(path.parent, "labels"),
        mutate_json,
    ),
    "options": (write_options, read_options, mutate_text),
    **{
        f"folder: {file}": (
            lambda place, file=file: write_model(place / "electra") / file,
            lambda path: open_folder(path.parent),
            mutate_bytes if file.endswith(".safetensors") else mutate_json,
        )
        for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
    },
    **{
        f"language model: {file}": (write_tokens(file), encode_tokens, mutate_json)
        for file in ("tokenizer.json", "tokenizer_config.json")
    },
}
# Those whose digests are in a record beside them, which is written anew: with the name of the record.
SEALED: dict[str, tuple[Write, Read, Mutation, str]] = {
    "prepared pairs": (
        lambda place: prepare_translation(place) / "record.json",
        lambda path: open_prepared(path.parent).summary(),
        mutate_json,
        "record.json",
    ),
    "prepared tokens": (
        lambda place: prepare_translation(place) / "train.source.offsets.npy",
        lambda path: list(open_prepared(path.parent).train),
        mutate_bytes,
        "record.json",
    ),
    "prepared text": (
        lambda place: prepare_text(place) / "record.json",
        read_prepared_text,
        mutate_json,
        "record.json",
    ),
    "shard": (
        lambda place: prepare_text(place) / "train-00000.npy",
        lambda path: open_text(path.parent, 8, 8).train[0],
        mutate_bytes,
        "record.json",
    ),
    "settings": (write_settings, read_run, mutate_json, "result.json"),
}


def make(write: Write, read: Read, mutate: Mutation, record: str | None = None) -> Callable[[Path], Reader]:
    """Return what writes a file below a folder and gives its reader."""

    def made(place: Path) -> Reader:
        path = write(place)
        reading = partial(read, path)
        return path, reading if record is None else resealing(path.parent / record, reading), mutate

    return made


MAKERS = {name: make(*parts) for name, parts in (FILES | SEALED).items()}
MAKERS |= {"parses": parses, "tuning": tuning(TUNING), "tuned": tuning(TUNED)}
