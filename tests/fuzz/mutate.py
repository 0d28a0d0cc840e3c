"""Mutated inputs for readers of files: what is read is either a result or a `HeadwiseError`, within two seconds.

    from fuzz.mutate import fuzz, mutate_json

    path = tmp_path / "idf.json"
    path.write_text(...)                       # an input that is read
    fuzz(lambda: read_idf(path), path, mutate=mutate_json)

`fuzz` writes mutated copies of that input to `path` and reads each. A failure names the error, the seed and a file that
holds the input. Mark a test of 10,000 inputs with `@pytest.mark.slow`.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import pickle
import random
import resource
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from headwise.errors import HeadwiseError

INPUTS = 10_000
SECONDS = 2.0
# What reading one input may allocate.
BYTES = 512 << 20
# Failures that are shown, one of a kind.
SHOWN = 8
LONG, DEEP, DIGITS = 200_000, 100_000, 5_000

Mutation = Callable[[bytes, random.Random], bytes]

TOKENS: tuple[bytes, ...] = (
    *(b"\x00", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\x1b[31m", b"\r", b"\n\n", b"\t", b"\x0b", b"\x1c"),
    *("\u2028".encode(), "\x85".encode(), "²".encode(), "٣".encode(), "\u202e".encode(), b"&amp;", b"<![CDATA["),
    *(b"-1", b"1e999", b"nan", b"9" * DIGITS, b"[" * DEEP, b"(" * DEEP, b'"', b"\\", b"../../x", b"[/x]", b"%s", b"{}"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 10**40, 0.5, -0.0, 1e308, math.nan, math.inf, -math.inf),
    *("", "x", "²", "\ud800", "\x00", "../../x", "/etc/passwd", "[/x]", "9" * DIGITS, [], {}, [None], [[]], {"": None}),
)
PLACE = "place of a text that json.dumps cannot write"
TEXTS = ("[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, "9" * DIGITS, "1e999", "-", "", "{")


def mutate_bytes(content: bytes, draw: random.Random) -> bytes:
    """Return `content` with a few bits flipped, bytes changed, a part cut out, repeated or moved, or its end lost."""
    mutated = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        start = draw.randrange(len(mutated) + 1)
        end = min(len(mutated), start + draw.choice((1, 4, 16, 256, 4096)))
        match draw.randrange(7):
            case 0 | 1 if mutated:
                mutated[draw.randrange(len(mutated))] ^= 1 << draw.randrange(8)
            case 2:
                del mutated[start:]
            case 3:
                del mutated[start:end]
            case 4:
                mutated[start:end] = draw.randbytes(end - start)
            case 5:
                part = bytes(mutated[start:end])
                mutated[start:start] = part * min(draw.choice((1, 2, 100)), LONG // max(1, len(part)))
            case _:
                place = draw.randrange(len(mutated) + 1)
                mutated[place:place] = mutated[start:end]
    return bytes(mutated)


def mutate_text(content: bytes, draw: random.Random) -> bytes:
    """Return `content` with odd characters, long or repeated parts, or lines in another order."""
    if draw.random() < 0.3:
        return mutate_bytes(content, draw)
    mutated = content
    for _ in range(draw.choice((1, 1, 2, 3))):
        start = draw.randrange(len(mutated) + 1)
        lines = mutated.split(b"\n")
        match draw.randrange(5):
            case 0 | 1:
                end = min(len(mutated), start + draw.choice((0, 0, 1, 5)))
                mutated = mutated[:start] + draw.choice(TOKENS) + mutated[end:]
            case 2:
                draw.shuffle(lines)
                mutated = b"\n".join(lines)
            case 3:
                del lines[draw.randrange(len(lines))]
                mutated = b"\n".join(lines)
            case _:
                part = mutated[start : start + draw.choice((1, 2, 8, 64))]
                mutated = mutated[:start] + part * (LONG // max(1, len(part))) + mutated[start:]
    return mutated


def mutate_json(content: bytes, draw: random.Random) -> bytes:
    """Return JSON with values of another type, missing, repeated or renamed keys, deep or huge values; or broken."""
    if draw.random() < 0.2:
        return mutate_text(content, draw)
    value = json.loads(content)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        value = _mutate_value(value, draw)
    text = json.dumps(value)
    while json.dumps(PLACE) in text:
        text = text.replace(json.dumps(PLACE), draw.choice(TEXTS), 1)
    return text.encode()


def mutate_json_lines(content: bytes, draw: random.Random) -> bytes:
    """Return lines of JSON of which one is mutated, or the lines as text."""
    lines = content.splitlines()
    if not lines or draw.random() < 0.2:
        return mutate_text(content, draw)
    place = draw.randrange(len(lines))
    lines[place] = mutate_json(lines[place], draw)
    return b"\n".join([*lines, b""])


def mutate_numbers(content: bytes, draw: random.Random) -> bytes:
    """Return JSON in which one integer, at any depth, is far larger, negative, nothing, or no integer."""
    value = json.loads(content)
    places = list(_find_integers(value))
    inner, key = draw.choice(places)
    number = inner[key]
    inner[key] = draw.choice(
        (*(number * times for times in (1000, 10**6, 10**9, 2)), *(10**5, 10**6, 10**7, 10**9, -number - 1, 0)),
    )
    if draw.random() < 0.3:
        odd = (float(number), 0.5, str(number), str(10**9), None, True, [number], [10**9] * 3, {"0": 10**9})
        inner[key] = draw.choice(odd)
    if draw.random() < 0.1:
        value["num_labels" if draw.random() < 0.5 else "num_hidden_layers"] = draw.choice((10**6, 10**9))
    return json.dumps(value).encode()


def _find_integers(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield where integers are in JSON data: what holds each, and its key."""
    for key, item in list(value.items()) if isinstance(value, dict) else list(enumerate(value)):
        if isinstance(item, dict | list):
            yield from _find_integers(item)
        elif type(item) is int:
            yield value, key


