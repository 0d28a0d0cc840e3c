"""Folders of `headwise.save` that someone else made or changed: names, and functions that make them of a good one."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from headwise.atomic import seal, seal_folder

RECORD = "headwise.json"
CANARY = "canary"


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the record of a folder, and seal it again as its maker could."""
    record = json.loads((folder / RECORD).read_text())
    change(record)
    names = [name for name in (*files_of(record), "config.json") if (folder / name).is_file()]
    (folder / RECORD).write_text(json.dumps(seal(record, folder, names)))


def seal_again(folder: Path) -> None:
    """Give a folder the digests of what it holds now."""
    edit(folder, lambda record: record)


def files_of(record: Mapping[str, Any]) -> list[str]:
    """The tensor files that a record names, which may be none."""
    files = record.get("files")
    return [name for name in files if "/" not in name] if isinstance(files, dict) else []


def tensor_file(folder: Path) -> Path:
    """The first tensor file of a folder."""
    return min(folder.glob("headwise-*.pt"))


def set_record(*keys: str, to: Any) -> Callable[[Path], None]:
    """Set a value of the record."""

    def change(record: dict[str, Any]) -> None:
        inner = record
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = to

    return lambda folder: edit(folder, change)


def set_tensors(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change the tensors of the first file."""

    def apply(folder: Path) -> None:
        path = tensor_file(folder)
        tensors = torch.load(path, weights_only=True)
        made = change(tensors)
        torch.save(tensors if made is None else made, path)
        seal_again(folder)

    return apply


def set_first(value: Callable[[torch.Tensor], Any]) -> Callable[[Path], None]:
    """Replace the weight of an embedding."""

    def change(tensors: dict[str, Any]) -> None:
        name = "embeddings.word_embeddings.weight"
        tensors[name] = value(tensors[name])

    return set_tensors(change)


def set_bytes(content: bytes, name: str = "") -> Callable[[Path], None]:
    """Replace the record, or the first tensor file for the name "tensors"."""

    def apply(folder: Path) -> None:
        (tensor_file(folder) if name else folder / RECORD).write_bytes(content)
        if name:
            seal_again(folder)

    return apply


def replace_file(make: Callable[[Path], object], name: str = "") -> Callable[[Path], None]:
    """Put something else in the place of the record, or of the first tensor file."""

    def apply(folder: Path) -> None:
        path = tensor_file(folder) if name else folder / RECORD
        path.unlink()
        make(path)

    return apply


class Large:
    """Becomes 3 GB when it is unpickled."""

    def __reduce__(self) -> Any:
        return bytearray, (3 << 30,)


def pack(path: Path) -> None:
    """Compress a file of torch, which may then be a thousandth of what it holds."""
    with zipfile.ZipFile(path) as archive:
        content = {part: archive.read(part) for part in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for part, data in content.items():
            archive.writestr(part, data)


def put_packed(folder: Path) -> None:
    """Compress the tensors."""
    pack(tensor_file(folder))
    seal_again(folder)


def link_out(folder: Path) -> None:
    """Put a link to a file outside the folder in the place of the tensors."""
    path = tensor_file(folder)
    outside = path.rename(folder.parent / path.name)
    path.symlink_to(outside)


class Runs:
    """Makes a file when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.place),)


def put_pickle(folder: Path) -> None:
    """Replace the tensors by a pickle that runs code."""
    tensor_file(folder).write_bytes(pickle.dumps({"x": Runs(folder / CANARY)}))
    seal_again(folder)


def put_torch_pickle(folder: Path) -> None:
    """Replace the tensors by a file of torch whose pickle runs code."""
    torch.save({"x": Runs(folder / CANARY)}, tensor_file(folder))
    seal_again(folder)


def put_code(folder: Path) -> None:
    """Name a Python file as the class of the configuration, at each depth."""
    (folder / "code.py").write_text(f"import os\nos.mkdir({str(folder / CANARY)!r})\n")
    names = {"AutoConfig": "code.Config", "AutoModel": "code.Model", "BertModel": "code.Model"}

    def change(record: dict[str, Any]) -> None:
        record["model"]["config"] |= {"auto_map": names, "model_type": "own", "vocab_size": -1}

    edit(folder, change)


def traverse(folder: Path) -> None:
    """Name a tensor file outside the folder."""
    outside = folder.parent / "headwise-outside.pt"
    shutil.copyfile(tensor_file(folder), outside)
    edit(folder, lambda record: record.update(files={"../headwise-outside.pt": next(iter(record["files"].values()))}))


def name_twice(folder: Path) -> None:
    """Name a tensor in two files."""
    shutil.copyfile(tensor_file(folder), folder / "headwise-copy.pt")
    edit(folder, lambda record: record["files"].update({"headwise-copy.pt": next(iter(record["files"].values()))}))


def grow(name: str, value: Any) -> Callable[[Path], None]:
    """Set a number of the configuration of the model."""
    return set_record("model", "config", name, to=value)


