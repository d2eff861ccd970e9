/** Reports that bring the next tasks. */

import assert from "node:assert/strict";
import type { IncomingMessage, ServerResponse } from "node:http";
import { test } from "node:test";

import { Worker, type WorkerOptions } from "@taskd/client";
import { Gate, SILENT, Taskd, allAre, bodyOf, rawServer, until } from "./support.js";

interface Body {
  completions?: { id: string }[];
  rejections?: { id: string; delay?: string; not_started?: boolean }[];
  next?: { max_tasks: number; wait: string };
}

function leased(id: string): object {
  const at = new Date(Date.now() + 3_600_000).toISOString();
  return { id, queue: "q", key: id, lease_token: id, lease_expires_at: at, attempt: 1 };
}

/** A taskd that gives a task to each of the first polls, and answers reports as the test says. Later polls wait. */
async function taskdOf(
  report: (path: string, body: Body, response: ServerResponse) => void,
  tasks = 1,
): Promise<{ url: string; close: () => Promise<void> }> {
  let polls = 0;
  const answer = async (request: IncomingMessage, response: ServerResponse): Promise<void> => {
    const path = request.url ?? "";
    const body = await bodyOf<Body>(request);
    if (path !== "/v1/tasks:get") report(path, body, response);
    else if (polls++ < tasks) response.end(JSON.stringify({ tasks: [leased(polls === 1 ? "polled" : String(polls))] }));
  };
  return rawServer((request, response) => {
    response.setHeader("content-type", "application/json");
    void answer(request, response);
  });
}

function accept(body: Body, response: ServerResponse, tasks?: object[]): void {
  const items = body.completions ?? body.rejections ?? [];
  response.end(JSON.stringify({ results: items.map(({ id }) => ({ id, status: "OK" })), tasks }));
}

function workerOf(options: Partial<WorkerOptions>): Worker {
  return new Worker({ queue: "q", concurrency: 1, logger: SILENT, signals: false, ...options });
}

test("a worker that polls gets its next tasks by its reports", async (t) => {
  const taskd = await Taskd.start();
  t.after(async () => taskd.stop());
  await taskd.client.insertBatch(Array.from({ length: 60 }, (_, n) => ({ queue: "q", key: String(n) })));
  const calls: Record<string, number> = {};
  const counting: typeof fetch = async (input, init) => {
    const path = new URL(input instanceof Request ? input.url : input).pathname;
    calls[path] = (calls[path] ?? 0) + 1;
    return fetch(input, init);
  };
  const worker = workerOf({ url: taskd.url, fetch: counting }).handle(() => undefined);
  const running = worker.run();
  await allAre(taskd.client, "q", "COMPLETED", 60);
  await until("all is reported", () => worker.stats.completed === 60);
  await worker.stop();
  await running;
  const [polls = 0, reports] = [calls["/v1/tasks:get"], calls["/v1/tasks:complete"]];
  assert.ok(polls < 30 && reports === 60, JSON.stringify(calls));
});

test("a task that a report brings behind the stop goes back", async (t) => {
  const [asked, gate] = [new Gate(), new Gate()];
  const rejections: unknown[] = [];
  const report = async (body: Body, response: ServerResponse): Promise<void> => {
    rejections.push(...(body.rejections ?? []).map(({ id, not_started }) => [id, not_started]));
    if (body.next !== undefined) {
      asked.open();
      await gate.opened;
    }
    accept(body, response, body.next && [leased("late")]);
  };
  const fake = await taskdOf((_, body, response) => void report(body, response));
  t.after(async () => fake.close());
  const worker = workerOf({ url: fake.url }).handle(() => undefined);
  const running = worker.run();
  await asked.opened;
  const stopped = worker.stop();
  gate.open();
  await Promise.all([running, stopped]);
  assert.deepEqual(rejections, [["late", true]]);
  assert.deepEqual([worker.stats.completed, worker.stats.returned, worker.stats.rejected], [1, 1, 0]);
});

test("a report without an answer goes anew at the stop", async (t) => {
  const asked = new Gate();
  const plain: unknown[] = [];
  const fake = await taskdOf((path, body, response) => {
    assert.equal(path, "/v1/tasks:complete");
    // The call that asks gets no answer.
    if (body.next === undefined) {
      plain.push(body.completions?.map(({ id }) => id));
      accept(body, response);
    } else asked.open();
  });
  t.after(async () => fake.close());
  const worker = workerOf({ url: fake.url }).handle(() => undefined);
  const running = worker.run();
  await asked.opened;
  await worker.stop();
  await running;
  assert.deepEqual([plain, worker.stats.completed, worker.stats.rejected], [[["polled"]], 1, 0]);
});

