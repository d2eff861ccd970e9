"""Tasks from taskd, by unary calls of gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from taskd_client._codec import Encoding
from taskd_client._connection import COMPLETE, EXTEND, GET, REJECT, Call, Connection
from taskd_client._time import to_duration
from taskd_client.errors import Unavailable
from taskd_client.source import Answer, Completion, ItemStatus, Lease, Rejection
from taskd_client.task import Limit, read_priority
from taskd_client.v1 import taskd_pb2 as pb

# taskd answers a report in milliseconds; a process that hangs must not keep it.
REPORT_TIMEOUT = 20.0
_SHORTEST_EXTENSION, _LONGEST_EXTENSION = 0.5, 30.0
# taskd refuses a longer one.
_LONGEST_DELAY = 365 * 24 * 3600.0
# taskd refuses a longer hold or pace.
_LONGEST_LIMIT = 3600.0
# How long the answer of a poll may take at a stop: as long as taskd takes where it has tasks. taskd gives back what it
# leased for a call only if it has not written the answer.
_ANSWER_COMES = 0.25
# Beyond the time that taskd waits for tasks.
_GET_MARGIN = 10.0


class GrpcSource:
    """Asks one process of taskd, and the next one when it is away."""

    def __init__(
        self,
        connection: Connection,
        *,
        worker: str,
        queues: Sequence[str],
        weights: Mapping[str, int],
        lease: float,
        wait: float,
        max_bytes: int,
    ) -> None:
        self._connection = connection
        self._worker = worker
        self._lease = lease
        self._wait = wait
        self._ask = pb.GetTasksRequest(
            worker=worker,
            queues=queues,
            weights=weights,
            wait=to_duration(wait),
            lease_duration=to_duration(lease),
            max_bytes=max_bytes,
        )
        self._waiting: Call | None = None
        self._asking: Call | None = None

    async def get(self, max_tasks: int) -> Sequence[Lease]:
        request = pb.GetTasksRequest(max_tasks=max_tasks)
        request.MergeFrom(self._ask)
        call, at = self._connection.start(GET, request, self._wait + _GET_MARGIN)
        self._waiting = call
        try:
            answer: pb.GetTasksResponse = await self._connection.finish(call, at)
        except (asyncio.CancelledError, Unavailable):
            if self._waiting is None:
                # Interrupted.
                return []
            raise
        finally:
            self._waiting = None
        return [read_lease(task) for task in answer.tasks]

    def interrupt(self) -> None:
        if self._waiting is not None:
            asyncio.get_running_loop().call_later(_ANSWER_COMES, self._end_get, self._waiting)

    def _end_get(self, call: Call) -> None:
        # False: the answer is here, so the call returns it.
        if self._waiting is call and call.cancel():
            self._waiting = None

    async def complete(self, completions: Sequence[Completion]) -> Sequence[Answer]:
        request = pb.CompleteTasksRequest(worker=self._worker, completions=[completion(one) for one in completions])
        return _answers((await self._connection.call(COMPLETE, request, REPORT_TIMEOUT)).results)

    async def complete_and_get(
        self, completions: Sequence[Completion], max_tasks: int
    ) -> tuple[Sequence[Answer], Sequence[Lease]] | None:
        request = pb.CompleteTasksRequest(worker=self._worker, completions=[completion(one) for one in completions])
        request.next.CopyFrom(self._ask)
        request.next.ClearField("wait")
        request.next.max_tasks = max_tasks
        call, at = self._connection.start(COMPLETE, request, REPORT_TIMEOUT)
        self._asking = call
        try:
            answer: pb.CompleteTasksResponse = await self._connection.finish(call, at)
        except (asyncio.CancelledError, Unavailable) as error:
            if self._asking is None and isinstance(error, Unavailable):
                # A report counts once, so it may go anew.
                return None
            raise
        finally:
            self._asking = None
        return _answers(answer.results), [read_lease(task) for task in answer.tasks]

    def ask_no_more(self) -> None:
        # False: the answer is here, so the call returns it.
        if self._asking is not None and self._asking.cancel():
            self._asking = None

    async def reject(self, rejections: Sequence[Rejection]) -> Sequence[Answer]:
        request = pb.RejectTasksRequest(worker=self._worker, rejections=[rejection(one) for one in rejections])
        return _answers((await self._connection.call(REJECT, request, REPORT_TIMEOUT)).results)

    async def extend(self, leases: Sequence[Lease]) -> Sequence[Answer]:
        items = [extension(lease, self._lease) for lease in leases]
        request = pb.ExtendTasksRequest(worker=self._worker, extensions=items)
        return _answers((await self._connection.call(EXTEND, request, extension_timeout(self._lease))).results)

    async def close(self) -> None:
        await self._connection.close()


def extension_timeout(lease: float) -> float:
    """How long an extension may take. Later than that, another attempt is better."""
    return min(_LONGEST_EXTENSION, max(lease / 4, _SHORTEST_EXTENSION))


def completion(one: Completion) -> pb.Completion:
    return pb.Completion(
        id=one.lease.id,
        lease_token=one.lease.token,
        result=one.result,
        result_encoding=one.encoding.value,
        discovered=one.discovered,
        limit=_limit(one.limit),
    )


def rejection(one: Rejection) -> pb.Rejection:
    lease = one.lease
    item = pb.Rejection(
        id=lease.id,
        lease_token=lease.token,
        reason=one.reason,
        retry=one.retry,
        not_started=one.not_started,
        limit=_limit(one.limit),
    )
    if one.delay is not None:
        item.delay.CopyFrom(to_duration(min(one.delay, _LONGEST_DELAY)))
    return item


def _limit(one: Limit | None) -> pb.LimitReport | None:
    if one is None:
        return None
    return pb.LimitReport(
        hold=to_duration(min(one.hold, _LONGEST_LIMIT)),
        pace=to_duration(min(one.pace, _LONGEST_LIMIT)),
    )


def extension(lease: Lease, by: float) -> pb.Extension:
    return pb.Extension(id=lease.id, lease_token=lease.token, by=to_duration(by))


_STATUSES = {pb.ItemStatus.Value(f"ITEM_STATUS_{status.name}"): status for status in ItemStatus}


def read_answer(item: pb.ItemResult) -> Answer:
    return Answer(_STATUSES.get(item.status, ItemStatus.INVALID), item.error)


def _answers(results: Sequence[pb.ItemResult]) -> list[Answer]:
    return [read_answer(item) for item in results]


def read_lease(task: pb.LeasedTask) -> Lease:
    return Lease(
        id=task.id,
        queue=task.queue,
        key=task.key,
        payload=task.payload,
        encoding=Encoding(task.payload_encoding),
        token=task.lease_token,
        headers=dict(task.headers),
        traceparent=task.traceparent,
        attempt=task.attempt,
        replicas=task.replicas,
        priority=read_priority(task.priority),
        limit_key=task.limit_key,
    )
