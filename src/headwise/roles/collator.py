"""A data collator that adds role masks to batches of text, for example for Hugging Face's Trainer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from headwise.errors import DataError, SettingError, require_integer
from headwise.masks.head_mask import HeadMask
from headwise.roles.build import Roles
from headwise.roles.word_table import WordTable, align

# The keyword argument of the forward that holds the mask.
ROLE_MASK = "role_mask"


class RoleCollator:
    """Encode the texts of a batch and add their role mask as "role_mask", for models guided by `guide`.

    Args:
        roles: The roles.
        tokenizer: A fast Hugging Face tokenizer.
        num_heads: Number H of heads of the model's attention.
        parse: A function from texts to word tables, such as `headwise.roles.spacy.Parser`. Default: `WordTable.split`
            of each text, without a parse.
        text: The column of the text, or two columns for pairs of texts.
        collator: Collates the encoded examples, including the other columns. Default: the tokenizer pads them and
            the other columns become tensors.
        max_length: Number of tokens to which a text is truncated. Default: no truncation.
        heads: The head of each role. Default: 0 to R - 1.
        empty: How a query attends if its role allows no key: "regular" or "self".
        longest: Largest number of tokens that the model takes; None if unknown.

    Raises:
        DataError: The tokenizer is not a fast one.
        SettingError: `text`, `parse` or `max_length` is invalid.

    Example:
        >>> # guidance = hw.guide(hw.find_heads(model))
        >>> # Trainer(model, arguments, data_collator=hw.roles.RoleCollator(roles, tokenizer, num_heads=12), ...)
    """

    def __init__(
        self,
        roles: Roles,
        tokenizer: Any,
        num_heads: int,
        *,
        parse: Callable[[list[str]], Sequence[WordTable]] | None = None,
        text: str | tuple[str, str] = "text",
        collator: Callable[[list[dict[str, Any]]], Any] | None = None,
        max_length: int | None = None,
        heads: Sequence[int] = (),
        empty: str = "regular",
        longest: int | None = None,
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise DataError(
                f"{type(tokenizer).__name__} is not a fast tokenizer, so it does not return the characters of its "
                "tokens; use its fast version, or build the masks with Roles and an Alignment."
            )
        self.columns = (text,) if isinstance(text, str) else tuple(text)
        if len(self.columns) not in (1, 2):
            raise SettingError(f"text is {text!r}; expected the column of the text, or two columns for pairs.")
        if parse is not None and not callable(parse):
            raise SettingError(
                f"parse is {parse!r}; expected a function from texts to word tables, such as "
                "headwise.roles.spacy.Parser(pipeline)."
            )
        if max_length is not None:
            require_integer("max_length", max_length, low=1)
        self.roles, self.tokenizer, self.num_heads = roles, tokenizer, num_heads
        self.parse = parse or _split_texts
        self.collator, self.max_length = collator, max_length
        self.heads, self.empty, self.longest = heads, empty, longest

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate examples, each a mapping with the text and the other inputs of the model.

        Raises:
            DataError: There is no example, one has no text, lacks a column of the others or is longer than the model
                allows, a column is not numeric, `parse` did not return a word table for each text, or `collator` pads
                on another side than the tokenizer.
            SettingError: `max_length` leaves no room for a text.
        """
        if not features:
            raise DataError("the collator was given no example; expected at least one.")
        texts = [
            [self._text(index, feature, column) for column in self.columns] for index, feature in enumerate(features)
        ]
        encoding = self.tokenizer(
            *(list(column) for column in zip(*texts, strict=True)),
            truncation=self.max_length is not None,
            max_length=self.max_length,
        )
        self._require_room([len(ids) for ids in encoding["input_ids"]])
        encoded = [{name: encoding[name][i] for name in encoding} for i in range(len(texts))]
        others = [{n: v for n, v in feature.items() if n not in self.columns} for feature in features]
        joined = [{**other, **one} for other, one in zip(others, encoded, strict=True)]
        batch = dict((self.collator or self._collate)(joined))
        flat = [text for row in texts for text in row]
        parsed = self.parse(flat)
        if len(parsed) != len(flat):
            raise DataError(f"parse gave {len(parsed)} word tables for {len(flat)} texts; expected one per text.")
        width = len(self.columns)
        tables = [tuple(parsed[i : i + width]) for i in range(0, len(parsed), width)]
        length, side = batch["input_ids"].shape[1], self.tokenizer.padding_side
        aligned = align(tables, encoding, length=length, padding_side=side)
        mask = self.roles(tables, self.num_heads, encoding=aligned, heads=self.heads, empty=self.empty)
        _require_same_padding(mask, batch.get("attention_mask"), self.tokenizer.padding_side)
        batch[ROLE_MASK] = mask
        return batch

    def _text(self, index: int, feature: Mapping[str, Any], column: str) -> str:
        text = feature.get(column)
        if isinstance(text, str):
            return text
        found = f"its {column!r} is a {type(text).__name__}" if column in feature else f"has {', '.join(feature)}"
        raise DataError(
            f"example {index} {found}; expected a text under {column!r}. The Trainer drops such columns unless you set "
            "TrainingArguments(remove_unused_columns=False)."
        )

    def _collate(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        names = self.tokenizer.model_input_names
        padded = self.tokenizer.pad([{n: f[n] for n in names if n in f} for f in features], return_tensors="pt")
        batch = dict(padded)
        for name in features[0]:
            if name not in batch and name != "overflow_to_sample_mapping":
                batch["labels" if name in ("label", "label_ids") else name] = _stack(name, features)
        return batch

    def _require_room(self, lengths: list[int]) -> None:
        """Raise where special tokens alone exceed `max_length`, and nothing is truncated, or the model takes fewer."""
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        if self.max_length is not None and lengths[longest] > self.max_length:
            raise SettingError(
                f"max_length is {self.max_length} and the tokenizer made {lengths[longest]} tokens; expected room for "
                "more than the special tokens."
            )
        if self.longest is not None and lengths[longest] > self.longest:
            raise DataError(
                f"example {longest} has {lengths[longest]} tokens and the model takes {self.longest}; truncate texts "
                f"(max_length={self.longest}), or split them."
            )


def _require_same_padding(mask: HeadMask, given: Any, side: str) -> None:
    if not isinstance(given, torch.Tensor) or given.dim() != 2 or mask.keep is None:
        return
    if given.shape != mask.keep.shape:
        raise DataError(
            f"the attention_mask is {tuple(given.shape)} and the input_ids are {tuple(mask.keep.shape)}; let collator= "
            "give both the same shape."
        )
    if not torch.equal(given.bool(), mask.keep):
        row = int((given.bool() != mask.keep).any(-1).nonzero()[0])
        raise DataError(
            f"the attention_mask of example {row} is {given[row].tolist()}, and its tokens, padded on the {side} as "
            f"the tokenizer does, are {mask.keep[row].int().tolist()}; let collator= pad on that side too."
        )


def _stack(name: str, features: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    without = next((index for index, feature in enumerate(features) if name not in feature), None)
    if without is not None:
        raise DataError(f"example {without} has no {name!r} but example 0 does; expected the same columns in all.")
    values = [feature[name] for feature in features]
    try:
        return torch.tensor(values)
    except (ValueError, TypeError, RuntimeError):
        raise DataError(
            f"the column {name!r} cannot become a tensor ({values[0]!r:.40}, ...); expected numbers: drop the column, "
            "or pass collator=..., which receives every column except the text."
        ) from None


# pickled with the collator for processes that load data
def _split_texts(texts: list[str]) -> list[WordTable]:
    return [WordTable.split(text) for text in texts]
