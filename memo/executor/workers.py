"""Threads that run tasks in the order given: the streams of a CPU, and those of a disk."""

import queue
import threading
import weakref
from collections.abc import Callable, Sequence


class Workers:
    """One thread for each name, from the start for `names`, else from its first task; threads end with this object."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._workers = {name: _Worker(name) for name in names}
        self.close = weakref.finalize(self, _stop_all, self._workers)

    @property
    def have_begun(self) -> bool:
        return bool(self._workers)

    def put(self, name: str, task: Callable[[], object]) -> None:
        if name not in self._workers:
            self._workers[name] = _Worker(name)
        self._workers[name].tasks.put(task)

    def record(self, name: str) -> threading.Event:
        event = threading.Event()
        self.put(name, event.set)
        return event

    def finish(self) -> None:
        """Return when all tasks have run, also after an error."""
        for event in [self.record(name) for name in self._workers]:
            event.wait()

    def raise_errors(self) -> None:
        for worker in self._workers.values():
            if worker.errors:
                first = worker.errors[0]
                worker.errors.clear()
                raise first


class _Worker:
    def __init__(self, name: str) -> None:
        self.tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.errors: list[BaseException] = []
        self.thread = threading.Thread(target=self._run, name=f"memo-{name}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (task := self.tasks.get()) is not None:
            try:
                task()
            except BaseException as error:  # raised by the next call; later events must still happen
                self.errors.append(error)


def _stop_all(workers: dict[str, _Worker]) -> None:
    for worker in workers.values():
        worker.tasks.put(None)
    for worker in workers.values():
        # This may run in a worker, if a finished task held the last reference to the backend.
        if worker.thread is not threading.current_thread():
            worker.thread.join()