@dataclass
class Tally:
    """How many inputs were read, and how many refused with a `HeadwiseError`; `messages` holds one of each start."""

    read: int = 0
    refused: int = 0
    messages: dict[str, str] = field(default_factory=dict)


def fuzz(
    read: Callable[[], object],
    path: Path,
    *,
    mutate: Mutation = mutate_bytes,
    inputs: int = INPUTS,
    seed: int = 0,
    seconds: float = SECONDS,
    memory: int = BYTES,
) -> Tally:
    """Read mutated copies of a file, and fail on any error but a `HeadwiseError`, or much time or memory of a read.

    They are read in one process, a copy of this one, whose memory is limited for each.

    Args:
        read: Reads `path`, and whatever belongs to it, from the beginning.
        path: A file that `read` reads without error; its content is restored.
        mutate: Makes one input of the content.
        inputs: How many.
        seed: Inputs are drawn with it and their number, so one of them can be made again.
        seconds: Longest time of one read: of its processor, as the machine may be busy, and twenty times as long of the
            clock.
        memory: Most bytes that reading may add to the process; beyond it allocation fails.
    """
    content = path.read_bytes()
    read()
    # a process of its own: native code may end it where there is no memory left
    shared, answer = mmap.mmap(-1, 8), path.with_name(f"answer-{path.name}")
    try:
        with warnings.catch_warnings(action="ignore"):
            child = os.fork()
        if child == 0:
            _answer(answer, lambda: _read_all(read, path, mutate, inputs, seed, seconds, memory, shared))
        _, status = os.waitpid(child, 0)
        number = int.from_bytes(shared[:], "little")
        if os.WIFSIGNALED(status):
            path.with_name(f"failed-{number}-{path.name}").write_bytes(path.read_bytes())
            raise AssertionError(f"the process died of signal {os.WTERMSIG(status)} at input {number} of seed {seed}")
        tally, failures = pickle.loads(answer.read_bytes())
    finally:
        path.write_bytes(content)
        answer.unlink(missing_ok=True)
    assert not failures, "\n".join([f"{len(failures)} kinds of failure:", *failures.values()])
    return tally


