"""The Hugging Face hub: how its libraries use cached files alone; and its data sets."""

import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants, is_offline_mode

from farspan.extras import optional_import

HUB_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(@(?P<config>[\w.-]+))?(:(?P<split>[^#]+))?(#(?P<column>.+))?")
CONVERTED = "refs/convert/parquet"  # the branch where the hub keeps a data set that is a script as parquet
# where the hub has the files of data sets whose old names are scripts or no longer exist
MIRRORS = {
    "nq_open": "google-research-datasets/nq_open:validation",
    "trivia_qa": "mandarjoshi/trivia_qa@rc.nocontext:validation",
    "popqa": "akariasai/PopQA:test",
}
KEPT = 30  # seconds for which the result of a connection is kept


@contextmanager
def cached_only(*, wanted: bool = False, proxies: bool = False) -> Iterator[bool]:
    """Let the hub's libraries use cached files only, if that is wanted, or if the hub cannot be reached: they would
    request each file for half a minute. Yield whether they do.

    Args:
        wanted: as the option `local_files_only`, which some of their requests do not get.
        proxies: the caller has proxies of its own, so that the hub may be reached where a connection from here fails.
    """
    before = is_offline_mode()
    constants.HF_HUB_OFFLINE = before or wanted or not (proxies or getproxies() or _is_reached())
    try:
        yield constants.HF_HUB_OFFLINE
    finally:
        constants.HF_HUB_OFFLINE = before


def why_not_downloaded(*, local_files_only: bool = False) -> str:
    """Return why a file that is not cached was not downloaded, with the fix, as the end of an error."""
    if local_files_only:
        return "local_files_only=True is given: leave it out to download"
    if is_offline_mode():
        return "HF_HUB_OFFLINE is set: unset it to download"
    return f"{constants.ENDPOINT} cannot be reached: correct the name, or connect to the network"


def _is_reached() -> bool:
    return _connects(constants.ENDPOINT, time.monotonic() // KEPT)


@lru_cache(maxsize=1)
def _connects(endpoint: str, period: float) -> bool:
    """Return whether a connection to the hub can be made; `period` makes the result expire."""
    hub = urlsplit(endpoint)
    address = hub.hostname or "", hub.port or (80 if hub.scheme == "http" else 443)
    try:
        socket.create_connection(address, constants.HF_HUB_ETAG_TIMEOUT).close()
    except OSError:
        return False
    return True


def cached_snapshot(id: str, branch: str) -> Path | None:
    """Return the folder of a data set's files in the hub's cache; None if the cache lacks them.

    Needed offline because `datasets` finds only data sets that it has prepared before."""
    from huggingface_hub import snapshot_download  # it takes a while, and most texts are files

    try:
        return Path(snapshot_download(id, repo_type="dataset", revision=branch, local_files_only=True))
    except OSError:
        return None


class UnknownSplitError(ValueError):
    """A data set on the hub has no split of that name."""


def hub_rows(id: str, config: str | None, split: str, *, converted: bool = False) -> tuple[str, Any]:
    """Return a name for errors and the rows of a data set on the hub, as `datasets` opens them.

    Offline, or if the hub cannot be reached, the cache of the hub's files is searched first, then that of `datasets`.

    Args:
        converted: the data set is a script: read the parquet files that the hub makes of it.

    Raises:
        ValueError: it is not cached and cannot be downloaded, cannot be read, is damaged, or exists only as a script.
        UnknownSplitError: it has no such split.
    """
    datasets = optional_import("datasets", "data")
    name = f"hub dataset {id}@{config or 'default'}:{split}"
    files = f"{config or 'default'}/{split}/*.parquet"
    folder, is_offline = None, False
    try:
        with cached_only() as is_offline:
            folder = cached_snapshot(id, CONVERTED if converted else "main") if is_offline else None
            if converted:
                place = f"{folder or f'hf://datasets/{id}@{CONVERTED}'}/{files}"
                return name, datasets.load_dataset("parquet", data_files={split: place}, split=split)
            return name, datasets.load_dataset(str(folder or id), config, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        if is_offline and folder is None and isinstance(error, OSError):
            why = f"{name} is not cached, and {why_not_downloaded()}; or give a local file or folder"
            raise ValueError(why) from error
        why = f"{name} cannot be read: {error}"
        if is_offline:
            why += f"; the rest of it is not cached, and {why_not_downloaded()}"
        if "Unknown split" in str(error):
            raise UnknownSplitError(why) from error
        script = folder is not None and (folder / f"{id.rpartition('/')[2]}.py").is_file()
        if script or "scripts are no longer supported" in str(error):
            why = (
                f"{name} exists only as a script, which is not run; the hub keeps it as parquet in "
                f"hf://datasets/{id}@{CONVERTED}/{files}: download that and give the folder as data{mirror(id)}"
            )
        raise ValueError(why) from error
    except datasets.exceptions.DatasetGenerationError as error:  # a file that is damaged, or has other columns
        why = " ".join(str(error.__cause__).split())
        raise ValueError(f"{name} cannot be read: {why}. Correct its files") from error


def mirror(id: str) -> str:
    """Return the end of an error message that names the files of a data set on the hub; empty where unknown."""
    found = MIRRORS.get(id.rpartition("/")[2].lower())
    return f"; as files it is {found} on the hub" if found and found.partition(":")[0] != id else ""
