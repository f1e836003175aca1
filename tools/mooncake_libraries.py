"""Add the missing system libraries to Mooncake's package. Standard library only.

Debian packages are downloaded and unpacked. Nothing is installed, and apt's lists are not changed.
The loader finds the libraries by RPATH in the package's folder of libraries, without an environment
variable. The exit code is 1, with a reason, if Mooncake cannot work.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

BINARIES = ("store.so", "mooncake_master")
OWN_LIBRARIES = "mooncake_transfer_engine_non_cuda.libs"
# Libraries that auditwheel leaves to the system and a minimal Debian lacks.
PROVIDERS = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}


class LibrariesError(Exception):
    """Some libraries are missing and not available. The message has names and reason."""


def missing_libraries(package: Path) -> set[str]:
    """Return the names of libraries that the loader does not find for the package's binaries."""
    missing = set()
    for name in BINARIES:
        result = subprocess.run(
            ["ldd", package / name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if result.returncode != 0:
            raise LibrariesError(f"ldd {package / name}: {result.stdout.strip()}")
        missing |= set(re.findall(r"^\s*(\S+) => not found", result.stdout, re.MULTILINE))
    return missing


def provide(package: Path) -> None:
    """Provide every library, or raise LibrariesError."""
    missing = missing_libraries(package)
    if not missing:
        return
    names = [PROVIDERS[each] for each in sorted(missing) if each in PROVIDERS]
    why = "no known Debian package has them"
    if names:
        why = "Debian's packages do not have them"
        try:
            copy_libraries(names, package.parent / OWN_LIBRARIES)
        except (LibrariesError, OSError) as error:
            why = str(error)
    missing = missing_libraries(package)
    if missing:
        raise LibrariesError(f"{', '.join(sorted(missing))} not found: {why}")


def copy_libraries(names: Sequence[str], into: Path) -> None:
    """Copy the libraries of these Debian packages and of their missing dependencies.

    Raises LibrariesError.
    """
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise LibrariesError(
                f"{tool} is missing; install the Debian packages {', '.join(names)}"
            )
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        for folder in ("lists/partial", "cache/archives/partial", "root"):
            (work / folder).mkdir(parents=True)
        settings = {
            "Dir::State::lists": work / "lists",
            "Dir::Cache": work / "cache",
            "APT::Sandbox::User": "root",  # another user could not write here
            "Debug::NoLocking": "true",
        }
        apt = [
            "apt-get",
            *(part for key, value in settings.items() for part in ("-o", f"{key}={value}")),
        ]
        run([*apt, "update", "-q"], work)
        planned = run(
            [*apt, "install", "--simulate", "--no-install-recommends", "-q", *names], work
        )
        wanted = re.findall(r"^Inst (\S+)", planned, re.MULTILINE)
        run([*apt, "download", "-q", *wanted], work)
        for archive in work.glob("*.deb"):
            run(["dpkg-deb", "-x", archive, work / "root"], work)
        for library in work.glob("root/**/lib/*-linux-*/lib*.so.*"):
            if re.fullmatch(r"lib.+\.so(\.\d+){1,2}", library.name) and library.is_file():
                shutil.copyfile(library, into / library.name)


def run(command: Sequence[str | Path], where: Path) -> str:
    """Return the output of a command. Raises LibrariesError with the end of the output."""
    result = subprocess.run(
        command,
        cwd=where,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(result.stdout, flush=True)
    if result.returncode != 0:
        last = result.stdout.strip().splitlines()[-1:] or [""]
        verb = next(
            (str(each) for each in command if each in ("update", "install", "download")), ""
        )
        raise LibrariesError(f"{command[0]} {verb}".strip() + f" failed: {last[0]}")
    return result.stdout


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Add the missing system libraries to Mooncake's package."
    )
    parser.add_argument("package", type=Path, help="the directory `mooncake` in site-packages")
    try:
        provide(parser.parse_args().package)
    except LibrariesError as error:
        print(f"Mooncake cannot be used: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
