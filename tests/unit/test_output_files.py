"""Files that are written whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from bitnet_inference import convert
from bitnet_inference.errors import InvalidParams
from bitnet_inference.output_files import refuse_unwritable, whole_file, whole_files, write_whole


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path):
    file = tmp_path / "a.json"
    file.write_text("before, and longer")
    with file.open() as reader:
        write_whole(file, "ä")
        assert reader.read() == "before, and longer", "whoever reads the old one goes on reading it"
    assert file.read_bytes() == "ä".encode() and os.listdir(tmp_path) == ["a.json"]


def test_a_failure_leaves_what_was_there(tmp_path):
    file = tmp_path / "a.json"
    file.write_text("before")
    with pytest.raises(UnicodeEncodeError):
        write_whole(file, "x\udc80")
    with pytest.raises(InvalidParams, match="cannot be written: Is a directory"):
        write_whole(tmp_path, "x")
    assert file.read_text() == "before" and os.listdir(tmp_path) == ["a.json"]


def test_a_link_stays_and_its_target_changes(tmp_path):
    (tmp_path / "here").mkdir()
    link = tmp_path / "here" / "link"
    link.symlink_to(tmp_path / "target")
    refuse_unwritable(link)
    write_whole(link, "x")
    assert link.is_symlink() and (tmp_path / "target").read_text() == "x"


def test_a_pipe_is_written_to(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    refuse_unwritable(pipe)
    write_whole(pipe, "x")
    assert os.read(reader, 9) == b"x" and pipe.is_fifo()
    os.close(reader)


def test_a_pipe_without_a_name_is_written_to():
    reader, writer = os.pipe()
    for folder in ("/dev/fd", "/proc/self/fd"):  # where a shell's >(...) and /dev/stdout lead
        if Path(folder).is_dir():
            refuse_unwritable(Path(folder) / str(writer))
            write_whole(Path(folder) / str(writer), "x")
            assert os.read(reader, 9) == b"x"
    os.close(reader)
    os.close(writer)


def test_what_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for file, cure in (
        (tmp_path, "may write"),
        (tmp_path / "no" / "a", "make it"),
        (tmp_path / "file" / "a", "make it"),
        (Path("-"), "give its name"),
    ):
        with pytest.raises(InvalidParams, match=cure):
            refuse_unwritable(file)
    refuse_unwritable(tmp_path / "file")
    refuse_unwritable(tmp_path / "new")
    assert os.listdir(tmp_path) == ["file"]


def test_what_can_be_no_name_is_refused(tmp_path):
    null = "null (byte|character)"  # which word it is depends on the version of Python
    names = {"x" * 300: "File name too long", "circle": "Too many levels of symbolic links", "\0": null}
    for name, why in names.items():
        for suffix in ("", ".gguf", ".mlpackage"):
            file = tmp_path / f"{name}{suffix}"
            if name == "circle":
                file.symlink_to(file.name)
            with pytest.raises(InvalidParams, match=f"cannot be written: .*{why}: choose another name"):
                convert("default", file) if suffix else refuse_unwritable(file)


def test_the_longest_name_that_a_file_can_have(tmp_path):
    file = tmp_path / ("x" * 255)
    refuse_unwritable(file)
    write_whole(file, "x")
    assert file.read_text() == "x" and os.listdir(tmp_path) == [file.name]


def test_a_file_in_pieces_is_there_at_the_end_or_as_it_was(tmp_path):
    file = tmp_path / "a.bin"
    with whole_file(file) as out:
        out.write(b"abc")
        assert not file.exists()
        out.seek(1)
        out.write(b"x")
    with pytest.raises(KeyError), whole_file(file) as out:
        out.write(b"half")
        raise KeyError
    assert file.read_bytes() == b"axc" and os.listdir(tmp_path) == ["a.bin"]


def test_several_files_are_there_at_the_end_or_as_they_were(tmp_path):
    (tmp_path / "a").write_text("before")
    (tmp_path / "c").mkdir()
    with whole_files(tmp_path / "a") as folder:
        for name in ("a", "a.data"):
            (folder / name).write_text("new")
        assert (tmp_path / "a").read_text() == "before"
    with pytest.raises(KeyError), whole_files(tmp_path / "a") as folder:
        (folder / "a").write_text("half")
        raise KeyError
    with pytest.raises(InvalidParams, match="cannot be written: No space left"), whole_files(tmp_path / "a") as folder:
        (folder / "b").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(InvalidParams, match="cannot be written: "), whole_files(tmp_path / "a") as folder:
        (folder / "a").write_text("newer")
        (folder / "c").write_text("no folder")
    assert sorted(os.listdir(tmp_path)) == ["a", "a.data", "c"]
    assert (tmp_path / "a").read_text() == (tmp_path / "a.data").read_text() == "new"
