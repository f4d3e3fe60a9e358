"""Requests of many clients in the same passes: whatever waits while one pass runs goes into the next.

Nothing waits for company: an idle server answers at once, a busy one fills its passes by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Lock, Thread

from qtuning.errors import QTuningError
from qtuning.predictor import Answer
from qtuning.tasks import Text

Answering = Callable[[Sequence[Text], Sequence[str | None]], list[Answer]]
ROWS_AT_ONCE = 64
"""Rows that share a pass, at most; a larger request goes alone."""
MOST_WAITING = 1024
"""Rows that may wait before requests are refused."""


class Busy(QTuningError):
    """Too much is waiting already."""


@dataclass(frozen=True)
class Request:
    """Texts of one client, and where the answer is put."""

    texts: Sequence[Text]
    tasks: Sequence[str | None]
    future: Future[list[Answer]] = field(default_factory=Future)


class Batcher:
    """A thread that answers requests, as many together as are there."""

    def __init__(
        self,
        answer: Answering,
        observe: Callable[[int], None] | None = None,
        rows_at_once: int = ROWS_AT_ONCE,
        most_waiting: int = MOST_WAITING,
    ):
        self.answer, self.observe = answer, observe
        self.rows_at_once, self.most_waiting = rows_at_once, most_waiting
        self.waiting = 0
        """Rows accepted and not answered yet."""
        self.accepted = self.answered = 0
        """Requests."""
        self._requests: SimpleQueue[Request | None] = SimpleQueue()
        self._lock = Lock()
        self._is_closed = False
        self._thread = Thread(target=self._work, name="batcher", daemon=True)
        self._thread.start()

    def submit(self, texts: Sequence[Text], tasks: Sequence[str | None]) -> Future[list[Answer]]:
        """Answers to come; refused when too much waits, or after `close`."""
        request = Request(texts, tasks)
        with self._lock:
            if self._is_closed:
                raise Busy("the server is shutting down; ask another one.")
            if self.waiting and self.waiting + len(texts) > self.most_waiting:
                raise Busy(f"{self.waiting} texts are waiting already; try again in a moment.")
            self.waiting += len(texts)
            self.accepted += 1
            self._requests.put(request)
        return request.future

    def close(self) -> None:
        """Answer what was accepted, and stop."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._requests.put(None)
        self._thread.join()

    def _work(self) -> None:
        kept: Request | None = None
        while True:
            first = kept or self._requests.get()
            kept = None
            if first is None:
                return
            batch, rows, is_last = [first], len(first.texts), False
            while rows < self.rows_at_once:
                try:
                    more = self._requests.get_nowait()
                except Empty:
                    break
                if more is None:
                    is_last = True
                    break
                if rows + len(more.texts) > self.rows_at_once:
                    kept = more
                    break
                batch.append(more)
                rows += len(more.texts)
            self._settle(batch)
            if is_last:
                return

    def _settle(self, batch: list[Request]) -> None:
        """Answer a batch; where it fails, every request for itself, so that one cannot spoil the others."""
        gone = [
            r for r in batch if not (r.future.running() or r.future.set_running_or_notify_cancel())
        ]
        self._done(gone)  # their clients wait no longer
        batch = [request for request in batch if request not in gone]
        if not batch:
            return
        texts = [text for request in batch for text in request.texts]
        tasks = [task for request in batch for task in request.tasks]
        if self.observe:
            self.observe(len(texts))
        try:
            answers = self.answer(texts, tasks)
        except Exception as error:
            if len(batch) > 1:
                for request in batch:
                    self._settle([request])
            else:
                self._done(batch)
                batch[0].future.set_exception(error)
            return
        self._done(batch)
        first = 0
        for request in batch:
            last = first + len(request.texts)
            request.future.set_result(answers[first:last])
            first = last

    def _done(self, batch: list[Request]) -> None:
        with self._lock:
            self.waiting -= sum(len(request.texts) for request in batch)
            self.answered += len(batch)
