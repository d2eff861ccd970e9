"""A client that knows nothing but gRPC's reflection completes a task, as grpcurl and GUIs do."""

from __future__ import annotations

from typing import Any

import grpc
from conftest import Taskd, until
from google.protobuf import message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (  # type: ignore[import-untyped]
    ProtoReflectionDescriptorDatabase,
)


def test_a_client_by_reflection_completes_a_task(shared_taskd: Taskd) -> None:
    with grpc.insecure_channel(shared_taskd.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {"taskd.v1.Tasks", "taskd.v1.Discovery"} <= set(database.get_services())
        pool = DescriptorPool(database)

        def call(service: str, name: str, **fields: Any) -> Any:
            method = pool.FindServiceByName(f"taskd.v1.{service}").FindMethodByName(name)
            request = message_factory.GetMessageClass(method.input_type)
            answer = message_factory.GetMessageClass(method.output_type)
            stub = channel.unary_unary(
                f"/taskd.v1.{service}/{name}",
                request_serializer=request.SerializeToString,
                response_deserializer=answer.FromString,
            )
            return stub(request(**fields), timeout=30)

        call("Discovery", "InsertTasks", tasks=[{"queue": "reflection", "key": b"a", "payload": b"x"}])

        def get() -> Any:
            got = call("Tasks", "GetTasks", worker="w", queues=["reflection"], wait={"seconds": 10})
            return list(got.tasks)

        (task,) = until(get, "the task comes")
        assert (task.key, task.payload) == (b"a", b"x")
        completion = {"id": task.id, "lease_token": task.lease_token, "result": b"done"}
        answer = call("Tasks", "CompleteTasks", worker="w", completions=[completion])
        assert [one.status for one in answer.results] == [1], answer
