"""Fetching by recipe, against a server in this process: whole, checked, resumed, unpacked, or refused."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from headwise.errors import DataError, SettingError
from headwise_lab.data.downloads import Download, fetch

CONTENT = bytes(range(256)) * 5_000


class Server(ThreadingHTTPServer):
    """Serves `content` under every path; counts what it sent and can break off or ignore ranges."""

    content, ranges, break_after, status = CONTENT, True, None, 200
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requested: list[str | None] = []
        self.sent = 0

    def url(self, name="corpus.bin"):
        return f"http://127.0.0.1:{self.server_port}/folder/{name}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        asked = self.headers.get("Range")
        server.requested.append(asked)
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and server.ranges else 0
        body = server.content[start:]
        self.send_response(206 if start else server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        body = body[: server.break_after]
        try:
            for start in range(0, len(body), 10_000):
                # counted first: the client may be done before this thread comes to the next line
                server.sent += len(body[start : start + 10_000])
                self.wfile.write(body[start : start + 10_000])
        except ConnectionError:
            self.close_connection = True

    def log_message(self, *_arguments):
        pass


@pytest.fixture
def server():
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def recipe(server, content=CONTENT, name="corpus.bin", members=()):
    return Download(server.url(name), hashlib.sha256(content).hexdigest(), len(content), tuple(members))


def test_a_file_arrives_whole_under_its_own_name_and_is_not_fetched_twice(server, tmp_path):
    folder = tmp_path / "new" / "folder"
    (path,) = fetch(recipe(server), folder, progress=True)
    assert path == folder / "corpus.bin"
    assert path.read_bytes() == CONTENT
    assert [child.name for child in folder.iterdir()] == ["corpus.bin"]
    fetch(recipe(server), folder)
    assert len(server.requested) == 1


@pytest.mark.parametrize("ranges", [True, False])
def test_a_transfer_that_broke_off_goes_on_or_begins_anew_where_the_server_cannot(server, tmp_path, ranges):
    server.break_after, server.ranges = 100_000, ranges
    with pytest.raises(DataError, match=r"stopped after 100,000 of 1,280,000 bytes; run again to resume"):
        fetch(recipe(server), tmp_path)
    assert not (tmp_path / "corpus.bin").exists()
    server.break_after = None
    (path,) = fetch(recipe(server), tmp_path)
    assert path.read_bytes() == CONTENT
    assert server.requested == [None, "bytes=100000-"]
    assert server.sent == len(CONTENT) + (0 if ranges else 100_000)


@pytest.mark.parametrize("served", [CONTENT[:-1] + b"x", CONTENT + b"more", b"<html>moved</html>" * 100_000])
def test_another_file_than_the_recipes_is_refused_with_both_checksums_and_not_kept(server, tmp_path, served):
    server.content = served
    with pytest.raises(DataError) as refusal:
        fetch(recipe(server), tmp_path)
    assert hashlib.sha256(CONTENT).hexdigest() in str(refusal.value)
    assert "1,280,000 bytes" in str(refusal.value)
    if len(served) == len(CONTENT):
        assert hashlib.sha256(served).hexdigest() in str(refusal.value)
    assert list(tmp_path.iterdir()) == []
    server.content = CONTENT
    assert fetch(recipe(server), tmp_path)[0].read_bytes() == CONTENT


def test_what_an_older_recipe_left_behind_is_begun_anew(server, tmp_path):
    (tmp_path / ".corpus.bin.partial").write_bytes(CONTENT + b"longer than the recipe says")
    assert fetch(recipe(server), tmp_path)[0].read_bytes() == CONTENT


def test_far_more_bytes_than_the_recipe_says_are_not_all_received(server, tmp_path):
    server.content = CONTENT * 40
    with pytest.raises(DataError, match="expected"):
        fetch(recipe(server), tmp_path)
    assert server.sent < len(server.content) / 2
    assert list(tmp_path.iterdir()) == []


def test_without_a_server_the_refusal_says_what_to_put_where(server, tmp_path):
    lost = recipe(server)
    server.server_close()
    with pytest.raises(DataError, match="cannot be fetched") as refusal:
        fetch(lost, tmp_path)
    assert f"put the file as corpus.bin into {tmp_path} (sha256 {lost.sha256})" in str(refusal.value)
    (tmp_path / "corpus.bin").write_bytes(CONTENT)
    assert fetch(lost, tmp_path) == (tmp_path / "corpus.bin",)


def test_an_answer_that_is_no_file_is_refused(server, tmp_path):
    server.status = 404
    with pytest.raises(DataError, match=r"cannot be fetched .*Not Found"):
        fetch(recipe(server), tmp_path)


def test_a_file_put_there_by_hand_is_checked_and_never_removed(server, tmp_path):
    (tmp_path / "corpus.bin").write_bytes(b"something else")
    with pytest.raises(DataError, match=r"corpus.bin is another file; take it away"):
        fetch(recipe(server), tmp_path)
    assert (tmp_path / "corpus.bin").read_bytes() == b"something else"
    assert server.requested == []


def packed(form):
    files = {"deep/a.txt": b"first", "deep/b.txt": b"second", "../outside.txt": b"never", "deep/unwanted.txt": b""}
    stream = io.BytesIO()
    if form == "zip":
        with zipfile.ZipFile(stream, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
    else:
        with tarfile.open(fileobj=stream, mode="w:gz") as archive:
            link = tarfile.TarInfo("deep/link.txt")
            link.type, link.linkname = tarfile.SYMTYPE, "a.txt"
            archive.addfile(link)
            for name, content in files.items():
                member = tarfile.TarInfo(f"./{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


@pytest.mark.parametrize("form", ["zip", "tgz"])
def test_only_the_named_members_are_unpacked_and_the_archive_goes(server, tmp_path, form):
    server.content = packed(form)
    wanted = recipe(
        server,
        server.content,
        f"c.{form}",
        [("deep/b.txt", "kept.en"), ("../outside.txt", "o.txt"), ("deep/a.txt", "a")],
    )
    folder = tmp_path / "below"
    assert fetch(wanted, folder) == (folder / "kept.en", folder / "o.txt", folder / "a")
    assert sorted(path.name for path in folder.iterdir()) == ["a", "kept.en", "o.txt"]
    assert [path.name for path in tmp_path.iterdir()] == ["below"]
    assert (folder / "kept.en").read_bytes() == b"second"
    fetch(wanted, folder)
    assert len(server.requested) == 1


def test_an_archive_put_there_by_hand_stays(server, tmp_path):
    content = packed("tgz")
    (tmp_path / "c.tgz").write_bytes(content)
    fetch(recipe(server, content, "c.tgz", [("deep/a.txt", "a")]), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c.tgz"]


def test_a_member_that_is_absent_or_no_file_is_refused_by_name(server, tmp_path):
    server.content = packed("tgz")
    wanted = recipe(server, server.content, "c.tgz", [("deep/a.txt", "a"), ("deep/link.txt", "l"), ("none", "n")])
    with pytest.raises(DataError, match=r"c.tgz lacks deep/link.txt, none"):
        fetch(wanted, tmp_path)


@pytest.mark.parametrize(
    "damage", [b"no archive", packed("tgz")[:-40], gzip.compress(b"no archive", mtime=0), b"PK\x03\x04"]
)
@pytest.mark.parametrize("name", ["c.tgz", "c.zip"])
def test_a_damaged_archive_is_refused(server, tmp_path, damage, name):
    server.content = damage
    with pytest.raises(DataError, match=r"cannot be unpacked|lacks"):
        fetch(recipe(server, damage, name, [("deep/unwanted.txt", "u")]), tmp_path)


def test_a_folder_that_cannot_be_made_is_refused(server, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        fetch(recipe(server), tmp_path / "file")


def test_a_recipe_that_cannot_be_one_is_refused(server):
    whole = recipe(server)
    for changed in ({"sha256": "abc"}, {"sha256": whole.sha256.upper()}, {"size": 0}, {"members": (("a", "../b"),)}):
        with pytest.raises(SettingError, match=next(iter(changed))):
            dataclasses.replace(whole, **changed)
