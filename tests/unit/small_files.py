"""Small files that claim, inflate to or unpickle as far more than they hold, and the commands that read them.

``python -m tests.unit.small_files FOLDER`` writes them, opens each in a child process, and prints a line of JSON for
each: its size, the exit code, and how much memory the command took above that of a process with the same modules.
"""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import resource
import struct
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml

from rl_eval.log.manifest import FORMAT, checksum
from rl_eval.log.segments import name_of
from rl_eval.records.episode import ROW
from rl_eval.records.parquet import episode_columns
from tests.unit import cli_world

GREAT: Final = 130 * 2**20
"""Number of bytes to which a file inflates."""
SPARSE: Final = 2**33
LIMIT: Final = 6 * 2**30
"""Limit of the address space, so that a command that takes all memory does not end this machine."""

Arguments = tuple[object, ...]
Bomb = Callable[[Path], Arguments]
"""Function that writes a file to a folder, and returns the command that reads it."""
BOMBS: dict[str, Bomb] = {}


def bomb(name: str) -> Callable[[Bomb], Bomb]:
    """Register a function under a name."""
    return lambda write: BOMBS.setdefault(name, write)


def run_policy(policy: object) -> Arguments:
    return ("run", "--env", "CartPole-v1", "-n", 1, "--runners", 0, "--policy", policy)


# ------------------------------------------------------------------------------ parts of files


