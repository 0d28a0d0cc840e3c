"""What `headwise budget` does: score the key/value heads of a model by a text, and write the budget and its map."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from headwise.atomic import write_whole
from headwise.cli.extensions import find_stock_folder
from headwise.cli.output import say
from headwise.cli.settings import Budget
from headwise.cli.shrink_subject import is_causal, open_whole
from headwise.errors import DataError
from headwise.heads.find import find_heads
from headwise.plots.heads import budget_map
from headwise.plots.style import to_png
from headwise.shrinking.budget import kv_budget
from headwise.texts.pretrained import open_tokenizer, quietly
from headwise.texts.tables import Columns
from headwise.texts.transformer import open_folder


def find_budget(given: Budget) -> Path:
    """Write the budget of a model and a picture of its map; return the file.

    Raises:
        DataError: The folder holds no model that generates, or the text is shorter than the window.
    """
    folder, trusted = find_stock_folder(given.model), given.trust_remote_code
    if given.out.exists():
        raise DataError(f"{given.out} exists; expected a new file for the budget.")
    with quietly():
        frozen = open_folder(folder, trust_remote_code=trusted)
        tokenizer = open_tokenizer(folder, trust_remote_code=trusted)
        model: Any = open_whole(folder, frozen.model, trust_remote_code=trusted)
    if not is_causal(type(model).__name__):
        raise DataError(
            f"{folder} holds a {type(model).__name__}; expected a causal language model, which has a cache."
        )
    text = "\n".join(map(str, frozen.read_text(given.text, Columns(given.text_column))))
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    length = min(2 * (given.sink + given.window), most or 2 * (given.sink + given.window))
    with quietly():
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.long)
    rows = min(given.rows, len(ids) // length)
    if not rows:
        raise DataError(
            f"{given.text} has {len(ids)} tokens; expected at least {length}, so that a row is longer than the window; "
            "give more text, or a smaller --window."
        )
    batches = list(ids[: rows * length].view(rows, 1, length))
    model = model.to(next(frozen.model.parameters()).device).eval()
    budget = kv_budget(find_heads(model), batches, keep=given.keep, sink=given.sink, window=given.window)
    picture = given.out.with_suffix(".png")
    write_whole(picture, to_png(budget_map(budget)))
    budget.save(given.out)
    say(str(budget))
    say(f"written to {given.out}, the map to {picture}; headwise.shrinking.KVBudget.load reads it.")
    return given.out
