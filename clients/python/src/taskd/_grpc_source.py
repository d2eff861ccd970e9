"""Tasks from taskd, by unary calls of gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from taskd._codec import Encoding
from taskd._connection import COMPLETE, EXTEND, GET, REJECT, Call, Connection, Target
from taskd._time import to_duration
from taskd.source import Answer, Completion, ItemStatus, Lease, Rejection
from taskd.task import read_priority
from taskd.v1 import taskd_pb2 as pb

# taskd answers a report in milliseconds; a process that hangs must not keep it.
_REPORT_TIMEOUT = 20.0
# Beyond the time that taskd waits for tasks.
_GET_MARGIN = 10.0


class GrpcSource:
    """Asks one process of taskd, and the next one when it is away."""

    def __init__(
        self, target: Target, *, worker: str, queues: Sequence[str], lease: float, wait: float, max_bytes: int
    ) -> None:
        self._connection = Connection(target)
        self._worker = worker
        self._lease = lease
        self._wait = wait
        self._ask = pb.GetTasksRequest(
            worker=worker,
            queues=queues,
            wait=to_duration(wait),
            lease_duration=to_duration(lease),
            max_bytes=max_bytes,
        )
        self._waiting: Call | None = None

    async def get(self, max_tasks: int) -> Sequence[Lease]:
        request = pb.GetTasksRequest(max_tasks=max_tasks)
        request.MergeFrom(self._ask)
        call, at = self._connection.start(GET, request, self._wait + _GET_MARGIN)
        self._waiting = call
        try:
            answer: pb.GetTasksResponse = await self._connection.finish(call, at)
        except asyncio.CancelledError:
            if self._waiting is None:
                # Interrupted: taskd gives back what it leased for this call.
                return []
            raise
        finally:
            self._waiting = None
        return [_lease(task) for task in answer.tasks]

    def interrupt(self) -> None:
        # False: the answer is here, so the call returns it.
        if self._waiting is not None and self._waiting.cancel():
            self._waiting = None

    async def complete(self, completions: Sequence[Completion]) -> Sequence[Answer]:
        items = [
            pb.Completion(
                id=one.lease.id,
                lease_token=one.lease.token,
                result=one.result,
                result_encoding=one.encoding.value,
                discovered=one.discovered,
            )
            for one in completions
        ]
        request = pb.CompleteTasksRequest(worker=self._worker, completions=items)
        return _answers((await self._connection.call(COMPLETE, request, _REPORT_TIMEOUT)).results)

    async def reject(self, rejections: Sequence[Rejection]) -> Sequence[Answer]:
        items = []
        for one in rejections:
            item = pb.Rejection(id=one.lease.id, lease_token=one.lease.token, reason=one.reason, retry=one.retry)
            if one.delay is not None:
                item.delay.CopyFrom(to_duration(one.delay))
            items.append(item)
        request = pb.RejectTasksRequest(worker=self._worker, rejections=items)
        return _answers((await self._connection.call(REJECT, request, _REPORT_TIMEOUT)).results)

    async def extend(self, leases: Sequence[Lease]) -> Sequence[Answer]:
        by = to_duration(self._lease)
        items = [pb.Extension(id=lease.id, lease_token=lease.token, by=by) for lease in leases]
        request = pb.ExtendTasksRequest(worker=self._worker, extensions=items)
        # Later than that, another attempt is better.
        timeout = min(_REPORT_TIMEOUT, max(self._lease / 4, 0.5))
        return _answers((await self._connection.call(EXTEND, request, timeout)).results)

    async def close(self) -> None:
        await self._connection.close()


_STATUSES = {pb.ItemStatus.Value(f"ITEM_STATUS_{status.name}"): status for status in ItemStatus}


def read_answer(item: pb.ItemResult) -> Answer:
    return Answer(_STATUSES.get(item.status, ItemStatus.INVALID), item.error)


def _answers(results: Sequence[pb.ItemResult]) -> list[Answer]:
    return [read_answer(item) for item in results]


def _lease(task: pb.LeasedTask) -> Lease:
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
    )
