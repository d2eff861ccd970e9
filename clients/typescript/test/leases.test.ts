/** Extensions of leases: none holds up another one, and what a handler asked for stays. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { BadRequestError, LeaseLostError, TimeoutError, Worker } from "@taskd/client";
import type { Extension, Handler, ItemAnswer, SourceHost, WorkerOptions } from "@taskd/client";
import { MockSource, type MockTask } from "@taskd/client/testing";
import { Gate, SILENT, bodyOf, rawServer, until } from "./support.js";

/** Answers extensions as a test says, and counts those that were granted. */
class Extending extends MockSource {
  readonly granted = new Map<string, number>();
  readonly lengths: number[] = [];
  refuse: (extension: Extension) => ItemAnswer | Error | undefined = () => undefined;

  override async extend(
    worker: string,
    extensions: readonly Extension[],
    signal: AbortSignal,
    limit = Infinity,
  ): Promise<ItemAnswer[]> {
    const refusals = extensions.map((extension) => this.refuse(extension));
    const error = refusals.find((refusal) => refusal instanceof Error);
    if (error instanceof TimeoutError) await silence(signal, limit);
    if (error !== undefined) throw error;
    const answers = await super.extend(worker, extensions, signal, limit);
    return answers.map((answer, nth) => {
      const refusal = refusals[nth] as ItemAnswer | undefined;
      if (refusal !== undefined) return refusal;
      this.lengths.push(extensions[nth]?.by ?? 0);
      this.granted.set(answer.id, (this.granted.get(answer.id) ?? 0) + 1);
      return answer;
    });
  }
}

/** Does not answer, as long as a call may take. */
async function silence(signal: AbortSignal, limit: number): Promise<void> {
  await new Promise<void>((resolve) => {
    const timer = limit === Infinity ? undefined : setTimeout(resolve, limit);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    });
  });
}

/** Runs a worker on tasks whose leases are short, while the test does something; then the handlers end. */
async function withTasks(
  source: Extending,
  handler: Handler,
  test: (worker: Worker) => Promise<void>,
  options: Partial<WorkerOptions> = {},
): Promise<void> {
  const worker = new Worker({ queue: "test", source, concurrency: 100, logger: SILENT, signals: false, ...options });
  const running = worker.handle(handler).run();
  try {
    await Promise.race([test(worker), running]);
  } finally {
    await worker.stop({ hard: true });
    await running;
  }
}

const forEver: Handler = async () => new Promise(() => undefined);
const tasks = (count: number): MockTask[] => Array.from({ length: count }, (_, n) => ({ key: String(n) }));

test("a lease whose extension is not answered does not hold up the others", async () => {
  const source = new Extending(tasks(20), { lease: 200 });
  const bad = "task-7";
  source.refuse = ({ id }) => (id === bad ? new TimeoutError("silent") : undefined);
  await withTasks(source, forEver, async () => {
    await until("each other lease was extended twice", () => {
      return source.granted.size === 19 && [...source.granted.values()].every((times) => times >= 2);
    });
  });
  assert.ok(!source.granted.has(bad));
});

test("a lease whose extension taskd does not read does not hold up the others", async () => {
  const source = new Extending(tasks(5), { lease: 200 });
  const problem = { type: "about:blank", title: "Bad Request", status: 400, detail: "by is wrong" };
  source.refuse = ({ id }) => (id === "task-2" ? new BadRequestError("POST", problem) : undefined);
  await withTasks(source, forEver, async (worker) => {
    await until("the other leases were extended twice", () => worker.stats.extended >= 8 && source.granted.size === 4);
    assert.equal(worker.stats.running, 5);
  });
});

test("an extension that is not answered ends in time for another one", async () => {
  let extensions = 0;
  const soon = new Date(Date.now() + 86_400_000).toISOString();
  const task = { id: "1", queue: "q", key: "k", lease_token: "t", lease_expires_at: soon, attempt: 1 };
  const fake = await rawServer((request, response, nth) => {
    response.setHeader("content-type", "application/json");
    if (request.url === "/v1/tasks:get") {
      if (nth === 0) response.end(JSON.stringify({ tasks: [task] }));
    } else if (request.url === "/v1/tasks:extend") {
      extensions += 1;
      // The first one has no answer.
      if (extensions > 1) response.end(JSON.stringify({ results: [{ id: "1", status: "OK" }] }));
    } else response.end(JSON.stringify({ results: [{ id: "1", status: "OK" }] }));
  });
  const worker = new Worker({
    url: fake.url,
    queue: "q",
    leaseDuration: "1s",
    timeout: "1h",
    logger: SILENT,
    signals: false,
  });
  const gate = new Gate();
  const running = worker.handle(async () => gate.opened).run();
  await until("the lease is extended", () => worker.stats.extended >= 2);
  gate.open();
  await worker.stop();
  await running;
  assert.equal(worker.stats.completed, 1);
  await fake.close();
});

test("what a handler asked for is not made shorter by the worker", async () => {
  const source = new Extending(tasks(1), { lease: 200 });
  const handler: Handler = async (task) => {
    await task.extend("6s");
    await task.extend();
    await forEver(task);
  };
  await withTasks(source, handler, async () => {
    // The worker itself extends when half of the six seconds is over.
    await until("the worker extends the lease, too", () => source.lengths.length >= 3);
  });
  const [asked, again = 0, own = 0] = source.lengths;
  assert.equal(asked, 6000);
  assert.ok(again > 1000 && own > 1000, source.lengths.join(" "));
});

