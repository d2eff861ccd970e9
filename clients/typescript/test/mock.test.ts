/** Handlers without a server: `runHandler` and `MockSource`. */

import assert from "node:assert/strict";
import { Buffer } from "node:buffer";
import { test } from "node:test";
import { inspect } from "node:util";

import {
  LeaseLostError,
  PutOff,
  Reject,
  Retry,
  TaskTimeoutError,
  TooLargeError,
  Worker,
  WorkerStoppedError,
} from "@taskd/client";
import type { ItemAnswer, Report, StandardSchema } from "@taskd/client";
import { MockSource, runHandler } from "@taskd/client/testing";
import { Gate, SILENT, until } from "./support.js";

test("a handler's result and its discovered tasks are what taskd would read", async () => {
  const outcome = await runHandler<{ url: string }>(
    (task) => {
      task.discover({ key: `${task.payload.url}/a`, payload: { depth: 1 } }, { queue: "other", key: "b" });
      task.discover({ port: "link", key: "c" });
      return { length: task.payload.url.length, at: new Date(0) };
    },
    { queue: "pages", payload: { url: "x" } },
  );
  assert.equal(outcome.status, "completed");
  assert.deepEqual(outcome.result, { length: 1, at: "1970-01-01T00:00:00.000Z" });
  assert.deepEqual(
    outcome.discovered.map(({ queue, port, key, payload }) => [queue, port, key, payload]),
    [
      ["pages", undefined, "x/a", { depth: 1 }],
      ["other", undefined, "b", null],
      [undefined, "link", "c", null],
    ],
  );
});

test("a worker of a source without a network stops without a clock", async (context) => {
  context.mock.timers.enable({ apis: ["setTimeout", "Date"] });
  const outcome = await runHandler(() => 1);
  assert.equal(outcome.status, "completed");
});

test("a payload and a result stay what they were", async () => {
  for (const value of [{ a: [1, null] }, "text", 0, false, new Uint8Array([0, 255]), null]) {
    const outcome = await runHandler((task) => task.payload, { payload: value });
    assert.deepEqual(outcome.status === "completed" && outcome.result, value);
  }
  const nothing = await runHandler(() => undefined);
  assert.equal(nothing.status === "completed" && nothing.result, null);
});

test("a result that JSON would change is a failure, which names the place", async () => {
  const reasonOf = async (result: unknown): Promise<unknown> => {
    const outcome = await runHandler(() => result);
    return outcome.status === "completed" ? outcome.result : outcome.reason;
  };
  const cases: [unknown, string][] = [
    [new Map([["a", 1]]), "result has the type Map"],
    [{ sizes: [1, new Set([2])] }, "result.sizes[1] has the type Set"],
    [{ cause: new RangeError("bad") }, "result.cause has the type Error"],
    [{ at: /a/ }, "result.at has the type RegExp"],
    [[Promise.resolve(1)], "result[0] has the type Promise"],
    [{ bytes: new Uint8Array([1]) }, "result.bytes has the type Uint8Array"],
    [NaN, "result is NaN"],
    [{ a: { b: [-Infinity] } }, "result.a.b[0] is -Infinity"],
  ];
  for (const [result, flaw] of cases) {
    assert.equal(await reasonOf(result), `TypeError: result cannot be written as JSON: ${flaw}`);
  }
  const plain = { at: new Date(0), none: undefined, url: new URL("http://a/"), list: [null, 1.5] };
  assert.deepEqual(await reasonOf(plain), { at: "1970-01-01T00:00:00.000Z", url: "http://a/", list: [null, 1.5] });
});

test("a discovered task that is wrong costs only itself", async () => {
  const circle: { self?: unknown } = {};
  circle.self = circle;
  const lines: string[] = [];
  const discovers = await runHandler(
    (task) => {
      task.discover({ key: "a" }, { key: "b", payload: { n: NaN } }, { key: "c", payload: 1n }, { key: "d" });
      task.discover({ key: "e", payload: circle }, { key: "f", delay: "soon" }, { key: "g" });
    },
    { id: "id" },
    { logger: { ...SILENT, warn: (line) => lines.push(line) } },
  );
  assert.deepEqual(discovers.status === "completed" && discovers.discovered.map(({ key }) => key), ["a", "d", "g"]);
  const first = "payload cannot be written as JSON: payload.n is NaN";
  assert.deepEqual(lines, [`task id: 4 discovered tasks are not stored; the first: ${first}`]);
});

