"""How long a text a model takes, by its tables of learned positions.

Owns the finding of such tables. Models whose positions are computed have none, and no end.
"""

from __future__ import annotations

from torch import nn

# What models call a table of positions.
POSITIONS = ("position", "wpe")


def longest_text(model: nn.Module) -> int | None:
    """Return the tokens of the longest text that every table of positions of a model has room for; None without any.

    Rows that a table keeps for padding, and for what comes before the first position, do not count.

    Args:
        model: The model.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 1}
        >>> longest_text(BertModel(BertConfig(max_position_embeddings=40, **sizes))), longest_text(nn.Linear(2, 2))
        (40, None)
    """
    rooms = []
    for name, module in model.named_modules():
        own = name.rpartition(".")[2].lower()
        if isinstance(module, nn.Embedding) and any(word in own for word in POSITIONS) and "relative" not in own:
            # RoBERTa's begin after the row of padding, BART's after two rows of its own
            before = 0 if module.padding_idx is None else module.padding_idx + 1
            rooms.append(module.num_embeddings - max(before, int(getattr(module, "offset", 0))))
    return min(rooms, default=None)
