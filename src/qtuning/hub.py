"""The Hugging Face hub: folders go up, folders come down."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from qtuning import __version__
from qtuning.errors import ConfigError, HubError


def push_folder(
    folder: str | PathLike[str],
    repo: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    replaces: Sequence[str] = (),
) -> str:
    """Upload a folder as a model repository, in one commit; returns its address.

    Args:
        folder: What to upload: an exported adapter, or several; `README.md` becomes the model card.
        repo: `owner/name`; made if it is not there yet.
        private: Of a new repository; the account's default where it is not said.
        token: The one you are logged in with by default.
        replaces: Patterns of files that are removed from the repository unless the folder has them.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    # its bases: the HTTP library's own error, whatever that library is, and OSError
    refusals: tuple[Any, ...] = (ValueError, *HfHubHTTPError.__bases__)
    check_repo(repo)
    api = HfApi(token=token, library_name="qtuning", library_version=__version__)
    try:
        address = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=address.repo_id,
            folder_path=Path(folder),
            commit_message=f"Upload with qtuning {__version__}",
            delete_patterns=list(replaces) or None,
        )
    except refusals as error:
        raise HubError(
            f"the hub did not take {str(folder)!r} as {repo!r}: {_first_line(error)} "
            f"Log in (hf auth login), check that you may write there, and try again."
        ) from None
    return str(address)


def check_repo(repo: str) -> str:
    """The name, if it can be one of a repository; to be asked before the work."""
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo)
    except ValueError:
        raise ConfigError(f"a repository's name must be 'owner/name', got {repo!r}.") from None
    return repo


def local_folder(name: str | PathLike[str]) -> Path:
    """The folder of that name or, where there is none and it reads owner/name, the hub's, downloaded."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    path = Path(name)
    if path.exists() or path.is_absolute() or str(name).count("/") != 1:
        return path
    try:
        return Path(snapshot_download(str(name)))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise HubError(
            f"there is no folder {str(name)!r}, and the hub did not have it: {_first_line(error)}"
        ) from None


def _first_line(error: BaseException) -> str:
    said = str(error).strip()
    return (said.splitlines()[0] if said else type(error).__name__).rstrip(".") + "."
