"""`farspan index`."""

import json
from pathlib import Path
from typing import Annotated, Literal

from farspan.cli.messages import err, one_line_errors
from farspan.cli.options import RUN, TEXTS, AsJson, count, option
from farspan.terminal import Terminal

INDEX = "Index"
LESS_MEMORY = "a smaller --encoder, or --kind bm25"


def index(
    text: Annotated[str, option(TEXTS, "Documents: FILE, FOLDER, org/name or builtin.", metavar="TEXT")],
    out: Annotated[
        Path, option(RUN, "Folder of the index; an index of the same documents and settings is kept.", metavar="FOLDER")
    ],
    kind: Annotated[
        Literal["bm25", "dense", "faiss"],
        option(INDEX, "bm25: words; dense: vectors, exact; faiss: vectors, approximate."),
    ] = "bm25",
    words: Annotated[int | None, count(INDEX, "Words in a passage; default 100.")] = None,
    passage_tokens: Annotated[
        int | None, count(INDEX, "Tokens in a passage, instead of words; needs --tokenizer.")
    ] = None,
    tokenizer: Annotated[str | None, option(INDEX, "Folder or hub id of the tokenizer that cuts passages.")] = None,
    encoder: Annotated[str | None, option(INDEX, "Encoder of dense and faiss; default facebook/contriever.")] = None,
    as_json: AsJson = False,
) -> None:
    """Cut documents into passages and index them, for tasks with retrieval."""
    with one_line_errors(less_memory=LESS_MEMORY):
        import time

        from farspan.loading import load_tokenizer
        from farspan.report.export import counted, memory_size
        from farspan.text.retrieval import ENCODER, WORDS, build

        if (passage_tokens is None) != (tokenizer is None):
            raise ValueError("--passage-tokens and --tokenizer go together: give both, or neither")
        if words is not None and passage_tokens is not None:
            raise ValueError("--words and --passage-tokens contradict each other: give one")
        if encoder is not None and kind == "bm25":
            raise ValueError("--encoder belongs to --kind dense and faiss, not to bm25: omit it, or choose one of them")
        started = time.perf_counter()
        built = build(
            text,
            out,
            kind=kind,
            words=words or WORDS,
            tokens=passage_tokens,
            tokenizer=None if tokenizer is None else load_tokenizer(tokenizer, what="tokenizer"),
            encoder=encoder or ENCODER,
        )
        summary = {
            "index": str(built.folder),
            "kind": kind,
            "documents": built.about["documents"],
            "passages": len(built),
            "bytes": sum(file.stat().st_size for file in built.folder.rglob("*") if file.is_file()),
            "seconds": round(time.perf_counter() - started, 2),
        }
        line = (
            f"{counted(len(built), 'passage')} of {counted(summary['documents'], 'document')} in {out}, "
            f"{memory_size(summary['bytes'])}, {summary['seconds']} s"
        )
        console = err if as_json else Terminal()
        console.print_line(line)
        if as_json:
            print(json.dumps(summary))
