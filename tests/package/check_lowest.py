"""Installs the lowest versions that pyproject.toml declares into an environment of its own, and uses them there.

`make wheel CHECK=lowest`. Torch alone has the version of constraints.txt: on PyPI, others come with several GB of
CUDA. What a package needs itself has its newest version, as it would where a user installs an old one today.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from run_command import run

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "build" / "lowest"
# Each package is imported under the names that the laboratory imports.
IMPORTS = """
import accelerate, filelock, joblib, matplotlib.pyplot, numpy, rich, safetensors.torch, scipy.stats, sacrebleu
import sklearn.linear_model, threadpoolctl, tokenizers, torch.utils.tensorboard, tqdm, transformers, typer
import nltk, rouge_score.rouge_scorer, headwise.api, headwise_lab.cli.commands
"""
MODEL = """
import sys
from pathlib import Path
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(("[PAD]", "[UNK]", "a", "cat"))}, "[UNK]"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
sizes = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=2, intermediate_size=8, vocab_size=4)
BertModel(BertConfig(**sizes)).save_pretrained("bert")
fast = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", model_max_length=32)
fast.save_pretrained("bert")
Path("text.txt").write_text("a cat\\na cat a cat\\ncat a\\n")
"""
DEMO = "compare logic --scale demo --arms plain --seeds 1 --set train_examples=200 --set epochs=1 --out runs"


def main() -> None:
    """Install, import without a warning, and run the commands on a small model and a small task."""
    shutil.rmtree(PLACE, ignore_errors=True)
    run(sys.executable, "-m", "venv", str(PLACE))
    python = str(PLACE / "bin" / "python")
    lowest = find_lowest()
    limits = ["-c", str(ROOT / "constraints.txt")]
    both = ["-e", str(ROOT), "-e", str(ROOT / "laboratory")]
    run(python, "-m", "pip", "install", "--quiet", *limits, *both, *lowest)
    run(python, "-W", "error", "-c", IMPORTS)
    run(python, "-W", "error", "-m", "headwise", "--help")
    with tempfile.TemporaryDirectory() as folder:
        run(python, "-c", MODEL, cwd=folder)
        print(run(python, "-m", "headwise", "inspect", "bert", "--text", "text.txt", cwd=folder).splitlines()[-1])
        print(run(python, "-m", "headwise", *DEMO.split(), cwd=folder).splitlines()[-1])
    print(f"works with {', '.join(lowest)}")


def find_lowest() -> list[str]:
    """Return the lowest version of each package of the command and the laboratory, as pip names it."""
    library, laboratory = (
        tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for folder in (ROOT, ROOT / "laboratory")
    )
    extras = library["optional-dependencies"]
    declared = [Requirement(line) for line in (*extras["cli"], *extras["plots"], *laboratory["dependencies"])]
    bounds = {one.name: [it.version for it in one.specifier if it.operator == ">="] for one in declared}
    # of itself headwise declares no version
    return [f"{name}=={version}" for name, versions in bounds.items() for version in versions]


if __name__ == "__main__":
    main()
