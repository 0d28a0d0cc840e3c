"""Folders of `headwise.save` that someone else made or changed: names, and functions that make them of a good one."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import struct
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from headwise.atomic import FILES, seal, seal_folder
from headwise.errors import DataError

RECORD, CONFIG, WEIGHTS = "headwise.json", "config.json", "weights"
CANARY = "canary"
EMBEDDING = "embeddings.word_embeddings.weight"

Attack = Callable[[Path], object]


def tensor_file(folder: Path) -> Path:
    """The first tensor file of a folder."""
    return min(folder.glob("headwise-*.safetensors"))


def find(folder: Path, name: str) -> Path:
    return tensor_file(folder) if name == WEIGHTS else folder / name


def edit(folder: Path, change: Callable[[dict[str, Any]], object], name: str = RECORD) -> None:
    """Change the JSON of a file, and seal the folder again as its maker could."""
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))
    seal_again(folder)


def seal_again(folder: Path) -> None:
    """Give a folder the digests of what it holds now."""
    record = json.loads((folder / RECORD).read_text())
    names = [name for name in record[FILES] if (folder / name).is_file()]
    (folder / RECORD).write_text(json.dumps(seal(record, folder, names)))


def set_value(name: str, *keys: Any, to: Any) -> Attack:
    """Set a value of the JSON of a file."""

    def change(content: Any) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = to

    return lambda folder: edit(folder, change, name)


def set_bytes(name: str, content: bytes) -> Attack:
    return replace_file(name, lambda path: path.write_bytes(content))


def replace_file(name: str, make: Callable[[Path], object]) -> Attack:
    """Put something else in the place of a file; of a file that can be read, with a new digest."""

    def apply(folder: Path) -> None:
        path = find(folder, name)
        path.rename(folder.parent / "taken away")
        make(path)
        if name != RECORD:
            with suppress(DataError):
                seal_again(folder)

    return apply


def halve(path: Path) -> None:
    content = (path.parents[1] / "taken away").read_bytes()
    path.write_bytes(content[: len(content) // 2])


# What may be in the place of any file.
THINGS: dict[str, Callable[[Path], object]] = {
    "nothing": lambda _: None,
    "no byte": Path.touch,
    "zeros": lambda path: path.write_bytes(bytes(4096)),
    "text": lambda path: path.write_bytes(b"tensors\n" * 50),
    "half of it": halve,
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link out of the folder": lambda path: path.symlink_to(path.parents[1] / "taken away"),
}
# What may be in the place of a JSON text.
TEXTS = {
    "another coding than UTF-8": b'{"format": "\xff"}',
    "many brackets": b"[" * 100_000 + b"]" * 100_000,
    "a number of 5,000 digits": b'{"format": ' + b"9" * 5000 + b"}",
    "a list": b"[1]",
    "a number": b"1",
}


def set_tensors(change: Callable[[dict[str, Any]], object]) -> Attack:
    """Change the tensors of the first file."""

    def apply(folder: Path) -> None:
        path = tensor_file(folder)
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        change(tensors)
        save_file(tensors, path)
        seal_again(folder)

    return apply


def set_embedding(value: Callable[[torch.Tensor], torch.Tensor]) -> Attack:
    return set_tensors(lambda tensors: tensors.update({EMBEDDING: value(tensors[EMBEDDING])}))


def set_header(change: Callable[[dict[str, Any]], object]) -> Attack:
    """Change what a file of tensors says of the first of them."""

    def apply(folder: Path) -> None:
        content = tensor_file(folder).read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        change(header[EMBEDDING])
        text = json.dumps(header).encode()
        tensor_file(folder).write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
        seal_again(folder)

    return apply


class Runs:
    """Makes a file when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.place),)


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


