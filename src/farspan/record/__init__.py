# ruff: noqa: F401  (the names are for `from farspan.record import`)
"""Rows (see `farspan.schema.row.Row`), appended to disk as they are measured; and the folder of the run they belong to.

runs/NAME/run.json     settings, models, versions, hardware, one entry for each start
runs/NAME/rows.jsonl   one line per example; a kill loses at most the line being written
runs/NAME/rows-2-of-8.jsonl   the same, of the second of 8 processes that measure the run together
runs/NAME/rows.lock, rows-2-of-8.lock    held by the process that writes these rows
runs/NAME/run.lock     held while run.json or examples.jsonl is changed
runs/NAME/examples.jsonl   the first example of each model and task, in readable form
"""

from farspan.record.configs import changed_fields
from farspan.record.provenance import environment
from farspan.record.rows import (
    ABSENT,
    NOT_FAILED,
    UNFINISHED,
    Shard,
    Tail,
    by_key,
    current,
    latest,
    read_examples,
    read_header,
    read_rows,
    refuse_file,
)
from farspan.record.run import Run, default_folder
from farspan.record.sampled import (
    CONTENTS,
    LARGEST,
    LENGTHS,
    OF_TOKENS,
    SAMPLED,
    TEXTS,
    VERSIONS,
    refuse_other_texts,
    spanned,
)
from farspan.record.settings import DEFAULT_REPEATS, continued, flat, refuse_changed_files, refuse_differences
from farspan.schema.row import Row
