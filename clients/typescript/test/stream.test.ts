/** Workers that get their tasks by streams, against a real taskd. */

import assert from "node:assert/strict";
import { getEventListeners } from "node:events";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";

import * as grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

import { BadRequestError, Client, LeaseLostError, Retry, Throttle, UnauthenticatedError, Worker } from "@taskd/client";
import type { Handler, NewTask, WorkerOptions } from "@taskd/client";
import { StreamSource, type StreamSourceOptions } from "@taskd/client/stream";
import { Cable, Gate, SILENT, Taskd, allAre, freePorts, until } from "./support.js";

let taskd: Taskd;
before(async () => {
  taskd = await Taskd.start('[queues.default]\nlease = "6s"\nbackoff = ["50ms"]\nmax_attempts = 5\n');
});
after(async () => {
  await taskd.stop();
});

type Options = Partial<WorkerOptions> & { queue: string; stream?: StreamSourceOptions };

function workerOf({ stream, ...options }: Options, handler: Handler): Worker {
  const source = new StreamSource({ url: taskd.grpc, timeout: "30s", ...stream });
  const name = `stream-${String(process.pid)}`;
  return new Worker({ url: taskd.url, name, logger: SILENT, signals: false, source, ...options }).handle(handler);
}

async function withWorker(options: Options, handler: Handler, test: (worker: Worker) => Promise<void>): Promise<void> {
  const worker = workerOf(options, handler);
  const running = worker.run();
  try {
    await Promise.race([test(worker), running]);
  } finally {
    await worker.stop();
    await running;
  }
}

/** Counts the calls of HTTP. */
function counting(): { fetch: typeof fetch; calls: string[] } {
  const calls: string[] = [];
  return {
    calls,
    fetch: async (input, init) => {
      calls.push((input as string).replace(/^.*\/v1\/tasks:/, ""));
      return fetch(input, init);
    },
  };
}

test("tasks come by a stream, and their reports go back on it", async () => {
  const { client } = taskd;
  const { fetch, calls } = counting();
  await client.insert({ queue: "tree", key: "root", payload: { depth: 5 } });
  const handler: Handler = (held) => {
    const { depth } = held.payload as { depth: number };
    if (held.attempt === 1 && held.key === "root0") throw new Retry("once more", { after: "10ms" });
    for (const child of ["0", "1", "1"]) {
      if (depth > 0) held.discover({ key: held.key + child, payload: { depth: depth - 1 } });
    }
    return { depth };
  };
  await withWorker({ queue: "tree", concurrency: 4, prefetch: 4, fetch }, handler, async (worker) => {
    const tasks = await allAre(client, "tree", "COMPLETED", 63);
    await until("all is reported", () => worker.stats.completed === 63);
    assert.deepEqual([worker.stats.rejected, worker.stats.lost, worker.stats.taken], [1, 0, 64]);
    const root = tasks.find(({ key }) => key === "root")?.id ?? "";
    assert.deepEqual((await client.results(root))[0]?.result, { depth: 5 });
  });
  assert.deepEqual(calls, []);
});

test("payloads, results and discovered tasks stay what they are", async () => {
  const { client } = taskd;
  const values = [{ n: [1.5, null] }, "text", 0, false, new Uint8Array([0, 255]), null];
  await client.insertBatch(values.map((payload, n) => ({ queue: "values", key: String(n), payload })));
  const found: NewTask = {
    queue: "found",
    key: "ключ",
    payload: new Uint8Array([1, 2, 255]),
    replicas: 2,
    priority: "high",
    delay: "1h 500ms",
    leaseDuration: "1500ms",
    maxAttempts: 7,
    headers: { a: "b" },
    backoff: { kind: "linear", initial: "1s", maximum: "1m", jitter: 0.5, giveUpAfter: "1h" },
  };
  const seen: unknown[] = [];
  const handler: Handler = (task) => {
    if (task.key === "0") task.discover(found);
    // taskd stores no such task; the completion goes over HTTP.
    if (task.key === "1" && task.attempt === 1) task.discover({ key: "new", fields: { a_new_field: 1 } });
    seen.push([task.key, task.payload]);
    return task.payload;
  };
  await withWorker({ queue: "values", concurrency: 1 }, handler, async () => {
    const tasks = await allAre(client, "values", "COMPLETED", values.length);
    for (const { id, key } of tasks) {
      assert.deepEqual((await client.results(id))[0]?.result, values[Number(key)], key);
      assert.deepEqual((await client.getTask(id)).payload, values[Number(key)], key);
    }
  });
  for (const [n, value] of values.entries()) assert.ok(seen.some((one) => isEqual(one, [String(n), value])));
  const [task] = await until("the task was found", async () => {
    const { tasks } = await client.listPage({ queue: "found" });
    return tasks.length === 1 && tasks;
  });
  const file = await client.getTask(task?.id ?? "");
  assert.deepEqual(
    [file.key, file.payload, file.replicas, file.priority, file.headers, file.backoff],
    [
      "ключ",
      found.payload,
      2,
      "high",
      { a: "b" },
      { kind: "linear", initial: "1s", maximum: "1m", jitter: 0.5, giveUpAfter: "1h" },
    ],
  );
  assert.ok((file.notBefore?.getTime() ?? 0) > Date.now() + 3_000_000);
});

