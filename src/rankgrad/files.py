"""Files and folders that appear whole or not at all; tensors with facts in checksummed safetensors, facts alone in checksummed JSON.

No pickle is ever loaded. A file that was cut short or changed later is refused by name. Equal contents give equal bytes.
"""

import ctypes
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

FORMAT = 1
ENTRY = "rankgrad"  # of the file's metadata
LARGE = 1 << 28  # bytes: no text of ours has as many
LARGE_JSON = 1 << 24
HEADER = 100_000_000  # bytes that the header of a safetensors file may have
CHECKSUM = "checksum"  # the last key of sealed JSON
_DIGEST, _TAIL = 64, b'"\n}\n'  # what stands after it


def write_atomically(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a file, in one or in parts, so that after any crash either the old or the new content is there, whole.

    What a killed process has left is written over; another process that is writing the same file now is a ValueError.
    """
    parts = [content] if isinstance(content, bytes) else content
    if _is_stream(path):
        with path.open("wb") as stream:
            stream.writelines(parts)
        return
    temporary = path.with_name(f".{path.name}.writing")
    try:
        if _leads_elsewhere(temporary):
            temporary.unlink()  # not ours: what it leads to would be written
        number = _hold(temporary, os.O_WRONLY | os.O_CREAT, path)
        try:
            with open(number, "wb") as file:
                file.truncate()
                file.writelines(parts)
                file.flush()
                os.fsync(file.fileno())
                temporary.replace(path)  # before it is closed, which lets go of it
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}; the file was left as it was", str(path)) from None
    fsync_folder(path.parent)


@contextmanager
def beside(target: Path) -> Iterator[Path]:
    """An empty folder beside the target, for this process alone; gone at the end unless it was renamed.

    It is always called the same, so that what a killed process has left there does not stay.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    building = target.with_name(f".{target.name}.building")  # renaming is atomic within a file system only
    number = _hold_folder(building, target)
    try:
        for rest in building.iterdir():
            shutil.rmtree(rest) if rest.is_dir() and not rest.is_symlink() else rest.unlink()
        yield building
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(target)) from None  # a full disk names no file
    finally:
        if _names(building, number):
            shutil.rmtree(building, ignore_errors=True)
        os.close(number)


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A new folder to fill beside the target; at the end it replaces the target, after an error it is removed.

    At every moment the target is the old folder or the new one, whole. Another process that replaces it now is a ValueError.
    """
    with beside(target) as building:
        _recover(target)
        with locked(target) if target.exists() else nullcontext():
            yield building
            for path in (*building.rglob("*"), building):
                _fsync(path)
            if not target.exists():
                building.rename(target)
            elif _exchange(building, target):
                shutil.rmtree(building, ignore_errors=True)  # the old folder, which we hold: nobody takes it for theirs
            else:
                _swap(building, target)
        fsync_folder(target.parent)


@contextmanager
def locked(folder: Path, *, make: bool = False) -> Iterator[None]:
    """Keep other processes out of a folder, one at a time: for whoever comes second it is a ValueError.

    Nothing is written, and the kernel lets go when the process ends, however it does: there is no lock to be left behind.
    """
    number = _hold_folder(folder, folder) if make else _hold(folder, os.O_RDONLY, folder)
    try:
        yield
    finally:
        os.close(number)


def _is_stream(path: Path) -> bool:
    """Whether a path is /dev/null, /dev/full, /dev/stdout or /dev/fd/63: they take what they are given, and stay."""
    if not os.path.lexists(path):
        return False
    return stat.S_ISCHR(path.lstat().st_mode) or (path.is_symlink() and path.parent in (Path("/dev"), Path("/dev/fd")))


def _leads_elsewhere(path: Path) -> bool:
    """Whether a path is a link, soft or hard, or a pipe, which waits for a reader, or anything else that we do not leave behind."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return not stat.S_ISREG(found.st_mode) or found.st_nlink > 1


