/** The client against a real taskd: inserts, lists, results, changes, tokens, TLS. */

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { promisify } from "node:util";

import { Agent, fetch as undiciFetch } from "undici";

import {
  BadRequestError,
  Client,
  ForbiddenError,
  NotFoundError,
  RejectedError,
  UnauthenticatedError,
  UnavailableError,
  Worker,
  type NewRecord,
} from "@taskd/client";
import { StreamSource } from "@taskd/client/stream";
import { SILENT, Taskd, allAre, until } from "./support.js";

let taskd: Taskd;
before(async () => {
  taskd = await Taskd.start();
});
after(async () => {
  await taskd.stop();
});

test("one task: created, a duplicate, rejected", async () => {
  const { client } = taskd;
  const created = await client.insert({ queue: "one", key: "k", payload: { a: 1.5 }, headers: { h: "v" } });
  assert.equal(created.status, "CREATED");
  assert.deepEqual(await client.insert({ queue: "one", key: "k" }), { status: "DUPLICATE", id: created.id });
  await assert.rejects(client.insert({ queue: "no name!" }), RejectedError);
  const file = await client.getTask<{ a: number }>(created.id ?? "");
  assert.deepEqual([file.payload.a, file.headers, file.payloadEncoding], [1.5, { h: "v" }, "json"]);
  assert.ok(file.createdAt instanceof Date && file.createdAt.getTime() > Date.now() - 600_000);
  await assert.rejects(client.getTask("01890a5d-ac96-774b-bcce-b302099a8057"), NotFoundError);
});

test("a list is answered task by task, and payloads stay what they were", async () => {
  const { client } = taskd;
  const payloads = [{ n: [1] }, "text", new Uint8Array([0, 255]), null];
  const answers = await client.insertBatch([
    ...payloads.map((payload, n) => ({ queue: "list", key: String(n), payload })),
    { queue: "list", key: "0" },
    { queue: "list", key: "x".repeat(5000) },
  ]);
  const statuses = answers.map(({ status }) => status);
  assert.deepEqual(statuses, ["CREATED", "CREATED", "CREATED", "CREATED", "DUPLICATE", "REJECTED"]);
  assert.match(answers[5]?.error ?? "", /^key has 5000 bytes/);
  for (const [n, payload] of payloads.entries()) {
    assert.deepEqual((await client.getTask(answers[n]?.id ?? "")).payload, payload);
  }
});

test("a stream of tasks from an async source", async () => {
  async function* tasks(): AsyncGenerator<{ queue: string; key: string }> {
    for (let n = 0; n < 5000; n += 1) {
      if (n % 1000 === 0) await new Promise((resolve) => setImmediate(resolve));
      yield { queue: "stream", key: String(n % 4000) };
    }
  }
  const counts: Record<string, number> = {};
  for await (const { status } of taskd.client.insertStream(tasks(), { batch: 500 })) {
    counts[status] = (counts[status] ?? 0) + 1;
  }
  assert.deepEqual(counts, { CREATED: 4000, DUPLICATE: 1000 });
});

test("lists go over all pages, and filters choose", async () => {
  const { client } = taskd;
  const keys = Array.from({ length: 250 }, (_, n) => `k${String(n)}`);
  await client.insertBatch(keys.map((key, n) => ({ queue: "pages", key, headers: { even: String(n % 2 === 0) } })));
  const found: string[] = [];
  for await (const task of client.listTasks({ queue: "pages", status: "UNFINISHED" })) found.push(task.key);
  assert.deepEqual(found.sort(), keys.sort());
  const even = await client.listPage({ queue: "pages", headers: { even: "true" }, keyPrefix: "k2" }, { limit: 1000 });
  assert.ok(even.tasks.length > 0 && even.tasks.every(({ key }) => key.startsWith("k2")));
  assert.ok(even.tasks.every(({ key }) => Number(key.slice(1)) % 2 === 0));
  const none = await client.listPage({ queue: "pages", since: new Date(Date.now() + 3_600_000) });
  assert.deepEqual(none.tasks, []);
  const queue = (await client.queues()).find(({ queue }) => queue === "pages");
  assert.equal(queue?.paused, false);
});