function isEqual(one: unknown, other: unknown): boolean {
  try {
    assert.deepEqual(one, other);
    return true;
  } catch {
    return false;
  }
}

test("taskd never sends more than the worker has room for, which keeps the leases on the stream", async () => {
  const { client } = taskd;
  const { fetch, calls } = counting();
  await client.insertBatch(Array.from({ length: 20 }, (_, n) => ({ queue: "room", key: String(n) })));
  const gate = new Gate();
  const begun = Date.now();
  const handler: Handler = async () => gate.opened;
  // Some heartbeats come while the worker is full.
  const options = { queue: "room", concurrency: 2, prefetch: 3, fetch, leaseDuration: "8s", stream: { timeout: "6s" } };
  await withWorker(options, handler, async (worker) => {
    await until("the worker is full", () => worker.stats.running === 2 && worker.stats.waiting === 3);
    // Beyond the lease, by the clock of taskd.
    const [id] = (await client.listPage({ queue: "room", status: "ASSIGNED" })).tasks.map((task) => task.id);
    await until("the leases are extended", async () => {
      const [attempt] = (await client.getTask(id ?? "")).history;
      return (attempt?.leaseExpiresAt?.getTime() ?? 0) > begun + 9000;
    });
    const queue = (await client.queues()).find(({ queue }) => queue === "room");
    assert.deepEqual([queue?.leases, worker.stats.taken], [5, 5]);
    gate.open();
    await allAre(client, "room", "COMPLETED", 20);
  });
  assert.deepEqual(calls, []);
});

test("a cancel reaches the handler at once, and a wish for a longer lease stays", async () => {
  const { client } = taskd;
  const { id = "" } = await client.insert({ queue: "cancel", key: "k" });
  const begun = new Gate();
  let heard: unknown;
  const handler: Handler = async (task) => {
    await task.extend("1h");
    begun.open();
    await new Promise((resolve) => {
      task.signal.addEventListener("abort", resolve);
    });
    heard = task.signal.reason;
  };
  await withWorker({ queue: "cancel" }, handler, async (worker) => {
    await begun.opened;
    const [attempt] = (await client.getTask(id)).history;
    assert.ok((attempt?.leaseExpiresAt?.getTime() ?? 0) > Date.now() + 3_000_000);
    assert.equal((await client.cancel([id]))[0]?.status, "OK");
    await until("the handler has heard of it", () => heard !== undefined);
    await until("nothing is left", () => worker.stats.running === 0);
    assert.deepEqual([worker.stats.lost, worker.stats.completed], [1, 0]);
  });
  assert.ok(heard instanceof LeaseLostError && heard.status === "CANCELLED");
});

test("a stop finishes what has begun, and the rest goes back at no cost", async () => {
  const { client } = taskd;
  await client.insertBatch(["a", "b", "c"].map((key) => ({ queue: "back", key })));
  const gate = new Gate();
  const first = workerOf({ queue: "back", concurrency: 1, prefetch: 2 }, async () => {
    await gate.opened;
    return "first";
  });
  const running = first.run();
  await until("one works and two wait", () => first.stats.running === 1 && first.stats.waiting === 2);
  const stopped = first.stop();
  gate.open();
  await Promise.all([running, stopped]);
  assert.equal(first.stats.completed, 1);
  const attempts: number[] = [];
  const handler: Handler = (task) => {
    attempts.push(task.attempt);
  };
  await withWorker({ queue: "back" }, handler, async () => {
    await allAre(client, "back", "COMPLETED", 3);
  });
  assert.deepEqual(attempts, [1, 1]);
});