test("a handler that runs for long is not silent", async () => {
  const lines: string[] = [];
  const logger = { ...SILENT, info: (line: string) => lines.push(line) };
  const source = new MockSource([{ id: "id", key: "slow" }]);
  const worker = new Worker({ queue: "test", source, logger, signals: false, leaseDuration: 200 });
  const running = worker
    .handle(async () => {
      await until("two lines say that it runs", () => lines.length >= 2);
    })
    .run();
  await source.settled();
  await worker.stop();
  await running;
  assert.equal(source.outcomes[0]?.status, "completed");
  for (const line of lines.slice(0, 2))
    assert.match(line, /^task id \(slow\): the handler still runs, after [\d.]+ s$/);
});

test("a handler tells of the limit key of its task", async () => {
  const rejects = await runHandler(
    (task) => {
      assert.equal(task.limitKey, "site");
      task.hold("2h");
      task.pace(500);
      throw new PutOff("busy");
    },
    { limitKey: "site" },
  );
  assert.ok(rejects.status === "put_off");
  assert.deepEqual([rejects.delay, rejects.limit], ["0ms", { hold: "3600000ms", pace: "500ms" }]);
  const completes = await runHandler(
    (task) => {
      task.pace("10s");
    },
    { limitKey: "site" },
  );
  assert.deepEqual(completes.limit, { pace: "10000ms" });
  const fails = await runHandler((task) => {
    task.hold("soon");
  });
  assert.ok(fails.status === "rejected");
  assert.match(fails.reason, /hold: "soon" is not a duration/);
});

test("a handler puts its task off, and it comes again", async () => {
  const outcome = await runHandler(() => {
    throw new PutOff("busy", { after: "30s" });
  });
  assert.equal(outcome.status, "put_off");
  assert.deepEqual([outcome.reason, outcome.delay], ["busy", "30000ms"]);
  assert.throws(() => new PutOff("busy", { after: "soon" }), /after: "soon" is not a duration/);
  const source = new MockSource([{}], { attempts: 3 });
  const worker = new Worker({ queue: "test", source, logger: SILENT, signals: false });
  let times = 0;
  const running = worker
    .handle(() => {
      times += 1;
      if (times < 3) throw new PutOff("busy", { after: 1000 });
      return "done";
    })
    .run();
  await source.settled();
  await worker.stop();
  await running;
  assert.deepEqual(
    source.outcomes.map(({ status, task }) => [status, task.attempt]),
    [
      ["put_off", 1],
      ["put_off", 1],
      ["completed", 1],
    ],
  );
  assert.deepEqual([worker.stats.completed, worker.stats.returned, worker.stats.rejected], [1, 2, 0]);
});

test("what a handler throws says how its attempt failed", async () => {
  const thrown = async (error: unknown): Promise<unknown[]> => {
    const outcome = await runHandler(() => {
      throw error;
    });
    assert.equal(outcome.status, "rejected");
    return [outcome.reason, outcome.retry, outcome.delay];
  };
  assert.deepEqual(await thrown(new Reject("never")), ["never", false, undefined]);
  const asks = "the handler asks for another attempt";
  assert.deepEqual(await thrown(new Retry(undefined, { after: "5s" })), [asks, true, "5000ms"]);
  assert.deepEqual(await thrown(new Retry("later", { after: 10 })), ["later", true, "10ms"]);
  assert.deepEqual(await thrown(new RangeError("bad")), ["RangeError: bad", true, undefined]);
  assert.deepEqual(await thrown("text"), ["text", true, undefined]);
  assert.deepEqual(await thrown(Object.create(null)), ["[Object: null prototype] {}", true, undefined]);
  assert.deepEqual(await thrown(new Retry("some day", { after: "400 days" })), ["some day", true, "31536000000ms"]);
});