test("results, cancel, retry, change, requeue, and any other call", async () => {
  const { client } = taskd;
  const { id = "" } = await client.insert({ queue: "change", key: "k" });
  await until("the task is queued", async () => (await client.getTask(id)).status === "QUEUED");
  assert.equal((await client.change([id], { priority: "high", replicas: 2 }))[0]?.status, "OK");
  assert.equal((await client.getTask(id)).replicas, 2);
  assert.equal((await client.requeue([id], { to: "w", reservedFor: "1m" }))[0]?.status, "OK");
  assert.equal((await client.cancel([id]))[0]?.status, "OK");
  assert.equal((await client.getTask(id)).status, "CANCELLED");
  assert.equal((await client.retry([id]))[0]?.status, "OK");
  assert.deepEqual(await client.results(id), []);
  assert.equal((await client.cancel(["nonsense"]))[0]?.status, "INVALID");
  assert.equal((await client.call("POST", "/v1/queues/change:pause"))["paused"], true);
  await assert.rejects(client.call("POST", "/v1/tasks:get", { worker: "w", queues: "q" }), (error) => {
    assert.ok(error instanceof BadRequestError && error.line === 1 && error.column !== undefined);
    assert.match(error.detail, /queues: invalid type/);
    return true;
  });
});

test("records are published to a topic", async () => {
  const { client } = taskd;
  await client.call("PUT", "/v1/topics/orders", {});
  const published = await client.publish("orders", [
    { value: { n: 1 }, key: "a", attributes: { lang: ["en", "de"], kind: "x" }, id: "1" },
    { value: Buffer.from([0xff]), key: "a" },
    { key: "k".repeat(4097) },
  ]);
  assert.deepEqual(
    published.map(({ status }) => status),
    ["STORED", "STORED", "REJECTED"],
  );
  assert.equal(published[2]?.error, "key has 4097 bytes; at most 4096");
  const page = await client.call("GET", "/v1/topics/orders/records");
  const records = page["records"] as Record<string, unknown>[];
  assert.deepEqual(
    records.map(({ offset }) => offset),
    published.slice(0, 2).map(({ offset }) => offset),
  );
  assert.deepEqual(records[0]?.["value"], { n: 1 });
  assert.deepEqual(records[0]["attributes"], { kind: ["x"], lang: ["en", "de"] });
  assert.equal(records[1]?.["value_base64"], "/w==");
  await assert.rejects(client.publish("order", [{}]), NotFoundError);
});

test("records go in calls that taskd takes, and none after one that is to be sent again", async () => {
  const calls: number[] = [];
  const largest: number[] = [];
  const answers: string[] = [];
  // It takes 600 records, and 8 MiB, at once.
  const client = new Client({
    retryFor: 0,
    fetch: async (_, init) => {
      const body = init?.body as string;
      const { length } = JSON.parse(body) as unknown[];
      if (length > 600) return problem(400, "more than 600 items in one call (max_items)");
      if (body.length > 8 << 20) return problem(413, "the body is too large");
      calls.push(length);
      largest.push(body.length);
      const status = answers.shift() ?? "STORED";
      if (status === "away") return problem(503, "taskd is away");
      const results = Array.from({ length }, (_, n) => ({ status: n === 0 ? status : "STORED" }));
      return Promise.resolve(Response.json({ results }));
    },
  });
  const problem = async (status: number, detail: string): Promise<Response> =>
    Promise.resolve(Response.json({ title: "refused", status, detail }, { status }));
  const statuses = async (records: NewRecord[]): Promise<Record<string, number>> => {
    calls.length = 0;
    const counts: Record<string, number> = {};
    for (const { status } of await client.publish("orders", records)) counts[status] = (counts[status] ?? 0) + 1;
    return counts;
  };
  const small = Array.from({ length: 1200 }, (_, value) => ({ value }));
  assert.deepEqual(await statuses(small), { STORED: 1200 });
  assert.deepEqual(calls, [500, 500, 200]);
  // By their bytes. One that is too large does not hold up the others.
  const large = Array.from({ length: 7 }, (_, n) => ({ value: "x".repeat(n === 3 ? 9 << 20 : 1 << 20) }));
  assert.deepEqual(await statuses(large), { STORED: 6, REJECTED: 1 });
  assert.deepEqual(calls, [3, 3]);
  assert.ok(largest.every((bytes) => bytes <= 4 << 20));
  // A record of the same key in a later call would come before the one that is sent again.
  answers.push("STORED", "TRY_LATER");
  assert.deepEqual(await statuses(small), { STORED: 999, TRY_LATER: 201 });
  assert.deepEqual(calls, [500, 500]);
  answers.push("STORED", "away");
  assert.deepEqual(await statuses(small), { STORED: 500, TRY_LATER: 700 });
  answers.push("away");
  await assert.rejects(statuses(small), UnavailableError);
});

