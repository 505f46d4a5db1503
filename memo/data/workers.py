"""Processes that encode pieces of files side by side, in order.

A tokenizer's own threads share what Python does between its calls: parsing JSON, and making lists of tokens. Here each
process does all of it for its pieces. They are processes that a build starts itself, not those of `multiprocessing`,
which run the user's script again where they cannot fork.
"""

import contextlib
import json
import os
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any

import numpy as np

from memo.artifacts.python_process import python_command
from memo.data.encode import Encoded, Encoder
from memo.data.records import RecordPiece
from memo.data.tokenizer import BPETokenizer, ByteTokenizer
from memo.errors import DataError

_SIZES = struct.Struct("<QQ")
_AHEAD = 3
"""Pieces that are read ahead for each process, so that none waits while the result of another one is written."""


def encode_all(pieces: Iterable[RecordPiece], encoder: Encoder, num_workers: int) -> Iterator[Encoded]:
    """`encoder` of each piece in turn, in `num_workers` processes where there are several.

    Raises DataError as `encoder`, and for a process that ends.
    """
    if num_workers < 2:
        yield from map(encoder, pieces)
        return
    with _Workers(encoder) as workers, ThreadPoolExecutor(num_workers) as threads:
        waiting: deque[Future[Encoded]] = deque()
        for piece in pieces:
            waiting.append(threads.submit(workers.encode, piece))
            if len(waiting) >= _AHEAD * num_workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class _Workers:
    """A context with one process for each thread that asks; at its end all processes end."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._own = threading.local()
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "_Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    _open(pipe).close()

    def encode(self, piece: RecordPiece) -> Encoded:
        process = getattr(self._own, "process", None)
        try:
            if process is None:
                process = self._own.process = self._started()
            are_json = all(isinstance(record, bytes) for record in piece.records)
            records = [len(record) for record in piece.records] if are_json else piece.records
            header = {"file": piece.file, "unit": piece.unit, "numbers": piece.numbers, "done_bytes": piece.done_bytes}
            body = b"".join(piece.records) if are_json else b""
            _send(_open(process.stdin), {**header, "are_json": are_json, "records": records}, body)
            answer, ids = _receive(_open(process.stdout))
        except (OSError, EOFError):
            status = None if process is None else process.poll()
            raise DataError(
                f"{piece.where(0)}: a process that tokenizes has ended (status {status}), perhaps for want of memory: "
                "give fewer --workers"
            ) from None
        if "error" in answer:
            raise DataError(answer["error"])
        lengths = np.array(answer.pop("lengths"), dtype=np.int64)
        refused = tuple(answer.pop("refused"))
        return Encoded(np.frombuffer(ids, dtype=self._encoder.dtype), lengths, refused, **answer)

    def _started(self) -> "subprocess.Popen[bytes]":
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        command = python_command("from memo.data.workers import serve; serve()")
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment)
        self._processes.append(process)
        made, tokenizer = self._encoder, self._encoder.tokenizer
        definition = tokenizer.definition if isinstance(tokenizer, BPETokenizer) else b""
        _send(_open(process.stdin), {"key": made.key, "dtype": made.dtype.str, "skip": made.skip}, definition)
        return process


def serve() -> None:
    """The program of such a process: make an encoder, then encode pieces until the pipe is closed."""
    asked, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything prints must not stand among the answers
    with contextlib.suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        setup, definition = _receive(asked)
        tokenizer = BPETokenizer("tokenizer.json", definition) if definition else ByteTokenizer()
        encoder = Encoder(tokenizer, setup["key"], np.dtype(setup["dtype"]), setup["skip"])
        while True:
            piece = _piece(*_receive(asked))
            try:
                found = encoder(piece)
            except DataError as error:
                _send(answers, {"error": str(error)}, b"")
                continue
            told = {"num_text_bytes": found.num_text_bytes, "done_bytes": found.done_bytes}
            _send(answers, {"lengths": found.lengths.tolist(), "refused": found.refused, **told}, found.ids.tobytes())


def _piece(header: dict[str, Any], body: bytes) -> RecordPiece:
    records, are_json = header.pop("records"), header.pop("are_json")
    if are_json:
        ends = np.cumsum(records).tolist()
        records = [body[end - size : end] for end, size in zip(ends, records, strict=True)]
    return RecordPiece(records=records, **header)


def _open(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _send(pipe: IO[bytes], header: dict[str, Any], body: bytes) -> None:
    """Write the sizes of both, the header in JSON, and the body.

    Values of a table that JSON cannot hold, such as dates, are no texts: they become null.
    """
    words = json.dumps(header, ensure_ascii=False, default=lambda value: None).encode("utf-8", "surrogatepass")
    pipe.write(_SIZES.pack(len(words), len(body)))
    pipe.write(words)
    pipe.write(body)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> tuple[dict[str, Any], bytes]:
    sizes = pipe.read(_SIZES.size)
    if len(sizes) < _SIZES.size:
        raise EOFError
    words, body = (pipe.read(size) for size in _SIZES.unpack(sizes))
    return json.loads(words.decode("utf-8", "surrogatepass")), body
