"""The folder of a model that fine-tuning begins with, and its tokenizer."""

from pathlib import Path

from headwise.errors import DataError
from headwise.texts.pretrained import open_tokenizer
from headwise_lab.tasks.lm.scales import LmScale
from headwise_lab.tasks.lm.tokens import TextTokens, read_tokens
from headwise_lab.training.start import Start, find_start, require_positions

EXPECTED = "the folder of a causal model with its tokenizer, or a finished run of lm, as OUT/ARM/seed-0"


def find_model(scale: LmScale) -> Start | None:
    """Return where the model of a scale comes from; None where runs begin with new ones.

    Raises:
        DataError: The folder holds no model, or the runs of a comparison; it has no tokenizer of tokenizers, or one
            that transformers cannot load; or it has fewer positions than rows have tokens.
    """
    if scale.pretrained is None:
        return None
    start = find_start(scale.pretrained, EXPECTED)
    if start.of_arms:
        raise DataError(f"{scale.pretrained} is a comparison of {start.task}; expected {EXPECTED}.")
    folder = start.any_folder()
    if not (folder / "tokenizer.json").is_file():
        raise DataError(
            f"{folder} has no tokenizer.json; write one with AutoTokenizer.from_pretrained(FOLDER)"
            ".save_pretrained(FOLDER)."
        )
    require_positions(folder, scale.length, trust_remote_code=scale.trust_remote_code)
    # it is saved with the trained model, and is refused now rather than then
    open_tokenizer(folder, trust_remote_code=scale.trust_remote_code)
    return start


def require_tokenizer(prepared: Path, words: TextTokens, scale: LmScale) -> None:
    """Refuse text that was prepared with another tokenizer than that of the model's folder.

    Raises:
        DataError: As above.
    """
    assert scale.preparation.tokenizer is not None
    own = read_tokens(scale.preparation.tokenizer)
    if own.to_json() != words.to_json():
        raise DataError(
            f"{prepared} was prepared with another tokenizer than {scale.preparation.tokenizer}; give the text itself "
            "to --data, or prepare it with --tokenizer and that file."
        )