test("a stream that breaks in a stop costs no attempt of what has not begun", async (t) => {
  const { client } = taskd;
  const cable = await Cable.to(taskd.grpc);
  t.after(async () => cable.close());
  await client.insertBatch(["a", "b", "c"].map((key) => ({ queue: "drained", key, maxAttempts: 1 })));
  const gate = new Gate();
  const logger = {
    ...SILENT,
    warn: (line: string) => {
      if (line.startsWith("there is no stream")) gate.open();
    },
  };
  const options = { queue: "drained", concurrency: 1, prefetch: 2, logger, stream: { url: cable.url } };
  const first = workerOf(options, async () => gate.opened);
  const running = first.run();
  await until("one works and two wait", () => first.stats.running === 1 && first.stats.waiting === 2);
  const stopped = first.stop();
  await until("it has stopped", () => first.stats.waiting === 0);
  cable.cut();
  await Promise.all([running, stopped]);
  const { completed, returned, lost, unreported } = first.stats;
  assert.deepEqual([completed, returned, lost, unreported], [1, 2, 0, 0]);
  const attempts: number[] = [];
  const handler: Handler = (task) => {
    attempts.push(task.attempt);
  };
  await withWorker({ queue: "drained" }, handler, async () => {
    await allAre(client, "drained", "COMPLETED", 3);
  });
  assert.deepEqual(attempts, [1, 1]);
});

test("a stream that breaks goes on with the tasks in hand", async (t) => {
  const { client } = taskd;
  const cable = await Cable.to(taskd.grpc);
  t.after(async () => cable.close());
  const answers = await client.insertBatch(["a", "b", "c", "d"].map((key) => ({ queue: "broken", key })));
  const gate = new Gate();
  const handler: Handler = async (task) => {
    await gate.opened;
    return task.attempt;
  };
  const options = { queue: "broken", concurrency: 2, prefetch: 1, stream: { url: cable.url } };
  await withWorker(options, handler, async (worker) => {
    await until("two work and one waits", () => worker.stats.running === 2 && worker.stats.waiting === 1);
    cable.cut();
    cable.mend();
    await until("there is another connection", () => cable.count >= 2);
    gate.open();
    await allAre(client, "broken", "COMPLETED", 4);
    assert.equal(worker.stats.lost, 0);
  });
  for (const { id = "" } of answers) assert.deepEqual((await client.results(id))[0]?.result, 1);
});

test("a stream that is silent is dead, and the worker opens another one", async (t) => {
  const { client } = taskd;
  const cable = await Cable.to(taskd.grpc);
  t.after(async () => cable.close());
  const begun = new Gate();
  const keys: string[] = [];
  const handler: Handler = (task) => {
    keys.push(task.key);
    begun.open();
  };
  await client.insert({ queue: "silent", key: "before" });
  await withWorker({ queue: "silent", stream: { url: cable.url, timeout: "2s" } }, handler, async (worker) => {
    await begun.opened;
    await until("it is reported", () => worker.stats.completed === 1);
    cable.freeze();
    await until("there is another connection", () => cable.count >= 2);
    await client.insert({ queue: "silent", key: "after" });
    await allAre(client, "silent", "COMPLETED", 2);
  });
  assert.deepEqual(keys, ["before", "after"]);
});

test("a lease that would end before a hung stream counts as dead is extended over HTTP", async (t) => {
  const { client } = taskd;
  const cable = await Cable.to(taskd.grpc);
  t.after(async () => cable.close());
  const gate = new Gate();
  const handler: Handler = async (task) => {
    await gate.opened;
    return task.attempt;
  };
  const { id = "" } = await client.insert({ queue: "hangs", key: "k" });
  // The worker gives the stream up after eighteen seconds.
  const options = { queue: "hangs", leaseDuration: "12s", stream: { url: cable.url, timeout: "30s" } };
  await withWorker(options, handler, async (worker) => {
    await until("it has begun", () => worker.stats.running === 1);
    cable.freeze();
    await until("there is another connection", () => cable.count >= 2);
    gate.open();
    await allAre(client, "hangs", "COMPLETED", 1);
    assert.equal(worker.stats.lost, 0);
  });
  assert.deepEqual(
    (await client.results(id)).map(({ result }) => result),
    [1],
  );
});

