/** Watches, inserts that wait, idempotency keys and backoffs against a real taskd. */

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { Client, NotFoundError, Reject, RejectedError, Worker, type Handler } from "@taskd/client";
import { Gate, SILENT, Taskd, fakeTaskd, until } from "./support.js";

let taskd: Taskd;
before(async () => {
  taskd = await Taskd.start();
});
after(async () => {
  await taskd.stop();
});

async function withWorker(queue: string, handler: Handler, test: () => Promise<void>): Promise<void> {
  const worker = new Worker({ url: taskd.url, queue, logger: SILENT, signals: false }).handle(handler);
  const running = worker.run();
  try {
    await Promise.race([test(), running]);
  } finally {
    await worker.stop();
    await running;
  }
}

test("a watch shows a task on its way, to its end, also past a taskd that is killed", async () => {
  const { client } = taskd;
  const { id = "" } = await client.insert({ queue: "watched", key: "k" });
  const gate = new Gate();
  const statuses: string[] = [];
  let last = "";
  const watching = (async () => {
    for await (const event of client.watchTask(id)) {
      assert.deepEqual([event.id, event.queue, event.at instanceof Date], [id, "watched", true]);
      statuses.push(event.status);
      last = event.eventId;
    }
  })();
  await withWorker(
    "watched",
    async () => gate.opened,
    async () => {
      await until("a worker has the task", () => statuses.at(-1) === "ASSIGNED");
      await taskd.kill();
      await taskd.run();
      gate.open();
      await watching;
    },
  );
  assert.equal(statuses.at(-1), "COMPLETED");
  assert.ok(
    statuses.every((status, nth) => status !== statuses[nth - 1]),
    statuses.join(" "),
  );
  for await (const event of client.watchTask(id, { lastEventId: last })) assert.fail(event.status);
  const again: string[] = [];
  for await (const { status } of client.watchTask(id)) again.push(status);
  assert.deepEqual(again, ["COMPLETED"]);
  const none = client.watchTask("01890a5d-ac96-774b-bcce-b302099a8057");
  await assert.rejects(none.next(), NotFoundError);
});

test("a watch of a queue shows its tasks, and goes on behind an event", async () => {
  const { client } = taskd;
  const ends: string[] = [];
  const ids: string[] = [];
  let first: string | undefined;
  let isHeard = false;
  const watching = (async () => {
    for await (const event of client.watchQueue("all")) {
      isHeard = true;
      if (event.type === "gap") continue;
      if (event.status === "COMPLETED" && !ends.includes(event.id)) {
        ends.push(event.id);
        first ??= event.eventId;
      }
      if (ends.length > 0 && ids.every((id) => ends.includes(id))) return;
    }
  })();
  await withWorker(
    "all",
    () => "done",
    async () => {
      // A watch hears from now on: it has begun when it hears of a task.
      await until("the watch hears", async () => {
        ids.push((await client.insert({ queue: "all", key: `early-${String(ids.length)}` })).id ?? "");
        return isHeard;
      });
      // Earlier tasks may have gone by.
      ids.splice(0);
      const answers = await client.insertBatch(["a", "b", "c"].map((key) => ({ queue: "all", key })));
      ids.push(...answers.map(({ id = "" }) => id));
      await watching;
    },
  );
  const rest = client.watchQueue("all", { lastEventId: first });
  const { value } = await rest.next();
  assert.ok(value?.type === "status" && value.queue === "all");
  await rest.return();
});

test("an insert that waits answers with the result", async () => {
  const { client } = taskd;
  const handler: Handler = (task) => {
    if (task.key === "bad") throw new Reject("it is bad");
    return { length: task.key.length };
  };
  await withWorker("waits", handler, async () => {
    const answer = await client.insert<{ length: number }>({ queue: "waits", key: "abc" }, { wait: "1m" });
    assert.deepEqual([answer.status, answer.taskStatus], ["CREATED", "COMPLETED"]);
    assert.equal(answer.results?.[0]?.result.length, 3);
    assert.ok(answer.results[0].completedAt instanceof Date);
    const again = await client.insert({ queue: "waits", key: "abc" }, { wait: "1m" });
    assert.deepEqual([again.status, again.id, again.taskStatus], ["DUPLICATE", answer.id, "COMPLETED"]);
    assert.deepEqual(again.results?.[0]?.result, { length: 3 });
    const tasks = [{ queue: "waits", key: "x" }, { queue: "waits", key: "bad" }, { queue: "no name!" }];
    const answers = await client.insertBatch(tasks, { wait: "1m" });
    assert.deepEqual(
      answers.map(({ index, status, taskStatus }) => [index, status, taskStatus]),
      [
        [0, "CREATED", "COMPLETED"],
        [1, "CREATED", "DEAD"],
        [2, "REJECTED", undefined],
      ],
    );
    assert.match(answers[2]?.error ?? "", /queue/);
    await assert.rejects(client.insert({ queue: "no name!" }, { wait: "1m" }), RejectedError);
  });
  const late = await client.insert({ queue: "nobody", key: "k" }, { wait: "50ms" });
  assert.equal(late.status, "CREATED");
  assert.ok(late.taskStatus !== "COMPLETED" && late.results === undefined);
  const many = Array.from({ length: 1001 }, (_, n) => ({ queue: "waits", key: String(n) }));
  await assert.rejects(client.insertBatch(many, { wait: "1s" }), /1001 tasks in an insert that waits; at most 1000/);
});