def _hold_folder(folder: Path, wanted: Path) -> int:
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # another process has removed it
            return _hold(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, wanted)


def _hold(path: Path, flags: int, wanted: Path) -> int:
    """Open a file or folder that no other process holds; until it is closed nobody else can."""
    while True:
        number = os.open(path, flags, 0o666)
        try:
            _lock(number)
            if _names(path, number):
                return number
        except BlockingIOError:
            os.close(number)
            raise ValueError(
                f"{wanted} is in use: another process is writing it; expected to be the only one; wait until that has ended, or "
                "choose another name"
            ) from None
        except BaseException:
            os.close(number)
            raise
        os.close(number)  # renamed or removed by the process that had it until now


def _lock(number: int) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass  # a file system that has no locks, some of a network: as it was before there were any


def _names(path: Path, number: int) -> bool:
    """Whether a path is that of an open file."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(number))
    except FileNotFoundError:
        return False


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change their names in one moment; False where the system or the file system cannot."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    done: int = rename(here, os.fsencode(one), here, os.fsencode(other), exchange)
    return done == 0


def _swap(building: Path, target: Path) -> None:
    """The same in two moves; killed between them, the next process moves the old folder back."""
    old = _old(target)
    target.rename(old)
    try:
        building.rename(target)
    except BaseException:
        old.rename(target)
        raise
    shutil.rmtree(old)


def _recover(target: Path) -> None:
    old = _old(target)
    if old.exists() and not target.exists():
        old.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _old(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def save_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors and JSON-able facts into one safetensors file."""
    write_atomically(path, pack(tensors, facts))