/** The parts of a worker's frame that the made server reads. */
interface Frame {
  open: { want: number } | null;
  number: number;
  want: number;
  rejections: { id: string; reason: string; not_started: boolean }[];
}

/** A made server with this handler of streams. */
async function made(
  serve: (stream: grpc.ServerDuplexStream<Frame, unknown>) => void,
): Promise<grpc.Server & { url: string }> {
  const proto = fileURLToPath(new URL("../../proto/taskd.proto", import.meta.url));
  const loaded = loadSync(proto, { keepCase: true, longs: Number, enums: String, defaults: true });
  const server = new grpc.Server();
  server.addService(loaded["taskd.v1.Tasks"] as unknown as grpc.ServiceDefinition, { StreamTasks: serve });
  const port = await new Promise<number>((resolve, reject) => {
    server.bindAsync("127.0.0.1:0", grpc.ServerCredentials.createInsecure(), (error, bound) => {
      if (error === null) resolve(bound);
      else reject(error);
    });
  });
  return Object.assign(server, { url: `http://127.0.0.1:${String(port)}` });
}

test("a throttled worker gives back all tasks that come late", async (t) => {
  const late = ["second", "third"];
  const rejected: Frame["rejections"] = [];
  const server = await made((stream) => {
    const send = (id: string): void => {
      stream.write({ tasks: [{ id, queue: "late", key: Buffer.from(id), lease_token: id, attempt: 1, replicas: 1 }] });
    };
    stream.on("data", ({ open, number, want, rejections }: Frame) => {
      if (open !== null) {
        const minute = { seconds: 60, nanos: 0 };
        stream.write({ opened: { session: "s", granted: open.want, heartbeat: minute, timeout: minute } });
        send("first");
        return;
      }
      for (const rejection of rejections) {
        rejected.push(rejection);
        // taskd sent it before it heard that the worker takes none.
        const next = late.shift();
        if (next !== undefined) send(next);
      }
      const results = rejections.map(({ id }) => ({ id, status: "ITEM_STATUS_OK" }));
      if (number > 0) stream.write({ answer: { number, granted: want, rejections: results } });
    });
    stream.on("end", () => {
      stream.end();
    });
  });
  t.after(() => {
    server.forceShutdown();
  });
  const handler: Handler = () => {
    throw new Throttle("the service is away", { after: "1h" });
  };
  await withWorker({ queue: "late", concurrency: 1, prefetch: 2, stream: { url: server.url } }, handler, async () => {
    await until("all are given back", () => rejected.length === 3);
  });
  const why = "the worker takes no tasks for a while";
  assert.deepEqual(
    rejected.map(({ id, reason, not_started: isNotStarted }) => [id, reason, isNotStarted]),
    [
      ["first", "the service is away", true],
      ["second", why, true],
      ["third", why, true],
    ],
  );
});

test("a wait for tasks leaves nothing in the signal of its worker", async () => {
  const { signal } = new AbortController();
  const source = new StreamSource();
  for (let n = 0; n < 20; n += 1) {
    assert.deepEqual(await source.get({ worker: "w", queues: ["q"], maxTasks: 1, wait: 1 }, signal), []);
  }
  assert.equal(getEventListeners(signal, "abort").length, 0);
  // AbortSignal.any() has its entries there.
  const dependants = Object.getOwnPropertySymbols(signal).find(
    ({ description }) => description === "kDependantSignals",
  );
  const entries = dependants && (signal as unknown as Record<symbol, Set<unknown> | null | undefined>)[dependants];
  assert.equal(entries?.size ?? 0, 0);
});