test("a reason is cut between two characters, to a length that taskd takes", async () => {
  const reasonOf = async (text: string): Promise<string> => {
    const outcome = await runHandler(() => {
      throw new Reject(text);
    });
    assert.equal(outcome.status, "rejected");
    return outcome.reason;
  };
  assert.equal(await reasonOf("x".repeat(4000)), "x".repeat(4000));
  for (const character of ["x", "é", "€", "😀"]) {
    for (const before of ["", "a", "ab", "abc"]) {
      const reason = await reasonOf(before + character.repeat(5000));
      assert.ok(Buffer.byteLength(reason) <= 4000 && Buffer.byteLength(reason) > 3990, reason);
      assert.equal(reason, `${before}${character.repeat(Array.from(reason).length - before.length - 1)}…`);
    }
  }
  // Half a character is no text.
  assert.equal(await reasonOf("a\uD83D"), "a\uFFFD");
});

test("a result without a form in JSON is a failure with a reason", async () => {
  const circle: { self?: unknown } = {};
  circle.self = circle;
  for (const result of [circle, 1n, () => 1]) {
    const outcome = await runHandler(() => result);
    assert.match(outcome.status === "rejected" ? outcome.reason : "", /TypeError: result cannot be written as JSON/);
  }
});

test("a schema checks payloads and gives them their type", async () => {
  const schema: StandardSchema<{ url: string }> = {
    "~standard": {
      version: 1,
      vendor: "test",
      validate: (value) =>
        typeof (value as { url?: unknown } | null)?.url === "string"
          ? { value: { url: (value as { url: string }).url.toUpperCase() } }
          : { issues: [{ message: "expected a string", path: ["url"] }] },
    },
  };
  const fits = await runHandler(
    (task) => `${String(task.payload.url.length)}${task.payload.url}`,
    { payload: { url: "x" } },
    { schema },
  );
  assert.equal(fits.status === "completed" && fits.result, "1X");
  const wrong = await runHandler((task) => task.payload.url, { payload: { url: 1 } as never }, { schema });
  assert.deepEqual(wrong.status === "rejected" && [wrong.reason, wrong.retry], [
    "the payload does not fit: url: expected a string",
    false,
  ]);
  const number = (payload: unknown): number => {
    if (typeof payload !== "number") throw new TypeError("no number");
    return payload;
  };
  const one = await runHandler((task) => task.payload + 1, { payload: 1 }, { schema: number });
  assert.equal(one.status === "completed" && one.result, 2);
  const none = await runHandler((task) => task.payload, {}, { schema: number });
  assert.equal(none.status === "rejected" && none.reason, "the payload does not fit: no number");
});

test("a handler has its bounds: the time for it, and no number of discovered tasks", async () => {
  const many = await runHandler((task) => {
    for (let n = 0; n <= 10_000; n += 1) task.discover({ key: String(n) });
  });
  assert.equal(many.status === "completed" && many.discovered.length, 10_001);
  let reason: unknown;
  const late = await runHandler(
    async (task) => {
      await new Promise<void>((resolve) => {
        task.signal.addEventListener("abort", () => {
          resolve();
        });
      });
      reason = task.signal.reason;
    },
    {},
    { taskTimeout: "20ms" },
  );
  assert.match(late.status === "rejected" ? late.reason : "", /took longer than 20 ms/);
  await until("the handler has heard of it", () => reason instanceof TaskTimeoutError);
});

test("a lease that is lost or a cancel aborts the signal, and nothing is reported", async () => {
  for (const status of ["LEASE_LOST", "CANCELLED"] as const) {
    const source = new MockSource([{}], { lease: 100 });
    let heard: unknown;
    const worker = new Worker({ queue: "test", source, logger: SILENT, signals: false }).handle(async (task) => {
      source.endLease(task.id, status);
      await new Promise((resolve) => {
        task.signal.addEventListener("abort", resolve);
      });
      heard = task.signal.reason;
      return "too late";
    });
    const running = worker.run();
    await until("the handler has heard of it", () => heard !== undefined);
    assert.ok(heard instanceof LeaseLostError && heard.status === status);
    await worker.stop();
    await running;
    assert.deepEqual(source.outcomes, []);
    assert.deepEqual([worker.stats.lost, worker.stats.completed], [1, 0]);
  }
});

