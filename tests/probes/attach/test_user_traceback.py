"""A printed traceback has the frames of the user's code and of torch, and none of ours."""

from __future__ import annotations

import traceback

import pytest

from probes.attach.patching.replaced import replaced
from probes.attach.process_end import without_our_frames


class Library:
    @staticmethod
    def backward() -> None:
        raise KeyError("lr")


def rate() -> None:
    try:
        Library.backward()
    except KeyError as error:
        raise ValueError("no rate") from error


def test_our_frames_are_removed_from_the_whole_chain() -> None:
    undo = replaced(Library, "backward", lambda real: real())
    try:
        with pytest.raises(ValueError, match="no rate") as raised:
            rate()
    finally:
        undo()
    text = "".join(traceback.format_exception(raised.value))
    assert "replaced.py" in text
    trace = without_our_frames(raised.value)
    text = "".join(traceback.format_exception(raised.value))
    assert "replaced.py" not in text
    assert text.count("test_user_traceback.py") >= 3
    assert trace is raised.value.__traceback__


def test_a_traceback_without_user_frames_is_unchanged() -> None:
    """A script that does not compile: all frames are those that start it."""
    code = compile('compile("l = (", "train.py", "exec")', "/x/rankscope/attached_script.py", "exec")
    with pytest.raises(SyntaxError) as raised:
        exec(code, {})
    error = raised.value
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next  # this test's own frame
    text = "".join(traceback.format_exception(error))
    assert without_our_frames(error) is error.__traceback__
    assert "".join(traceback.format_exception(error)) == text
