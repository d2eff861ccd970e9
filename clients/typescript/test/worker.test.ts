/** Workers against a real taskd. */

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import {
  BadRequestError,
  LeaseLostError,
  PutOff,
  Reject,
  Retry,
  Throttle,
  Worker,
  type Handler,
  type WorkerOptions,
} from "@taskd/client";
import { StreamSource } from "@taskd/client/stream";
import { Gate, SILENT, Taskd, allAre, fakeTaskd, freePorts, until } from "./support.js";

let taskd: Taskd;
before(async () => {
  const queue = 'lease = "10s"\nbackoff = ["50ms"]\nmax_attempts = 3\n';
  const limited = 'limit_by = "given"\nlimit_at_a_time = 1\nmax_attempts = 1\n';
  taskd = await Taskd.start(`[queues.default]\n${queue}[queues.polls]\n${limited}[queues.stream]\n${limited}`);
});
after(async () => {
  await taskd.stop();
});

/** Runs a worker while the test does something. */
async function withWorker<P>(
  options: Partial<WorkerOptions> & Pick<WorkerOptions, "queue">,
  handler: Handler<P>,
  test: (worker: Worker) => Promise<void>,
): Promise<void> {
  const worker = new Worker({ url: taskd.url, logger: SILENT, signals: false, ...options }).handle(handler);
  const running = worker.run();
  try {
    await Promise.race([test(worker), running]);
  } finally {
    await worker.stop();
    await running;
  }
}

test("tasks are done, with their results and what they discover", async () => {
  const { client } = taskd;
  const traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
  const { id = "" } = await client.insert({
    queue: "tree",
    key: "root",
    payload: { depth: 5 },
    headers: { site: "a" },
    traceparent,
  });
  const seen = new Map<string, number>();
  let root: unknown[] = [];
  const handler: Handler<{ depth: number }> = (task) => {
    seen.set(task.key, (seen.get(task.key) ?? 0) + 1);
    if (task.key === "root")
      root = [task.queue, task.headers, task.attempt, task.replicas, task.traceparent.slice(0, 35)];
    for (const child of ["0", "1", "1"]) {
      if (task.payload.depth > 0) task.discover({ key: task.key + child, payload: { depth: task.payload.depth - 1 } });
    }
    return { depth: task.payload.depth };
  };
  await withWorker({ queue: "tree", concurrency: 4, prefetch: 4 }, handler, async (worker) => {
    await allAre(client, "tree", "COMPLETED", 63);
    await until("all is reported", () => worker.stats.completed === 63);
    assert.deepEqual([worker.stats.rejected, worker.stats.lost], [0, 0]);
    const [result] = await client.results(id);
    assert.deepEqual([result?.result, result?.worker], [{ depth: 5 }, worker.name]);
  });
  assert.ok([...seen.values()].every((times) => times === 1));
  assert.deepEqual(root, ["tree", { site: "a" }, 1, 1, traceparent.slice(0, 35)]);
});