test("the gRPC port is named as a mistake", async () => {
  const client = new Client({ url: taskd.grpc, retryFor: 0 });
  await assert.rejects(client.insert({ queue: "one", key: "k" }), /is this taskd's HTTP port\? 7600 by default/);
});

test("tokens: none, a wrong one, one without the role, and one that is good", async () => {
  const guarded = await Taskd.start('auth = "tokens"\n');
  try {
    const token = await guarded.command("token", "create", "inserter", "--roles", "insert");
    const client = (secret?: string): Client => new Client({ url: guarded.url, token: secret });
    await assert.rejects(client().insert({ queue: "q", key: "a" }), UnauthenticatedError);
    await assert.rejects(client("taskd_wrong").insert({ queue: "q", key: "a" }), UnauthenticatedError);
    await until("taskd knows the token", async () => {
      return client(token)
        .insert({ queue: "q", key: "a" })
        .then(Boolean, (error: unknown) => {
          if (error instanceof UnauthenticatedError) return false;
          throw error;
        });
    });
    await assert.rejects(client(token).queues(), ForbiddenError);
    const asked = new Client({ url: guarded.url, token: () => Promise.resolve(token) });
    assert.equal((await asked.insert({ queue: "q", key: "k" })).status, "CREATED");
    const worker = new Worker({ url: guarded.url, queue: "q", token: "wrong", logger: SILENT, signals: false });
    await assert.rejects(worker.handle(() => 1).run(), UnauthenticatedError);
    const stranger = new Worker({ url: guarded.url, queue: "q", token, logger: SILENT, signals: false });
    await assert.rejects(stranger.handle(() => 1).run(), ForbiddenError);
  } finally {
    await guarded.stop();
  }
});

test("TLS with a client's certificate, by undici's agent", async () => {
  const folder = await mkdtemp(join(tmpdir(), "ts-tls-"));
  const file = (name: string): string => join(folder, name);
  const openssl = async (...args: string[]): Promise<unknown> => promisify(execFile)("openssl", args, { cwd: folder });
  const subject = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"];
  await openssl("req", "-x509", ...subject, "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.pem");
  await writeFile(file("names"), "subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n");
  for (const name of ["server", "client"]) {
    await openssl("req", ...subject.slice(0, 5), "-subj", `/CN=${name}`, "-keyout", `${name}.key`, "-out", "csr");
    const sign = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names"];
    await openssl("x509", "-req", "-in", "csr", ...sign, "-out", `${name}.pem`);
  }
  const read = async (name: string): Promise<string> => readFile(file(name), "utf8");
  const connect = { ca: await read("ca.pem"), cert: await read("client.pem"), key: await read("client.key") };
  const dispatcher = new Agent({ connect });
  const fetch = undiciFetch as unknown as typeof globalThis.fetch;
  const config = `tls_cert_file = "${file("server.pem")}"\ntls_key_file = "${file("server.key")}"
tls_client_ca_file = "${file("ca.pem")}"\n`;
  const ready = async (url: string): Promise<boolean> =>
    undiciFetch(`${url}/readyz`, { dispatcher }).then(
      (response) => response.ok,
      () => false,
    );
  const guarded = await Taskd.start(config, { scheme: "https", ready });
  try {
    const client = new Client({ url: guarded.url, fetch, dispatcher });
    assert.equal((await client.insert({ queue: "q", key: "k" })).status, "CREATED");
    const worker = new Worker({ url: guarded.url, fetch, dispatcher, queue: "q", logger: SILENT, signals: false });
    const running = worker.handle(() => "done").run();
    await allAre(client, "q", "COMPLETED", 1);
    await worker.stop();
    await running;
    const source = new StreamSource({ url: guarded.grpc, tls: connect });
    const streaming = new Worker({
      url: guarded.url,
      fetch,
      dispatcher,
      queue: "s",
      source,
      logger: SILENT,
      signals: false,
    });
    const streams = streaming.handle(() => "done").run();
    await client.insert({ queue: "s", key: "k" });
    await until("a stream brought it", () => streaming.stats.completed === 1);
    await streaming.stop();
    await streams;
    const stranger = new Client({
      url: guarded.url,
      fetch,
      retryFor: 0,
      dispatcher: new Agent({ connect: { ca: connect.ca } }),
    });
    await assert.rejects(stranger.insert({ queue: "q", key: "b" }));
  } finally {
    await guarded.stop();
    await dispatcher.close();
    await rm(folder, { recursive: true });
  }
});