test("a session that learns of a lease does so behind the call under way", async () => {
  const [asks, gate] = [new Gate(), new Gate()];
  let host: SourceHost | undefined;
  class Moving extends Extending {
    open(of: SourceHost): void {
      host = of;
    }

    override async extend(...call: Parameters<Extending["extend"]>): Promise<ItemAnswer[]> {
      asks.open();
      await gate.opened;
      return super.extend(...call);
    }
  }
  const source = new Moving(tasks(1), { lease: 30_000 });
  const handler: Handler = async (task) => {
    await task.extend();
    await forEver(task);
  };
  await withTasks(source, handler, async () => {
    await asks.opened;
    const begun = performance.now();
    host?.onMoved();
    gate.open();
    await until("the lease is extended once more", () => source.lengths.length >= 2);
    // By itself the worker extends the lease again after 10 s.
    assert.ok(performance.now() - begun < 5000);
  });
});

test("a refused wish of a handler does not end the extensions by the worker", async () => {
  const source = new Extending(tasks(1), { lease: 1000 });
  source.refuse = ({ id, by }) =>
    by > 3_600_000 ? { id, status: "INVALID", error: "by is 2h; must be 100ms to 1h" } : undefined;
  let refusal: unknown;
  const handler: Handler = async (task) => {
    await task.extend("2h").catch((error: unknown) => {
      refusal = error;
    });
    await forEver(task);
  };
  await withTasks(source, handler, async () => {
    await until("the worker extends the lease", () => source.lengths.length >= 2);
  });
  assert.match(String(refusal), /the lease is not extended: by is 2h; must be 100ms to 1h/);
  assert.deepEqual(source.lengths.slice(0, 2), [1000, 1000]);
});

test("a lease that is longer than taskd grants is extended by less", async () => {
  const source = new Extending(tasks(1), { lease: 200 });
  source.refuse = ({ id, by }) => (by > 3000 ? { id, status: "INVALID", error: "by is too long" } : undefined);
  const lines: string[] = [];
  const logger = { ...SILENT, error: (line: string) => lines.push(line) };
  const leaseDuration = "10s";
  await withTasks(
    source,
    forEver,
    async () => {
      await until("the worker extends the lease", () => source.lengths.length >= 1);
    },
    { leaseDuration, logger },
  );
  assert.deepEqual(source.lengths[0], 2500);
  assert.equal(lines.filter((line) => line.includes("by is too long")).length, 1);
});

test("an extension of a lost lease, and of a task that is over, is an error of its own", async () => {
  const source = new Extending(tasks(1));
  let [lost, over]: unknown[] = [];
  const handler: Handler = async (task) => {
    source.endLease(task.id, "CANCELLED");
    await task.extend().catch((error: unknown) => (lost = error));
    await task.extend().catch((error: unknown) => (over = error));
  };
  await withTasks(source, handler, async () => {
    await until("both were refused", () => over !== undefined);
  });
  assert.ok(lost instanceof LeaseLostError && lost.status === "CANCELLED");
  assert.ok(over instanceof LeaseLostError && over.status === "CANCELLED");
});

test("a cancel reaches all handlers of a worker, and tasks that wait", async () => {
  const source = new Extending(tasks(3), { lease: 200 });
  const reasons: unknown[] = [];
  const handler: Handler = async (task) => {
    await new Promise((resolve) => {
      task.signal.addEventListener("abort", resolve);
    });
    reasons.push(task.signal.reason);
  };
  await withTasks(
    source,
    handler,
    async (worker) => {
      await until("two work and one waits", () => worker.stats.running === 2 && worker.stats.waiting === 1);
      for (const id of ["task-1", "task-2", "task-3"]) source.endLease(id, "CANCELLED");
      await until("all are lost", () => worker.stats.lost === 3 && worker.stats.running + worker.stats.waiting === 0);
    },
    { concurrency: 2, prefetch: 1 },
  );
  assert.equal(reasons.filter((reason) => reason instanceof LeaseLostError && reason.status === "CANCELLED").length, 2);
});

test("extensions of one lease do not overtake each other", async () => {
  const source = new Extending(tasks(1), { lease: 200 });
  const gate = new Gate();
  let [now, most] = [0, 0];
  const extend = source.extend.bind(source);
  source.extend = async (...args) => {
    now += 1;
    most = Math.max(most, now);
    if (source.lengths.length === 0) await gate.opened;
    const answers = await extend(...args);
    now -= 1;
    return answers;
  };
  const handler: Handler = async (task) => {
    await until("the worker extends the lease", () => now === 1);
    const asked = task.extend("1h");
    gate.open();
    await asked;
    await forEver(task);
  };
  await withTasks(source, handler, async () => {
    await until("the handler's wish is the last", () => source.lengths.at(-1) === 3_600_000);
  });
  assert.equal(most, 1);
});

test("requests of extensions have the form of taskd", async () => {
  const bodies: unknown[] = [];
  const task = { id: "1", queue: "q", key: "k", lease_token: "t", lease_expires_at: new Date().toISOString() };
  const fake = await rawServer((request, response, nth) => {
    response.setHeader("content-type", "application/json");
    const item = { id: "1", status: "OK" };
    if (request.url === "/v1/tasks:get") {
      if (nth === 0) response.end(JSON.stringify({ tasks: [task] }));
    } else if (request.url === "/v1/tasks:extend") {
      void bodyOf(request).then((body) => {
        bodies.push(body);
        response.end(JSON.stringify({ results: [item] }));
      });
    } else response.end(JSON.stringify({ results: [item] }));
  });
  const worker = new Worker({ url: fake.url, queue: "q", name: "w", logger: SILENT, signals: false });
  const running = worker.handle(async (held) => held.extend("90s")).run();
  await until("the task is done", () => worker.stats.completed === 1);
  await worker.stop();
  await running;
  assert.deepEqual(bodies.at(-1), { worker: "w", extensions: [{ id: "1", lease_token: "t", by: "90000ms" }] });
  await fake.close();
});