test("without a stream the worker polls, and it takes the stream when there is one", async (t) => {
  const { client } = taskd;
  const { fetch, calls } = counting();
  const [nobody] = await freePorts(1);
  const cable = await Cable.to(taskd.grpc, { isCut: true });
  t.after(async () => cable.close());
  const stream = { url: [`http://127.0.0.1:${String(nobody)}`, cable.url] };
  const done: string[] = [];
  const handler: Handler = (task) => {
    done.push(task.key);
  };
  await client.insert({ queue: "polls", key: "poll" });
  await withWorker({ queue: "polls", fetch, stream }, handler, async () => {
    await until("the task came by a poll, and was reported so", () => calls.includes("complete"));
    assert.ok(done.includes("poll") && calls.includes("get"), calls.join(" "));
    cable.mend();
    await until("a stream is open", () => cable.count >= 1);
    // The last poll ends when the session is open.
    await until("tasks come by the stream", async () => {
      const polls = calls.length;
      const key = `stream-${String(done.length)}`;
      await client.insert({ queue: "polls", key });
      await until("it is done", () => done.includes(key));
      return calls.length === polls;
    });
    await allAre(client, "polls", "COMPLETED", done.length);
  });
});

test("a poll whose answer is on its way brings its tasks when a stream opens", async (t) => {
  const { client } = taskd;
  const cable = await Cable.to(taskd.grpc, { isCut: true });
  t.after(async () => cable.close());
  const [answered, isOpen] = [new Gate(), new Gate()];
  const logger = {
    ...SILENT,
    info: (line: string) => {
      if (line.includes("by a stream again")) isOpen.open();
    },
  };
  const slow: typeof fetch = async (input, init) => {
    if (!(input as string).endsWith("/v1/tasks:get")) return fetch(input, init);
    // taskd has written the answer, and it is here when the stream has opened.
    const answer = await fetch(input, { ...init, signal: null });
    answered.open();
    return new Promise((resolve, reject) => {
      init?.signal?.addEventListener("abort", () => {
        reject(new Error("the poll was ended"));
      });
      void isOpen.opened.then(() => {
        resolve(answer);
      });
    });
  };
  await client.insertBatch(["a", "b"].map((key) => ({ queue: "late", key, maxAttempts: 1 })));
  const options = { queue: "late", concurrency: 1, fetch: slow, logger, stream: { url: cable.url } };
  const handler: Handler = (task) => task.attempt;
  await withWorker(options, handler, async (worker) => {
    await answered.opened;
    cable.mend();
    const statuses = await until("both have ended", async () => {
      const statuses = (await client.listPage({ queue: "late" })).tasks.map(({ status }) => status);
      return statuses.length === 2 && statuses.every((one) => one === "COMPLETED" || one === "DEAD") && statuses;
    });
    assert.deepEqual(statuses, ["COMPLETED", "COMPLETED"]);
    assert.deepEqual([worker.stats.taken, worker.stats.lost], [2, 0]);
  });
});

test("a stream sends nothing for the room of a poll under way, which ends soon", async (t) => {
  const { client } = taskd;
  const cable = await Cable.to(taskd.grpc, { isCut: true });
  t.after(async () => cable.close());
  const answered = new Gate();
  const late: typeof fetch = async (input, init) => {
    if (!(input as string).endsWith("/v1/tasks:get")) return fetch(input, init);
    const answer = await fetch(input, { ...init, signal: null });
    answered.open();
    // The answer comes just before the end of the poll.
    return new Promise((resolve) => {
      init?.signal?.addEventListener("abort", () => {
        resolve(answer);
      });
    });
  };
  await client.insertBatch(["a", "b"].map((key) => ({ queue: "share", key })));
  let leases: number | undefined;
  const handler: Handler = async () => {
    leases ??= (await client.queues()).find(({ queue }) => queue === "share")?.leases;
  };
  const options = { queue: "share", concurrency: 1, fetch: late, stream: { url: cable.url } };
  await withWorker(options, handler, async () => {
    await answered.opened;
    cable.mend();
    await allAre(client, "share", "COMPLETED", 2);
  });
  assert.equal(leases, 1);
});

