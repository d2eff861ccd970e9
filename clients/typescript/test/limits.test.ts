/** Workers of a taskd that takes less than they send, and of sources that answer at once or not at all. */

import assert from "node:assert/strict";
import process from "node:process";
import { after, before, test } from "node:test";

import { Worker, type Handler, type Source, type WorkerOptions } from "@taskd/client";
import { StreamSource } from "@taskd/client/stream";
import { SILENT, Taskd, allAre, until } from "./support.js";

let taskd: Taskd;
before(async () => {
  const queue = '[queues.default]\nbackoff = ["50ms"]\nmax_attempts = 1\n';
  taskd = await Taskd.start(`max_request_bytes = "1MiB"\nmax_items = 5\n${queue}`);
});
after(async () => {
  await taskd.stop();
});

/** Works on tasks of which one has a result that taskd does not take, until all are over. */
async function work(queue: string, options: Partial<WorkerOptions>): Promise<void> {
  const { client } = taskd;
  const small = Array.from({ length: 20 }, (_, n) => `small-${String(n)}`);
  for (const key of ["large", ...small]) await client.insert({ queue, key });
  const handler: Handler = async ({ key }) => {
    if (key === "large") return "x".repeat(2 << 20);
    // All reports come together, more of them than taskd takes in a frame or a call.
    await until("all others are at work", () => worker.stats.running >= small.length || worker.stats.completed > 0);
    return key;
  };
  const worker = new Worker({ url: taskd.url, queue, concurrency: 30, logger: SILENT, signals: false, ...options });
  const running = worker.handle(handler).run();
  try {
    await Promise.race([until("all is reported", () => worker.stats.completed === small.length), running]);
    const [dead] = await until("the large one is dead", async () => {
      const { tasks } = await client.listPage({ queue, status: "DEAD" });
      return tasks.length === 1 && tasks;
    });
    const { key, reason } = await client.getTask(dead?.id ?? "");
    assert.equal(key, "large");
    assert.match(String(reason), /taskd refuses the completion: .*max_request_bytes/);
    assert.deepEqual([worker.stats.rejected, worker.stats.lost, worker.stats.unreported], [1, 0, 0]);
  } finally {
    await worker.stop();
    await running;
  }
}

test("a frame that taskd does not take is reported by calls, and the stream goes on", async () => {
  await work("frames", { source: new StreamSource({ url: taskd.grpc }) });
});

test("a worker that polls asks for as many tasks as taskd gives, and reports as many as it takes", async () => {
  await work("polls", {});
});

/** A source without tasks. */
function emptySource(parts: Partial<Source>): Source {
  const none = async (): Promise<never[]> => Promise.resolve([]);
  return { get: none, complete: none, reject: none, extend: none, ...parts };
}

test("a source that does not wait is not asked again and again", async (t) => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  t.mock.method(performance, "now", () => 0);
  let asked = 0;
  const source = emptySource({
    get: async () => {
      asked += 1;
      return Promise.resolve([]);
    },
  });
  const worker = new Worker({ queue: "q", wait: 0, source, logger: SILENT, signals: false }).handle(() => 1);
  const running = worker.run();
  const turnOfLoop = async (): Promise<void> => new Promise((resolve) => void setImmediate(resolve));
  for (const [passed, times] of [
    [0, 1],
    [99, 1],
    [1, 2],
    [99, 2],
    [1, 3],
  ] as const) {
    t.mock.timers.tick(passed);
    for (let turn = 0; turn < 100; turn += 1) await turnOfLoop();
    assert.equal(asked, times);
  }
  t.mock.timers.reset();
  await worker.stop();
  await running;
});

test("a source that cannot be opened or closed leaves no handler of signals behind", async () => {
  const before = process.listenerCount("SIGTERM");
  const fail = (): never => {
    throw new Error("it does not work");
  };
  for (const source of [
    emptySource({ open: fail }),
    emptySource({ close: async () => Promise.reject(new Error("it does not work")) }),
  ]) {
    const worker = new Worker({ queue: "q", wait: 0, source, logger: SILENT }).handle(() => 1);
    const running = worker.run();
    await Promise.all([worker.stop(), assert.rejects(running, /it does not work/)]);
  }
  assert.equal(process.listenerCount("SIGTERM"), before);
});

test("more calls than ten at a time are no warning", async () => {
  const warnings: Error[] = [];
  const onWarning = (warning: Error): void => void warnings.push(warning);
  process.on("warning", onWarning);
  const keys = Array.from({ length: 20 }, (_, n) => String(n));
  await taskd.client.insertBatch(keys.map((key) => ({ queue: "calls", key })));
  const options = { url: taskd.url, queue: "calls", concurrency: keys.length, logger: SILENT, signals: false } as const;
  const worker = new Worker(options).handle(async (task) => {
    await until("all are at work", () => worker.stats.running === keys.length || worker.stats.extended > 0);
    await task.extend("1m");
  });
  const running = worker.run();
  await allAre(taskd.client, "calls", "COMPLETED", keys.length);
  await worker.stop();
  await running;
  process.off("warning", onWarning);
  assert.deepEqual(warnings, []);
});