def put_code(folder: Path) -> None:
    """Name a Python file as the class of the configuration, at each depth."""
    (folder / "code.py").write_text(f"import os\nos.mkdir({str(folder / CANARY)!r})\n")
    names = {"AutoConfig": "code.Config", "AutoModel": "code.Model", "BertModel": "code.Model"}
    edit(
        folder,
        lambda config: config["config"].update(auto_map=names, model_type="own", vocab_size=-1),
        CONFIG,
    )


def divide(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    """Put the tensors into two files with an index, whose places are then changed."""
    whole = tensor_file(folder)
    tensors = load_file(whole)
    files = ("headwise-1-00001-of-00002.safetensors", "headwise-1-00002-of-00002.safetensors")
    places = {name: files[number % 2] for number, name in enumerate(tensors)}
    for file in files:
        save_file({name: tensor.clone() for name, tensor in tensors.items() if places[name] == file}, folder / file)
    whole.unlink()
    change(places)
    index = {"metadata": {}, "weight_map": places}
    (folder / "headwise-1.safetensors.index.json").write_text(json.dumps(index))
    record = json.loads((folder / RECORD).read_text())
    record["weights"] = "headwise-1.safetensors.index.json"
    names = [path.name for path in folder.iterdir() if path.name != RECORD]
    (folder / RECORD).write_text(json.dumps(seal(record, folder, names)))


def place_all(name: str, make: Callable[[Path], object] = lambda _: None) -> Attack:
    """Have an index name one file for all tensors."""

    def apply(folder: Path) -> None:
        make(folder / name)
        divide(folder, lambda places: places.update(dict.fromkeys(places, name)))

    return apply


def place_twice(folder: Path) -> None:
    """Put a tensor into both files of an index."""
    divide(folder, lambda _: None)
    one, other = sorted(folder.glob("headwise-1-*"))
    tensors = load_file(other)
    save_file({**{name: tensor.clone() for name, tensor in tensors.items()}, EMBEDDING: torch.zeros(20, 8)}, other)
    seal_again(folder)
    assert EMBEDDING in load_file(one)


def change_surgery(kind: str, change: Callable[[dict[str, Any]], object]) -> Attack:
    """Change the first surgery of a kind, or of none such an added one."""

    def apply(record: dict[str, Any]) -> None:
        found = [surgery for surgery in record["surgeries"] if surgery["do"] == kind] or [{"do": kind}]
        change(found[0])
        record["surgeries"] += [] if found[0] in record["surgeries"] else found

    return lambda folder: edit(folder, apply)


def set_setting(change: Callable[[dict[str, Any]], object]) -> Attack:
    return change_surgery("aggregate", lambda surgery: change(surgery["setting"]))


def set_field(**values: Any) -> Attack:
    return set_setting(lambda setting: setting["fields"].update(values))


def set_number(name: str, text: str) -> Attack:
    """Write other characters for a number of the record."""

    def apply(folder: Path) -> None:
        changed, times = re.subn(rf'(?<="{name}": )[^,\s}}]+', text, (folder / RECORD).read_text())
        assert times > 0
        (folder / RECORD).write_text(changed)

    return apply


BERT = "transformers.models.bert.modeling_bert"
# Values that a JSON file may have at a place: what the file is, the keys, and the values by name.
VALUES: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    (RECORD, ("format",), {"null": None, "a deep list": [[[1]]], "of the next version": 3}),
    (
        RECORD,
        ("weights",),
        {
            "outside": "../headwise-1.safetensors",
            "a whole path": "/etc/passwd",
            "another file": CONFIG,
            "a number": 3,
            "not there": "headwise-2.safetensors",
        },
    ),
    (RECORD, ("surgeries",), {"a text": "prune", "of numbers": [1], "of no kind": [{"module": ""}], "an object": {}}),
    (RECORD, ("tied",), {
        "a list": [],
        "to nothing": {"pooler.dense.weight": "elsewhere"},
        "of nothing": {"elsewhere": "pooler.dense.weight"},
        "of another shape": {EMBEDDING: "pooler.dense.bias"},
        "to a number": {"elsewhere": 3},
    }),
    (CONFIG, ("config",), {"a text": "BertModel", "null": None, "empty": {}, "a list": []}),
    (CONFIG, ("class",), {
        "of os": "os:system",
        "a function": f"{BERT}:eager_attention_forward",
        "no model": f"{BERT}:BertConfig",
        "of no module": "transformers.models.none:Model",
        "a command": "transformers.cli.transformers:main",
        "a number": 3,
        "another one": "transformers.models.gpt2.modeling_gpt2:GPT2Model",
    }),
    (CONFIG, ("attention",), {
        "a kernel": {"": "kernels-community/flash-attn2"},
        "not installed": {"": "flash_attention_2"},
        "a list": {"": ["eager"]},
        "a text": "eager",
    }),
    (CONFIG, ("config", "attn_implementation"), {"a kernel": "kernels-community/flash-attn2"}),
    (CONFIG, ("config", "part"), {
        "with a kernel": {"_attn_implementation": {"": "someone/kernel:main"}},
        "of a billion layers": {"n_layer": 10**9},
    }),
    (CONFIG, ("config", "num_attention_heads"), {
        "negative": -2,
        "0": 0,
        "no divisor": 7,
        "a text": "two",
        "a list": [2],
        "huge": 10**12,
    }),
    (CONFIG, ("config", "num_hidden_layers"), {"huge": 10**6, "negative": -1, "a thousand": 1000}),
    (CONFIG, ("config", "hidden_size"), {"huge": 2**28, "of 4,000 digits": 10**4000}),
    (CONFIG, ("config", "intermediate_size"), {"ten million": 10**7}),
    (CONFIG, ("config", "sliding_window"), {"of nothing": 0}),
    (CONFIG, ("config", "vocab_size"), {"huge": 2**29}),
    (CONFIG, ("config", "max_position_embeddings"), {"huge": 2**29, "twenty million": 2 * 10**7}),
    (CONFIG, ("config", "num_labels"), {"huge": 10**9}),
    (CONFIG, ("config", "id2label"), {"many": {str(number): "x" for number in range(10**5)}}),
    (CONFIG, ("generation",), {"a text": "greedy"}),
]  # fmt: skip


