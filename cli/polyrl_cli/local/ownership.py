"""A run's folder belongs to one account: closed to others, and with nothing in it that points out of it.

A folder may have come from somebody else, by mail or by `cp`; a runner writes to fixed names in it, keys among them.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from polyrl.errors import UserError

OWNER_ONLY: Final = 0o700
OTHERS_NOTHING: Final = 0o077
"""The umask of all that a runner starts."""
WANDB_LOG_LINK: Final = "wandb/*/logs/debug-core.log"
"""Pattern of W&B's link to its log, within a run's folder."""


def take_over(root: Path) -> None:
    """Closes the folder to others, then refuses it, as a UserError that names the file, if something in it is not
    ours, leads out of it, is no file, or is a folder that we may not list. In that order, so that nobody can exchange
    what was looked at. W&B's own link out of it is taken away."""
    _refuse_foreign(root)
    root.chmod(OWNER_ONLY)
    for folder, folders, files in os.walk(root, onerror=_refuse_closed):
        for name in (*folders, *files):
            _refuse(Path(folder, name), root)


def require_own(*paths: Path) -> None:
    """Raises UserError, which names the first that is not this account's own, or is reached through a link."""
    for path in paths:
        _refuse_foreign(path)
        if path.is_symlink():
            raise UserError(f"{path}: a link, which no run makes there")


def _refuse(path: Path, root: Path) -> None:
    kind = path.lstat()
    if stat.S_ISLNK(kind.st_mode):
        # W&B makes links within its folder, and one to its log elsewhere, which nothing reads.
        if path.match(WANDB_LOG_LINK) and path.parents[3] == root:
            path.unlink()
        elif not path.resolve().is_relative_to(root):
            raise UserError(f"{path}: a link that leads out of the run's folder; delete it, or do not resume this run")
        return
    _refuse_foreign(path)
    if stat.S_ISREG(kind.st_mode) and kind.st_nlink > 1:
        raise UserError(f"{path}: has a second name (a hard link); copy the run's folder and resume the copy")
    if not (stat.S_ISREG(kind.st_mode) or stat.S_ISDIR(kind.st_mode) or stat.S_ISSOCK(kind.st_mode)):
        raise UserError(f"{path}: neither a file nor a folder; delete it, or do not resume this run")


def _refuse_closed(error: OSError) -> None:
    """Names in it can be written to all the same, and through links."""
    raise UserError(f"{error.filename}: cannot be looked into: {error.strerror}; do not resume this run") from error


def _refuse_foreign(path: Path) -> None:
    owner = path.lstat().st_uid
    if owner != os.geteuid():
        raise UserError(f"{path}: belongs to user {owner}, not to you; copy the run's folder and resume the copy")
