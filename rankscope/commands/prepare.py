"""`rankscope prepare`: turn text, JSONL and Parquet into token files to train on."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.terminal import FormatOption, console, echo, fail, print_json, wants_json

if TYPE_CHECKING:
    from trainer.data.prepare.prepare import Prepared

__all__ = ["EPILOG", "prepare"]

EPILOG = (
    "\b\nExamples:\nrankscope prepare web/*.jsonl.gz --tokenizer gpt2/tokenizer.json --out prepared/web\n"
    "rankscope prepare s3://bucket/books --field body --tokenizer tokenizer.json --out prepared/books\n"
    "rankscope prepare notes.txt --document line --tokenizer bytes --out prepared/notes"
)


def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(help="Files, folders, globs or fsspec URLs.", metavar="SOURCES...", show_default=False),
    ],
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", metavar="FILE", help="A tokenizer.json, a folder with one, or: bytes.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Output folder; created if missing.")],
    field: Annotated[
        str, typer.Option("--field", help="Field or column of the text. Default: text or content.", metavar="NAME")
    ] = "",
    document: Annotated[
        str, typer.Option("--document", help="What a document is in a text file: file or line.", metavar="file|line")
    ] = "file",
    end_token: Annotated[
        str, typer.Option("--end-token", help="Token after each document. Default: the tokenizer's.", metavar="TOKEN")
    ] = "",
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Skip and count invalid documents instead of stopping.")
    ] = False,
    processes: Annotated[
        int, typer.Option("--processes", min=0, help="Number of processes, 0: one per core. The output stays the same.")
    ] = 0,
    shard_mb: Annotated[
        int,
        typer.Option(
            "--shard-mb",
            min=1,
            max=4096,
            help="MB of text per shard; after a kill, each process repeats at most one shard.",
        ),
    ] = 64,
    output: FormatOption = "text",
) -> None:
    """Turn text, JSONL and Parquet into token files that `train` reads. The same command continues after a kill."""
    as_json = wants_json(output)
    if document not in ("file", "line"):
        fail(f"--document {document}: choose file or line")
    from trainer.data.prepare.documents import ReadOptions
    from trainer.data.prepare.prepare import PrepareRequest
    from trainer.data.prepare.prepare import prepare as prepare_data
    from trainer.data.prepare.progress_view import ProgressView
    from trainer.data.token_folder import DataError

    request = PrepareRequest(
        sources=sources,
        tokenizer=tokenizer,
        out=out,
        end_token=end_token,
        options=ReadOptions(text_field=field, document="line" if document == "line" else "file", skip_bad=skip_bad),
        shard_bytes=shard_mb << 20,
    )
    try:
        with ProgressView(console(err=as_json)) as progress:
            done = prepare_data(
                request, num_processes=processes or len(os.sched_getaffinity(0)), on_progress=progress.show
            )
    except DataError as error:
        fail(str(error))
    except KeyboardInterrupt:
        echo(f"rankscope: interrupted; the same command continues in {out}", err=True)
        raise typer.Exit(130) from None
    if as_json:
        print_json(_result(done, out))
    else:
        _print_result(done, out)


_COUNTS = ("num_skipped", "num_empty", "num_unknown")


def _result(done: Prepared, out: Path) -> dict[str, object]:
    manifest = done.manifest
    counts = {name: sum(getattr(shard, name) for shard in manifest.shards) for name in _COUNTS}
    return {
        "folder": str(out), "num_tokens": manifest.num_tokens, "dtype": manifest.dtype,
        "num_documents": manifest.num_documents, "num_shards": len(manifest.shards), **counts,
        "already_complete": done.already_complete, "shards_reused": done.shards_reused,
        "vocab_size": manifest.tokenizer["vocab_size"],
    }  # fmt: skip


_UNKNOWN = "the tokenizer's unknown token: it does not cover this text"


def _print_result(done: Prepared, out: Path) -> None:
    from analyzers.wording import counted

    manifest = done.manifest
    documents = counted(manifest.num_documents, "document") or "no document"
    shards = counted(len(manifest.shards), "shard") or "no shard"
    size = f"{manifest.num_tokens:,} tokens ({manifest.dtype}) of {documents} in {shards}"
    echo(f"{out}: {size}{', complete already' if done.already_complete else ''}")
    if (reused := done.shards_reused) and not done.already_complete:
        echo(f"{counted(reused, 'shard')} {'is' if reused == 1 else 'are'} from an earlier call.")
    for name, noun, one, many in (
        ("num_skipped", "document", "was invalid and was left out", "were invalid and were left out"),
        ("num_empty", "document", "was empty and was left out", "were empty and were left out"),
        ("num_unknown", "token", f"is {_UNKNOWN}", f"are {_UNKNOWN}"),
    ):
        if number := sum(getattr(shard, name) for shard in manifest.shards):
            echo(f"{counted(number, noun)} {one if number == 1 else many}.")
    facts = manifest.tokenizer
    settings = f"--set data.path={shlex.quote(str(out))} --set model.vocab_size={facts['vocab_size']}"
    echo(f"Train on it:  rankscope train CONFIG {settings}")