def change_module(module: Any) -> Attack:
    return change_surgery("aggregate", lambda surgery: surgery.update(module=module))


FOLDERS: dict[str, Attack] = {
    **{
        f"{name} is {what}": replace_file(name, make)
        for name in (RECORD, CONFIG, WEIGHTS)
        for what, make in THINGS.items()
    },
    **{f"{name} is {what}": set_bytes(name, text) for name in (RECORD, CONFIG) for what, text in TEXTS.items()},
    **{
        f"{'.'.join(map(str, keys))} is {what}": set_value(file, *keys, to=value)
        for file, keys, values in VALUES
        for what, value in values.items()
    },
    "an empty folder": lambda folder: [path.unlink() for path in folder.iterdir()],
    "a file added since it was sealed": lambda folder: (seal_folder(folder), (folder / "added.txt").touch()),
    # code
    "a pickle in the place of tensors": lambda folder: set_bytes(WEIGHTS, pickle.dumps(Runs(folder / CANARY)))(folder),
    "a file of torch in the place of tensors": lambda folder: replace_file(
        WEIGHTS, lambda path: torch.save({"x": Runs(folder / CANARY)}, path)
    )(folder),
    "a pickle in an index": lambda folder: place_all(
        "headwise-1.bin", lambda path: path.write_bytes(pickle.dumps(Runs(folder / CANARY)))
    )(folder),
    "a Python file for the configuration": put_code,
    # files of tensors
    "a header longer than the file": set_bytes(WEIGHTS, struct.pack("<Q", 1 << 62) + b"{}"),
    "a header that is no JSON": set_bytes(WEIGHTS, struct.pack("<Q", 4) + b"{{{{"),
    "a tensor beyond the file": set_header(lambda tensor: tensor.update(data_offsets=[0, 1 << 40])),
    "a tensor of negative size": set_header(lambda tensor: tensor.update(shape=[-20, 8])),
    "a tensor of a huge shape": set_header(lambda tensor: tensor.update(shape=[1 << 40, 1 << 40])),
    "a tensor of an unknown type": set_header(lambda tensor: tensor.update(dtype="object")),
    "an index of a file outside": place_all("../taken.safetensors"),
    "an index of a whole path": place_all("/etc/passwd"),
    "an index of a file that is not there": place_all("headwise-2.safetensors"),
    "an index of a file without a digest": lambda folder: (
        place_all("headwise-x.safetensors", lambda path: shutil.copyfile(tensor_file(folder), path))(folder),
        edit(folder, lambda record: record[FILES].pop("headwise-x.safetensors")),
    ),
    "an index that is a list": lambda folder: (
        divide(folder, lambda _: None),
        set_value("headwise-1.safetensors.index.json", "weight_map", to=[1])(folder),
    ),
    "a tensor in both files of an index": place_twice,
    # tensors
    "an unknown tensor": set_tensors(lambda tensors: tensors.update(strange=torch.zeros(2))),
    "a missing tensor": set_tensors(lambda tensors: tensors.pop(EMBEDDING)),
    "a tensor of another shape": set_embedding(lambda tensor: tensor.T.contiguous()),
    "a tensor of integers": set_embedding(torch.Tensor.long),
    "a tensor of truth values": set_embedding(lambda tensor: tensor > 0),
    "a tensor of complex numbers": set_embedding(lambda tensor: tensor.to(torch.complex64)),
    "a NaN": set_embedding(lambda tensor: tensor.index_fill(0, torch.tensor([3]), float("nan"))),
    # surgeries
    **{
        f"an aggregator with {name} {value}": change_surgery("aggregate", lambda s, n=name, v=value: s.update({n: v}))
        for name, value in [
            ("num_heads", -2),
            ("num_heads", 4),
            ("num_heads", 0.5),
            ("num_heads", True),
            ("width", 2**29),
        ]
    },
    "an aggregator without a size": change_surgery("aggregate", lambda surgery: surgery.pop("width")),
    "an aggregator of one more size": change_surgery("aggregate", lambda surgery: surgery.update(depth=3)),
    **{
        f"an aggregator in the place of {module!r}": change_module(module)
        for module in ("encoder.layer.9.dense", "", "encoder.forward", 3)
    },
    "an adopted module that is not there": change_surgery("adopt", lambda surgery: surgery.update(module="encoder.9")),
    "an adopted module that is no attention": change_surgery("adopt", lambda s: s.update(module="embeddings")),
    "sizes that are a list": change_surgery("resize", lambda surgery: surgery.update(module="embeddings", sizes=[1])),
    "a size of 0": change_surgery("resize", lambda surgery: surgery.update(module="embeddings", sizes={"width": 0})),
    "a size of something else": change_surgery(
        "resize", lambda s: s.update(module="embeddings", sizes={"training": 1})
    ),
    # settings
    "a setting of an unknown class": set_setting(lambda setting: setting.update(setting="Popen")),
    "a setting of no class": set_setting(lambda setting: setting.update(setting=["Gate"])),
    "a setting that is no aggregator": set_setting(lambda setting: setting.update(setting="Chunks", fields={})),
    "a setting whose fields are a list": set_setting(lambda setting: setting.update(fields=[1])),
    "a setting with another field": set_field(shell=True),
    "a setting with NaN": set_number("floor", "NaN"),
    "a setting with a number beyond their range": set_number("floor", "1e400"),
    "a setting with a negative number": set_field(iterations=-1),
    "a setting whose votes are a number": set_field(votes=5),
    "a setting whose votes are deep": set_field(votes=json.loads('{"a":' * 900 + "1" + "}" * 900)),
    "a setting of more capsules": set_field(capsules=2**30),
}