test("rejects, retries, throws, and results that cannot be", async () => {
  const { client } = taskd;
  const keys = ["throws", "never", "retry", "circle", "huge", "too huge", "bytes"];
  const answers = await client.insertBatch(keys.map((key) => ({ queue: "fail", key })));
  const ids = Object.fromEntries(keys.map((key, n) => [key, answers[n]?.id ?? ""]));
  const attempts: Record<string, number> = {};
  const handler: Handler = (task) => {
    attempts[task.key] = task.attempt;
    switch (task.key) {
      case "throws":
        throw new RangeError("this is too much");
      case "never":
        throw new Reject("it is nothing");
      case "retry":
        if (task.attempt === 1) throw new Retry("not yet", { after: "10ms" });
        return "at last";
      case "circle": {
        const circle: { self?: unknown } = {};
        circle.self = circle;
        return circle;
      }
      case "huge":
        return "x".repeat(3 << 20);
      case "too huge":
        return "x".repeat(6 << 20);
      default:
        return new Uint8Array([1, 2, 255]);
    }
  };
  await withWorker({ queue: "fail", maxRequestBytes: 5 << 20 }, handler, async () => {
    const ends = async (key: string, status: string): Promise<string> => {
      const id = ids[key] ?? "";
      const file = await until(`${key} is ${status}`, async () => {
        const file = await client.getTask(id);
        // SQL has the end when it has the result, or the reason.
        const isStored = status === "DEAD" ? file.reason !== undefined : file.results > 0;
        return file.status === status && isStored ? file : undefined;
      });
      return file.reason ?? "";
    };
    assert.match(await ends("throws", "DEAD"), /RangeError: this is too much/);
    assert.match(await ends("never", "DEAD"), /it is nothing/);
    await ends("retry", "COMPLETED");
    assert.match(await ends("circle", "DEAD"), /result cannot be written as JSON/);
    assert.match(await ends("huge", "DEAD"), /taskd refuses the completion: result has 3145728 bytes/);
    assert.match(await ends("too huge", "DEAD"), /RangeError: the result has more than 5242880 bytes/);
    await ends("bytes", "COMPLETED");
  });
  assert.deepEqual((await client.results(ids["bytes"] ?? ""))[0]?.result, new Uint8Array([1, 2, 255]));
  assert.equal((await client.results(ids["retry"] ?? ""))[0]?.result, "at last");
  assert.deepEqual(attempts, { throws: 3, never: 1, retry: 2, circle: 3, huge: 3, "too huge": 3, bytes: 1 });
});

test("two workers do each task of NUM = 2 once each", async () => {
  const { client } = taskd;
  const tasks = Array.from({ length: 30 }, (_, n) => ({ queue: "twice", key: String(n), replicas: 2 }));
  const answers = await client.insertBatch(tasks);
  const done: string[] = [];
  const handler: Handler = (task) => {
    done.push(`${task.worker} ${task.key}`);
  };
  await withWorker({ queue: "twice", name: "a" }, handler, async () => {
    await withWorker({ queue: "twice", name: "b" }, handler, async () => {
      await allAre(client, "twice", "COMPLETED", 30);
    });
  });
  assert.deepEqual([done.length, new Set(done).size], [60, 60]);
  for (const { id = "" } of answers) {
    assert.deepEqual((await client.results(id)).map(({ worker }) => worker).sort(), ["a", "b"]);
  }
});

test("a slow handler keeps its lease", async () => {
  const { client } = taskd;
  const { id = "" } = await client.insert({ queue: "slow", key: "k", leaseDuration: "4s" });
  const gate = new Gate();
  const begun = Date.now();
  const handler: Handler = async (task) => {
    await task.extend();
    await gate.opened;
    return task.signal.aborted;
  };
  await withWorker({ queue: "slow" }, handler, async (worker) => {
    // Beyond the lease, by the clock of taskd. The first extension is that of the handler.
    await until("the lease was extended beyond itself", async () => {
      const [attempt] = (await client.getTask(id)).history;
      return worker.stats.extended > 1 && (attempt?.leaseExpiresAt?.getTime() ?? 0) > begun + 5500;
    });
    gate.open();
    await allAre(client, "slow", "COMPLETED", 1);
  });
  const [result, ...others] = await client.results(id);
  assert.deepEqual([result?.attempt, result?.result, others.length], [1, false, 0]);
});

test("a cancel reaches the handler", async () => {
  const { client } = taskd;
  const { id = "" } = await client.insert({ queue: "cancel", key: "k", leaseDuration: "4s" });
  const begun = new Gate();
  let heard: unknown;
  const handler: Handler = async (task) => {
    begun.open();
    await new Promise((resolve) => {
      task.signal.addEventListener("abort", resolve);
    });
    heard = task.signal.reason;
  };
  await withWorker({ queue: "cancel" }, handler, async (worker) => {
    await begun.opened;
    assert.equal((await client.cancel([id]))[0]?.status, "OK");
    await until("the handler has heard of it", () => heard !== undefined);
    await until("nothing is left", () => worker.stats.running === 0);
    assert.deepEqual([worker.stats.lost, worker.stats.completed], [1, 0]);
  });
  assert.ok(heard instanceof LeaseLostError && heard.status === "CANCELLED");
});