test("an insert that waits outlives a taskd that is killed, and says that its task is new", async () => {
  const { client } = taskd;
  const waiting = client.insert({ queue: "outlives", key: "k" }, { wait: "2m" });
  await until("the task is stored", async () => (await client.listPage({ queue: "outlives" })).tasks.length === 1);
  await taskd.kill();
  await taskd.run();
  await withWorker(
    "outlives",
    () => "done",
    async () => {
      const answer = await waiting;
      // The answer of the first call was lost with taskd, unless the second one had been sent already.
      assert.ok(["CREATED", "DUPLICATE"].includes(answer.status));
      assert.deepEqual([answer.taskStatus, answer.results?.[0]?.result], ["COMPLETED", "done"]);
    },
  );
});

test("a wait takes several calls, and the first one says whether a task is new", async () => {
  const bodies: string[] = [];
  const answers = [
    [
      { status: "CREATED", id: "1", task_status: "QUEUED" },
      { status: "TRY_LATER", error: "full" },
    ],
    [
      { status: "DUPLICATE", id: "1", task_status: "ASSIGNED" },
      { status: "CREATED", id: "2", task_status: "DEAD" },
    ],
    [{ status: "DUPLICATE", id: "1", task_status: "COMPLETED", results: [{ worker: "w", result_base64: "AP8=" }] }],
  ];
  const fake = await fakeTaskd((path, body, nth) => {
    assert.match(path, /^\/v1\/tasks\?wait=\d+ms$/);
    bodies.push(body);
    return { body: JSON.stringify({ results: answers[nth] }) };
  });
  const tasks = ["a", "b"].map((key) => ({ queue: "q", key }));
  const [one, two] = await new Client({ url: fake.url }).insertBatch(tasks, { wait: "1h" });
  assert.deepEqual(one, {
    index: 0,
    status: "CREATED",
    id: "1",
    taskStatus: "COMPLETED",
    results: [{ worker: "w", result: new Uint8Array([0, 255]) }],
  });
  assert.deepEqual(two, { index: 1, status: "CREATED", id: "2", taskStatus: "DEAD" });
  assert.deepEqual(
    bodies.map((body) => (JSON.parse(body) as { key: string }[]).map(({ key }) => key).join("")),
    ["ab", "ab", "a"],
  );
  await fake.close();
});

test("an insert that is sent again with its idempotency key is answered as the first time", async () => {
  const { client } = taskd;
  const task = { queue: "once", key: "k", payload: { n: 1 }, idempotencyKey: "8e03978e" };
  const first = await client.insert(task);
  assert.deepEqual([first.status, await client.insert(task)], ["CREATED", first]);
  assert.equal((await client.insert({ queue: "once", key: "k", payload: { n: 1 } })).status, "DUPLICATE");
  await assert.rejects(client.insert({ ...task, payload: { n: 2 } }), RejectedError);
  const [listed] = await client.insertBatch([task]);
  assert.deepEqual([listed?.status, listed?.id], ["CREATED", first.id]);
});

test("a task has a backoff of its own", async () => {
  const { client } = taskd;
  const backoff = { kind: "constant", initial: "1ms", maximum: "1s", jitter: 0, giveUpAfter: "1h" } as const;
  const { id = "" } = await client.insert({ queue: "backs-off", key: "k", maxAttempts: 3, backoff });
  await client.insert({ queue: "backs-off", key: "queue's" });
  let attempts = 0;
  const handler: Handler = (task) => {
    if (task.key !== "k") return;
    attempts += 1;
    throw new Error("not yet");
  };
  await withWorker("backs-off", handler, async () => {
    await until("the task is dead", async () => (await client.getTask(id)).status === "DEAD");
  });
  assert.equal(attempts, 3);
  assert.deepEqual((await client.getTask(id)).backoff, backoff);
  const limited = { giveUpAfter: "1ms" };
  const given = await client.insert({ queue: "gives-up", key: "k", backoff: limited });
  await withWorker("gives-up", handler, async () => {
    const file = await until("the task is given up", async () => {
      const file = await client.getTask(given.id ?? "");
      return file.status === "DEAD" && file.reason !== undefined ? file : undefined;
    });
    assert.match(file.reason ?? "", /give_up_after/);
  });
});