def deflated(start: bytes, block: bytes, size: int) -> bytes:
    """Return the raw deflate stream of a start and a repeated block."""
    stream = zlib.compressobj(9, zlib.DEFLATED, -15)
    parts = [stream.compress(start)]
    parts += [stream.compress(block * (2**20 // len(block))) for _ in range(size // 2**20)]
    return b"".join([*parts, stream.flush()])


def archive(path: Path, **entries: bytes | tuple[int, bytes]) -> Path:
    """Write a zip archive. An entry is its content, or a compression and the content."""
    with zipfile.ZipFile(path, "w") as file:
        for name, content in entries.items():
            method, data = content if isinstance(content, tuple) else (zipfile.ZIP_STORED, content)
            file.writestr(name, data, method)
    return path


def inflating(
    path: Path, entry: str, start: bytes = b"", block: bytes = b"[", claimed: int = 0, **others: bytes
) -> Path:
    """Write a zip archive with an entry that inflates to GREAT bytes, or only claims fewer."""
    archive(path, **{entry: b"?"}, **others)
    stream = deflated(start, block, GREAT)
    with zipfile.ZipFile(path) as file:
        contents = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w") as file:
        for name, content in contents.items():
            if name != entry:
                file.writestr(name, content)
                continue
            info = zipfile.ZipInfo(name)
            info.CRC = zlib.crc32((start + block * claimed)[:claimed])
            info.header_offset = file.fp.tell()  # type: ignore[union-attr]
            info.compress_type, info.compress_size = zipfile.ZIP_DEFLATED, len(stream)
            info.file_size = claimed or GREAT + len(start)
            file.fp.write(info.FileHeader(False) + stream)  # type: ignore[union-attr]
            file.filelist.append(info)
            file.NameToInfo[name] = info
            file.start_dir = file.fp.tell()  # type: ignore[union-attr]
            file._didModify = True  # type: ignore[attr-defined]
    return path


def sparse(path: Path, start: bytes = b"", end: bytes = b"", size: int = SPARSE) -> Path:
    """Write a file that is a hole between its start and its end."""
    with path.open("wb") as file:
        file.write(start)
        file.seek(size - len(end))
        file.write(end)
        file.truncate(size)
    return path


def model(path: Path, data: bytes | tuple[int, bytes]) -> Path:
    return archive(path, data=data, **{"policy.pth": b"x"})


class Call:
    """Object whose pickle calls a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def pickled_facts(**pickles: bytes) -> bytes:
    encoded = {name: {":serialized:": base64.b64encode(data).decode()} for name, data in pickles.items()}
    return json.dumps(encoded).encode()


MANY_LISTS: Final = b"\x80\x04" + b"]" * 2_000_000 + b"."
MANY_DICTS: Final = b"[" + b'{"":0},' * 500_000 + b"0]"

# ------------------------------------------------------------------------------ models of Stable-Baselines3


@bomb("SB3: data inflates")
def _(folder: Path) -> Arguments:
    return run_policy(inflating(folder / "m.zip", "data", **{"policy.pth": b"x"}))


@bomb("SB3: data inflates, doctor")
def _(folder: Path) -> Arguments:
    model_file = inflating(folder / "m.zip", "data", **{"policy.pth": b"x"})
    return ("doctor", "--env", "CartPole-v1", "--policy", model_file)


@bomb("SB3: data inflates, watch")
def _(folder: Path) -> Arguments:
    inflating(folder / "m.zip", "data", **{"policy.pth": b"x"})
    return ("watch", folder, "--env", "CartPole-v1", "--once", "--runners", 0)


@bomb("SB3: data claims to be small")
def _(folder: Path) -> Arguments:
    return run_policy(inflating(folder / "m.zip", "data", claimed=200_000, **{"policy.pth": b"x"}))


@bomb("SB3: data inflates, bzip2")
def _(folder: Path) -> Arguments:
    return run_policy(model(folder / "m.zip", (zipfile.ZIP_BZIP2, b"[" * GREAT)))


@bomb("SB3: data inflates, lzma")
def _(folder: Path) -> Arguments:
    return run_policy(model(folder / "m.zip", (zipfile.ZIP_LZMA, b"[" * GREAT)))


@bomb("SB3: bzip2 that claims to be small")
def _(folder: Path) -> Arguments:
    path = model(folder / "m.zip", (zipfile.ZIP_BZIP2, b"[" * GREAT))
    path.write_bytes(path.read_bytes().replace(struct.pack("<I", GREAT), struct.pack("<I", 100)))
    return run_policy(path)


@bomb("SB3: data nested")
def _(folder: Path) -> Arguments:
    return run_policy(model(folder / "m.zip", (zipfile.ZIP_DEFLATED, b"[" * 3_000_000)))


@bomb("SB3: data of mappings")
def _(folder: Path) -> Arguments:
    return run_policy(model(folder / "m.zip", (zipfile.ZIP_DEFLATED, MANY_DICTS)))


@bomb("SB3: table of contents claims much")
def _(folder: Path) -> Arguments:
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 9, 9, 2**31, 0, 0)
    return run_policy(sparse(folder / "m.zip", b"PK\3\4", end, size=2**32 - 1))


@bomb("SB3: many entries")
def _(folder: Path) -> Arguments:
    path, entry = folder / "m.zip", zipfile.ZipInfo("a")
    entry.header_offset = 0
    table = b"PK\1\2" + bytes(24) + struct.pack("<H", 1) + bytes(16) + b"a"
    count = 80_000
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count & 0xFFFF, count & 0xFFFF, count * len(table), 0, 0)
    path.write_bytes(table * count + end)
    return run_policy(path)


@bomb("SB3: pickle of many lists")
def _(folder: Path) -> Arguments:
    return run_policy(model(folder / "m.zip", (zipfile.ZIP_DEFLATED, pickled_facts(_last_obs=MANY_LISTS))))


@bomb("SB3: pickle of a great array")
def _(folder: Path) -> Arguments:
    array = pickle.dumps(Call(np.ndarray, (2**27,), "f4"))
    great = pickled_facts(_last_obs=array, _last_original_obs=array)
    return run_policy(model(folder / "m.zip", great))


@bomb("SB3: pickle of a great array, reconstructed")
def _(folder: Path) -> Arguments:
    whole = np.ones(1).__reduce__()[0]
    array = pickle.dumps(Call(whole, np.ndarray, (2**27,), "f4"))
    great = pickled_facts(_last_obs=array, _last_original_obs=array)
    return run_policy(model(folder / "m.zip", great))


@bomb("SB3: folder of models")
def _(folder: Path) -> Arguments:
    for name in "abc":
        model(folder / f"{name}.zip", (zipfile.ZIP_BZIP2, b"[" * GREAT))
    return run_policy(folder)


# ------------------------------------------------------------------------------ torch and safetensors


@bomb("torch: data.pkl inflates")
def _(folder: Path) -> Arguments:
    return run_policy(inflating(folder / "m.pt", "x/data.pkl"))


@bomb("torch: data.pkl inflates, bzip2")
def _(folder: Path) -> Arguments:
    return run_policy(archive(folder / "m.pt", **{"x/data.pkl": (zipfile.ZIP_BZIP2, b"[" * GREAT)}))


def run_weights(weights: Path) -> Arguments:
    config = weights.with_name("c.yaml")
    config.write_text(
        yaml.safe_dump(
            {
                "environment": {"env": "CartPole-v1"},
                "policy": {
                    "policy": "rl_eval.policies.mlp:MLPActor",
                    "policy_kwargs": {"num_inputs": 4, "num_outputs": 2},
                    "weights": str(weights),
                },
                "evaluation": {"num_episodes": 1},
            }
        )
    )
    return ("run", config)


@bomb("torch: weights inflate")
def _(folder: Path) -> Arguments:
    path, whole = folder / "w.pt", io.BytesIO()
    torch.save({"w": torch.zeros(GREAT // 4)}, whole)
    with zipfile.ZipFile(whole) as stored, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name in stored.namelist():
            file.writestr(name, stored.read(name))
    return run_weights(path)


@bomb("torch: pickle of many lists")
def _(folder: Path) -> Arguments:
    entries = {"x/data.pkl": (zipfile.ZIP_DEFLATED, MANY_LISTS), "x/version": b"3\n", "x/byteorder": b"little"}
    return run_weights(archive(folder / "w.pt", **entries))


@bomb("torch: sparse weights")
def _(folder: Path) -> Arguments:
    return run_weights(sparse(folder / "w.pt", b"PK\3\4"))


@bomb("safetensors: header claims all")
def _(folder: Path) -> Arguments:
    (folder / "w.safetensors").write_bytes((2**63 - 1).to_bytes(8, "little") + b"{}")
    return run_weights(folder / "w.safetensors")


@bomb("safetensors: sparse header")
def _(folder: Path) -> Arguments:
    return run_weights(sparse(folder / "w.safetensors", (90_000_000).to_bytes(8, "little") + b"{", size=2**28))


def tensors(path: Path, header: bytes, data: bytes = b"") -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


@bomb("safetensors: tensor of terabytes")
def _(folder: Path) -> Arguments:
    header = b'{"w":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4000000000000]}}'
    return run_weights(tensors(folder / "w.safetensors", header))


@bomb("safetensors: nested header")
def _(folder: Path) -> Arguments:
    return run_weights(tensors(folder / "w.safetensors", b'{"a":' * 500_000))


@bomb("safetensors: sparse tensor")
def _(folder: Path) -> Arguments:
    header = b'{"w":{"dtype":"F32","shape":[1000000000],"data_offsets":[0,4000000000]}}'
    start = len(header).to_bytes(8, "little") + header
    return run_weights(sparse(folder / "w.safetensors", start, size=len(start) + 4_000_000_000))


# ------------------------------------------------------------------------------ results and logs


def result(folder: Path, **changes: Any) -> Path:
    """Write a result of one episode, with other fields in its plan."""
    outcome = cli_world.call(*run_policy("random"), "-o", folder / "run", "--quiet")
    assert outcome.exit_code == 0, outcome.output
    path = folder / "run" / "result.json"
    described = json.loads(path.read_text())
    path.write_text(json.dumps(described | {"plan": described["plan"] | changes}))
    return folder / "run"


def rows(count: int) -> dict[str, pa.Array]:
    return episode_columns(np.zeros(count, ROW), np.zeros((count, 0)), ())


def parquet(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(columns), path, **options)
    return path


@bomb("result: sparse result.json")
def _(folder: Path) -> Arguments:
    sparse(result(folder) / "result.json", b'{"a": "')
    return ("show", folder / "run")


@bomb("result: mappings in result.json")
def _(folder: Path) -> Arguments:
    (result(folder) / "result.json").write_bytes(b'{"a":' + MANY_DICTS + b"}")
    return ("show", folder)


@bomb("result: as many mappings in result.json as are read")
def _(folder: Path) -> Arguments:
    (result(folder) / "result.json").write_bytes(b'{"a":[' + b'{"":0},' * 249_000 + b"0]}")
    return ("show", folder / "run")


@bomb("result: nested result.json")
def _(folder: Path) -> Arguments:
    (result(folder) / "result.json").write_bytes(b"[" * 4_000_000)
    return ("report", folder / "run", "-o", folder / "page.html")


@bomb("Parquet: great row group")
def _(folder: Path) -> Arguments:
    parquet(result(folder, num_episodes=5_000_000) / "episodes.parquet", rows(5_000_000))
    return ("show", folder / "run")


@bomb("Parquet: zstd")
def _(folder: Path) -> Arguments:
    zeros = {name: pa.array(np.zeros(300_000)) for name in rows(1)}
    path = result(folder, num_episodes=300_000) / "episodes.parquet"
    parquet(path, zeros, compression="zstd", use_dictionary=False)
    return ("show", folder / "run")


@bomb("Parquet: great dictionary")
def _(folder: Path) -> Arguments:
    words = pa.array(["x" * (GREAT // 8) + str(number) for number in range(8)])
    columns = rows(8) | {"outcome": pa.DictionaryArray.from_arrays(pa.array(range(8), pa.int32()), words)}
    parquet(result(folder, num_episodes=8) / "episodes.parquet", columns, compression="zstd")
    return ("show", folder / "run")


def column_chunks(path: Path, count: int) -> None:
    """Write a Parquet file with a row group of many column chunks, which take three bytes each."""
    name = lambda text: bytes([len(text)]) + text  # noqa: E731
    root, leaf = b"\x48" + name(b"r") + b"\x15\x02\x00", b"\x15\x04\x25\x00\x18" + name(b"a") + b"\x00"
    size = bytes([count & 0x7F | 0x80, count >> 7 & 0x7F | 0x80, count >> 14])
    groups = b"\x19\x1c\x19\xfc" + size + b"\x26\x00\x00" * count + b"\x16\x00\x16\x02\x00"
    footer = b"\x15\x02\x19\x2c" + root + leaf + b"\x16\x02" + groups + b"\x00"
    path.write_bytes(b"PAR1" + footer + struct.pack("<I", len(footer)) + b"PAR1")


@bomb("Parquet: 600,000 column chunks")
def _(folder: Path) -> Arguments:
    column_chunks(result(folder) / "episodes.parquet", 600_000)
    return ("show", folder / "run")


@bomb("Parquet: 95,000 column chunks")
def _(folder: Path) -> Arguments:
    column_chunks(result(folder) / "episodes.parquet", 95_000)
    return ("show", folder / "run")


@bomb("Parquet: sparse footer")
def _(folder: Path) -> Arguments:
    path = result(folder) / "episodes.parquet"
    sparse(path, b"PAR1", struct.pack("<I", 2**31 - 100) + b"PAR1", size=2**31)
    return ("show", folder / "run")


@bomb("log: sparse manifest")
def _(folder: Path) -> Arguments:
    (folder / "run" / "segments").mkdir(parents=True)
    (folder / "run" / "owners").mkdir()
    sparse(folder / "run" / "manifest.json", f'{{"format": {FORMAT}, "a": "'.encode())
    return ("show", folder / "run")


@bomb("log: great segment")
def _(folder: Path) -> Arguments:
    outcome = cli_world.call(*run_policy("random"), "--output", folder / "run", "--quiet")
    assert outcome.exit_code == 0, outcome.output
    sink = pa.BufferOutputStream()
    header = json.dumps({"format": FORMAT, "session": "me"})
    pq.write_table(pa.table(rows(5_000_000), metadata={"rl_eval": header}), sink)
    data = bytes(sink.getvalue().to_pybytes())
    (folder / "run" / "segments" / str(name_of(data, 2, 1, "episodes"))).write_bytes(data)
    return ("show", folder / "run")


@bomb("log: a plan of many episodes")
def _(folder: Path) -> Arguments:
    outcome = cli_world.call(*run_policy("random"), "--output", folder / "run", "--quiet")
    assert outcome.exit_code == 0, outcome.output
    path = folder / "run" / "manifest.json"
    body = json.loads(path.read_text()) | {"num_episodes": 2**31}
    form = body.pop("format")
    body.pop("checksum")
    path.write_text(json.dumps({"format": form, "checksum": checksum(body), **body}))
    return ("report", folder / "run", "-o", folder / "page.html")


# ------------------------------------------------------------------------------ steps of other policies


def estimate(data: Path) -> Arguments:
    config = data.with_name("c.yaml")
    config.write_text("environment: {env: CartPole-v1}\npolicy: {policy: random}\n")
    return ("ope", data, config)


@bomb("npz: an array inflates")
def _(folder: Path) -> Arguments:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (GREAT,)})
    return estimate(inflating(folder / "d.npz", "episode.npy", header.getvalue(), b"\0"))


@bomb("npz: a header inflates")
def _(folder: Path) -> Arguments:
    start = b"\x93NUMPY\x02\x00" + struct.pack("<I", GREAT)
    return estimate(inflating(folder / "d.npz", "episode.npy", start, b" "))


@bomb("npz: a header inflates to more than it claims")
def _(folder: Path) -> Arguments:
    start = b"\x93NUMPY\x02\x00" + struct.pack("<I", GREAT)
    return estimate(inflating(folder / "d.npz", "episode.npy", start, b" ", claimed=200_000))


@bomb("npz: bzip2")
def _(folder: Path) -> Arguments:
    return estimate(archive(folder / "d.npz", **{"episode.npy": (zipfile.ZIP_BZIP2, bytes(GREAT))}))


@bomb("npz: a shape of terabytes")
def _(folder: Path) -> Arguments:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (10**13,)})
    return estimate(archive(folder / "d.npz", **{"episode.npy": header.getvalue()}))


@bomb("npz: sparse")
def _(folder: Path) -> Arguments:
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 9, 9, 2**31, 0, 0)
    return estimate(sparse(folder / "d.npz", b"PK\3\4", end, size=2**32 - 1))


# ------------------------------------------------------------------------------ YAML, JSON, CSV


def laughs(levels: int = 9) -> str:
    lines = ["a: &a [x,x,x,x,x,x,x,x,x]"]
    lines += [f"{chr(98 + n)}: &{chr(98 + n)} [{','.join(['*' + chr(97 + n)] * 9)}]" for n in range(levels)]
    return "\n".join(lines)


def config(folder: Path, text: str) -> Path:
    (folder / "c.yaml").write_text(text)
    return folder / "c.yaml"


@bomb("YAML: aliases")
def _(folder: Path) -> Arguments:
    return ("run", config(folder, laughs()))


@bomb("YAML: contains itself")
def _(folder: Path) -> Arguments:
    return ("run", config(folder, "environment: &e\n  env: CartPole-v1\n  env_kwargs: {a: *e}\n"))


@bomb("YAML: nested")
def _(folder: Path) -> Arguments:
    return ("doctor", config(folder, "environment: " + "{a: " * 3000))


@bomb("YAML: a list of 10 MB")
def _(folder: Path) -> Arguments:
    return ("run", config(folder, "x: [" + "1," * 5_000_000 + "1]"))


@bomb("YAML: a list of 1 MB")
def _(folder: Path) -> Arguments:
    return ("run", config(folder, "x: [" + "1," * 500_000 + "1]"))


@bomb("YAML: as much text as is read")
def _(folder: Path) -> Arguments:
    return ("run", config(folder, "x: [" + "aaaaaaaaaaaaaaaaaaa 'a'," * 170_000 + "1]"))


@bomb("YAML: a text of 4 MB")
def _(folder: Path) -> Arguments:
    return ("run", config(folder, "x: " + "a " * 2_000_000))


@bomb("YAML: 5,000 digits")
def _(folder: Path) -> Arguments:
    return ("run", config(folder, "evaluation: {num_episodes: " + "9" * 5000 + "}"))


@bomb("YAML: sparse")
def _(folder: Path) -> Arguments:
    return ("run", sparse(folder / "c.yaml"))


@bomb("YAML: a suite of aliases")
def _(folder: Path) -> Arguments:
    return ("suite", "plan", config(folder, laughs()))


def with_conditions(file: Path) -> Arguments:
    text = f"environment: {{env: CartPole-v1}}\nevaluation: {{conditions: {file}}}\n"
    return ("run", config(file.parent, text), "--policy", "random")


@bomb("conditions: mappings in JSON")
def _(folder: Path) -> Arguments:
    (folder / "r.json").write_bytes(MANY_DICTS)
    return with_conditions(folder / "r.json")


@bomb("conditions: as many mappings in JSON as are read")
def _(folder: Path) -> Arguments:
    (folder / "r.json").write_bytes(b"[" + b'{"":0},' * 249_000 + b"0]")
    return with_conditions(folder / "r.json")


@bomb("conditions: zstd")
def _(folder: Path) -> Arguments:
    zeros = pa.array(np.zeros(20_000_000))
    return with_conditions(parquet(folder / "r.parquet", {"a": zeros}, compression="zstd", use_dictionary=False))


@bomb("conditions: sparse CSV")
def _(folder: Path) -> Arguments:
    return with_conditions(sparse(folder / "r.csv", b"a\n"))


@bomb("/dev/zero as a policy")
def _(folder: Path) -> Arguments:
    return run_policy("/dev/zero")


@bomb("/dev/zero as a config")
def _(folder: Path) -> Arguments:
    return ("run", "/dev/zero")


@bomb("a pipe as a model")
def _(folder: Path) -> Arguments:
    os.mkfifo(folder / "m.zip")
    return run_policy(folder / "m.zip")


# ------------------------------------------------------------------------------ what each takes


def memory(field: str) -> int:
    """Return a field of this process's memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def looked_into(arguments: Arguments) -> dict[str, Any]:
    """Run a command in a child process; return its exit code, the last line, and the highest memory above the start."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
        before, started = memory("VmRSS"), time.monotonic()
        Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew.
        outcome = cli_world.call(*arguments)
        line = ([*outcome.output.strip().splitlines(), ""] if outcome.exit_code != 1 else [repr(outcome.exception)])[0]
        said = {
            "code": outcome.exit_code, "peak": memory("VmHWM") - before, "seconds": time.monotonic() - started,
            "said": line[:200],
        }  # fmt: skip
        os.write(writer, json.dumps(said).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return dict(json.loads(text or '{"code": -9, "peak": 1e99, "seconds": 0, "said": "ended"}'))


def main(folder: Path, names: list[str]) -> Iterator[dict[str, Any]]:
    """Yield what a command does with each file."""

    import rl_eval.ope.data
    import rl_eval.reports.html
    import rl_eval.training.watching  # noqa: F401

    (folder / "first").mkdir()
    result(folder / "first")
    cli_world.call("show", folder / "first" / "run")
    for number, (name, write) in enumerate(BOMBS.items()):
        if names and name not in names:
            continue
        place = folder / str(number)
        place.mkdir()
        os.chdir(place)
        pid = os.fork()  # What writing takes is not this process's memory.
        arguments: Arguments = ()
        if not pid:
            (folder / f"{number}.json").write_text(json.dumps([str(one) for one in write(place)]))
            os._exit(0)
        os.waitpid(pid, 0)
        arguments = tuple(json.loads((folder / f"{number}.json").read_text()))
        stored = sum(file.lstat().st_blocks * 512 for file in place.rglob("*"))
        yield {"name": name, "stored": stored, **looked_into(arguments)}


if __name__ == "__main__":
    for line in main(Path(sys.argv[1]), sys.argv[2:]):
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
