"""Readers of foreign files have limits that hold before a library reads a length."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import sqlite3
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from analyzers.evidence.diagnose_files import diagnose_files
from store.open import is_shared
from store.readers.untrusted import archives, confined, external_files
from store.readers.untrusted.confined import confined as run_confined
from store.readers.untrusted.external_files import SourceError, unpacked


def _pid(path: Path) -> int:
    return os.getpid()


def _greedy(path: Path) -> int:
    return len(bytearray(3 << 30))


def _endless(path: Path) -> int:
    while True:
        pass


def _confused(path: Path) -> int:
    raise KeyError("a library\nwas confused")


def _refusing(path: Path) -> int:
    raise SourceError(f"{path.name} is not for me")


@pytest.fixture
def binary(tmp_path: Path) -> Path:
    path = tmp_path / "file.bin"
    path.write_bytes(b"PAR1" * 10)
    return path


def test_one_process_reads_file_after_file_and_a_short_text_needs_none(binary: Path, tmp_path: Path) -> None:
    text = tmp_path / "x.json"
    text.write_text('{"a": 1}')
    first = run_confined(_pid, binary)
    with pytest.raises(SourceError, match="is not for me"):
        run_confined(_refusing, binary)
    assert run_confined(_pid, binary) == first != os.getpid()
    assert run_confined(_pid, text) == os.getpid()


@pytest.mark.parametrize(
    ("read", "words"),
    [(_greedy, "MiB of memory"), (_endless, "took longer than"), (_confused, "is damaged: KeyError: .*was confused")],
)
def test_a_reader_that_goes_over_its_limits_is_named_and_the_next_one_reads(
    binary: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], int], words: str
) -> None:
    if read is _endless:
        monkeypatch.setattr(confined, "LIMIT_S", 0.5)
    with pytest.raises(SourceError, match=words) as told:
        run_confined(read, binary)
    assert "\n" not in str(told.value)
    monkeypatch.undo()
    assert run_confined(_pid, binary) != os.getpid()


def _with_header(path: Path, kind: bytes, num_bytes: int) -> None:
    header = tarfile.TarInfo("x")
    header.type, header.size = kind, num_bytes
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(header.tobuf(tarfile.GNU_FORMAT))
        for _ in range(num_bytes >> 20):
            file.write(b"a" * (1 << 20))
        file.write(tarfile.TarInfo("y").tobuf() + bytes(1024))


@pytest.mark.parametrize("kind", [b"x", b"g", b"L", b"K"], ids=["pax", "global", "long name", "long link"])
def test_a_header_of_a_tar_is_bounded(tmp_path: Path, kind: bytes) -> None:
    path = tmp_path / "evidence.tar.gz"
    _with_header(path, kind, 64 << 20)
    with pytest.raises(SourceError, match="holds a header of 67,108,864 bytes"):
        diagnose_files([path])
    assert not is_shared(path)


def test_a_member_above_the_size_limit_is_refused_without_reading_it(tmp_path: Path) -> None:
    member = tarfile.TarInfo("rank0.log")
    member.size = 1 << 50
    path = tmp_path / "e.tar"
    path.write_bytes(member.tobuf(tarfile.GNU_FORMAT) + b"step 1 loss 2.0\n".ljust(512, b"\0"))
    with pytest.raises(SourceError, match="holds a file of 1,125,899,906,842,624 bytes"):
        archives.expand(path, tmp_path)


def test_long_names_that_are_names_are_read(tmp_path: Path) -> None:
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        path, into = tmp_path / f"{form}.tar", tmp_path / f"into-{form}"
        into.mkdir()
        with tarfile.open(path, "w", format=form) as archive:
            member = tarfile.TarInfo("/".join(["long-name" * 10] * 4) + "/rank0.log")
            member.size = 3
            archive.addfile(member, io.BytesIO(b"abc"))
        assert archives.expand(path, into) == []
        assert [found.read_bytes() for found in into.rglob("rank0.log")] == [b"abc"]


def test_an_archive_that_unpacks_to_a_thousand_times_its_size_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "ALWAYS_BYTES", 1 << 20)
    path, into = tmp_path / "bomb.zip", tmp_path / "into"
    into.mkdir()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("rank0.log", b"a" * (64 << 20))
    with pytest.raises(SourceError, match="unpacks to more than the limit"):
        archives._expand(path, into)
    assert sum(file.stat().st_size for file in into.rglob("*")) < 8 << 20


def test_a_zip_of_more_files_than_are_read_is_refused_before_they_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "many.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(archives.MAX_MEMBERS + 1):
            archive.writestr(zipfile.ZipInfo(f"{number}"), b"")
    with pytest.raises(SourceError, match="holds 20,001 files"):
        archives.expand(path, tmp_path)


def _zipped(path: Path, *names: str, how: int = zipfile.ZIP_DEFLATED) -> bytearray:
    with zipfile.ZipFile(path, "w", how) as archive:
        for name in names:
            archive.writestr(name, b"step 1 loss 2.0\n" * 200)
    return bytearray(path.read_bytes())


@pytest.mark.parametrize("how", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_damaged_member_of_a_zip_costs_no_other(tmp_path: Path, how: int) -> None:
    path, into = tmp_path / "e.zip", tmp_path / "into"
    into.mkdir()
    content = _zipped(path, "rank0.log", "rank1.log", how=how)
    at = zipfile.sizeFileHeader + len("rank0.log") + 9
    content[at : at + 12] = b"\xff" * 12
    path.write_bytes(content)
    ((name, problem),) = archives.expand(path, into)
    assert (name, problem[:22]) == ("rank0.log", "is damaged or cut off:")
    assert (into / "rank1.log").stat().st_size == 3200


@pytest.mark.parametrize("names", [("é" * 300, "rank1.log"), ("a", "a/b", "rank1.log"), ("a/b", "a", "rank1.log")])
def test_a_member_that_cannot_be_written_costs_no_other(tmp_path: Path, names: tuple[str, ...]) -> None:
    path, into = tmp_path / "e.zip", tmp_path / "into"
    into.mkdir()
    _zipped(path, *names)
    problems = archives.expand(path, into)
    assert len(problems) == len(names) - 2
    assert not any(str(into) in problem for _, problem in problems)
    assert (into / "rank1.log").stat().st_size == 3200


def test_a_zip_whose_names_are_no_text_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "e.zip"
    content = _zipped(path, "é.log")
    at = content.rfind(b"PK\x01\x02") + zipfile.sizeCentralDir
    content[at] = 0xFF
    path.write_bytes(content)
    with pytest.raises(SourceError, match=r"is damaged or cut off: .*codec can't decode"):
        archives.expand(path, tmp_path)


def test_a_file_of_torch_is_named(tmp_path: Path) -> None:
    _zipped(tmp_path / "rank0.pt", "archive/data.pkl", "archive/version", "archive/data/0")
    with pytest.raises(SourceError, match=r"rank0\.pt is a file of torch\.save, which is not read"):
        diagnose_files([tmp_path])


def test_parts_of_a_gzip_without_end_are_named(tmp_path: Path) -> None:
    (tmp_path / "rank0.log.gz").write_bytes(gzip.compress(b"step 1 loss 2.0\n") + gzip.compress(b"") * 5_000)
    diagnosis = diagnose_files([tmp_path])
    assert "empty parts" in str(diagnosis.run["file_problems"])


@pytest.mark.parametrize(
    ("name", "content", "packer"),
    [("e.7z", b"7z\xbc\xaf\x27\x1c" + os.urandom(90), "7-Zip"),
     ("e.rar", b"Rar!\x1a\x07\x01" + os.urandom(90), "RAR")],
)  # fmt: skip
def test_a_file_packed_in_a_way_that_is_not_read_is_named(
    tmp_path: Path, name: str, content: bytes, packer: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=f"{name} is packed with {packer}, which is not supported: unpack it"):
        diagnose_files([tmp_path])


ERROR = b"[rank3]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n"


@pytest.mark.parametrize("pack", [lzma.compress, bz2.compress])
def test_a_log_in_streams_of_xz_or_bzip2_is_read_whole(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    (tmp_path / "job.log.packed").write_bytes(pack(b"step 1 loss 2.0\n" * 100_000) + pack(b"") + pack(ERROR))
    (finding, *_) = diagnose_files([tmp_path]).fired
    assert finding.ranks == (3,)


@pytest.mark.parametrize("pack", [lzma.compress, bz2.compress])
@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda packed: packed[:-40], "cut off"),
        (lambda packed: packed[:60] + bytes(40) + packed[100:], "damaged"),
    ],
)
def test_damaged_xz_and_bzip2_are_named(
    tmp_path: Path, pack: Callable[[bytes], bytes], damage: Callable[[bytes], bytes], problem: str
) -> None:
    text = b"".join(b"step %d loss %s\n" % (step, os.urandom(9).hex().encode()) for step in range(1, 9_000))
    (tmp_path / "job.log").write_bytes(ERROR)
    (tmp_path / "rank0.log.packed").write_bytes(damage(pack(text)))
    assert problem in str(diagnose_files([tmp_path]).run["file_problems"])


@pytest.mark.parametrize("pack", [lzma.compress, bz2.compress])
def test_empty_streams_without_end_are_named(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    (tmp_path / "rank0.log.packed").write_bytes(pack(b"step 1 loss 2.0\n") + pack(b"") * 5_000)
    assert "compressed parts" in str(diagnose_files([tmp_path]).run["file_problems"])


NSYS = {
    "generated columns": (
        "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (k, start GENERATED ALWAYS AS (length(zeroblob(k))), end, shortName);"
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL (k, end, shortName) VALUES (1, 2, 1)",
        "computes the values of table CUPTI_ACTIVITY_KIND_KERNEL"),
    "names": (
        "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, shortName);" + "".join(
            f'CREATE TABLE "t{number}{"n" * 50_000}" (a);' for number in range(40)),
        "names of 50,00"),
    "a virtual table": (
        "CREATE VIRTUAL TABLE CUPTI_ACTIVITY_KIND_KERNEL USING fts5(start, end, shortName)",
        "computes the values of table CUPTI_ACTIVITY_KIND_KERNEL"),
    "a text of megabytes": (
        "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, shortName);"
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1, 2, CAST(zeroblob(30000000) AS TEXT))",
        "string or blob too big"),
}  # fmt: skip


@pytest.mark.parametrize("name", NSYS)
def test_an_sqlite_report_runs_nothing_of_the_file(tmp_path: Path, name: str) -> None:
    script, words = NSYS[name]
    with sqlite3.connect(tmp_path / "rank0.sqlite") as connection:
        connection.executescript("CREATE TABLE StringIds (id INTEGER, value TEXT);" + script)
    connection.close()
    assert words in str(diagnose_files([tmp_path]).run["file_problems"])


def test_a_zip_whose_members_share_bytes_is_refused(tmp_path: Path) -> None:
    """A directory of any length may point at one member: each entry unpacks it again."""
    path = tmp_path / "e.zip"
    content = _zipped(path, "rank0.log", "rank1.log")
    second = content.rindex(b"PK\x01\x02")
    content[second + 42 : second + 46] = bytes(4)  # the second entry's member begins where the first one's does
    path.write_bytes(content)
    with pytest.raises(SourceError, match="members that share bytes"):
        archives.expand(path, tmp_path)


def test_many_small_members_of_a_gzip_file_are_read_as_one_text(tmp_path: Path) -> None:
    member = gzip.compress(b"step 1 loss 2.0\n")
    path = tmp_path / "job.log.gz"
    path.write_bytes(member * 3_000)
    chunks = list(unpacked(path))
    assert (len(chunks), b"".join(chunks)) == (1, b"step 1 loss 2.0\n" * 3_000)


def test_members_above_the_limit_are_named_and_the_rest_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_files, "MAX_MEMBERS", 50)
    path = tmp_path / "job.log.gz"
    path.write_bytes(gzip.compress(b"step 1 loss 2.0\n") * 60)
    chunks = unpacked(path)
    assert next(chunks) == b"step 1 loss 2.0\n" * 50
    with pytest.raises(SourceError, match="more than 50 compressed parts: the rest was not read"):
        next(chunks)