def set_size(name: str, value: Any) -> Callable[[Path], None]:
    """Set a size of the first aggregator."""
    return lambda folder: edit(folder, lambda record: next(iter(record["aggregators"].values())).update({name: value}))


def set_setting(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change the setting of the first aggregator."""
    return lambda folder: edit(folder, lambda record: change(next(iter(record["aggregators"].values()))["setting"]))


def set_number(name: str, text: str) -> Callable[[Path], object]:
    """Write other characters for a number of the record."""

    def apply(folder: Path) -> None:
        changed, times = re.subn(rf'(?<="{name}": )[^,\s}}]+', text, (folder / RECORD).read_text())
        assert times > 0
        (folder / RECORD).write_text(changed)

    return apply


def rename_key(record: dict[str, Any], old: str, new: str) -> None:
    """Rename a key of the aggregators."""
    record["aggregators"][new] = record["aggregators"].pop(old)


FOLDERS: dict[str, Callable[[Path], object]] = {
    # files
    "an empty folder": lambda folder: [path.unlink() for path in folder.iterdir()],
    "a file added since it was sealed": lambda folder: (seal_folder(folder), (folder / "added.txt").touch()),
    "no record": lambda folder: (folder / RECORD).unlink(),
    "an empty record": set_bytes(b""),
    "a record of zeros": set_bytes(bytes(4096)),
    "a record that is not UTF-8": set_bytes(b'{"format": "\xff"}'),
    "half a record": lambda folder: os.truncate(folder / RECORD, (folder / RECORD).stat().st_size // 2),
    "a deep record": set_bytes(b"[" * 100_000 + b"]" * 100_000),
    "a deep setting": set_setting(lambda setting: setting.update(votes=json.loads('{"a":' * 900 + "1" + "}" * 900))),
    "a number of 5,000 digits": set_bytes(b'{"format": ' + b"9" * 5000 + b"}"),
    "a record that is a list": set_bytes(b"[1]"),
    "a record that is a number": set_bytes(b"1"),
    "a record of format null": set_record("format", to=None),
    "a record of a deep format": set_record("format", to=[[[1]]]),
    "a folder in the place of the record": replace_file(Path.mkdir),
    "a pipe in the place of the record": replace_file(os.mkfifo),
    "a link to itself in the place of the record": replace_file(lambda path: path.symlink_to(path)),
    "a link to a device in the place of the record": replace_file(lambda path: path.symlink_to("/dev/zero")),
    "a folder in the place of the tensors": replace_file(Path.mkdir, "tensors"),
    "a pipe in the place of the tensors": replace_file(os.mkfifo, "tensors"),
    "a link to a device in the place of the tensors": replace_file(
        lambda path: path.symlink_to("/dev/zero"), "tensors"
    ),
    "no tensors": lambda folder: tensor_file(folder).unlink(),
    "an empty file of tensors": set_bytes(b"", "tensors"),
    "a text file of tensors": set_bytes(b"tensors\n" * 50, "tensors"),
    "half a file of tensors": lambda folder: (
        os.truncate(tensor_file(folder), tensor_file(folder).stat().st_size // 2),
        seal_again(folder),
    ),
    "a file of tensors outside the folder": traverse,
    "a link to tensors outside the folder": link_out,
    "a file of tensors by its whole path": lambda folder: edit(
        folder, lambda record: record.update(files={"/etc/passwd": ["x"]})
    ),
    # code
    "a pickle in the place of tensors": put_pickle,
    "a pickle of torch in the place of tensors": put_torch_pickle,
    "a pickle of something large": set_tensors(lambda tensors: tensors.update(large=Large())),
    "a packed archive": put_packed,
    "a Python file for the configuration": put_code,
    "a class of os": set_record("model", "class", to="os:system"),
    "a class that is a function": set_record(
        "model", "class", to="transformers.models.bert.modeling_bert:apply_rotary"
    ),
    "a class that is no model": set_record("model", "class", to="transformers.models.bert.modeling_bert:BertConfig"),
    "a module that is not there": set_record("model", "class", to="transformers.models.none:Model"),
    "a module of transformers with a command": set_record("model", "class", to="transformers.cli.transformers:main"),
    "a class that is a number": set_record("model", "class", to=3),
    "an attention kernel": set_record("model", "attention", to={"": "kernels-community/flash-attn2"}),
    "an attention kernel in the configuration": grow("attn_implementation", "kernels-community/flash-attn2"),
    "an attention kernel of a part": grow("part", {"_attn_implementation": {"": "someone/kernel:main"}}),
    "a flash attention that is not installed": set_record("model", "attention", to={"": "flash_attention_2"}),
    "an attention that is a list": set_record("model", "attention", to={"": ["eager"]}),
    # tensors
    "an unknown tensor": set_tensors(lambda tensors: tensors.update(strange=torch.zeros(2))),
    "a missing tensor": set_tensors(lambda tensors: dict(list(tensors.items())[1:])),
    "tensors in two files": name_twice,
    "a tensor that is a number": set_first(lambda _: 3),
    "a tensor that is a list": set_first(lambda _: [1.0]),
    "a file that holds one tensor": set_tensors(lambda _: torch.zeros(3)),
    "a tensor of another shape": set_first(lambda tensor: tensor.T.contiguous()),
    "a tensor of integers": set_first(lambda tensor: tensor.long()),
    "a tensor of truth values": set_first(lambda tensor: tensor > 0),
    "a tensor of complex numbers": set_first(lambda tensor: tensor.to(torch.complex64)),
    "a sparse tensor": set_first(lambda tensor: tensor.to_sparse()),
    "a tensor without numbers": set_first(lambda tensor: tensor.to("meta")),
    "a NaN": set_first(lambda tensor: tensor.clone().index_fill_(0, torch.tensor([3]), float("nan"))),
    "a tied tensor that is not stored": set_record("tied", to={"pooler.dense.weight": "elsewhere"}),
    "a tied tensor that the model does not have": set_record("tied", to={"elsewhere": "pooler.dense.weight"}),
    "a tied tensor of another shape": set_record("tied", to={"embeddings.word_embeddings.weight": "pooler.dense.bias"}),
    "tensor names that are numbers": lambda folder: edit(
        folder, lambda record: record.update(files={name: [1, 2] for name in record["files"]})
    ),
    # sizes
    "another class": set_record("model", "class", to="transformers.models.gpt2.modeling_gpt2:GPT2Model"),
    "a negative number of heads": grow("num_attention_heads", -2),
    "no heads": grow("num_attention_heads", 0),
    "a number of heads that divides nothing": grow("num_attention_heads", 7),
    "heads that are a text": grow("num_attention_heads", "two"),
    "heads that are a list": grow("num_attention_heads", [2]),
    "a huge number of heads": grow("num_attention_heads", 10**12),
    "a huge number of layers": grow("num_hidden_layers", 10**6),
    "a negative number of layers": grow("num_hidden_layers", -1),
    "a huge width": grow("hidden_size", 2**28),
    "a huge vocabulary": grow("vocab_size", 2**29),
    "a huge number of positions": grow("max_position_embeddings", 2**29),
    "a huge number of labels": grow("num_labels", 10**9),
    "many names of labels": grow("id2label", {str(number): "x" for number in range(10**5)}),
    "twenty million positions": grow("max_position_embeddings", 2 * 10**7),
    "a feed-forward layer of ten million": grow("intermediate_size", 10**7),
    "a thousand layers": grow("num_hidden_layers", 1000),
    "a part of a billion layers": grow("part", {"n_layer": 10**9}),
    "a width of 4,000 digits": grow("hidden_size", 10**4000),
    "a configuration that is a list": set_record("model", "config", to=[]),
    "a configuration without anything": set_record("model", "config", to={}),
    "a generation configuration that is a text": set_record("model", "generation", to="greedy"),
    "a model that is a text": set_record("model", to="BertModel"),
    # aggregators
    "an aggregator of a negative size": set_size("num_heads", -2),
    "an aggregator of a huge size": set_size("width", 2**29),
    "an aggregator of more heads": set_size("num_heads", 4),
    "an aggregator of half a head": set_size("num_heads", 0.5),
    "an aggregator whose size is true": set_size("num_heads", True),
    "an aggregator without a size": lambda folder: edit(
        folder, lambda record: next(iter(record["aggregators"].values())).pop("width")
    ),
    "an aggregator that is a text": set_record("aggregators", to={"encoder.layer.0.output.dense": "gate"}),
    "aggregators that are a list": set_record("aggregators", to=[1]),
    "an aggregator elsewhere": lambda folder: edit(
        folder, lambda record: rename_key(record, next(iter(record["aggregators"])), "encoder.layer.9.dense")
    ),
    "an aggregator in the place of the model": lambda folder: edit(
        folder, lambda record: rename_key(record, next(iter(record["aggregators"])), "")
    ),
    "an aggregator in the place of a method": lambda folder: edit(
        folder, lambda record: rename_key(record, next(iter(record["aggregators"])), "encoder.forward")
    ),
    "a setting of an unknown class": set_setting(lambda setting: setting.update(setting="Popen")),
    "a setting of no class": set_setting(lambda setting: setting.update(setting=["Gate"])),
    "a setting with another field": set_setting(lambda setting: setting.update(shell=True)),
    "a setting with NaN": set_number("floor", "NaN"),
    "a setting with a number beyond their range": set_number("floor", "1e400"),
    "a setting with a negative number": set_setting(lambda setting: setting.update(iterations=-1)),
    "a setting whose votes are a number": set_setting(lambda setting: setting.update(votes=5)),
    "a setting that is no aggregator": set_setting(lambda setting: (setting.clear(), setting.update(setting="Chunks"))),
    "a setting of more capsules": set_setting(lambda setting: setting.update(capsules=2**30)),
    "an adopted module that is not there": set_record("adopted", to=["encoder.layer.9"]),
    "an adopted module that is no attention": set_record("adopted", to=["embeddings"]),
    "an adopted module that is a number": set_record("adopted", to=[3]),
}