test("a stop finishes what has begun, and gives back what has not", async () => {
  const source = new MockSource([{}, {}, {}]);
  const [begun, gate] = [new Gate(), new Gate()];
  const worker = new Worker({ queue: "test", source, concurrency: 1, prefetch: 2, logger: SILENT, signals: false });
  worker.handle(async () => {
    begun.open();
    await gate.opened;
  });
  const running = worker.run();
  await begun.opened;
  await until("two tasks wait", () => worker.stats.waiting === 2);
  const stopped = worker.stop();
  await until("the two are given back", () => worker.stats.returned === 2);
  gate.open();
  await Promise.all([running, stopped]);
  assert.deepEqual([source.outcomes.map(({ status }) => status), worker.stats.rejected], [["completed"], 0]);
  const next = new Worker({ queue: "test", source, logger: SILENT, signals: false });
  next.handle(({ attempt }) => attempt);
  void next.run();
  await until("the two are done", () => next.stats.completed === 2);
  await next.stop();
  assert.ok(source.outcomes.every((outcome) => outcome.status === "completed" && outcome.task.attempt === 1));
});

test("a hard stop aborts the handlers and rejects their tasks", async () => {
  const source = new MockSource([{}]);
  const begun = new Gate();
  let heard: unknown;
  const worker = new Worker({ queue: "test", source, logger: SILENT, signals: false }).handle(async (task) => {
    task.signal.addEventListener("abort", () => {
      heard = task.signal.reason;
    });
    begun.open();
    await new Promise(() => undefined);
  });
  const running = worker.run();
  await begun.opened;
  await worker.stop({ hard: true });
  await running;
  assert.ok(heard instanceof WorkerStoppedError);
  assert.equal(source.outcomes[0]?.status === "rejected" && source.outcomes[0].reason, "the worker stopped");
});

test("the drain has an end, also with a handler that has none", async () => {
  const source = new MockSource([{}]);
  const begun = new Gate();
  const worker = new Worker({ queue: "test", source, drainTimeout: "10ms", logger: SILENT, signals: false });
  worker.handle(async () => {
    begun.open();
    await new Promise(() => undefined);
  });
  const running = worker.run();
  await begun.opened;
  await worker.stop();
  await running;
  assert.equal(source.outcomes[0]?.status, "rejected");
});

test("at most as many handlers as agreed run, and a mock follows discovered tasks", async () => {
  const source = new MockSource([{ key: "root", payload: 5 }], { follow: true });
  let [now, most] = [0, 0];
  const worker = new Worker({ queue: "test", source, concurrency: 3, prefetch: 2, logger: SILENT, signals: false });
  worker.handle<number>(async (task) => {
    now += 1;
    most = Math.max(most, now);
    await new Promise((resolve) => setImmediate(resolve));
    for (const child of [0, 1]) {
      if (task.payload > 0) task.discover({ key: `${task.key}/${String(child)}`, payload: task.payload - 1 });
    }
    now -= 1;
  });
  const running = worker.run();
  await source.settled();
  await worker.stop();
  await running;
  assert.equal(source.outcomes.length, 63);
  assert.equal(most, 3);
  assert.deepEqual([worker.stats.taken, worker.stats.completed, worker.stats.unreported], [63, 63, 0]);
});

test("another attempt has the next number", async () => {
  const source = new MockSource([{}], { attempts: 3 });
  const worker = new Worker({ queue: "test", source, logger: SILENT, signals: false }).handle((task) => {
    if (task.attempt < 3) throw new Retry();
    return task.attempt;
  });
  const running = worker.run();
  await source.settled();
  await worker.stop();
  await running;
  assert.deepEqual(
    source.outcomes.map(({ status }) => status),
    ["rejected", "rejected", "completed"],
  );
});

