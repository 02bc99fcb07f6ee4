"""Execute a notebook and store its outputs: python packaging/notebook.py examples/tutorial.ipynb (extra notebook)."""

import atexit
import os
import sys
from pathlib import Path
from typing import Any

from farspan.extras import optional_import
from farspan.files import write

CELL_SECONDS = 600
# of the kernel: no progress bars, and no advice of tqdm about widgets, which names files of this machine
QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONWARNINGS": "ignore:IProgress not found"}


def executed(path: Path, folder: Path) -> Any:
    """Return a notebook with the outputs of its cells, executed in order by a new kernel in a folder.

    Raises:
        ValueError: no notebook, a cell that raises or takes too long, a kernel that is missing or dies, or a missing
            package of the extra `notebook`.
    """
    nbformat, nbclient, kernels = (
        optional_import(name, "notebook") for name in ("nbformat", "nbclient", "jupyter_client.kernelspec")
    )
    optional_import("ipykernel", "notebook")
    try:
        notebook = nbformat.read(path, as_version=4)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a notebook: {error}") from error
    os.environ |= QUIET
    client = nbclient.NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        startup_timeout=CELL_SECONDS,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    kernel = notebook.metadata.get("kernelspec", {}).get("name", "python3")
    try:
        client.execute()
    except nbclient.exceptions.CellExecutionError as error:
        raise ValueError(f"{path}: a cell raised {error.ename}: {error.evalue}. Correct the cell") from error
    except nbclient.exceptions.CellTimeoutError as error:
        raise ValueError(f"{path}: a cell took more than {CELL_SECONDS} seconds. Make it smaller") from error
    except kernels.NoSuchKernel as error:
        raise ValueError(
            f"{path}: kernel {error.name!r} is not installed: pip install 'farspan[notebook]', or choose another kernel"
        ) from error
    except (nbclient.exceptions.DeadKernelError, RuntimeError, OSError) as error:
        raise ValueError(
            f"{path}: kernel {kernel!r} does not start or died ({error}). Repair it: "
            f"{sys.executable} -m ipykernel install --sys-prefix"
        ) from error
    finally:
        atexit.unregister(client._cleanup_kernel)  # of a kernel that never ran it would print a traceback
    for cell in notebook.cells:
        cell.metadata.clear()
    notebook.metadata = {"kernelspec": notebook.metadata.kernelspec, "language_info": {"name": "python"}}
    return notebook


def main() -> None:
    """Exit 2 with one line for what a user can correct."""
    path = Path(sys.argv[1])
    try:
        notebook = executed(path, Path.cwd())
    except ValueError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    write(path, optional_import("nbformat", "notebook").writes(notebook) + "\n")
    print(path)


if __name__ == "__main__":
    main()
