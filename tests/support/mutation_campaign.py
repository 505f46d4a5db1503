"""Damages files of every parser and reads them: each must be read, or refused by an error of memo's.

    python tests/support/mutation_campaign.py --mutations 1000 [--parser "run log"] [--first 0]

A process for each parser reads one damaged file after another, with 1 GiB more address space than it has after reading
an undamaged file. A parser fails if it raises anything but a MemoError, takes 5 seconds of CPU time or a minute by the
clock, or kills its process. A failure is printed with the seed of its file.
"""

import argparse
import contextlib
import faulthandler
import io
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from mutations import replace
from parsers import PARSERS, Parser

from memo.errors import MemoError

LIMIT_CPU_S = 5.0
LIMIT_CLOCK_S = 60.0
LIMIT_BYTES = 1 << 30


@dataclass
class Result:
    """Results of one parser on damaged files."""

    read: int = 0
    refused: int = 0
    failures: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    peak_bytes: int = 0

    @property
    def row(self) -> str:
        peak = f"{self.peak_bytes / (1 << 20):.0f} MiB"
        return f"{self.read:>6} {self.refused:>8} {len(self.failures):>9} {self.longest_s:>9.2f} {peak:>9}"


def run_parser(name: str, seeds: range) -> Result:
    """Read the files of all `seeds`; if a child dies, another one goes on after the seed at which it died."""
    result, first = Result(), seeds.start
    while first < seeds.stop:
        last, lines = _child(name, range(first, seeds.stop))
        for line in lines:
            kind, seed, seconds, peak, *rest = line.split("\t")
            result.longest_s = max(result.longest_s, float(seconds))
            result.peak_bytes = max(result.peak_bytes, int(peak))
            result.read += kind == "read"
            result.refused += kind == "refused"
            if kind == "failed":
                result.failures.append(f"{name}, seed {seed}: {rest[0]}")
        first = seeds.start + result.read + result.refused + len(result.failures)
        if last == "status 2":
            raise RuntimeError(f"the whole file of {name} cannot be read, see above")
        if last != "ended":
            result.failures.append(f"{name}, seed {first}: the process died ({last})")
            first += 1
    return result


def _child(name: str, seeds: range) -> tuple[str, list[str]]:
    """Read the files of `seeds` in a process; return how it ended, and its lines."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        with os.fdopen(writer, "w", buffering=1) as out:
            try:
                _read_all(name, PARSERS[name], seeds, out)
            except BaseException:
                traceback.print_exc()
                os._exit(2)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as lines:
        found = lines.read().splitlines()
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name, found
    return ("ended" if status == 0 else f"status {os.WEXITSTATUS(status)}"), found


def _read_all(name: str, parser: Parser, seeds: range, out: io.TextIOBase) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / parser.file
        parser.write(path)
        whole = path.read_bytes()
        with contextlib.redirect_stdout(io.StringIO()):
            parser.read(path)  # so that imports, threads and caches are not measured
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        baseline = _resident_bytes()
        resource.setrlimit(resource.RLIMIT_AS, (_virtual_bytes() + LIMIT_BYTES, hard))
        for seed in seeds:
            replace(path, whole, name, seed)
            began = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, LIMIT_CPU_S)  # kills, whatever is running
            faulthandler.dump_traceback_later(LIMIT_CLOCK_S, exit=True)
            kind, text = _read(parser, path)
            faulthandler.cancel_dump_traceback_later()
            signal.setitimer(signal.ITIMER_PROF, 0)
            grown = max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - baseline)
            out.write(f"{kind}\t{seed}\t{time.process_time() - began:.3f}\t{grown}\t{text}\n")


def _read(parser: Parser, path: Path) -> tuple[str, str]:
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            parser.read(path)
    except MemoError as error:
        text = str(error)
        if len(text) > 2000 or "\n" in text:
            return "failed", f"a message of {len(text)} characters: {text[:300]!r}"
        return "refused", ""
    except BaseException as error:  # a panic of Rust code is no Exception
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
        return "failed", f"{type(error).__name__}: {str(error)[:200]!r} at {where}"
    return "read", ""


def _virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--parser", choices=list(PARSERS), action="append")
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    print(f"{'parser':<24} {'read':>6} {'refused':>8} {'failures':>9} {'longest s':>9} {'growth':>9}", flush=True)
    failures = 0
    for name in options.parser or PARSERS:
        result = run_parser(name, range(options.first, options.first + options.mutations))
        failures += len(result.failures)
        print(f"{name:<24} {result.row}", flush=True)
        print("".join(f"{failure}\n" for failure in result.failures), end="", file=sys.stderr, flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