test("reports share calls, within their bounds", async () => {
  const sizes: number[] = [];
  class Counting extends MockSource {
    override async complete(worker: string, reports: readonly Report[]): Promise<ItemAnswer[]> {
      sizes.push(reports.length);
      await new Promise((resolve) => setImmediate(resolve));
      return super.complete(worker, reports);
    }
  }
  const source = new Counting(Array.from({ length: 100 }, () => ({ payload: "x".repeat(1000) })));
  const reports = { maxItems: 20, maxBytes: 10_000 };
  const worker = new Worker({ queue: "test", source, concurrency: 100, reports, logger: SILENT, signals: false });
  const running = worker.handle((task) => task.payload).run();
  await source.settled();
  await worker.stop();
  await running;
  assert.equal(source.outcomes.length, 100);
  // A report has a kilobyte and its id.
  assert.ok(sizes.length < 100 && sizes.every((size) => size <= 9), sizes.join(" "));
});

test("a report that is too large does not harm those beside it, and one that comes too soon is sent again", async () => {
  let later = 0;
  class Narrow extends MockSource {
    override async complete(worker: string, reports: readonly Report[]): Promise<ItemAnswer[]> {
      if (reports.some(({ text }) => text.includes("huge"))) {
        const title = "Payload Too Large";
        throw new TooLargeError("POST", { type: "about:blank", title, status: 413, detail: "more than it may have" });
      }
      if (reports.length > 1 && later < 3) {
        later += 1;
        return reports.map(({ id }) => ({ id, status: "TRY_LATER" }));
      }
      return super.complete(worker, reports);
    }
  }
  const source = new Narrow(["a", "huge", "b", "c"].map((payload) => ({ payload })));
  const worker = new Worker({ queue: "test", source, logger: SILENT, signals: false });
  const running = worker.handle((task) => task.payload).run();
  await source.settled();
  await worker.stop();
  await running;
  const ended = source.outcomes.map((outcome) => [outcome.task.payload, outcome.status]);
  assert.deepEqual(ended.sort(), [
    ["a", "completed"],
    ["b", "completed"],
    ["c", "completed"],
    ["huge", "rejected"],
  ]);
});

test("whatever a handler throws ends its task, and not the process", async () => {
  const odd: [unknown, RegExp][] = [
    [Object.assign(new Error("x"), { message: { code: 1 } }), /Error: \[object Object\]/],
    [Object.assign(new Error("x"), { name: Symbol("s"), stack: null }), /Symbol\(s\): x/],
    [
      {
        [inspect.custom]: () => {
          throw new Error("no");
        },
      },
      /something that has no text/,
    ],
    [
      Object.defineProperty(new Error("x"), "message", {
        get: () => {
          throw new Error("no");
        },
      }),
      /Error: .*something that has no text/,
    ],
    [Object.assign(new Retry("later"), { after: "soon" }), /^later$/],
    [undefined, /^undefined$/],
  ];
  for (const [thrown, reason] of odd) {
    const outcome = await runHandler(() => {
      throw thrown;
    });
    assert.ok(outcome.status === "rejected" && outcome.retry);
    assert.match(outcome.reason, reason);
  }
});

test("hooks run around the handler, and no rejection is silent", async () => {
  const said: string[] = [];
  const log = (text: string): void => void said.push(text);
  const source = new MockSource([{ key: "a" }, { key: "wrong" }, { key: "later" }]);
  const logger = { ...SILENT, info: log, warn: log };
  const worker = new Worker({ queue: "test", source, concurrency: 1, signals: false, logger });
  worker.around(async (task, call) => {
    said.push(`outer before ${task.key}`);
    return `<${String(await call())}>`;
  });
  worker.around(async (_task, call) => {
    try {
      return await call();
    } finally {
      said.push("inner after");
    }
  });
  worker.handle((task) => {
    said.push("handler");
    if (task.key === "wrong") throw new Reject("no such page");
    if (task.key === "later") throw new PutOff("busy", { after: "5s" });
    return "done";
  });
  const run = worker.run();
  await source.settled();
  await worker.stop();
  await run;
  assert.deepEqual(said.slice(0, 3), ["outer before a", "handler", "inner after"]);
  assert.equal(source.outcomes[0]?.status === "completed" && source.outcomes[0].result, "<done>");
  assert.ok(said.includes("task task-2 (wrong): rejected: no such page"), said.join("\n"));
  assert.ok(said.includes("task task-3 (later): put off: busy"), said.join("\n"));
});