test("a report that takes long holds up no poll", async (t) => {
  const asked = new Gate();
  const fake = await taskdOf((_, body, response) => {
    if (body.next === undefined) accept(body, response);
    else asked.open();
  }, 2);
  t.after(async () => fake.close());
  const worker = workerOf({ url: fake.url }).handle(() => undefined);
  const running = worker.run();
  await asked.opened;
  await until("both tasks are reported", () => worker.stats.completed === 2);
  await worker.stop();
  await running;
});

test("a taskd that does not know `next` is asked by polls", async (t) => {
  let refused = 0;
  const fake = await taskdOf((_, body, response) => {
    if (body.next === undefined) {
      accept(body, response);
      return;
    }
    refused += 1;
    response.writeHead(400).end('{"title":"Bad Request","status":400,"detail":"unknown field `next`"}');
  }, 5);
  t.after(async () => fake.close());
  const worker = workerOf({ url: fake.url }).handle(() => undefined);
  const running = worker.run();
  await until("the tasks are reported", () => worker.stats.completed === 5);
  assert.equal(refused, 1);
  await worker.stop();
  await running;
});

test("a report that fails while it asks is sent again", async (t) => {
  let failures = 0;
  const fake = await taskdOf((_, body, response) => {
    if (body.next === undefined || failures > 0) accept(body, response, body.next && []);
    else {
      failures += 1;
      response.destroy();
    }
  }, 2);
  t.after(async () => fake.close());
  const worker = workerOf({ url: fake.url }).handle(() => undefined);
  const running = worker.run();
  await until("both tasks are reported", () => worker.stats.completed === 2);
  assert.equal(failures, 1);
  await worker.stop();
  await running;
});

test("while a report that asks for tasks is under way, no poll is", async (t) => {
  const gate = new Gate();
  let [reports, pollsMeanwhile] = [0, 0];
  const fake = await rawServer((request, response) => {
    response.setHeader("content-type", "application/json");
    if (request.url === "/v1/tasks:get") {
      if (reports > 0) pollsMeanwhile += 1;
      else response.end(JSON.stringify({ tasks: ["a", "b"].map(leased) }));
      return;
    }
    reports += 1;
    void bodyOf<Body>(request).then(async (body) => {
      if (reports === 2) await gate.opened;
      accept(body, response, reports < 3 ? [leased(`with ${String(reports)}`)] : []);
    });
  });
  t.after(async () => fake.close());
  const done: string[] = [];
  const worker = workerOf({ url: fake.url, concurrency: 2 }).handle((task) => void done.push(task.key));
  const running = worker.run();
  await until("the second report is under way", () => reports === 2);
  assert.equal(pollsMeanwhile, 0);
  gate.open();
  await until("all is done", () => done.length === 4 && worker.stats.unreported === 0);
  // The last report brought nothing, so the worker polls.
  await until("a poll waits", () => pollsMeanwhile === 1);
  await worker.stop();
  await running;
});

test("a task that did not begin goes back at no cost", async (t) => {
  const rejections: unknown[] = [];
  const fake = await taskdOf((path, body, response) => {
    const [first] = body.rejections ?? [];
    if (path === "/v1/tasks:reject") rejections.push([first?.not_started, first?.delay]);
    accept(body, response);
  }, 2);
  t.after(async () => fake.close());
  const [begun, gate] = [new Gate(), new Gate()];
  const worker = workerOf({ url: fake.url, prefetch: 1 }).handle(async () => {
    begun.open();
    await gate.opened;
  });
  const running = worker.run();
  await begun.opened;
  await until("a task waits", () => worker.stats.waiting === 1);
  const stopped = worker.stop();
  await until("it is given back", () => worker.stats.returned === 1);
  gate.open();
  await Promise.all([running, stopped]);
  assert.deepEqual(rejections, [[true, "0ms"]]);
  assert.deepEqual([worker.stats.completed, worker.stats.rejected, worker.stats.lost], [1, 0, 0]);
});