test("taskd is killed amid work, and each task counts once", async () => {
  const { client } = taskd;
  const answers = await client.insertBatch(
    Array.from({ length: 200 }, (_, n) => ({ queue: "killed", key: String(n) })),
  );
  const handler: Handler = async (task) => {
    await new Promise((resolve) => setTimeout(resolve, 5));
    return task.key;
  };
  // What taskd had leased and not sent comes back after the lease.
  const options = { queue: "killed", concurrency: 5, prefetch: 5, leaseDuration: "6s" };
  const workers = ["a", "b"].map((name) => workerOf({ ...options, name }, handler));
  const running = workers.map((worker) => worker.run());
  const completed = (): number => workers.reduce((sum, { stats }) => sum + stats.completed, 0);
  for (const least of [30, 100]) {
    await until(`${String(least)} tasks are done`, () => completed() >= least);
    await taskd.kill();
    await taskd.run();
  }
  await allAre(client, "killed", "COMPLETED", 200);
  await Promise.all(workers.map((worker) => worker.stop()));
  await Promise.all(running);
  for (const [n, { id = "" }] of answers.entries()) {
    const results = (await client.results(id)).filter(({ surplus }) => !surplus);
    assert.deepEqual(
      results.map(({ result }) => result),
      [String(n)],
    );
  }
});

test("a refusal ends the worker: a wrong queue name, a wrong token", async () => {
  await assert.rejects(workerOf({ queue: "no name!" }, () => 1).run(), BadRequestError);
  // taskd reads the weights.
  await assert.rejects(workerOf({ queue: "q", weights: { other: 3 } }, () => 1).run(), /weights names "other"/);
  const guarded = await Taskd.start('auth = "tokens"\n');
  try {
    const stream = { url: guarded.grpc, token: () => Promise.resolve("wrong") };
    await assert.rejects(workerOf({ queue: "q", url: guarded.url, stream }, () => 1).run(), UnauthenticatedError);
    const token = await guarded.command("token", "create", "worker", "--roles", "insert,work,read");
    const worker = workerOf({ queue: "q", url: guarded.url, token, stream: { url: guarded.grpc } }, () => 1);
    const client = worker.client;
    await until("taskd knows the token", async () =>
      client.insert({ queue: "q", key: "k" }).then(Boolean, () => false),
    );
    const running = worker.run();
    await allAre(client, "q", "COMPLETED", 1);
    await worker.stop();
    await running;
  } finally {
    await guarded.stop();
  }
  assert.throws(() => new StreamSource({ url: "127.0.0.1:7601" }), /url: "127.0.0.1:7601"/);
  assert.throws(() => new StreamSource({ url: [] }), /there is no address/);
});

test("a function that never answers with the token does not hold the worker up", async () => {
  const { client } = taskd;
  const lines: string[] = [];
  const logger = {
    ...SILENT,
    warn: (line: string) => {
      lines.push(line);
    },
  };
  let asked = 0;
  const token = async (): Promise<string> => {
    asked += 1;
    return asked === 1 ? new Promise<string>(() => undefined) : "any";
  };
  await client.insert({ queue: "mute", key: "k" });
  await withWorker(
    { queue: "mute", logger, stream: { token } },
    () => 1,
    async () => {
      await allAre(client, "mute", "COMPLETED", 1);
    },
  );
  assert.match(
    lines[0] ?? "",
    /there is no stream of tasks, trying again: .* the token did not answer within 10000 ms/,
  );
});

test("a stream whose token was replaced goes on with the next one", async (t) => {
  const guarded = await Taskd.start('auth = "tokens"\n');
  t.after(async () => guarded.stop());
  const make = async (name: string): Promise<string> =>
    guarded.command("token", "create", name, "--roles", "insert,work,read");
  const [first, second] = [await make("first"), await make("second")];
  const client = new Client({ url: guarded.url, token: second });
  await until("taskd knows the tokens", async () =>
    client.insert({ queue: "q", key: "before" }).then(Boolean, () => false),
  );
  let token = first;
  const [begun, gate] = [new Gate(), new Gate()];
  const options = { queue: "q", url: guarded.url, token: () => Promise.resolve(token) };
  await withWorker(
    { ...options, stream: { url: guarded.grpc } },
    async (task) => {
      begun.open();
      if (task.key === "before") await gate.opened;
    },
    async (worker) => {
      await begun.opened;
      token = second;
      await guarded.command("token", "revoke", "first");
      await client.insert({ queue: "q", key: "after" });
      await until("the other task is done on another stream", () => worker.stats.completed === 1);
      gate.open();
      await until("both are done", () => worker.stats.completed === 2);
    },
  );
});
