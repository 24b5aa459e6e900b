"""Readers of files that other programs of a job write (schedulers, GPU tools, loggers), one per module; each module of
this package is registered.

A module has `NAME` (what the file is, in words), `recognise(first)`, which gets the first 64 KiB, and one of

* `read(path) -> ProgramRows`: rows of `steps`, `log_events` and `health`, or stacks;
* `lines(path)`: the lines of a text log that the file wraps, which the rules of text logs then read.

Both run confined (`store.readers.untrusted.confined`). A reader leaves out a value that the file lacks, so that it
becomes NULL.
"""
