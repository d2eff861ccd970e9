/** Parts that need no taskd: durations, forms on the wire, errors, addresses. */

import assert from "node:assert/strict";
import type { IncomingMessage, ServerResponse } from "node:http";
import { test } from "node:test";
import { setFlagsFromString } from "node:v8";
import { runInNewContext } from "node:vm";

import {
  BusyError,
  Client,
  ConnectionError,
  InvalidAnswerError,
  NotFoundError,
  Problem,
  Retry,
  TimeoutError,
  Worker,
} from "@taskd/client";
import { fakeTaskd, freePorts, rawServer, until } from "./support.js";

const CREATED = JSON.stringify({ results: [{ status: "CREATED", id: "1" }] });

test("a task is written as taskd reads it", async () => {
  const bodies: unknown[] = [];
  const fake = await fakeTaskd((_, body) => {
    bodies.push(JSON.parse(body));
    return { body: CREATED };
  });
  const client = new Client({ url: fake.url });
  await client.insert({
    queue: "q",
    key: "k",
    payload: { n: 1 },
    replicas: 2,
    priority: "high",
    delay: "1m 30s",
    notBefore: new Date(0),
    leaseDuration: 1500,
    maxAttempts: 3,
    headers: { a: "b" },
    traceparent: "00-",
  });
  await client.insert({ queue: "q", payload: new Uint8Array([0, 255]) });
  await client.insert({ queue: "q", payload: "text" });
  await client.insert({ queue: "q", payload: null, fields: { a_new_field: { some: "thing" } } });
  const backoff = { kind: "linear", initial: "1s", maximum: 60_000, jitter: 0, giveUpAfter: "1h" } as const;
  await client.insert({ queue: "q", idempotencyKey: "i", backoff });
  await client.insert({ queue: "q", tree: "new" });
  await client.insert({ queue: "q", tree: { then: "r", timeout: "1h", onDead: "hold" } });
  assert.deepEqual(bodies, [
    {
      queue: "q",
      key: "k",
      payload: { n: 1 },
      replicas: 2,
      priority: "high",
      delay: "90000ms",
      not_before: "1970-01-01T00:00:00.000Z",
      lease_duration: "1500ms",
      max_attempts: 3,
      headers: { a: "b" },
      traceparent: "00-",
    },
    { queue: "q", payload_base64: "AP8=" },
    { queue: "q", payload: "text" },
    { queue: "q", a_new_field: { some: "thing" } },
    {
      queue: "q",
      idempotency_key: "i",
      backoff: { kind: "linear", initial: "1000ms", maximum: "60000ms", jitter: 0, give_up_after: "3600000ms" },
    },
    { queue: "q", tree: "new" },
    { queue: "q", tree: { then: "r", timeout: "3600000ms", on_dead: "hold" } },
  ]);
  await fake.close();
});

test("a task that has no form in JSON is an error of the caller", async () => {
  const client = new Client({ url: "http://127.0.0.1:1" });
  const circle: { self?: unknown } = {};
  circle.self = circle;
  await assert.rejects(client.insert({ queue: "q", payload: circle }), /payload cannot be written as JSON/);
  await assert.rejects(client.insert({ queue: "q", payload: 1n }), /payload cannot be written as JSON/);
  await assert.rejects(client.insert({ queue: "q", payload: () => 1 }), /payload cannot be written as JSON/);
  await assert.rejects(client.insert({ queue: "q", payload: [NaN] }), /JSON: payload\[0\] is NaN/);
  await assert.rejects(client.insert({ queue: "q", payload: { a: new Map() } }), /JSON: payload.a has the type Map/);
  await assert.rejects(client.insert({ queue: "q", delay: "soon" }), /delay: "soon" is not a duration/);
  const unknown = { queue: "q", backoff: { kind: "linear" as const, giveUp: 1 } };
  await assert.rejects(client.insert(unknown), /a backoff has no field "giveUp"; it has kind, initial/);
  const misspelt = { queue: "q", pirority: "high" };
  await assert.rejects(client.insert(misspelt), /a task has no field "pirority"/);
});

