from __future__ import annotations

import probes.tape.run_facts
from analyzers.run.ends.exceptions import frame_texts, own_frame, read_traceback


def fail(depth: int) -> None:
    if depth:
        fail(depth - 1)
    raise KeyError("tokens")


def described(raising: object) -> str:
    try:
        raising()  # type: ignore[operator]
    except Exception as error:
        return str(probes.tape.run_facts.exception_fields(error)["traceback"])
    raise AssertionError


def test_tracebacks_written_by_python_are_parsed() -> None:
    (link,) = read_traceback(described(lambda: fail(2)))
    assert (link.error_type, link.message) == ("KeyError", "'tokens'")
    frame = own_frame(link)
    assert frame is not None
    assert frame.text == f"run/test_exceptions.py:{fail.__code__.co_firstlineno + 3} in fail"
    assert frame_texts(link)[0] == frame.text


def test_chained_exceptions_are_separated() -> None:
    def caused() -> None:
        try:
            fail(0)
        except KeyError as error:
            raise ValueError("bad sample") from error

    def handled() -> None:
        try:
            fail(0)
        except KeyError:
            raise ValueError("bad sample")  # noqa: B904

    for raising, is_caused in ((caused, True), (handled, False)):
        first, last = read_traceback(described(raising))
        assert (first.error_type, last.error_type, last.is_caused) == ("KeyError", "ValueError", is_caused)


def test_the_user_frame_in_a_loader_worker_is_named() -> None:
    inner = described(lambda: fail(0))
    text = (
        "Traceback (most recent call last):\n"
        '  File "/home/me/train.py", line 5, in main\n'
        '  File "/x/lib/python3.11/site-packages/torch/_utils.py", line 750, in reraise\n'
        "KeyError: Caught KeyError in DataLoader worker process 0.\nOriginal " + inner
    )
    (link,) = read_traceback(text)
    frame = own_frame(link)
    assert link.error_type == "KeyError"
    assert frame is not None
    assert frame.function == "fail"


def test_other_text_has_no_traceback_and_lengths_are_bounded() -> None:
    assert read_traceback("") == []
    assert read_traceback("\x1b[31mFile <b>\n" * 9) == []
    wide = 'Traceback (most recent call last):\n  File "' + "a" * 400 + '", line 3, in ' + "f" * 199 + "\nKeyError: 1\n"
    many = wide.replace("KeyError: 1\n", "") * 500 + "KeyError: 1\n"
    (link,) = read_traceback(many)
    assert len(frame_texts(link)) == 12
    assert all(len(frame) < 650 for frame in frame_texts(link))


def test_a_traceback_without_user_code_names_the_innermost_frame() -> None:
    text = 'Traceback (most recent call last):\n  File "/usr/lib/python3.11/runpy.py", line 9, in run\nKeyError: 1\n'
    (link,) = read_traceback(text)
    frame = own_frame(link)
    assert frame is not None
    assert frame.text == "python3.11/runpy.py:9 in run"
