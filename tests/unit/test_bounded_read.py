"""Bounded reads: a file that is larger than it looks is an error before the memory is taken."""

from __future__ import annotations

import os
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rl_eval.bounded_read import FEW_MB, BoundedFile, check_inflation, open_zip, read_bytes, read_entry, read_named
from tests.unit.small_files import archive, inflating, sparse


def test_a_file_up_to_the_limit_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_bytes(tmp_path / "a", 5) == b"12345"
    with pytest.raises(OSError, match=r"5 bytes.*4.*a'"):
        read_bytes(tmp_path / "a", 4)
    (tmp_path / "empty").touch()
    assert read_bytes(tmp_path / "empty") == b""


def test_one_read_is_limited_and_the_file_is_not(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    with BoundedFile(tmp_path / "a", 3) as file:
        assert (file.read(3), file.read()) == (b"123", b"45")
        file.seek(0)
        with pytest.raises(OSError, match="4 bytes"):
            file.read(4)


def test_what_is_not_a_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match=str(path)):
            read_bytes(path)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "none")


@pytest.mark.parametrize("size", [0, 5, 6, 500_000])
def test_a_pipe_that_the_user_names_is_read_up_to_the_limit(tmp_path: Path, size: int) -> None:
    path, content = tmp_path / "pipe", b"x" * size
    os.mkfifo(path)
    with ThreadPoolExecutor() as pool:
        writing = pool.submit(path.write_bytes, content)
        if size <= 5:
            assert read_named(path, 5) == content
        else:
            with pytest.raises(OSError, match=r"6 bytes.*pipe'"):
                read_named(path, 5)
        assert isinstance(writing.exception(), BrokenPipeError | None)


def test_other_files_that_the_user_names_are_read_as_any_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_named(tmp_path / "a", 5) == b"12345"
    for path in (Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match=str(path)):
            read_named(path)


def test_holes_do_not_count(tmp_path: Path) -> None:
    """A small hole is read as zeros; a file of little else is refused."""
    assert read_bytes(sparse(tmp_path / "small", b"a", size=100_000)) == b"a".ljust(100_000, b"\0")
    with pytest.raises(OSError, match=f"{FEW_MB + 1:,}"):
        read_bytes(sparse(tmp_path / "great", b"a", size=FEW_MB + 1), 2**40)


def test_entries_of_archives(tmp_path: Path) -> None:
    path = archive(
        tmp_path / "a.zip", plain=b"x" * 10, small=(zipfile.ZIP_DEFLATED, b"y" * 1000), no=(zipfile.ZIP_LZMA, b"")
    )
    with open_zip(path) as file:
        assert read_entry(file, "plain", path) == b"x" * 10
        assert read_entry(file, "small", path) == b"y" * 1000
        with pytest.raises(OSError, match=r"small.*1,000"):
            read_entry(file, "small", path, 999)
        with pytest.raises(OSError, match="no"):
            read_entry(file, "no", path)
        with pytest.raises(KeyError):
            read_entry(file, "other", path)


def test_an_entry_that_claims_to_be_small_gives_no_more(tmp_path: Path) -> None:
    path = inflating(tmp_path / "a.zip", "data", claimed=100)
    with open_zip(path) as file:
        assert read_entry(file, "data", path) == b"[" * 100


def test_an_archive_may_inflate_a_hundred_times(tmp_path: Path) -> None:
    for size, fits in ((30_000_000, True), (40_000_000, False)):
        path = archive(tmp_path / "a.zip", a=(zipfile.ZIP_DEFLATED, bytes(size)))
        with open_zip(path) as file:
            if fits:
                check_inflation(file, path)
            else:
                with pytest.raises(OSError, match=f"{size:,}"):
                    check_inflation(file, path)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_entry_may_be_larger_than_one_read(tmp_path: Path, method: int) -> None:
    content = os.urandom(2 * FEW_MB)
    path = archive(tmp_path / "a.zip", a=(method, content))
    with open_zip(path) as file:
        assert read_entry(file, "a", path, 2 * FEW_MB) == content


def test_a_file_whose_holes_are_unknown_is_whole() -> None:
    """The file system of processes does not seek to data."""
    with BoundedFile(Path("/proc/cmdline")) as file:
        assert file.stored == file.size