test("tasks that did not begin go back at a stop, and another worker does them", async () => {
  const { client } = taskd;
  await client.insertBatch(["a", "b", "c"].map((key) => ({ queue: "back", key })));
  const [begun, gate] = [new Gate(), new Gate()];
  const first = new Worker({
    url: taskd.url,
    queue: "back",
    concurrency: 1,
    prefetch: 2,
    logger: SILENT,
    signals: false,
  }).handle(async () => {
    begun.open();
    await gate.opened;
    return "first";
  });
  const running = first.run();
  await begun.opened;
  await until("two wait", () => first.stats.waiting === 2);
  const stopped = first.stop();
  await withWorker(
    { queue: "back", name: "second" },
    () => "second",
    async (second) => {
      await until("the other worker did two", () => second.stats.completed === 2);
      gate.open();
      await Promise.all([running, stopped]);
      await allAre(client, "back", "COMPLETED", 3);
    },
  );
});

test("a worker goes on at another address, and past garbage", async () => {
  const { client } = taskd;
  const [dead] = await freePorts(1);
  const garbage = await fakeTaskd(() => ({ body: "<html>not taskd</html>" }));
  const other = await fakeTaskd(() => ({ body: '{"error":"not taskd"}' }));
  await client.insertBatch(Array.from({ length: 20 }, (_, n) => ({ queue: "move", key: String(n) })));
  const url = [`http://127.0.0.1:${String(dead)}`, garbage.url, other.url, taskd.url];
  await withWorker(
    { queue: "move", url },
    () => "done",
    async () => {
      await allAre(client, "move", "COMPLETED", 20);
    },
  );
  await garbage.close();
  await other.close();
});

