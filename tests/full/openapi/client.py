"""Calls every operation of a running taskd with the client that was generated from its /openapi.json.

client.py URL TOKEN DOCUMENT, with the generated package taskd_client on the path. scripts/check-openapi starts it.
"""

import importlib
import inspect
import json
import pkgutil
import sys
import time
import uuid

import taskd_client.api
from taskd_client import AuthenticatedClient, Client
from taskd_client import models as m

url, token, document = sys.argv[1:]
document = json.load(open(document))
client = AuthenticatedClient(base_url=url, token=token, timeout=60) if token else Client(base_url=url, timeout=60)
called = set()


def operations():
    """The generated modules, by the id of their operation in snake_case."""
    found = pkgutil.walk_packages(taskd_client.api.__path__, "taskd_client.api.")
    return {each.name.rsplit(".", 1)[1]: importlib.import_module(each.name) for each in found if not each.ispkg}


OPERATIONS = operations()


def call(name, *args, status=200, **kwargs):
    """Calls an operation; the answer must have the status, and be read by the client if it is not text."""
    called.add(name)
    answer = OPERATIONS[name].sync_detailed(*args, client=client, **kwargs)
    assert answer.status_code == status, (name, answer.status_code, answer.content)
    assert answer.parsed is not None, (name, answer.content)
    return answer.parsed


def until(what, condition):
    """Waits for a condition, for at most half a minute."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within 30 s: {what}")


def flow():
    """A task from its insert to its results, one that dies and is sent again, and what taskd says of them."""
    key = str(uuid.uuid4())
    queue = f"generated-client-{key[:8]}"
    call("get_index"), call("get_health"), call("get_readiness"), call("get_open_api"), call("get_metrics")

    # Insert: one, several of which one is wrong, and one wrong one.
    one = m.NewTask(queue=queue, key=key, payload={"n": 1.5}, replicas=1, delay="0s")
    (inserted,) = call("insert_tasks", body=one).results
    assert inserted.status == "CREATED", inserted
    wrong = m.NewTask(queue=queue, key=f"{key}/wrong", replicas=100_000)
    several = call("insert_tasks", body=[m.NewTask(queue=queue, key=f"{key}/dies"), wrong]).results
    assert [answer.status for answer in several] == ["CREATED", "REJECTED"], several
    assert call("insert_tasks", body=wrong, status=422).results[0].error

    # Look.
    task = call("get_task", inserted.id)
    assert (task.key, task.id) == (key, inserted.id), task
    explained = call("explain_task", queue=queue, key=key, worker="w")
    assert explained.task.id == inserted.id and explained.worker.worker == "w", explained
    call("get_task", uuid.uuid4(), status=404)

    # Work: extend, complete with a discovered task, reject for good.
    leased = []

    def lease():
        body = m.GetTasks(worker="w", queues=[queue], max_tasks=10, wait="1s")
        leased.extend(call("get_tasks", body=body).tasks)
        return len(leased) >= 2

    until("two tasks are leased", lease)
    (task,) = [task for task in leased if task.key == key]
    (dies,) = [task for task in leased if task.key != key]
    assert task.payload == {"n": 1.5} and task.payload_encoding == "json", task
    holds = {"id": str(task.id), "lease_token": task.lease_token}
    queues = call("list_queues").queues
    assert any(view.queue == queue and view.leases >= 2 for view in queues), queues
    body = m.ExtendTasks(worker="w", extensions=[m.Extension(**holds, by="1m")])
    (extended,) = call("extend_tasks", body=body).results
    assert extended.status == "OK" and extended.lease_expires_at, extended
    found = m.NewTask(queue=queue, key=f"{key}/found")
    completion = m.Completion(**holds, result=[1, 2], discovered=[found])
    (completed,) = call("complete_tasks", body=m.CompleteTasks(worker="w", completions=[completion])).results
    assert completed.status == "OK", completed
    rejection = m.Rejection(id=str(dies.id), lease_token=dies.lease_token, reason="no use", retry=False)
    (rejected,) = call("reject_tasks", body=m.RejectTasks(worker="w", rejections=[rejection])).results
    assert rejected.status == "OK", rejected

    # What became of them.
    (result,) = until("the result is stored", lambda: call("get_results", inserted.id).results)
    assert result.result == [1, 2] and result.worker == "w", result
    until("the task is dead", lambda: call("list_dead_letters", queue=queue).letters)
    letter = call("get_dead_letter", dies.id)
    assert letter.reason == "no use" and letter.kind == "task", letter
    body = m.ChangeLetters(filter_=m.LetterFilter(queue=queue), dry_run=True)
    assert call("retry_dead_letters", body=body).matched == 1
    assert call("retry_dead_letters", body=m.ChangeLetters(ids=[str(dies.id)])).changed == 1
    assert call("purge_dead_letters", body=body).matched == 0
    call("purge_dead_letters", body=m.ChangeLetters(), status=400)
    assert call("list_acts", limit=5).acts

    # A session without a stream.
    me = {"worker": "s", "session": call("open_session", body=m.OpenSession(worker="s", queues=[queue], want=1)).session}
    (task,) = until("it has a task", lambda: call("want_tasks", body=m.WantTasks(**me, wait="1s")).tasks)
    done = m.Completion(id=str(task.id), lease_token=task.lease_token)
    assert call("report_tasks", body=m.ReportTasks(**me, completions=[done])).counted == 1
    pending = call("get_pending_count", body=m.SessionCall(**me))
    assert (pending.demand, pending.in_hand) == (0, 0), pending
    assert call("surrender_tasks", body=m.SessionCall(**me)).surrendered == 0
    assert call("close_session", body=m.SessionCall(**me)).offered == 0
    call("close_session", body=m.SessionCall(**me), status=404)


def others():
    """Each operation that the flow has not called, with as little as it takes."""
    for name in sorted(OPERATIONS.keys() - called):
        module, args, kwargs = OPERATIONS[name], [], {}
        for parameter in inspect.signature(module.sync_detailed).parameters.values():
            if parameter.default is not inspect.Parameter.empty or parameter.name == "client":
                continue
            if parameter.name == "body":
                classes = (each for each in vars(m).values() if inspect.isclass(each))
                types = [each for each in classes if each.__name__ in str(parameter.annotation)]
                try:
                    kwargs["body"] = max(types, key=lambda each: len(each.__name__)).from_dict({})
                except KeyError as missing:
                    print(f"client: {name} is left to schemathesis: its body needs {missing}")
                    break
            elif "UUID" in str(parameter.annotation):
                args.append(uuid.uuid4())
            else:
                args.append("generated-client")
        else:
            answer = module.sync_detailed(*args, client=client, **kwargs)
            assert answer.status_code < 500 and answer.parsed is not None, (name, answer)
            called.add(name)


def without_token():
    """Without the token, each operation that needs one is answered 401 with a problem that the client reads."""
    stranger = AuthenticatedClient(base_url=url, token="taskd_nobody", timeout=60)
    for module in (OPERATIONS["list_queues"], OPERATIONS["list_acts"], OPERATIONS["list_dead_letters"]):
        answer = module.sync_detailed(client=stranger)
        assert answer.status_code == 401 and answer.parsed.detail, answer


flow()
others()
if token:
    without_token()
ids = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
assert len(ids) == len(OPERATIONS), (ids, sorted(OPERATIONS))
print(f"client: {len(called)} of {len(ids)} operations called")
