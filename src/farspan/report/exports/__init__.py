"""Runs in the formats of other tools. A format is a function of one run that writes files into a folder."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from farspan.files import expanded, written
from farspan.record import refuse_file
from farspan.report.exports.eval_results import write_eval_results
from farspan.report.exports.every_eval_ever import write_every_eval_ever
from farspan.report.exports.model_card import write_model_card
from farspan.report.exports.rows import write_rows_csv, write_rows_parquet
from farspan.report.notices import unfinished
from farspan.report.runs import Source, grouped, read_run
from farspan.specs import check_known

Notice = Callable[[str], None]
Writer = Callable[..., list[Path]]  # of a run and a folder; returns the files that it wrote there
FORMATS: dict[str, Writer] = {
    "parquet": write_rows_parquet,
    "csv": write_rows_csv,
    "every-eval-ever": write_every_eval_ever,
    "hf-eval-results": write_eval_results,
    "model-card": write_model_card,
}
ROWS = ("parquet", "csv")  # formats of rows, which also hold those that failed
ELSEWHERE = ("wandb", "trackio", "mlflow")  # trackers that keep runs in places of their own
TRACKERS = ("tensorboard", *ELSEWHERE)
WHOLE = ("tensorboard", "lm_eval")  # folders that hold one export: files of an earlier one would be read with it


def export(
    run: str | Path,
    to: str,
    out: str | Path | None = None,
    *,
    model: str | None = None,
    dataset: str | None = None,
    formats: Mapping[str, Writer] = FORMATS,
    notice: Notice = lambda line: None,
) -> list[Path]:
    """Write a run in the format of another tool and return the paths of the files.

    Args:
        run: its folder.
        to: one of `formats`.
        out: a folder; default: `export` in the run's, where earlier exports are replaced.
        model: one of the run's models, to export it alone.
        dataset: id of a data set on the Hub under which `hf-eval-results` files the numbers; default: the run's text.
        formats: by name; those that need torch are in `farspan.measuring`.
        notice: called with a line for each thing left out.

    Raises:
        ValueError: an unknown format or model, `out` for a tracker that keeps its own, no run, a run without rows, one
            of which no row has a result (but for formats of rows), a file in the place of one to write, or a missing
            package.
    """
    check_known("format", to, formats)
    if dataset is not None and to != "hf-eval-results":
        raise ValueError(f"--dataset belongs to --to hf-eval-results: got --to {to}. Omit it")
    if out is not None and to in ELSEWHERE:
        raise ValueError(f"--out has no effect with --to {to}, which stores its runs itself. Omit it")
    if out is not None and Path(out).suffix == f".{to}":
        raise ValueError(
            f"--out {out}: got the name of a {to} file, expected a folder. Give {Path(out).with_suffix('')}"
        )
    source = read_run(run, model)
    if to not in ROWS:
        check_measured(source, notice)
    folder = expanded(out) if out is not None else source.folder / "export"
    refuse_file(folder)
    with_dataset: dict[str, Any] = {} if dataset is None else {"dataset": dataset}
    with TemporaryDirectory() as place:
        made = {folder / path.relative_to(place): path for path in formats[to](source, Path(place), **with_dataset)}
        if out is not None and (taken := [path for path in made if path.exists()]):
            raise ValueError(f"{taken[0]} exists: delete it, or choose another folder (out)")
        if out is None:
            for name in {path.relative_to(folder).parts[0] for path in made} & {*WHOLE}:
                shutil.rmtree(folder / name, ignore_errors=True)  # a link is not followed
        for path, new in made.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with written(path) as beside:
                shutil.copyfile(new, beside)
    return list(made)


def check_measured(source: Source, notice: Notice) -> None:
    """Call `notice` with a line for the rows without a result, one for the rows not yet measured, and one for the tasks
    whose numbers have no better direction.

    Raises:
        ValueError: no row has a result.
    """
    if missing := [row for row in source.rows if row.status != "ok"]:
        first = f"first: {missing[0].status}: {missing[0].reason}"
        if len(missing) == len(source.rows):
            raise ValueError(
                f"{source.folder}: none of the {len(missing):,} rows has a result, {first}. Measure again, or export "
                f"the rows themselves: --to {' or '.join(ROWS)}"
            )
        notice(f"{len(missing):,} of {len(source.rows):,} rows have no result and are left out, {first}")
    if line := unfinished(source):
        notice(line)
    undirected = [group.spec for group in grouped([source]) if group.entry["quality"]["higher_is_better"] is None]
    if undirected:
        why = "neither direction of its numbers is better, and the format needs one: it is left out"
        notice(f"{', '.join(undirected)}: {why}")