test("wrong options are named at once", () => {
  assert.throws(() => new Client({ url: "127.0.0.1:7600" }), /url: "127.0.0.1:7600"/);
  assert.throws(() => new Client({ url: "ftp://a" }), /neither with http/);
  assert.throws(() => new Client({ url: [] }), /there is no address/);
  assert.throws(() => new Worker({ queue: [] }), /queue: there is none/);
  assert.throws(() => new Worker({ queue: ["q", ""] }), /queue: there is none; give the name of one/);
  assert.throws(() => new Worker({ queue: "q", concurrency: 0 }), /concurrency: 0/);
  assert.throws(() => new Worker({ queue: "q", taskTimeout: "x" }), /taskTimeout: "x"/);
  assert.throws(() => new Worker({ queue: "q", drainTimeout: -1 }), /drainTimeout: -1/);
  assert.throws(() => new Retry("later", { after: "x" }), /after: "x"/);
});

test("an error of taskd is a typed problem", async () => {
  const details = { type: "about:blank", title: "Not Found", status: 404, detail: "there is no task" };
  const fake = await fakeTaskd(() => ({ status: 404, body: JSON.stringify(details) }));
  await assert.rejects(new Client({ url: fake.url }).getTask("x"), (error) => {
    assert.ok(error instanceof NotFoundError && error instanceof Problem);
    assert.deepEqual([error.status, error.title, error.detail], [404, "Not Found", "there is no task"]);
    return true;
  });
  await fake.close();
});

test("a redirect is not followed, so that no token goes astray", async () => {
  const fake = await fakeTaskd(() => ({ status: 302, headers: { location: "http://127.0.0.1:1/" }, body: "" }));
  const call = new Client({ url: fake.url, token: "secret" }).queues();
  await assert.rejects(call, (error) => error instanceof Problem && error.status === 302);
  await fake.close();
});

test("a busy taskd is asked again after Retry-After, and in the end told as busy", async () => {
  const busy = { title: "Too Many Requests", status: 429, detail: "full" };
  const times: number[] = [];
  const fake = await fakeTaskd((_, __, nth) => {
    times.push(performance.now());
    return nth === 0 ? { status: 429, headers: { "retry-after": "1" }, body: JSON.stringify(busy) } : { body: CREATED };
  });
  assert.equal((await new Client({ url: fake.url }).insert({ queue: "q" })).status, "CREATED");
  const [first = 0, second = 0] = times;
  assert.ok(second - first >= 990, "the second call came before Retry-After");
  await fake.close();
  const full = await fakeTaskd(() => ({ status: 429, headers: { "retry-after": "1" }, body: JSON.stringify(busy) }));
  await assert.rejects(new Client({ url: full.url, retryFor: 0 }).insert({ queue: "q" }), BusyError);
  await full.close();
});

test("garbage is tried again, and is an error of its own in the end", async () => {
  const fake = await fakeTaskd((_, __, nth) => ({ body: nth === 0 ? "<html>" : CREATED }));
  assert.equal((await new Client({ url: fake.url }).insert({ queue: "q" })).status, "CREATED");
  await fake.close();
  const lines = await fakeTaskd((_, __, nth) => ({ body: nth === 0 ? "<html>\n" : '{"status":"CREATED","id":"1"}\n' }));
  assert.deepEqual(await new Client({ url: lines.url }).insertBatch([{ queue: "q" }]), [
    { index: 0, status: "CREATED", id: "1" },
  ]);
  const other = new Client({ url: lines.url, retryFor: 0 });
  await lines.close();
  await assert.rejects(other.insertBatch([{ queue: "q" }]), ConnectionError);
  const broken = await fakeTaskd(() => ({ body: "[1" }));
  await assert.rejects(new Client({ url: broken.url, retryFor: 0 }).insertBatch([{ queue: "q" }]), InvalidAnswerError);
  await assert.rejects(new Client({ url: broken.url, retryFor: 0 }).insert({ queue: "q" }), InvalidAnswerError);
  await broken.close();
});

