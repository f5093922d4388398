"""Makes an installed PyTorch for CUDA into one for CPUs: a tenth of its size, the same code for CPUs.

PyPI has PyTorch for x86-64 Linux only with CUDA, 5 GB with NVIDIA's packages. This removes what only a GPU can use, and
gives the loader small stand-ins in its place: same names, same symbol versions, each of CUDA's functions answers
`cudaErrorNoDevice`. So `torch.cuda.is_available()` is False, as on any machine without a GPU. Needs `gcc`, `nm` and
`readelf`; runs in a build stage only. A PyTorch without CUDA is left as it is.
check_torch.py must pass on the result, or the build fails.
Usage: cpu_torch.py SITE_PACKAGES
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

REMOVED = ("nvidia", "triton", "cuda", "torch/include", "torch/bin/protoc*", "torch/test", "torch/share")
"""Folders and files in site-packages that only a GPU or a compiler can use."""
CUDA_PARTS = ("libtorch_cuda.so", "libtorch_cuda_linalg.so", "libtorch_nvshmem.so", "libcaffe2_nvrtc.so")
"""PyTorch's own libraries for GPUs: 540 MB of kernels; the loader asks for the first one, by name."""
GPU_ROUTES = "torch/_native/ops/__init__.py"
"""Imports faster routes for operations on GPUs, which look for the removed kernels; emptied, there are none."""
NO_DEVICE = 100
"""cudaErrorNoDevice (CUDA's driver_types.h): what the stand-ins' functions return, and PyTorch takes for `no GPU`."""
KIND = "_ZTVN10__cxxabiv117__class_type_infoE"
COMMON = f"""
static char room[4096] __attribute__((aligned(4096)));
static long nothing(void) {{ return (long)room; }}
extern char {KIND}[];
static void *absent[] = {{ {KIND} + 16, "6Absent" }};
#define TABLE {{0, absent, [2 ... 255] = nothing}}
static void *table[] = TABLE;
"""
"""What PyTorch's own absent functions return as its modules load: a reference to write to, whose lowest byte is 0, so
that it is false where a bool was asked for. Objects of absent classes have a table of functions that do nothing."""
SYSTEM = re.compile(r"lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s|z|gomp|gfortran|quadmath|util)\.so|ld-linux")


def main(site: Path) -> None:
    """Thins the PyTorch below `site`; raises SystemExit with what a compiler or a tool said."""
    lib = site / "torch/lib"
    if not (lib / CUDA_PARTS[0]).exists():
        return
    for name in CUDA_PARTS:
        (lib / name).unlink()
    for pattern in REMOVED:
        for path in site.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    routes = site / GPU_ROUTES
    routes.unlink()
    routes.touch()
    kept = [*lib.glob("*.so*"), *(site / "torch").glob("_C*.so")]
    wanted = wanted_by(kept, {path.name for path in kept})
    wanted[CUDA_PARTS[0]] |= orphans(kept)
    for soname, names in wanted.items():
        build(lib / soname, names)
        print(f"{soname}: {len(names)} symbols")


def symbols(path: Path, which: str, kind: str = "") -> set[str]:
    """Dynamic symbols of a library, as `name` or `name@version`; `kind` is nm's letter, all of them without one."""
    lines = [line.split() for line in run("nm", "-D", "--with-symbol-versions", which, str(path)).splitlines()]
    return {words[-1].replace("@@", "@") for words in lines if kind in words[-2]}


def wanted_by(kept: list[Path], present: set[str]) -> dict[str, set[str]]:
    """Which absent libraries the kept ones name, and the versioned symbols they want of each."""
    wanted: dict[str, set[str]] = defaultdict(set)
    for path in kept:
        absent = {n for n in needed(path) if n not in present and not SYSTEM.match(n)}
        versions = version_needs(path)
        for soname in absent:
            wanted[soname] |= {s for s in symbols(path, "--undefined-only") if s.partition("@")[2] in versions[soname]}
    return wanted


def orphans(kept: list[Path]) -> set[str]:
    """Symbols without a version that a kept library cannot do without and no kept one has; Python loads all at once."""
    asked = {s for path in kept for s in symbols(path, "--undefined-only", kind="U") if "@" not in s}
    system = [Path(run("gcc", f"-print-file-name={name}").strip()) for name in ("libstdc++.so.6", "libc.so.6")]
    had = {s.partition("@")[0] for path in (*kept, *system) for s in symbols(path, "--defined-only")}
    return {s for s in asked - had if not s.startswith(("Py", "_Py"))}


def needed(path: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-dW", str(path)))


def version_needs(path: Path) -> dict[str, set[str]]:
    """Versions that a library wants of each library that it names."""
    needs: dict[str, set[str]] = defaultdict(set)
    soname = ""
    for line in run("readelf", "-VW", str(path)).splitlines():
        if file := re.search(r"File: (\S+)", line):
            soname = file[1]
        elif name := re.search(r"Name: (\S+)\s+Flags", line):
            needs[soname].add(name[1])
    return needs


def build(target: Path, names: set[str]) -> None:
    """Compiles one stand-in with the given `name[@version]` symbols."""
    versions: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        plain, _, version = name.partition("@")
        versions[version].append(plain)
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder) / "stand_in.c", Path(folder) / "versions"
        answers = {version: str(NO_DEVICE) if version else "(long)room" for version in versions}
        code = [definition(name, answers[version]) for version, group in versions.items() for name in group]
        source.write_text(COMMON + "".join(code))
        script.write_text(
            "".join(f"{v or 'STAND_IN'} {{ global: {'; '.join(g)}; }};\n" for v, g in versions.items() if v)
        )
        version_script = [f"-Wl,--version-script={script}"] if any(versions) else []
        libraries = ["-Wl,--no-as-needed", "-l:libstdc++.so.6"]
        run("gcc", "-w", "-Os", "-s", "-shared", "-fPIC", f"-Wl,-soname,{target.name}", *version_script,
            "-o", str(target), str(source), *libraries)  # fmt: skip


def definition(name: str, answer: str) -> str:
    """C for one symbol: a class's description, its table of functions, a constructor, or a function with `answer`."""
    if name.startswith("_ZTI"):
        return f'const void *{name}[] = {{{KIND} + 16, "{name[4:]}"}};\n'
    if name.startswith("_ZTV"):
        return f"void *{name}[] = TABLE;\n"
    if re.search("(?i)get_?error_?(string|name)", name):
        return f'const char *{name}(void) {{ return "there is no CUDA here"; }}\n'
    if re.match(r"_ZN.*C[12]E", name):
        return f"void {name}(void **self) {{ *self = table + 2; }}\n"
    return f"long {name}(void) {{ return {answer}; }}\n"


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:3])}: exit {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]))