test("a second worker of the machine and queue needs a name", async () => {
  const options = { url: taskd.url, logger: SILENT, signals: false as const };
  const [first, second, third] = [1, 2, 3].map(() => new Worker({ ...options, queue: ["names", "more"] }));
  assert(first !== undefined && second !== undefined && third !== undefined);
  const running = first.handle(() => "first").run();
  await allAre(taskd.client, "names", "COMPLETED", (await taskd.client.insert({ queue: "names", key: "a" }), 1));
  await assert.rejects(second.handle(() => 1).run(), /a worker .* runs on this machine already.*name: "/);
  const named = new Worker({ ...options, queue: "names", name: "names-2" }).handle(() => 1);
  const other = named.run();
  await Promise.all([first.stop(), named.stop()]);
  await Promise.all([running, other]);
  // The name is free again.
  const again = third.handle(() => "third").run();
  await taskd.client.insert({ queue: "names", key: "b" });
  await allAre(taskd.client, "names", "COMPLETED", 2);
  await third.stop();
  await again;
});

test("a wrong queue name, no handler, and a second run are errors at once", async () => {
  const options = { url: taskd.url, logger: SILENT, signals: false as const };
  const wrong = new Worker({ ...options, queue: "no name!" }).handle(() => 1);
  await assert.rejects(wrong.run(), (error) => error instanceof BadRequestError && /no name!/.test(error.message));
  // taskd reads the weights.
  const weighed = new Worker({ ...options, queue: "q", weights: { other: 3 } }).handle(() => 1);
  await assert.rejects(weighed.run(), /weights names "other"/);
  await assert.rejects(new Worker({ ...options, queue: "q" }).run(), /no handler/);
  const worker = new Worker({ ...options, queue: "q" }).handle(() => 1);
  const abort = new AbortController();
  const running = worker.run({ signal: abort.signal });
  await assert.rejects(worker.run(), /runs once/);
  abort.abort();
  await running;
});

test("a handler discovers as many tasks as a sitemap has, and a wrong one costs only itself", async () => {
  const { client } = taskd;
  await client.insert({ queue: "sitemap", key: "root", maxAttempts: 1 });
  const lines: string[] = [];
  const logger = { ...SILENT, warn: (line: string) => lines.push(line) };
  const count = 50_000;
  const handler: Handler = (task) => {
    for (let n = 0; n < count; n += 1) task.discover({ queue: "links", key: `http://example.org/${String(n)}` });
    task.discover({ queue: "links", key: "x".repeat(5000) }, { queue: "links", key: "NaN", payload: NaN });
    task.discover({ queue: "links", key: "http://example.org/0" });
  };
  await withWorker({ queue: "sitemap", logger }, handler, async () => {
    await allAre(client, "sitemap", "COMPLETED", 1);
    await until("all links are tasks", async () => {
      const { pending = 0, waiting = 0 } = (await client.queues()).find(({ queue }) => queue === "links") ?? {};
      return pending + waiting === count;
    });
  });
  assert.match(lines.join("\n"), /2 discovered tasks are not stored; the first: payload cannot be written as JSON/);
});

test("a task is put off at no cost", async () => {
  const { client } = taskd;
  const { id = "" } = await client.insert({ queue: "off", key: "k", maxAttempts: 1 });
  let times = 0;
  const handler: Handler = () => {
    times += 1;
    if (times < 4) throw new PutOff("the site is busy", { after: "200ms" });
  };
  await withWorker({ queue: "off" }, handler, async (worker) => {
    await allAre(client, "off", "COMPLETED", 1);
    await until("all is reported", () => worker.stats.completed === 1);
    assert.deepEqual([worker.stats.returned, worker.stats.rejected], [3, 0]);
  });
  assert.equal((await client.getTask(id)).attempts, 0);
});

test("a worker whose handlers all throttle it says nothing of listeners", async (t) => {
  const { client } = taskd;
  const warnings: string[] = [];
  const onWarning = ({ name }: Error): void => {
    warnings.push(name);
  };
  process.on("warning", onWarning);
  t.after(() => process.off("warning", onWarning));
  const count = 20;
  await client.insertBatch(Array.from({ length: count }, (_, n) => ({ queue: "throttled-often", key: String(n) })));
  const all = new Gate();
  let running = 0;
  const handler: Handler = async () => {
    running += 1;
    if (running === count) all.open();
    await all.opened;
    throw new Throttle("the service is away", { after: "1h" });
  };
  await withWorker({ queue: "throttled-often", concurrency: count }, handler, async (worker) => {
    await until("all are given back", () => worker.stats.returned === count);
  });
  assert.deepEqual(warnings, []);
});

for (const queue of ["throttled-polls", "throttled-stream"]) {
  test(`a throttled worker takes nothing meanwhile: ${queue}`, async () => {
    const { client } = taskd;
    for (const key of ["a", "b", "c"]) await client.insert({ queue, key, maxAttempts: 1 });
    const began: number[] = [];
    const handler: Handler = () => {
      began.push(performance.now());
      if (began.length === 1) throw new Throttle("the service is away", { after: "1500ms" });
    };
    const source = queue.endsWith("stream") ? { source: new StreamSource({ url: taskd.grpc }) } : {};
    await withWorker({ queue, concurrency: 1, prefetch: 1, ...source }, handler, async () => {
      await allAre(client, queue, "COMPLETED", 3);
    });
    const [first = 0, second = 0] = began;
    assert.equal(began.length, 4);
    assert.ok(second - first >= 1500, String(second - first));
  });
}

for (const queue of ["polls", "stream"]) {
  test(`handlers hold and slow their limit key, with ${queue}`, async () => {
    const { client } = taskd;
    const plain = `plain-${queue}`;
    const visits: { name: string; began: number; ended: number }[] = [];
    const lines: string[] = [];
    const handler: Handler = (task) => {
      const began = performance.now();
      const before = visits.length;
      try {
        if (task.queue === plain) task.hold("1h");
        else if (task.key === "root") {
          task.discover({ key: "a", limitKey: "site" }, { key: "b", limitKey: "site" });
          task.hold("1s");
        } else if (task.key === "a" && before === 1) {
          task.hold(1500);
          throw new PutOff("the site answers 429");
        } else if (task.key === "a") task.pace("1s");
        return "done";
      } finally {
        const name = `${task.limitKey} ${task.key}`;
        if (task.queue === queue) visits.push({ name, began, ended: performance.now() });
      }
    };
    const logger = { ...SILENT, warn: (line: string) => lines.push(line) };
    const source = queue === "stream" ? { source: new StreamSource({ url: taskd.grpc }) } : {};
    const starts = new Map<string, number>();
    await withWorker({ queue: [queue, plain], logger, ...source }, handler, async (worker) => {
      await client.insert({ queue: plain, key: "plain" });
      await client.insert({ queue, key: "root", limitKey: "site" });
      for (const { id, key } of await allAre(client, queue, "COMPLETED", 3)) {
        const history = await until(`the attempts of ${key} are stored`, async () => {
          const file = await client.getTask(id);
          return file.history.length > 0 && file.history;
        });
        starts.set(key, history.at(-1)?.from?.getTime() ?? NaN);
      }
      await until("all is reported", () => worker.stats.completed === 4);
      assert.deepEqual([worker.stats.returned, worker.stats.rejected], [1, 0]);
    });
    const [root, first, second] = visits;
    assert.deepEqual(
      visits.map(({ name }) => name),
      ["site root", "site a", "site a", "site b"],
    );
    assert.ok((first?.began ?? NaN) - (root?.ended ?? NaN) >= 1000, JSON.stringify(visits));
    assert.ok((second?.began ?? NaN) - (first?.ended ?? NaN) >= 1500, JSON.stringify(visits));
    assert.ok((starts.get("b") ?? NaN) - (starts.get("a") ?? NaN) >= 1000, JSON.stringify([...starts]));
    assert.match(lines.join("\n"), /plain\): it has no limit key, so hold and pace do nothing/);
  });
}

