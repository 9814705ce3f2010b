"""What a batch shell becomes: `python -P -u -m launch.slurm.entry PICKLE` calls the function that submitit pickled.

submitit's own entry point takes USR2 to mean that it requeues the job itself, waits up to a minute for a pickle that is
renamed after submission, and leaves the result of an earlier attempt lying. Here the function handles the signals, the
pickle is there before sbatch is called, and a stale result is removed first. The result is left where submitit's
`job.result()` looks for it, except for a run that goes on (exit code 75).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

from launch.errors import Exit
from launch.failures import describe
from stages import sharedfs


def main(argv: list[str]) -> int:
    """Call what the pickle holds; returns the exit code: the function's own, where it returns a number."""
    path = Path(argv[0])
    os.umask(0o077)
    job_id = os.environ.get("SLURM_JOB_ID")
    if job_id is None:
        sys.stderr.write("rollmill: this is what a batch script becomes; submit the script with sbatch\n")
        return Exit.WRONG
    os.environ["SUBMITIT_FOLDER"] = str(path.parent)
    result = path.parent / f"{job_id}_0_result.pkl"
    sharedfs.unlink(result)
    with contextlib.suppress(FileExistsError):
        (path.parent / f"{job_id}_submitted.pkl").symlink_to(path.name)
    try:
        value = _load(path).result()
    except BaseException as error:  # the last boundary of the job: submitit's users get the stack, people a line
        if isinstance(error, SystemExit):
            raise
        _leave(result, ("error", "".join(traceback.format_exception(error))))
        message, code = describe(error)
        traceback.print_exception(error)
        sys.stderr.write(f"rollmill: {message}\n")
        return code
    code = value if isinstance(value, int) else int(Exit.DONE)
    if code != Exit.REQUEUED:
        _leave(result, ("success", value))
    return int(code)


def _load(path: Path) -> Any:
    """The submission; only what this user wrote is ever unpickled.

    Raises:
        PermissionError: the file is another user's.
    """
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_uid != os.getuid():
            raise PermissionError(f"{path} belongs to another user and is not unpickled; submit the run anew")
        return pickle.load(file)  # noqa: S301 - see above


def _leave(path: Path, outcome: tuple[str, Any]) -> None:
    sharedfs.write_atomic(path, pickle.dumps(outcome))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
