"""Fine-tune a causal language model with LoRA, a penalty and repulsion, in Hugging Face's Trainer.

    python examples/finetune_llm.py MODEL_FOLDER my.txt

MODEL_FOLDER is any causal model with its tokenizer (Llama, Qwen, Mistral, GPT-2, ...), and my.txt any text. A plain
script except for an import and the line marked `headwise`: the outputs of the heads are made less alike, and the rows
of the effective weights of their queries, keys and values repel one another. The adapters are merged into the folder
that is written, which transformers, vLLM or lm-eval load without headwise.
"""

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, set_seed

import headwise as hw
from headwise.integrations import huggingface  # headwise


def cut(text: str, tokenizer: Any, length: int) -> list[dict]:
    """Return a text as rows of tokens."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    rows = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    return [{"input_ids": row, "labels": row} for row in rows]


def main(
    folder: Annotated[Path, typer.Argument(help="Folder of a causal model with its tokenizer.", exists=True)],
    text: Annotated[Path, typer.Argument(help="Text to fine-tune on; its last tenth is held out.", exists=True)],
    output: Annotated[Path, typer.Option(help="Output folder.")] = Path("runs/finetune-llm"),
    rank: Annotated[int, typer.Option(help="Rank of the adapters.")] = 8,
    steps: Annotated[int, typer.Option(help="Optimizer steps; -1 for one epoch.")] = -1,
    length: Annotated[int, typer.Option(help="Tokens per row.")] = 512,
    batch_size: Annotated[int, typer.Option(help="Rows per step.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the adapters and the data order.")] = 0,
) -> None:
    """Fine-tune, and print the perplexity of the held-out text before and after."""
    set_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    adapters = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), adapters)
    whole = text.read_text(encoding="utf-8")
    most = getattr(model.config, "max_position_embeddings", None) or length
    if length > most:
        raise typer.BadParameter(f"--length is {length}; the model has {most} positions.")
    held_out = len(whole) * 9 // 10
    train, test = cut(whole[:held_out], tokenizer, length), cut(whole[held_out:], tokenizer, length)
    if not train or not test:
        raise typer.BadParameter(
            f"{text} gives {len(train)} and {len(test)} held-out rows of {length} tokens; give more text or a smaller "
            "--length."
        )
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=str(output),
            num_train_epochs=1,
            max_steps=steps,
            learning_rate=2e-4,
            per_device_train_batch_size=batch_size,
            per_device_eval_batch_size=batch_size,
            seed=seed,
            save_strategy="no",
            report_to="none",
            dataloader_pin_memory=False,
        ),
        train_dataset=train,
        eval_dataset=test,
    )
    before = trainer.evaluate()["eval_loss"]
    huggingface.attach(trainer, hw.Penalize(hw.similarity.CKA()), hw.Repel(hw.SVGD(alpha=hw.Relative(0.1))))  # headwise
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    print(f"perplexity before {math.exp(before):.2f}, after {math.exp(after):.2f}")
    model.merge_and_unload().save_pretrained(output / "model")
    tokenizer.save_pretrained(output / "model")


if __name__ == "__main__":
    typer.run(main)
