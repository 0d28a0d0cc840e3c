"""Word pieces, BERT's tokenization, learned here or given as a `tokenizer.json`."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from headwise.errors import DataError, require_integer
from headwise.input_files import encode_json
from headwise_lab.data.subwords import TextEncoder, clear_settings, drop_long_words, read_tokenizer

PADDING, UNKNOWN, START, END, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LEAST_OFTEN = 2
# BERT's own limit; letters beyond it are unknown.
MOST_LETTERS = 1_000
CONTINUES = "##"


class WordPieces(TextEncoder):
    """Turns text into the ids of word pieces.

    Example:
        >>> words = learn_word_pieces(lambda: ["the cat sat on the mat"] * 2, 40)
        >>> [words.tokenizer.id_to_token(one) for one in words.encode_batch(["The cat [SEP]"])[0][:2]]
        ['the', 'cat']
    """

    @property
    def padding(self) -> int:
        """Id of padding."""
        return self._id(PADDING)

    @property
    def start(self) -> int:
        """Id of the start of a text."""
        return self._id(START)

    @property
    def end(self) -> int:
        """Id of the end of a text or segment."""
        return self._id(END)

    @property
    def mask(self) -> int:
        """Id of the mask token."""
        return self._id(MASK)

    @property
    def continuing(self) -> np.ndarray:
        """Whether each id continues a word, bool [V]."""
        found = np.zeros(self.vocabulary_size, dtype=bool)
        for token, number in self.tokenizer.get_vocab(with_added_tokens=True).items():
            found[number] = token.startswith(CONTINUES)
        return found

    def files(self) -> dict[str, str]:
        """Return the files by which `transformers.AutoTokenizer` knows it, name to text."""
        names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
            **dict(zip(names, SPECIAL, strict=True)),
        }
        return {
            "tokenizer.json": self.to_json(),
            "tokenizer_config.json": encode_json({**settings, "model_max_length": 512}, indent=1) + "\n",
        }

    def _id(self, token: str) -> int:
        found = self.tokenizer.token_to_id(token)
        assert found is not None  # a tokenizer without it was refused
        return found


def learn_word_pieces(
    texts: Callable[[], Iterable[str]], vocabulary_size: int, *, progress: bool = False
) -> WordPieces:
    """Return lower-cased word pieces learned from texts; the same for the same texts.

    Args:
        texts: Gives the text to learn from, from its beginning each time it is called.
        vocabulary_size: Number of ids at most, the five special ones included. A letter may need two, and no more than
            1,000 letters, the most frequent ones, are known.
        progress: Whether to show a bar on stderr where that is a terminal.
    """
    require_integer("vocabulary_size", vocabulary_size, low=len(SPECIAL) + 2)
    tokenizer = _make_empty(models.WordPiece(unk_token=UNKNOWN))
    # one that learns cannot be asked for its words
    other = _make_empty(models.WordPiece(unk_token=UNKNOWN))

    def short() -> Iterator[str]:
        return (drop_long_words(text, other) for text in texts())

    letters, continuing = _find_alphabet(short(), tokenizer, min(MOST_LETTERS, (vocabulary_size - len(SPECIAL)) // 2))
    # the trainer numbers what continues a word in the order of a random hash, and breaks ties by these numbers
    fixed = [*SPECIAL, *(CONTINUES + letter for letter in continuing)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocabulary_size,
        min_frequency=LEAST_OFTEN,
        special_tokens=fixed,
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        continuing_subword_prefix=CONTINUES,
        show_progress=progress and sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(short(), trainer)
    learned = models.WordPiece(tokenizer.get_vocab(with_added_tokens=False), unk_token=UNKNOWN)
    return _finish(_make_empty(learned))


def read_word_pieces(path: Path) -> WordPieces:
    """Return the tokenizer of a `tokenizer.json`, or of a folder that holds one, learned here or elsewhere."""
    path = path / "tokenizer.json" if path.is_dir() else path
    tokenizer = read_tokenizer(path)
    missing = [token for token in SPECIAL if tokenizer.token_to_id(token) is None]
    if missing:
        raise DataError(f"{path} lacks {', '.join(missing)}; expected a tokenizer with {', '.join(SPECIAL)}.")
    return _finish(tokenizer)


def _find_alphabet(texts: Iterable[str], tokenizer: Tokenizer, most: int) -> tuple[list[str], list[str]]:
    """Return the most frequent letters of texts, and those of them that continue a word, each sorted."""
    words = Counter[str]()
    for text in texts:
        words.update(tokenizer.normalizer.normalize_str(text).split())
    counts = Counter[str]()
    continuing: set[str] = set()
    for word, count in words.items():
        for part, _ in tokenizer.pre_tokenizer.pre_tokenize_str(word):
            continuing.update(part[1:])
            for letter in part:
                counts[letter] += count
    letters = sorted(sorted(counts, key=lambda letter: (-counts[letter], letter))[:most])
    return letters, [letter for letter in letters if letter in continuing]


def _make_empty(model: models.WordPiece) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUES)
    return tokenizer


def _finish(tokenizer: Tokenizer) -> WordPieces:
    tokenizer.add_special_tokens(list(SPECIAL))
    clear_settings(tokenizer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A {END}",
        pair=f"{START} $A {END} $B:1 {END}:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (START, END)],
    )
    return WordPieces(tokenizer)
