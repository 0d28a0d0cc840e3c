"""Small sets of the graph-to-text task, written to disk."""

from __future__ import annotations

from pathlib import Path

METHODS = ("beam search", "lda", "neural network", "kernel machine")
TASKS = ("parsing", "machine translation", "image retrieval")


def line(number: int) -> str:
    """A title, two triples and a text that follows from them."""
    method, other = METHODS[number % 4], METHODS[(number + 1 + number // 4 % 3) % 4]
    task = TASKS[number % 3]
    triples = f"{method} <method> | USED-FOR | {task} <task> ; {method} | COMPARE | {other} <method>"
    text = f"We apply {method} to {task} . It beats {other}, as run {number} shows ."
    return f"On {task} {number}\t{triples}\t{text}"


def write_triples(path: Path, count: int) -> Path:
    """A file of one's own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line(number)}\n" for number in range(count)), encoding="utf-8")
    return path


def agenda_line(number: int, **changed: str) -> str:
    """A line as AGENDA has it, perhaps with a field changed."""
    fields = {
        "title": f"On Parsing {number} .",
        "entities": "beam search ; Parsing ; lda",
        "types": "<method> <task> <method>",
        "triples": "0 1 1 ; 2 0 1",
        "text": f"we use <method_0> for <task_1> , not <method_2> , in run {number} .",
        "order": "0 1 2 -1",
    }
    return "\t".join((fields | changed).values())


def write_agenda(folder: Path, *splits: str, count: int = 20) -> Path:
    """A folder like AGENDA's with these of its splits."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "relations.vocab").write_text("USED-FOR\nCOMPARE", encoding="utf-8")
    for place, split in enumerate(splits):
        lines = [agenda_line(100 * place + number) for number in range(count)]
        (folder / f"preprocessed.{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
