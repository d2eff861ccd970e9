/** A worker as a process of its own, which tests kill. It prints a line when a handler begins. */

import { setTimeout as sleep } from "node:timers/promises";

import { Worker } from "@taskd/client";

const [, , url = "", queue = "", name = "", until = ""] = process.argv;
const worker = new Worker({ url, queue, name, concurrency: 3, logger: { ...console, info: console.log } });
const told = new Promise<void>((resolve) => {
  process.stdin.once("data", () => {
    resolve();
  });
});

worker.handle(async (task) => {
  console.log(`begun ${task.key}`);
  if (until === "told") await told;
  else await sleep(3_600_000, undefined, { signal: task.signal });
  return name;
});
await worker.run();
console.log("ended");
process.stdin.destroy();