def _answer(place: Path, work: Callable[[], object]) -> NoReturn:
    """Write what work returns and end this process, without anything that a test does at its end."""
    try:
        place.write_bytes(pickle.dumps(work()))
    except BaseException:
        traceback.print_exc()
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0)


def _read_all(
    read: Callable[[], object],
    path: Path,
    mutate: Mutation,
    inputs: int,
    seed: int,
    seconds: float,
    memory: int,
    shared: mmap.mmap,
) -> tuple[Tally, dict[str, str]]:
    content, tally, failures = path.read_bytes(), Tally(), {}
    for number in range(inputs):
        shared[:] = number.to_bytes(8, "little")
        mutated = mutate(content, random.Random(f"{seed}/{number}"))
        path.write_bytes(mutated)
        try:
            with limit_memory(memory):
                read_in_time(read, seconds)
            tally.read += 1
            continue
        except HeadwiseError as error:
            caught: BaseException = error
            if not ran_out(error):
                tally.refused += 1
                tally.messages.setdefault(type(error).__name__ + str(error)[-40:], str(error))
                continue
        except (Exception, SystemExit, TooSlow) as error:
            caught = error
        kind = f"{type(caught).__name__} at {_find_line(caught)}"
        if kind not in failures:
            kept = path.with_name(f"failed-{number}-{path.name}")
            kept.write_bytes(mutated)
            failures[kind] = f"{kind}, input {number} of seed {seed}, {kept}: {str(caught)[:300]}"
        if len(failures) == SHOWN:
            break
    return tally, failures


def ran_out(error: BaseException | None) -> bool:
    """Return whether a refusal came only after an allocation failed, which on a larger machine would not have."""
    while error is not None:
        if isinstance(error, MemoryError) or "alloc" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


class TooSlow(BaseException):
    """A read took too long; no reader catches it by accident."""


def read_in_time(read: Callable[[], object], seconds: float = SECONDS) -> None:
    """Call `read`, and raise `TooSlow` if it takes longer."""
    start = time.process_time()
    with _alarm(signal.ITIMER_PROF, signal.SIGPROF, seconds), _alarm(signal.ITIMER_REAL, signal.SIGALRM, 20 * seconds):
        read()
    if time.process_time() - start > seconds:
        raise TooSlow(f"more than {seconds} s, in code that no signal interrupts")


@contextmanager
def _alarm(timer: int, number: signal.Signals, seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooSlow(f"more than {seconds} s")

    before = signal.signal(number, stop)
    signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, before)


@contextmanager
def limit_memory(more: int) -> Iterator[None]:
    # what is private and may be written; a file that is mapped is not
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    status = Path("/proc/self/status").read_text()
    now = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (now + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _find_line(error: BaseException) -> str:
    """Return the last line of headwise in a traceback, or else its last line."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/headwise/" in frame.filename] or list(frames)
    return f"{own[-1].filename}:{own[-1].lineno}"


def _mutate_value(value: Any, draw: random.Random) -> Any:
    """Return JSON data with one value changed, at any depth; `value` is left alone."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not keys or draw.random() < 0.15:
        return draw.choice((*VALUES, PLACE, [value], {"a": value}, str(value)))
    chosen = draw.choice(keys)
    changed: Any = dict(value) if isinstance(value, dict) else list(value)
    match draw.randrange(8):
        case 0:
            del changed[chosen]
        case 1:
            changed[chosen] = draw.choice(VALUES)
        case 2:
            changed[chosen] = changed[draw.choice(keys)]
        case 3 if isinstance(changed, dict):
            changed[draw.choice(("", "x", chosen + "x", "../x", "\ud800"))] = changed.pop(chosen)
        case 3:
            changed.insert(chosen, changed[draw.choice(keys)])
        case _:
            changed[chosen] = _mutate_value(changed[chosen], draw)
    return changed