test("a task has a deadline", async () => {
  const { client } = taskd;
  await client.insert({ queue: "deadlines", key: "root", finishWithin: "1h" });
  const soon = (): Date => new Date(Date.now() + 500);
  const handler: Handler = (task) => {
    task.discover({ queue: "late", key: "found within", finishWithin: "500ms" });
    task.discover({ queue: "late", key: "found by", deadline: soon() });
  };
  await withWorker({ queue: "deadlines" }, handler, async () => {
    await allAre(client, "deadlines", "COMPLETED", 1);
  });
  await client.insert({ queue: "late", key: "within", finishWithin: 500 });
  await client.insert({ queue: "late", key: "by", deadline: soon().toISOString() });
  const dead = await allAre(client, "late", "DEAD", 4);
  assert.match((await client.getTask(dead[0]?.id ?? "")).reason ?? "", /^the deadline of /);
  const both = client.insert({ queue: "late", key: "both", deadline: soon(), finishWithin: "1s" });
  await assert.rejects(both, /deadline and finish_within are both given/);
});

test("a report that taskd does not read does not hold up the others", async () => {
  const { client } = taskd;
  const keys = Array.from({ length: 40 }, (_, n) => String(n));
  await client.insertBatch(keys.map((key) => ({ queue: "mixed", key, maxAttempts: 1 })));
  const handler: Handler = (task) => {
    // The key is too long: this costs only the discovered task.
    if (Number(task.key) % 10 === 0) task.discover({ key: "x".repeat(5000) });
    // Half a character is no text.
    return Number(task.key) % 10 === 1 ? "\uD800" : "fine";
  };
  await withWorker({ queue: "mixed", concurrency: 40 }, handler, async () => {
    await until("all tasks have ended", async () => {
      const { tasks } = await client.listPage({ queue: "mixed" });
      const count = (status: string): number => tasks.filter((task) => task.status === status).length;
      return count("COMPLETED") === 36 && count("DEAD") === 4;
    });
  });
});
