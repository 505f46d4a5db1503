"""A process of its own for a chat template, which is a program of strangers, with limits that the kernel enforces.

One process serves a whole build. It gets a line of JSON for each conversation, and answers with a line that has its
text. No check inside of Python can stop 'a' * 10**11, 2**10**10, or a loop in a loop in a loop. Here they end only that
process: RLIMIT_AS bounds its memory, and a timer whose signal nobody handles its processor time. Both work in any
thread of the caller, and on a busy machine a template has no less time.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from memo.artifacts.memory_limit import address_space_bytes, limited_memory
from memo.artifacts.python_process import python_command
from memo.data.chat_render import Renderer, TemplateRefusal, reason_of

TIME_LIMIT_S = 3.0
"""Processor time for one conversation, or to compile the template: thousands of times what templates take."""
RENDERING_LIMIT_S = 0.05
"""Added for each time that the conversation is rendered: one with many answers is rendered many times."""
MEMORY_LIMIT_BYTES = 512 << 20
MEMORY_BYTES_PER_CHARACTER = 64
"""Added for long conversations: a text, its pieces and its beginnings, at four bytes a character."""
MAX_CHARACTERS, MAX_GROWTH = 1 << 20, 16
"""The text may have so many characters, and so many more for each character of the conversation in JSON."""

_PROGRAM = """
import sys, types
package = sys.modules["memo.data"] = types.ModuleType("memo.data")
package.__path__ = [sys.argv[1]]
from memo.data.template_process import serve
serve()
"""
"""The process imports modules of memo.data without memo/data/__init__.py, which would import numpy: that alone takes
longer than a template."""


class TemplateProcess:
    """Renders conversations with one template, in a process that starts with the first of them.

    Args:
        setup: the arguments of Renderer, by name.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        self._setup = setup
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Any] | None = None

    def start(self) -> None:
        """Compile the template. Raises TemplateRefusal with what is wrong with it, or the limit that it goes beyond."""
        with self._lock:
            self._start()

    def render(
        self, messages: tuple[dict[str, Any], ...], tools: list[Any] | None, *, asks: bool = False
    ) -> dict[str, Any]:
        """The text of a conversation, and spans: [begin, end) of each answer; `asks`: the text up to the next answer.

        Raises TemplateRefusal, also for a limit that the template goes beyond; the next call starts another process.
        """
        with self._lock:
            if self._process is None:
                self._start()
            return self._ask({"messages": messages, "tools": tools, "asks": asks})

    def close(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def _start(self) -> None:
        self.close()
        command = python_command(_PROGRAM, os.path.dirname(__file__))
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        except OSError as error:
            raise TemplateRefusal(f"cannot be given a process of its own ({error.strerror})") from None
        self._end = weakref.finalize(self, _stop, self._process)
        try:
            self._ask(self._setup)
        except TemplateRefusal:
            self.close()
            raise

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        # ASCII, and no line break inside; tables hold dates and decimals, which a template would print as text.
        line = json.dumps(question, default=str).encode()
        with contextlib.suppress(BrokenPipeError):  # it has ended, as the missing answer shows below
            process.stdin.write(line + b"\n")
            process.stdin.flush()
        answer = process.stdout.readline()
        if not answer.endswith(b"\n"):
            status = process.wait()
            self.close()
            raise _stopped(_ending(status, len(line)))
        found: dict[str, Any] = json.loads(answer)
        if "refusal" in found:
            raise TemplateRefusal(found["refusal"])
        if "memory" in found:
            self.close()  # with what it holds
            raise _stopped(_needs_memory(len(line)))
        return found


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    with contextlib.suppress(OSError):
        process.communicate()


def _stopped(why: str) -> TemplateRefusal:
    return TemplateRefusal(f"{why}; give another chat template")


def _ending(status: int, num_characters: int) -> str:
    if status == -signal.SIGPROF:
        return f"takes more than {TIME_LIMIT_S:.0f} s of processor time"
    if status == -signal.SIGKILL:
        return _needs_memory(num_characters)
    return f"ends the process that renders it (status {status})"


def _needs_memory(num_characters: int) -> str:
    return f"needs more than {_memory_bytes(num_characters) >> 20} MiB of memory"


def _memory_bytes(num_characters: int) -> int:
    return MEMORY_LIMIT_BYTES + MEMORY_BYTES_PER_CHARACTER * num_characters


def serve() -> None:
    """The other process: a line of setup, then a line for each conversation; each is answered with one line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides what Ctrl-C means, and ends this process
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    base_bytes = address_space_bytes()
    setup = sys.stdin.buffer.readline()
    try:
        with _limits(base_bytes, len(setup), num_renderings=0):
            renderer = Renderer(**json.loads(setup))
        _answer({})
    except MemoryError:
        return _answer({"memory": True})
    except Exception as error:  # Jinja's own errors, and those of Python's compiler, which reads what Jinja writes
        return _answer({"refusal": f"no valid chat template ({reason_of(error)}); repair it"})
    for line in sys.stdin.buffer:
        _answer(_rendered(renderer, line, base_bytes))


def _rendered(renderer: Renderer, line: bytes, base_bytes: int) -> dict[str, Any]:
    question = json.loads(line)
    try:
        with _limits(base_bytes, len(line), renderer.num_renderings(question["messages"])):
            most = MAX_CHARACTERS + MAX_GROWTH * len(line)
            if question.pop("asks"):
                return {"text": renderer.prompt(question["messages"], most), "spans": []}
            text, spans = renderer.conversation(**question, max_characters=most)
        return {"text": text, "spans": spans}
    except TemplateRefusal as refusal:
        return {"refusal": str(refusal)}
    except MemoryError:
        return {"memory": True}


def _answer(found: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(found).encode() + b"\n")
    sys.stdout.buffer.flush()


@contextlib.contextmanager
def _limits(base_bytes: int, num_characters: int, num_renderings: int) -> Iterator[None]:
    signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT_S + RENDERING_LIMIT_S * num_renderings)
    try:
        with limited_memory(base_bytes + _memory_bytes(num_characters)):
            yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