test("an address that is dead does not matter while another answers", async () => {
  const fake = await fakeTaskd(() => ({ body: CREATED }));
  const [dead] = await freePorts(1);
  const client = new Client({ url: [`http://127.0.0.1:${String(dead)}`, fake.url] });
  for (let n = 0; n < 3; n += 1) assert.equal((await client.insert({ queue: "q" })).status, "CREATED");
  const alone = new Client({ url: `http://127.0.0.1:${String(dead)}`, retryFor: 0 });
  await assert.rejects(alone.insert({ queue: "q" }), (error) => {
    return error instanceof ConnectionError && error.message.includes("ECONNREFUSED");
  });
  await fake.close();
});

test("without time for tries, each address still has one", async () => {
  const fake = await fakeTaskd(() => ({ body: CREATED }));
  const [one, two] = await freePorts(2);
  const url = [`http://127.0.0.1:${String(one)}`, `http://127.0.0.1:${String(two)}`, fake.url];
  for (let n = 0; n < 20; n += 1) {
    assert.equal((await new Client({ url, retryFor: 0 }).insert({ queue: "q" })).status, "CREATED");
  }
  await fake.close();
});

test("a token that does not come is a time-out", async () => {
  const token = async (): Promise<string> => new Promise(() => undefined);
  const client = new Client({ url: "http://127.0.0.1:1", token, timeout: "20ms", retryFor: 0 });
  await assert.rejects(client.queues(), TimeoutError);
});

test("a silent taskd is a time-out, and an abort is the caller's reason", async () => {
  const asked: string[] = [];
  const fake = await fakeTaskd((path) => {
    asked.push(path);
    return { body: "" };
  });
  fake.server.removeAllListeners("request");
  fake.server.on("request", (request) => asked.push(String(request.url)));
  const client = new Client({ url: fake.url, timeout: "50ms", retryFor: 0 });
  await assert.rejects(client.queues(), TimeoutError);
  const abort = new AbortController();
  const call = new Client({ url: fake.url }).queues({ signal: abort.signal });
  await until("the call has come", () => asked.length === 2);
  abort.abort(new RangeError("enough"));
  await assert.rejects(call, /enough/);
  await fake.close();
});

test("a stream inserts in bounded memory, in order, and sends again what was not stored", async () => {
  let stored = 0;
  const fake = await fakeTaskd((_, body, nth) => {
    const keys = body
      .trimEnd()
      .split("\n")
      .map((line) => (JSON.parse(line) as { key: string }).key);
    // The first call stores half of its lines.
    const open = nth === 0 ? keys.length / 2 : keys.length;
    const lines = keys.map((id, place) =>
      JSON.stringify(place < open ? { status: "CREATED", id } : { status: "TRY_LATER", error: "line 3: full" }),
    );
    stored += Math.min(open, keys.length);
    return { headers: { "content-type": "application/x-ndjson" }, body: `${lines.join("\n")}\n` };
  });
  let [made, answered, ahead] = [0, 0, 0];
  function* tasks(): Generator<{ queue: string; key: string }> {
    for (; made < 1000; made += 1) {
      ahead = Math.max(ahead, made - answered);
      yield { queue: "q", key: String(made) };
    }
  }
  const client = new Client({ url: fake.url });
  for await (const answer of client.insertStream(tasks(), { batch: 10, inFlight: 2 })) {
    assert.deepEqual(answer, { index: answered, status: "CREATED", id: String(answered) });
    answered += 1;
  }
  assert.deepEqual([made, answered, stored], [1000, 1000, 1000]);
  assert.ok(ahead <= 40, `the stream read ${String(ahead)} tasks ahead`);
  await fake.close();
});

test("a stream keeps no answer that its reader has had", async () => {
  setFlagsFromString("--expose-gc");
  const collect = runInNewContext("gc") as () => void;
  const fake = await fakeTaskd(() => ({ body: `${JSON.stringify({ status: "CREATED", id: "1", results: [] })}\n` }));
  let hasEnded = false;
  function* tasks(): Generator<{ queue: string }> {
    while (!hasEnded) yield { queue: "q" };
  }
  const { signal } = new AbortController();
  let first: WeakRef<object> | undefined;
  for await (const { index, results } of new Client({ url: fake.url }).insertStream(tasks(), { batch: 1, signal })) {
    if (index === 0) first = new WeakRef(results ?? {});
    if (index !== 20) continue;
    await until("the first answer is gone", () => {
      collect();
      return first?.deref() === undefined;
    });
    hasEnded = true;
  }
  assert.ok(hasEnded);
  await fake.close();
});