def load_tensors(path: Path, hint: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save_tensors` wrote, or a ValueError that names the file and, as `hint`, what to do."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist; expected a file written by rankgrad{hint}")
    try:
        _expect_all_there(path)
        return unpack(path.read_bytes(), str(path))
    except ValueError as error:
        raise ValueError(f"{error}{hint}") from None


def _expect_all_there(path: Path) -> None:
    """Refuse a file whose header speaks of other bytes than it has, before memory is taken for them."""
    size = expect_no_holes(path)
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
        fits = header <= min(size - 8, HEADER)
        try:
            entries = parsed_json(file.read(header)) if fits else {}
            ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
            fits = fits and 8 + header + max(ends, default=0) == size
        except (ValueError, LookupError, TypeError, AttributeError):
            fits = False
    if not fits:
        raise ValueError(
            f"{path} is cut short or damaged (its {size} bytes are not those that it speaks of); expected a file written by rankgrad"
        )


def expect_no_holes(path: Path) -> int:
    """The size of a file; refuses a large one that is next to nothing on the disk: reading it would fill the memory with zeros."""
    found = path.stat()
    if found.st_size > LARGE and found.st_blocks * 512 < found.st_size // 1000:
        raise ValueError(
            f"{path} has {found.st_size:,} bytes, of which {found.st_blocks * 512:,} are on the disk; expected a file without holes"
        )
    return found.st_size


def read_text_file(path: Path, most: int = LARGE) -> bytes:
    """The bytes of a file that holds JSON or TOML; larger than any of ours it is refused, and so is a pipe, which may never end."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        raise ValueError(f"{path} is a pipe or a device; expected a regular file; put a copy there")
    if found.st_size > most:
        raise ValueError(
            f"{path} has {found.st_size:,} bytes; expected less than {most:,}; was it written by rankgrad?"
        )
    return path.read_bytes()


def refuse_links(folder: Path) -> None:
    """Refuse a folder with a link that leads out of it: a folder of somebody else's is not to show or change other files."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if not path.is_symlink():
            continue
        end = Path(os.path.realpath(path))  # Path.resolve raises a RuntimeError at links that lead in a circle
        if end.is_symlink() or not end.is_relative_to(os.path.realpath(folder)):
            where = "that leads in a circle" if end.is_symlink() else f"to {end}, out of its folder"
            raise ValueError(f"{path} is a link {where}; expected files of the folder itself; put a copy there")


def pack(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> bytes:
    """Tensors and JSON-able facts as the bytes of a safetensors file."""
    plain = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    places = {tensor.data_ptr(): name for name, tensor in plain.items()}
    # Weights that two layers share are written for each.
    plain = {name: t if places[t.data_ptr()] == name or not t.numel() else t.clone() for name, t in plain.items()}
    words = json.dumps(facts)
    # One entry: safetensors writes several in random order, and equal runs are to leave equal files.
    entry = {"format": FORMAT, "facts": words, "checksum": _checksum(plain, words)}
    return save(plain, metadata={ENTRY: json.dumps(entry)})


def unpack(content: bytes, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `pack` was given, or a ValueError that says what is wrong with `name`."""
    try:
        tensors = load(content)
        size = int.from_bytes(content[:8], "little")
        header = parsed_json(content[8 : 8 + size]).get("__metadata__", {})
        entry = parsed_json(header[ENTRY]) if ENTRY in header else header  # before 0.1.0 there were three entries
    except (SafetensorError, ValueError, LookupError, AssertionError, RuntimeError) as error:
        raise ValueError(f"{name} is cut short or damaged ({error}); expected a file written by rankgrad") from None
    if (
        not isinstance(entry, dict)
        or str(entry.get("format")) != str(FORMAT)
        or not {"facts", "checksum"} <= entry.keys()
        or not isinstance(entry["facts"], str)
    ):
        found = entry.get("format") if isinstance(entry, dict) else None
        raise ValueError(f"{name} is of format {found!r}; expected {FORMAT}, written by rankgrad")
    if entry["checksum"] != _checksum(tensors, entry["facts"]):
        raise ValueError(f"{name} was damaged after it was written: its checksum does not match")
    facts = parsed_json(entry["facts"])
    if not isinstance(facts, dict):
        raise ValueError(f"{name} holds no facts by name; expected a file written by rankgrad")
    return tensors, facts


def sealed(facts: Mapping[str, Any]) -> bytes:
    r"""JSON whose last key is a checksum of all bytes before it; `unsealed` reads it.

    >>> print(sealed({"epochs": 3}).decode()[:45])
    {
      "epochs": 3,
      "checksum": "9281602dddc68
    """
    words = json.dumps({**facts, CHECKSUM: ""}, indent=2)[: 1 - len(_TAIL)].encode()
    return words + hashlib.sha256(words).hexdigest().encode() + _TAIL


def unsealed(content: bytes, marks: Sequence[str] = ()) -> dict[str, Any]:
    """What `sealed` was given, with its checksum; a ValueError says what is wrong.

    JSON of earlier versions has no checksum; it is taken as it is where it holds none of `marks`, keys that every sealed file of
    its kind has. No single change of a sealed file can remove its checksum and these.
    """
    words, digest = content[: -_DIGEST - len(_TAIL)], content[-_DIGEST - len(_TAIL) : -len(_TAIL)]
    whole = content.endswith(_TAIL) and hashlib.sha256(words).hexdigest().encode() == digest
    facts = parsed_json(content)
    if not isinstance(facts, dict):
        raise ValueError("it is not a JSON object")
    if not whole and (not marks or any(mark in facts for mark in (CHECKSUM, *marks))):
        raise ValueError("its checksum does not match")
    return facts


def parsed_json(content: bytes | str) -> Any:
    """JSON of somebody else's; a ValueError where it is none, nested too deeply, or would take many times its size in memory."""
    if len(content) > LARGE_JSON:
        words = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
        if sum(map(words.count, (b"[", b"{", b","))) > len(words) // 4:
            raise ValueError("it is long and consists of brackets and commas for the most part")
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def fsync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut."""
    _fsync(folder)


def _fsync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _checksum(tensors: Mapping[str, Tensor], words: str) -> str:
    digest = hashlib.sha256(words.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
