"""Files and directories that appear whole or not at all."""

import os

import pytest

from riftco.files import json_lines, new_directory, new_file, read_small, replace_file


def _full(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.tiny
def test_a_file_is_replaced_and_nothing_else_stays(tmp_path):
    path = tmp_path / "a.txt"
    replace_file(path, "one\n")
    replace_file(path, b"two\xff")
    assert path.read_bytes() == b"two\xff" and os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_failure_names_the_file_and_leaves_it_as_it_was(tmp_path, monkeypatch, name):
    path = tmp_path / "a.txt"
    replace_file(path, "one")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space") as error:
        patch.setattr(os, name, _full)
        replace_file(path, "two")
    assert error.value.filename == str(path) and error.value.strerror == "No space left on device"
    assert path.read_text() == "one" and os.listdir(tmp_path) == ["a.txt"]
    with pytest.raises(FileNotFoundError, match=r"b\.txt'"):
        replace_file(tmp_path / "none" / "b.txt", "x")


@pytest.mark.skipif(os.name != "posix", reason="directories are flushed on POSIX alone")
def test_the_file_and_its_directory_are_flushed(tmp_path, monkeypatch):
    flushed, fsync = [], os.fsync

    def watched(descriptor):
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}") if os.path.isdir("/proc/self/fd") else "")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    replace_file(tmp_path / "a.txt", "x")
    assert len(flushed) == 2 and flushed[1] in ("", str(tmp_path))
    with new_directory(tmp_path / "d") as place:
        (place / "sub").mkdir()
        (place / "sub" / "a").write_text("x")
    assert len(flushed) == 2 + 4  # the file, its directory, the new one, the one around it


def test_a_directory_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    place = tmp_path / "d"
    with pytest.raises(ZeroDivisionError), new_directory(place) as fresh:
        (fresh / "a").write_text("half")
        _ = 1 / 0
    assert os.listdir(tmp_path) == []
    place.mkdir()
    with new_directory(place) as fresh:  # an empty one gives way
        (fresh / "a").write_text("one")
    with pytest.raises(OSError, match="d'"), new_directory(place):
        pass
    rename = os.rename

    def last_rename_fails(source, target):
        if str(source).endswith("new"):
            assert not place.exists()
            _full()
        rename(source, target)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(os, "rename", last_rename_fails)
        with new_directory(place, replace=True):
            pass
    assert (place / "a").read_text() == "one" and os.listdir(tmp_path) == ["d"]
    with new_directory(place, replace=True) as fresh:
        (fresh / "b").write_text("two")
    assert os.listdir(place) == ["b"] and os.listdir(tmp_path) == ["d"]


@pytest.mark.tiny
def test_json_lines_say_what_is_no_object_and_what_is_torn(tmp_path):
    path = tmp_path / "a.jsonl"
    assert json_lines(path) == []
    path.write_bytes('{"a": "x\u2028y"}\n\n[1]\n{"a": 2}\n{"a'.encode())
    lines = json_lines(path)
    assert [line.number for line in lines] == [1, 3, 4, 5]
    assert [line.record for line in lines] == [{"a": "x\u2028y"}, None, {"a": 2}, None]
    assert [line.is_whole for line in lines] == [True, True, True, False]


@pytest.mark.parametrize("replace", [False, True])
def test_a_long_file_appears_whole_or_not_at_all_and_takes_no_others_place(tmp_path, monkeypatch, replace):
    path = tmp_path / "sub" / "a.bin"
    with pytest.raises(ZeroDivisionError), new_file(path, replace=replace) as file:
        file.write(b"half")
        _ = 1 / 0
    assert os.listdir(tmp_path / "sub") == []
    with new_file(path, replace=replace) as file:
        file.write(b"____ world")
        file.seek(0)
        file.write(b"hell")
    assert path.read_bytes() == b"hell world" and os.listdir(tmp_path / "sub") == ["a.bin"]
    if replace:
        with new_file(path, replace=True) as file:
            file.write(b"again")
        assert path.read_bytes() == b"again"
        return
    with pytest.raises(FileExistsError), new_file(path):
        pass
    late = tmp_path / "sub" / "late.bin"
    with pytest.raises(FileExistsError), new_file(late) as file:
        late.write_bytes(b"mine")
    assert late.read_bytes() == b"mine"
    monkeypatch.setattr(os, "link", _full)
    with new_file(tmp_path / "sub" / "no_links.bin") as file:
        file.write(b"x")
    with pytest.raises(OSError, match="No space") as error, new_file(late.with_name("late2.bin")) as file:
        late.with_name("late2.bin").write_bytes(b"mine")
    assert error.value.filename == str(late.with_name("late2.bin"))
    assert sorted(os.listdir(tmp_path / "sub")) == ["a.bin", "late.bin", "late2.bin", "no_links.bin"]


def test_a_device_is_not_read_as_a_small_file(tmp_path):
    (tmp_path / "endless").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="plain file"):
        read_small(tmp_path / "endless")
    (tmp_path / "long").write_bytes(bytes(11))
    with pytest.raises(ValueError, match="at most 10 bytes"):
        read_small(tmp_path / "long", most=10)
    assert read_small(tmp_path / "long", most=11) == bytes(11)


def _aged(path):
    os.utime(path, (1e9, 1e9))
    return path


def test_what_a_killed_process_left_aside_goes_when_the_place_is_written_again(tmp_path):
    target = tmp_path / "model"
    (tmp_path / ".model.0badf00d.tmp" / "new").mkdir(parents=True)
    (tmp_path / ".model.0badf00d.tmp" / "new" / "weights").write_bytes(bytes(9))
    _aged(tmp_path / ".model.0badf00d.tmp")
    (tmp_path / ".model.00000001.tmp" / "new").mkdir(parents=True)  # young: its owner may be about to lock it
    (tmp_path / ".models.0badf00d.tmp").mkdir()  # of another place
    _aged(tmp_path / ".models.0badf00d.tmp")
    with new_directory(target) as fresh:
        (fresh / "a").write_text("a")
    assert sorted(os.listdir(tmp_path)) == [".model.00000001.tmp", ".models.0badf00d.tmp", "model"]
    _aged(tmp_path / ".model.00000001.tmp").rename(tmp_path / ".m.gguf.00000001.tmp")
    (tmp_path / ".m.gguf.00000002.tmp").write_bytes(bytes(9))
    _aged(tmp_path / ".m.gguf.00000002.tmp")
    with new_file(tmp_path / "m.gguf") as file:
        file.write(b"x")
    assert sorted(os.listdir(tmp_path)) == [".models.0badf00d.tmp", "m.gguf", "model"]


def test_what_is_being_written_is_nobodys_to_remove(tmp_path):
    target = tmp_path / "model"
    with new_directory(target) as first:
        aside = _aged(first.parent)
        with new_directory(target) as second:
            (second / "a").write_text("second")
        assert aside.is_dir()
        (first / "a").write_text("first")
        target.joinpath("a").unlink()
    assert (target / "a").read_text() == "first" and os.listdir(tmp_path) == ["model"]


def test_what_was_set_aside_comes_back_when_a_process_was_killed_between_two_renames(tmp_path):
    target, aside = tmp_path / "model", tmp_path / ".model.0badf00d.tmp"
    (aside / "old").mkdir(parents=True)
    (aside / "old" / "a").write_text("mine")
    _aged(aside)
    with pytest.raises(OSError), new_directory(target) as fresh:
        (fresh / "a").write_text("new")
    assert (target / "a").read_text() == "mine" and os.listdir(tmp_path) == ["model"]
