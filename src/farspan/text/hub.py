"""Data sets on the Hugging Face hub, and in its cache when offline."""

import re
from pathlib import Path
from typing import Any

from huggingface_hub import is_offline_mode

from farspan.extras import optional_import

HUB_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(@(?P<config>[\w.-]+))?(:(?P<split>[^#]+))?(#(?P<column>.+))?")
CONVERTED = "refs/convert/parquet"  # the branch where the hub keeps a data set that is a script as parquet
# where the hub has the files of data sets whose old names are scripts or no longer exist
MIRRORS = {
    "nq_open": "google-research-datasets/nq_open:validation",
    "trivia_qa": "mandarjoshi/trivia_qa@rc.nocontext:validation",
    "popqa": "akariasai/PopQA:test",
}


def cached_snapshot(id: str, branch: str = "main") -> Path | None:
    """Return the folder of a data set's files in the hub's cache; None if online, or if the cache lacks them.

    Needed offline because `datasets` finds only data sets that it has prepared before."""
    if not is_offline_mode():
        return None
    try:
        hub = optional_import("huggingface_hub", "data")
        return Path(hub.snapshot_download(id, repo_type="dataset", revision=branch, local_files_only=True))
    except OSError:
        return None


class UnknownSplitError(ValueError):
    """A data set on the hub has no split of that name."""


def hub_rows(id: str, config: str | None, split: str, *, converted: bool = False) -> tuple[str, Any]:
    """Return a name for errors and the rows of a data set on the hub, as `datasets` opens them.

    Offline, the cache of the hub's files is searched first, then that of `datasets`.

    Args:
        converted: the data set is a script: read the parquet files that the hub makes of it.

    Raises:
        ValueError: it cannot be read, is damaged, or exists only as a script.
        UnknownSplitError: it has no such split.
    """
    datasets = optional_import("datasets", "data")
    name = f"hub dataset {id}@{config or 'default'}:{split}"
    files = f"{config or 'default'}/{split}/*.parquet"
    folder = cached_snapshot(id, CONVERTED if converted else "main")
    try:
        if converted:
            place = f"{folder or f'hf://datasets/{id}@{CONVERTED}'}/{files}"
            return name, datasets.load_dataset("parquet", data_files={split: place}, split=split)
        return name, datasets.load_dataset(str(folder or id), config, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        why = f"{name} cannot be read: {error}"
        if "Unknown split" in str(error):
            raise UnknownSplitError(why) from error
        script = folder is not None and (folder / f"{id.rpartition('/')[2]}.py").is_file()
        if script or "scripts are no longer supported" in str(error):
            why = (
                f"{name} exists only as a script, which is not run; the hub keeps it as parquet in "
                f"hf://datasets/{id}@{CONVERTED}/{files}: download that and give the folder as data{mirror(id)}"
            )
        if is_offline_mode():
            why += "; HF_HUB_OFFLINE is set: unset it to download"
        raise ValueError(why) from error
    except datasets.exceptions.DatasetGenerationError as error:  # a file that is damaged, or has other columns
        why = " ".join(str(error.__cause__).split())
        raise ValueError(f"{name} cannot be read: {why}. Correct its files") from error


def mirror(id: str) -> str:
    """Return the end of an error message that names the files of a data set on the hub; empty where unknown."""
    found = MIRRORS.get(id.rpartition("/")[2].lower())
    return f"; as files it is {found} on the hub" if found and found.partition(":")[0] != id else ""
