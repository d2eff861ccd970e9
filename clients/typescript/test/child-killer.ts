/** A worker as a process of its own, whose handler kills it at once. */

import process from "node:process";

import { Worker } from "@taskd/client";
import { StreamSource } from "@taskd/client/stream";

const [, , url = "", grpc = "", queue = ""] = process.argv;
const worker = new Worker({ url, queue, source: new StreamSource({ url: grpc, timeout: "2s" }) });
worker.handle(() => {
  process.kill(process.pid, "SIGKILL");
});
await worker.run();