test("an abort ends a stream whose source and calls wait", async () => {
  let answered = 0;
  const fake = await rawServer((_, response) => {
    answered += 1;
    if (answered === 1) response.end(`${JSON.stringify({ status: "CREATED", id: "1" })}\n`);
  });
  async function* tasks(): AsyncGenerator<{ queue: string }> {
    yield { queue: "q" };
    yield { queue: "q" };
    await new Promise(() => undefined);
  }
  const abort = new AbortController();
  const stream = new Client({ url: fake.url }).insertStream(tasks(), { batch: 1, signal: abort.signal });
  assert.equal((await stream.next()).value?.status, "CREATED");
  const next = assert.rejects(stream.next(), /enough/);
  await until("the second call has come", () => answered === 2);
  abort.abort(new RangeError("enough"));
  await next;
  await assert.rejects(
    new Client({ url: fake.url }).insertStream(tasks(), { signal: abort.signal }).next(),
    /enough/,
    "a stream that was aborted before it began",
  );
  await fake.close();
});

test("a stream sends what it has while its source is slow, and ends when its reader does", async () => {
  const fake = await fakeTaskd((_, body) => {
    const line = JSON.stringify({ status: "CREATED", id: "1" });
    return { body: `${line}\n`.repeat(body.trimEnd().split("\n").length) };
  });
  let isClosed = false;
  async function* slow(): AsyncGenerator<{ queue: string }> {
    try {
      yield { queue: "q" };
      yield { queue: "q" };
      await until("the reader has left", () => isLeaving);
      yield { queue: "q" };
    } finally {
      isClosed = true;
    }
  }
  let [answers, isLeaving] = [0, false];
  for await (const answer of new Client({ url: fake.url }).insertStream(slow(), { linger: "10ms" })) {
    assert.equal(answer.status, "CREATED");
    answers += 1;
    if (answers === 2) {
      isLeaving = true;
      break;
    }
  }
  await until("the source is closed", () => isClosed);
  await fake.close();
});

test("a task that cannot be written is rejected in its place", async () => {
  const fake = await fakeTaskd((_, body) => {
    return { body: body.trimEnd().replace(/.+/g, JSON.stringify({ status: "CREATED", id: "1" })) };
  });
  const answers = await new Client({ url: fake.url }).insertBatch([
    { queue: "q" },
    { queue: "q", payload: 1n },
    { queue: "q" },
  ]);
  assert.deepEqual(
    answers.map(({ index, status }) => [index, status]),
    [
      [0, "CREATED"],
      [1, "REJECTED"],
      [2, "CREATED"],
    ],
  );
  await fake.close();
});

test("of an answer that breaks off, the whole lines count, and the other tasks are sent again", async () => {
  const sent: number[] = [];
  const fake = await fakeTaskd(() => ({ body: "" }));
  fake.server.removeAllListeners("request");
  fake.server.on("request", (request: IncomingMessage, response: ServerResponse) => {
    let body = "";
    request.on("data", (chunk: Buffer) => {
      body += chunk.toString();
    });
    request.on("end", () => {
      const lines = body
        .trimEnd()
        .split("\n")
        .map(() => `{"status":"CREATED","id":"${String(sent.length)}"}\n`);
      sent.push(lines.length);
      response.writeHead(200, { "content-type": "application/x-ndjson" });
      if (sent.length > 1) return response.end(lines.join(""));
      return response.write(`${lines.slice(0, 3).join("")}{"status":"CRE`, () => {
        setImmediate(() => response.destroy());
      });
    });
  });
  const tasks = Array.from({ length: 10 }, () => ({ queue: "q" }));
  const answers = await new Client({ url: fake.url }).insertBatch(tasks);
  assert.ok(answers.every(({ status, index }, nth) => status === "CREATED" && index === nth));
  // The break may come before the answer: then all tasks are sent again.
  assert.deepEqual(sent[0], 10);
  assert.equal(answers.filter(({ id }) => id === "0").length, 10 - (sent.at(-1) ?? 0));
  await fake.close();
});
